"""Memory: what is too large for it is refused, and what the backward pass keeps is chosen to fit."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from jax_tformer.config import Remat, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import PairData, TextData, TrainingConfig
from jax_tformer.functional import AnyTransformer, transformer
from jax_tformer.lora import join_adapters, split_adapters, trained
from jax_tformer.model.fast import choose_implementation
from jax_tformer.model.masks import Mask
from jax_tformer.training.processes import least
from jax_tformer.training.sharding import bytes_per_device

BatchLoss = Callable[..., tuple[Any, Any]]
"""(net, params, batch, dropout_key=key) -> (summed loss, labels that count): `jax_tformer.training.step.batch_loss`."""
_ROOM = 0.8
"""The usable fraction of a device's memory; the compiler's temporary buffers need the rest."""


def require_memory(asked: int, what: str, mend: str, device: jax.Device | None = None) -> None:
    """Raises InputError if `what` takes more bytes (`asked`) than there are on `device`; None: on this machine.

    Without this check it would fail after minutes, or the system would kill the process without a message.
    """
    if device is None or device.platform == "cpu":
        limit, where = host_memory(), "here"
    else:
        limit, where = (device.memory_stats() or {}).get("bytes_limit", asked), "on each device"
    if asked > limit:
        told = f"{what} take {asked / 2**30:,.1f} GiB, and there are {limit / 2**30:,.1f} GiB {where}"
        raise InputError(f"{told}; {mend}")


def host_memory() -> int:
    """Returns the bytes of memory of the machine, or of the container if those are fewer."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return machine


def fit_to_devices(
    config: TransformerConfig, batch_loss: BatchLoss, batch: Mapping[str, Any], mesh: Mesh, accumulation: int
) -> TransformerConfig:
    """Replaces compute.remat "auto" by a choice for training by `batch_loss` on batches shaped like `batch`."""
    if config.compute.remat != "auto":
        return config
    device = mesh.local_devices[0]
    # Of the smallest device of any process, so that all compile the same program.
    limit = least(None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit"))
    part = {
        name: jax.ShapeDtypeStruct((len(rows) // accumulation, *rows.shape[1:]), rows.dtype)
        for name, rows in batch.items()
    }
    tokens_split = mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["context"]
    with jax.set_mesh(mesh):
        remat = choose_remat(config, batch_loss, part, limit, tokens_split, mesh.shape["fsdp"] * mesh.shape["tensor"])
    return dataclasses.replace(config, compute=dataclasses.replace(config.compute, remat=remat))


def require_room(state: PyTree, mesh: Mesh) -> None:
    """Raises InputError if `state`, abstract and with shardings, does not fit into memory."""
    asked, device = bytes_per_device(state), mesh.local_devices[0]
    if device.platform == "cpu":
        # All devices of this process share the machine's memory.
        asked *= len(mesh.local_devices)
    mend = (
        "make the model smaller (--model.d-model, the stacks' --num-layers and --feedforward-width, "
        "--data.tokenizer.vocab-size), or split it over more devices (--mesh.fsdp, --mesh.tensor)"
    )
    require_memory(asked, "the parameters and the optimizer's state", mend, device)


def require_room_for_batches(data: TextData | PairData, training: TrainingConfig, mend: str) -> None:
    """Raises InputError if the batches held at once do not fit into the machine's memory; `mend` says what to do."""
    tokens = data.context_length if isinstance(data, TextData) else data.source_length + data.target_length
    # The least: int32 tokens and labels of a batch for evaluation, one for the step, and four that wait.
    asked = training.batch_size * tokens * 8 * 6
    require_memory(asked, f"batches of {training.batch_size:,} rows", mend)


def choose_remat(
    config: TransformerConfig,
    batch_loss: BatchLoss,
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
        net = transformer(dataclasses.replace(config, compute=dataclasses.replace(config.compute, remat=remat)))
        # Parameters, and of those that train the gradients and Adam's two moments.
        weights = (_bytes(net.shapes) + 3 * _bytes(trained(net.shapes))) / weights_split
        if weights + kept_bytes(net, batch_loss, part) / tokens_split <= _ROOM * limit:
            return remat
    return "full"


def kept_bytes(net: AnyTransformer, batch_loss: BatchLoss, part: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Counts the bytes that the forward pass of one part keeps for the backward pass, without parameters."""
    key = jax.eval_shape(lambda: jax.random.key(0))

    def forward(params: Any, batch: Any, key: Any) -> Any:
        trains, frozen = split_adapters(params)

        def loss(params: Any) -> Any:
            return batch_loss(net, join_adapters(params, frozen), batch, dropout_key=key)[0]

        return jax.vjp(loss, trains)[1]

    return max(0, _bytes(jax.eval_shape(forward, net.shapes, dict(part), key)) - _bytes(net.shapes))


def describe_compute(config: TransformerConfig, mesh: Mesh, length: int) -> str:
    """Describes type, attention and remat in words; `length` is that of the output stack's sequences."""
    compute, stack = config.compute, config.output_stack
    attention = compute.attention
    if attention == "auto":
        # As many rows as the mesh splits; every batch has a multiple of them.
        shape = (mesh.shape["data"] * mesh.shape["fsdp"], length, stack.num_heads, config.head_width(stack))
        platform, dtype = mesh.devices.flat[0].platform, jnp.dtype(compute.dtype)
        with jax.set_mesh(mesh):
            mask = Mask(causal=config.decoder is not None, window=stack.window)
            drops = config.dropout.attention > 0
            attention = choose_implementation(platform, dtype, shape, shape, mask, drops=drops)
    return f"{compute.dtype}, attention {attention!r}, remat {compute.remat!r}"


def _bytes(tree: Any) -> int:
    return sum(
        math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
        if hasattr(leaf, "shape") and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )
