"""Attention in blocks of queries: what training computes on CPU, where no fused kernel is at hand."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_tformer.nn.arrays import accumulator
from jax_tformer.nn.dropout import dropout
from jax_tformer.nn.masks import both, masked_softmax


def block_length(length: int) -> int:
    """Queries computed at a time: small blocks skip more of what a causal mask hides, large ones multiply faster.

    Never more than 32 blocks, each of which is compiled by itself.
    """
    return max(64 if length <= 512 else 128, -(-length // 32))


def attend_in_blocks(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Bool[Array, "B 1 1 S"] | None,
    *,
    causal: bool,
    scale: float,
    dropout_rate: float,
    keep: Bool[Array, "B H T S"] | None,
) -> Float[Array, "B T H C"]:
    """`attend`, where a causal block of queries is multiplied only with the keys up to its own end.

    Sequences and heads share one leading axis, R = B * K, for which XLA on CPU has its fast matrix products. The
    blocks are static: nothing depends on a loop's counter, and plain differentiation gives the backward pass.
    """
    batch, length, heads, width = query.shape
    key_value_heads = key.shape[2]
    groups = heads // key_value_heads
    apart = query.reshape(batch, length, key_value_heads, groups, width).transpose(0, 2, 3, 1, 4)
    queries = apart.reshape(-1, groups, length, width)
    keys, values = (x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], width) for x in (key, value))
    step = block_length(length) if causal else length
    outputs = []
    for start in range(0, length, step):
        end = min(start + step, length)
        seen = end if causal else keys.shape[1]
        rows = queries[:, :, start:end].reshape(len(queries), -1, width)
        scores = jnp.einsum("rtc,rsc->rts", rows, keys[:, :seen], preferred_element_type=accumulator(query.dtype))
        weights = _weights(
            (scores * scale).reshape(batch, heads, end - start, seen),
            None if mask is None else mask[..., :seen],
            start if causal else None,
        )
        dropped = dropout(weights, dropout_rate, None if keep is None else keep[:, :, start:end, :seen])
        output = jnp.einsum("rts,rsc->rtc", dropped.astype(value.dtype).reshape(scores.shape), values[:, :seen])
        outputs.append(output.reshape(len(queries), groups, end - start, width))
    joined = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=2)
    return joined.reshape(apart.shape).transpose(0, 3, 1, 2, 4).reshape(query.shape)


def _weights(scores: Float[Array, "B H t S"], mask: Bool[Array, "B 1 1 S"] | None, start: int | None) -> Array:
    """Attention weights of the queries that begin at `start`; None: not causal."""
    if start is None:
        return masked_softmax(scores, mask)
    rows, columns = scores.shape[-2:]
    seen = (start + jnp.arange(rows)[:, None] >= jnp.arange(columns)[None, :])[None, None]
    if mask is not None:
        return masked_softmax(scores, both(seen, mask))
    # Every row sees itself, so that none is empty: adding is enough, and costs nothing in the backward pass.
    zero, never = jnp.zeros((), scores.dtype), jnp.full((), -jnp.inf, scores.dtype)
    return masked_softmax(scores + jnp.where(seen, zero, never), None)
