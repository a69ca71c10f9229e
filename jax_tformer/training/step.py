"""The optimizer step and the evaluation step, as pure functions."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Key, UInt32

from jax_tformer.config import IGNORED
from jax_tformer.config.experiment import CROSS_ENTROPY, LossConfig
from jax_tformer.functional import AnyTransformer, Params
from jax_tformer.lora import join_adapters, split_adapters, trained
from jax_tformer.model.parameters import Count, DropoutKey, RandomKey, Scalar, accumulator, flatten
from jax_tformer.model.transformer import Outputs
from jax_tformer.training.linear_loss import linear_cross_entropy
from jax_tformer.training.optimizer import global_norm
from jax_tformer.training.sharding import by_path, parameter_shardings, replicate

Batch = dict[str, Array]
"""Arrays of one batch: tokens or source and target, their masks, and labels."""
Sums = tuple[Array, Array, Params, Array]
"""The summed loss, the number of labels that count, the summed gradients, and the squared norms of each part's mean."""


class TrainState(NamedTuple):
    """Everything that training changes."""

    params: Params
    opt_state: optax.OptState
    """Of what trains: all parameters, or the adapters alone."""
    step: Count
    """The number of updates."""
    key: UInt32[Array, " words"]
    """The data of the key from which each step's dropout key is derived."""
    finite: Bool[Array, ""] | np.bool_ = np.True_
    """False once the loss or the gradients of a step were not finite. That step and later ones change no parameter, and
    are not counted, so that the cause can be found."""
    average: Params | None = None
    """The average of what trains, in at least float32 (see `train_step`)."""


class StepMetrics(NamedTuple):
    """The metrics of one step."""

    loss: Scalar
    """Mean cross-entropy, with what `LossConfig` adds, of the batch before the update, in nats per token."""
    gradient_norm: Scalar
    """Global norm before clipping."""
    tokens: Count
    """Tokens that the model read, source and target, without padding."""
    norms: dict[str, Float[Array, "*L"]]
    """If asked for, `layer_norms` of gradients and updates."""
    noise: tuple[Scalar, Scalar] | None
    """If asked for, unbiased estimates of the true gradient's squared norm, and of the variance of a row's gradient."""


def forward(
    net: AnyTransformer, params: Params, batch: Batch, *, dropout_key: DropoutKey = None, capture: bool = False
) -> Outputs:
    """Runs the model on any kind of batch: but for the labels, its arrays have the names of the model's arguments."""
    inputs: dict[str, Any] = {name: array for name, array in batch.items() if name != "labels"}
    return net.bind(params)(**inputs, dropout_key=dropout_key, capture=capture)


def batch_loss(
    net: AnyTransformer,
    params: Params,
    batch: Batch,
    loss: LossConfig = CROSS_ENTROPY,
    *,
    dropout_key: DropoutKey = None,
) -> tuple[Scalar, Count]:
    """Returns the summed cross-entropy of a batch in nats, with what `loss` adds, and how many labels count."""
    model = net.bind(params)
    hidden = forward(net, params, batch, dropout_key=dropout_key).hidden
    assert model.head is not None
    matrix = model.head.matrix(model.table)
    bias = None if model.head.bias is None else model.head.bias[...]
    return linear_cross_entropy(hidden, matrix, bias, batch["labels"], loss, net.config.cap)


def split_batch(batch: Batch, parts: int) -> Batch:
    """Splits the batch into `parts`, stacked along a new leading axis; rows keep their order."""
    return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)


def dropout_keys(net: AnyTransformer, state: "TrainState", accumulation: int) -> Key[Array, " parts"] | None:
    """Returns the dropout key of each part of the step after `state`; None for a model without dropout.

    The keys depend only on the state's key and the step's number, so a resumed run draws the same masks.
    """
    if not net.config.drops:
        return None
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    return key[None] if accumulation == 1 else jax.random.split(key, accumulation)


def tokens_read(batch: Batch) -> Count:
    """Counts the tokens of the batch that are not padding."""
    masks = {"source": "source_mask", "target": "target_mask", "tokens": "mask"}
    read = [batch.get(mask, jnp.ones_like(batch[ids])) for ids, mask in masks.items() if ids in batch]
    return jnp.stack([tokens.sum() for tokens in read]).sum()


def init_state(
    net: AnyTransformer,
    tx: optax.GradientTransformation,
    key: RandomKey,
    given: Params | None = None,
    *,
    averages: bool = False,
) -> TrainState:
    """Makes the state of step 0: the `given` parameters (without adapters), or new ones, and the optimizer's state."""
    init_key, dropout_key = jax.random.split(key)
    params = net.init(init_key)
    if given is not None:
        # Adapters are new.
        params = join_adapters(trained(params), given) if net.config.lora is not None else given
    state = TrainState(params, tx.init(trained(params)), jnp.zeros((), jnp.int32), jax.random.key_data(dropout_key))
    if not averages:
        return state
    return state._replace(average=jax.tree.map(lambda p: jnp.array(p, accumulator(p.dtype)), trained(params)))


def average_of(state: TrainState) -> Params:
    """Returns all parameters with the averages of those that train, in their types."""
    trains, frozen = split_adapters(state.params)
    return join_adapters(jax.tree.map(lambda p, mean: mean.astype(p.dtype), trains, state.average), frozen)


def state_shardings(mesh: Mesh, tx: optax.GradientTransformation, state: TrainState) -> Any:
    """Returns a TrainState with the sharding of every array; the optimizer's arrays are split like their parameters.

    What Adafactor has of rows and columns is small, and whole on every device.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    parameters = parameter_shardings(mesh, state.params)
    shapes = flatten(state.params)
    shardings = flatten(parameters)

    opt_state = by_path(
        lambda name, leaf: shardings[name] if name in shapes and shapes[name].shape == leaf.shape else replicated,
        state.opt_state,
    )
    average = None if state.average is None else trained(parameters)
    return TrainState(parameters, opt_state, replicated, replicated, replicated, average)  # type: ignore[arg-type]


def train_step(
    net: AnyTransformer,
    tx: optax.GradientTransformation,
    *,
    accumulation: int = 1,
    loss: LossConfig = CROSS_ENTROPY,
    average: float = 0.0,
    norms: bool = False,
    noise: bool = False,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Makes the function (state, batch) -> (state, metrics); jit it with its state donated.

    Gradients are those of the loss summed over the whole batch and divided by the number of labels that count, in
    however many parts (`accumulation`) they are computed. With adapters (`net.config.lora`), only they have gradients
    and change. If the loss or the gradient norm is not finite, see `TrainState.finite`.

    A state that has an average gets the exponential moving average, with the decay `average`, of the parameters after
    each update so far, its bias corrected as that of Adam's moments: the initial parameters have no part in it.

    `norms` and `noise` ask for those metrics. The gradient noise scale is the mean of `StepMetrics.noise[1]` over many
    steps, divided by that of `noise[0]` (McCandlish et al., 2018, appendix A.1: a batch against its parts).
    """

    def gradients(params: Params, frozen: Params, batch: Batch, keys: Array | None) -> Sums:
        def differentiate(part: Batch, key: Array | None) -> Sums:
            (total, counted), grads = jax.value_and_grad(
                lambda params: batch_loss(net, join_adapters(params, frozen), part, loss, dropout_key=key), has_aux=True
            )(params)
            squared = jnp.square(global_norm(grads) / jnp.maximum(counted, 1)) if noise else jnp.zeros(())
            return total, counted, grads, squared

        if accumulation == 1:
            return differentiate(batch, None if keys is None else keys[0])
        parts = split_batch(batch, accumulation)

        first = jax.tree.map(lambda x: x[0], (parts, keys))
        # In at least float32: sums of parts in bfloat16 would lose precision.
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, accumulator(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype),
            jax.eval_shape(lambda: differentiate(*first)),
        )
        return jax.lax.scan(
            lambda sums, inputs: (jax.tree.map(jnp.add, sums, differentiate(*inputs)), None),
            zeros,
            (parts, keys),
        )[0]

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        before, frozen = split_adapters(state.params)
        total, counted, grads, squares = gradients(before, frozen, batch, dropout_keys(net, state, accumulation))
        count = jnp.maximum(counted, 1)
        grads = jax.tree.map(lambda g, p: (g / count).astype(p.dtype), grads, before)
        updates, opt_state = tx.update(grads, state.opt_state, before)
        metrics = StepMetrics(total / count, global_norm(grads), tokens_read(batch), {}, None)
        if norms:
            measured = layer_norms("gradient_norm", grads) | layer_norms("update_norm", updates)
            metrics = metrics._replace(norms=replicate(measured))
        if noise:
            whole = jnp.square(metrics.gradient_norm)
            part = squares / accumulation
            others = accumulation - 1
            signal = accumulation * whole - part
            spread = len(batch["labels"]) * (part - whole)
            metrics = metrics._replace(noise=(signal / others, spread / others))
        finite = jnp.isfinite(metrics.loss) & jnp.isfinite(metrics.gradient_norm) & state.finite
        after = jax.tree.map(lambda p, update: jnp.where(finite, p + update, p).astype(p.dtype), before, updates)
        # Adam's correction of its moments, taken into the share of the newest, and exact for a decay near 1.
        mean = state.average
        if mean is not None:
            share = finite * (1 - average) / -jnp.expm1((state.step + 1) * math.log(average))
            mean = jax.tree.map(lambda mean, p: mean + (share * (p - mean)).astype(mean.dtype), mean, after)
        params = join_adapters(after, frozen)
        return TrainState(params, opt_state, state.step + finite, state.key, finite, mean), metrics

    return step


def layer_norms(name: str, tree: Params) -> dict[str, Array]:
    """Returns the norms of the layers of each stack, [L], and of each module outside, [], in at least float32."""
    squares = dict[str, Array]()
    for path, x in flatten(tree).items():
        stack, layers, _ = path.partition(".blocks.")
        of = f"{name}/{stack}.blocks" if layers else f"{name}/{path.rpartition('.')[0]}"
        axes = tuple(range(1 if layers else 0, x.ndim))
        squares[of] = squares.get(of, 0) + jnp.square(x.astype(accumulator(x.dtype))).sum(axes)
    return {of: jnp.sqrt(sums) for of, sums in squares.items()}


def count_right(net: AnyTransformer, params: Params, batch: Batch) -> tuple[Count, Count]:
    """Returns how many labels are the most probable tokens, and how many count."""
    most_probable = forward(net, params, batch).logits.argmax(-1)
    return (most_probable == batch["labels"]).sum(), (batch["labels"] != IGNORED).sum()
