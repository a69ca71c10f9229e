"""One optimizer step, one evaluation step: pure functions of a state."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, UInt32

from jax_tformer.models.transformer import Transformer
from jax_tformer.nn.arrays import Params, accumulator
from jax_tformer.training.losses import cross_entropy
from jax_tformer.training.optimizer import global_norm

Batch = dict[str, Array]
"""Arrays of one batch: tokens or source and target, their masks, and labels."""


class TrainState(NamedTuple):
    """All that training changes."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]
    """Updates made so far."""
    key: UInt32[Array, " words"]
    """The data of the key that every step's dropout key follows from."""


class StepMetrics(NamedTuple):
    """What one step measured."""

    loss: Float[Array, ""]
    """Mean cross-entropy (smoothed, if training is) of the batch before the update, in nats a token."""
    gradient_norm: Float[Array, ""]
    """Global norm before clipping."""
    tokens: Int[Array, ""]
    """Tokens that the model read, source and target, without padding."""


def batch_logits(net: Transformer, params: Params, batch: Batch, dropout_key: Array | None) -> Float[Array, "B T V"]:
    """The model applied to whatever kind of batch this is."""
    if "source" in batch:
        masks = {"source_mask": batch["source_mask"], "target_mask": batch["target_mask"]}
        return net.apply(params, batch["source"], batch["target"], **masks, dropout_key=dropout_key)
    return net.apply(params, batch["tokens"], dropout_key=dropout_key)


def tokens_read(batch: Batch) -> Int[Array, ""]:
    """How many tokens of the batch are not padding."""
    if "source" in batch:
        return batch["source_mask"].sum() + batch["target_mask"].sum()
    return jnp.asarray(batch["tokens"].size)


def init_state(net: Transformer, tx: optax.GradientTransformation, key: Key[Array, ""]) -> TrainState:
    """Fresh parameters, an empty optimizer, step 0."""
    init_key, dropout_key = jax.random.split(key)
    params = net.init(init_key)
    return TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key_data(dropout_key))


def train_step(
    net: Transformer,
    tx: optax.GradientTransformation,
    *,
    accumulation: int = 1,
    label_smoothing: float = 0.0,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The function (state, batch) -> (state, metrics), to be jitted with its state donated.

    Gradients are those of the loss summed over the whole batch, divided by its number of counting tokens, however
    many parts (`accumulation`) it is computed in. The dropout keys of a step follow from the state's key and the
    step's number, so that a resumed run draws what an uninterrupted one would have drawn.
    """
    dropout_rates = net.config.dropout
    drops = any((dropout_rates.embedding, dropout_rates.attention, dropout_rates.residual, dropout_rates.feedforward))

    def total_loss(params: Params, part: Batch, dropout_key: Array | None) -> tuple[Array, Array]:
        return cross_entropy(batch_logits(net, params, part, dropout_key), part["labels"], label_smoothing)

    def gradients(params: Params, batch: Batch, dropout_key: Array | None) -> tuple[Array, Array, Params]:
        differentiate = jax.value_and_grad(total_loss, has_aux=True)
        if accumulation == 1:
            (loss, tokens), grads = differentiate(params, batch, dropout_key)
            return loss, tokens, grads
        parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
        keys = None if dropout_key is None else jax.random.split(dropout_key, accumulation)

        def add(sums: tuple[Array, Array, Params], inputs: tuple[Batch, Array | None]) -> tuple[tuple, None]:
            (loss, tokens), grads = differentiate(params, *inputs)
            return jax.tree.map(jnp.add, sums, (loss, tokens, grads)), None

        first = jax.tree.map(lambda x: x[0], (parts, keys))
        # In float32 at least: parts in bfloat16 would lose what the whole batch keeps.
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, accumulator(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype),
            jax.eval_shape(lambda: (lambda value, grads: (*value, grads))(*differentiate(params, *first))),
        )
        return jax.lax.scan(add, zeros, (parts, keys))[0]

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        dropout_key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step) if drops else None
        loss, tokens, grads = gradients(state.params, batch, dropout_key)
        count = jnp.maximum(tokens, 1)
        grads = jax.tree.map(lambda g, p: (g / count).astype(p.dtype), grads, state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = TrainState(params, opt_state, state.step + 1, state.key)
        return state, StepMetrics(loss / count, global_norm(grads), tokens_read(batch))

    return step


def evaluation_step(net: Transformer) -> Callable[[Params, Batch], tuple[Array, Array]]:
    """The function (params, batch) -> (summed loss in nats, counting tokens), without dropout or smoothing."""

    def step(params: Params, batch: Batch) -> tuple[Array, Array]:
        return cross_entropy(batch_logits(net, params, batch, None), batch["labels"])

    return step
