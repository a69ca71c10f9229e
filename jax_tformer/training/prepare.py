"""Prepares a training on its devices: what the backward pass keeps so that all fits, the state, and the step.

And says how much work a step is, and how fast this machine does such work: model FLOPs utilisation (MFU).
"""

import math
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from jax_tformer.config import Remat, StackConfig, TransformerConfig
from jax_tformer.config.errors import require
from jax_tformer.config.experiment import PairData, TextData, TrainingConfig
from jax_tformer.functional import AnyTransformer, transformer
from jax_tformer.lora import join_adapters, split_adapters, trained
from jax_tformer.model.fast import choose_implementation
from jax_tformer.model.masks import Mask
from jax_tformer.model.parameters import flatten, row_parts
from jax_tformer.startup import compiler_options, require_memory
from jax_tformer.terminal import SMALLER_TRAINING
from jax_tformer.training.processes import least
from jax_tformer.training.sharding import bytes_per_device
from jax_tformer.training.step import TrainState, batch_loss, init_state, state_shardings, train_step

_ROOM = 0.8
"""The usable fraction of a device's memory; the compiler's temporary buffers need the rest."""
_MEASURED = 0.5
"""Seconds in which products are timed."""


def require_room(state: PyTree, mesh: Mesh) -> None:
    """Raises InputError if `state`, abstract and with shardings, does not fit into memory."""
    asked = bytes_per_device(state)
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        # All devices of this process share the machine's memory.
        asked *= len(mesh.local_devices)
    require_memory(
        asked,
        "the parameters and the optimizer's state",
        "make the model smaller (--model.d-model, the stacks' --num-layers and --feedforward-width, "
        "--data.tokenizer.vocab-size), or split it over more devices (--mesh.fsdp, --mesh.tensor)",
        device,
    )


def require_room_for_batches(data: TextData | PairData, training: TrainingConfig) -> None:
    """Raises InputError if the batches held at once do not fit into the machine's memory."""
    tokens = data.context_length if isinstance(data, TextData) else data.source_length + data.target_length
    # The least: int32 tokens and labels of a batch for evaluation, one for the step, and four that wait.
    asked = training.batch_size * tokens * 8 * 6
    if isinstance(data, PairData) and data.tokens_per_batch is not None:
        asked = data.tokens_per_batch * 2 * 8 * 6
    require_memory(asked, f"batches of {training.batch_size:,} rows", SMALLER_TRAINING)


def fit_to_devices(
    config: TransformerConfig, batch: Mapping[str, Any], mesh: Mesh, accumulation: int
) -> TransformerConfig:
    """Replaces compute.remat "auto" and compute.unroll None by choices for training on batches shaped like `batch`.

    On a GPU the layers are unrolled, since a loop copies the parameters of each layer and what its backward pass needs.
    With FSDP they are not, since without a loop nothing keeps the compiler from gathering all layers at once. Raises
    InputError for a kernel that these devices do not run.
    """
    device = mesh.local_devices[0]
    require(
        config.compute.attention != "pallas" or device.platform == "tpu",
        f"attention is 'pallas', a kernel for TPUs, and this is a {device.platform}; expected 'auto', 'einsum' or "
        "'blocks'",
    )
    if config.compute.unroll is None:
        depth = max(stack.num_layers for stack in config.stacks.values())
        unrolls = device.platform == "gpu" and mesh.shape["fsdp"] == 1
        config = config.with_compute(unroll=depth if unrolls else 1)
    if config.compute.remat != "auto":
        return config
    # Of the smallest device of any process, so that all compile the same program.
    limit = least(None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit"))
    part = {
        name: jax.ShapeDtypeStruct((len(rows) // accumulation, *rows.shape[1:]), rows.dtype)
        for name, rows in batch.items()
    }
    tokens_split = row_parts(mesh) * mesh.shape["context"]
    with jax.set_mesh(mesh):
        remat = choose_remat(config, part, limit, tokens_split, mesh.shape["fsdp"] * mesh.shape["tensor"])
    return config.with_compute(remat=remat)


def choose_remat(
    config: TransformerConfig,
    part: Mapping[str, jax.ShapeDtypeStruct],
    limit: int | None,
    tokens_split: int,
    weights_split: int,
) -> Remat:
    """Chooses the least rematerialisation that fits a device of `limit` bytes; without a limit "dots", fastest on CPU.

    Tokens of a batch are split over `tokens_split` devices, parameters and optimizer over `weights_split`.
    """
    if limit is None:
        return "dots"
    kept: tuple[Remat, ...] = ("none", "dots")
    for remat in kept:
        net = transformer(config.with_compute(remat=remat))
        # Parameters, and of those that train the gradients and Adam's two moments.
        weights = (_bytes(net.shapes) + 3 * _bytes(trained(net.shapes))) / weights_split
        if weights + kept_bytes(net, part) / tokens_split <= _ROOM * limit:
            return remat
    return "full"


def kept_bytes(net: AnyTransformer, part: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Counts the bytes that the forward pass of one part keeps for the backward pass, without parameters."""
    key = jax.eval_shape(lambda: jax.random.key(0))

    def forward(params: Any, batch: Any, key: Any) -> Any:
        trains, frozen = split_adapters(params)
        return jax.vjp(lambda x: batch_loss(net, join_adapters(x, frozen), batch, dropout_key=key)[0], trains)[1]

    return max(0, _bytes(jax.eval_shape(forward, net.shapes, dict(part), key)) - _bytes(net.shapes))


def describe_compute(config: TransformerConfig, mesh: Mesh, length: int) -> str:
    """Describes type, attention and remat in words; `length` is that of the output stack's sequences."""
    compute = config.compute
    stack = config.output_stack
    attention: str = compute.attention
    if attention == "auto":
        # As many rows as the mesh splits; every batch has a multiple of them.
        shape = (row_parts(mesh), length, stack.num_heads, config.head_width(stack))
        platform = mesh.devices.flat[0].platform
        dtype = jnp.dtype(compute.dtype)
        with jax.set_mesh(mesh):
            bias = jnp.zeros((1, 1, 1, 1)) if stack.positions == "relative" else None
            masks = [Mask(config.decoder is not None, each, bias=bias, cap=stack.score_cap) for each in stack.windows]
            choose = partial(choose_implementation, platform, dtype, shape, shape, drops=config.dropout.attention > 0)
            attention = " and ".join(sorted(set(map(choose, masks))))
    return f"{compute.dtype}, attention {attention!r}, remat {compute.remat!r}"


class Prepared(NamedTuple):
    """The training state of a run and its step on a mesh."""

    abstract: TrainState
    """The shape, type and sharding of every array, to restore a checkpoint into."""
    first_state: Callable[..., TrainState]
    """Computes the state at step 0, of new parameters or of `given` ones, which it donates."""
    step: jax.stages.Lowered
    """(state, batch) -> (state, metrics), traced but not compiled; donates the state."""
    compile: Callable[[Any], jax.stages.Compiled]
    """Compiles the step for batches like this one, of another shape."""


def prepare(
    net: AnyTransformer,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    training: TrainingConfig,
    batch: Mapping[str, jax.ShapeDtypeStruct],
) -> Prepared:
    """Prepares training of `net` by `tx` on batches like `batch` (of `abstract_batch`); raises InputError if it does
    not fit."""
    first_state = jax.tree_util.Partial(
        init_state, net, tx, jax.random.key(training.seed), averages=training.average > 0
    )
    shapes = jax.eval_shape(first_state)
    shardings = state_shardings(mesh, tx, shapes)
    abstract = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, shardings)
    require_room(abstract, mesh)
    update = jax.jit(
        train_step(
            net,
            tx,
            accumulation=training.accumulation,
            loss=training.loss,
            average=training.average,
            norms=training.log_norms,
            noise=training.log_noise_scale,
        ),
        out_shardings=(shardings, None),
        donate_argnums=0,
        compiler_options=compiler_options(net.config.compute.dtype),
    )

    def lower(batch: Mapping[str, Any]) -> jax.stages.Lowered:
        with jax.set_mesh(mesh):
            return update.lower(abstract, dict(batch))

    initialise = jax.jit(
        first_state, out_shardings=shardings, donate_argnames=("given",), compiler_options=compiler_options(once=True)
    )
    return Prepared(abstract, initialise, lower(batch), lambda batch: lower(batch).compile())


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape"))


class Flops(NamedTuple):
    """Floating-point operations of one training step; a multiplication and an addition are two."""

    projections: int
    """Products of activations with parameters, the head included; looking up embeddings is none."""
    attention: int
    """Products of queries with keys and of weights with values; where causal, the half that must be computed."""

    @property
    def needed(self) -> int:
        """What counts as work."""
        return self.projections + self.attention


@cache
def training_flops(config: TransformerConfig, batch: int, length: int, source: int = 0) -> Flops:
    """Counts the operations of a step on `batch` rows of `length` tokens (of a target), with `source` tokens before.

    Every product is computed once forward and twice backward, once for each of its factors: 6 operations for each
    parameter and token, and for self-attention 12 L H C T S in a row (two products of 2 H C T S forward). What
    softmax, norms, activations and the optimizer take is left out: it does not grow with the widths squared.
    """
    encoder = config.encoder
    decoder = config.decoder
    read = source if decoder is not None else length
    projections = attention = 0
    for path, leaf in parameter_shapes(config).items():
        if path.endswith(".kernel"):
            of_source = path.startswith("encoder.") or made_of_source(path)
            projections += 6 * math.prod(leaf.shape) * (read if of_source else length)
    if config.tied_head:
        projections += 6 * (config.vocab_size or 0) * config.d_model * length
    if encoder is not None:
        attention += _attention(config, encoder, read, read)
    if decoder is not None:
        attention += _attention(config, decoder, length, length) // 2
        if encoder is not None:
            attention += _attention(config, decoder, length, source)
    return Flops(batch * projections, batch * attention)


def _attention(config: TransformerConfig, stack: StackConfig, queries: int, keys: int) -> int:
    return 12 * stack.num_layers * stack.num_heads * config.head_width(stack) * queries * keys


def parameter_shapes(config: TransformerConfig) -> dict[str, Any]:
    """Returns every parameter's shape and type, by its path with dots."""
    return flatten(transformer(config).shapes)


def made_of_source(path: str) -> bool:
    """Whether a parameter makes keys or values of the encoder's output."""
    return ".cross_attention.key." in path or ".cross_attention.value." in path


def product_rate(dtype: str) -> float:
    """Measures the operations a second of one large product of matrices, the fastest of half a second of them.

    On the first device of this process, times the number of its accelerators; on a CPU, which all cores share.
    """
    devices = jax.local_devices()
    size = 1024 if devices[0].platform == "cpu" else 8192
    matrix = jax.device_put(jax.random.normal(jax.random.key(0), (size, size), dtype), devices[0])
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(matrix, matrix))
    fastest = math.inf
    ends = time.perf_counter() + _MEASURED
    while (began := time.perf_counter()) < ends:
        jax.block_until_ready(multiply(matrix, matrix))
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * size**3 / fastest * (1 if devices[0].platform == "cpu" else len(devices))
