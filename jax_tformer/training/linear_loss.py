"""Computes the cross-entropy of a vocabulary projection and its gradient, without holding all logits at once.

The logits are by far the largest array of a language model: 16 sequences of 1,024 tokens over GPT-2's vocabulary are
3.3 GB, three times over in the backward pass. This function processes the tokens in parts: logits, loss and gradient of
one part, then the next. It computes nothing twice, because the gradient of a sum of losses is known except for a factor
from outside. Hsu et al., "Liger Kernel" (2024), section 3.2, describe the same for a GPU kernel.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jax_tformer.config import IGNORED, CapForm
from jax_tformer.config.experiment import CROSS_ENTROPY, LossConfig
from jax_tformer.model.layers import soft_cap
from jax_tformer.model.parameters import Count, Scalar, accumulator, batch_parts, context_parts, gather_features

LOGITS_AT_ONCE = 2**26
"""The most logits at once on each device, or on all devices of a CPU: 256 MB in float32."""
MORE_AT_ONCE = {"gpu": 4}
"""A kind of device where so many times more are faster: each part reads and writes the whole gradient of the table."""
Cap = tuple[float, CapForm]
_LANES = 128
"""On tensor cores, products in narrow types are fastest if the vocabulary is a multiple of this."""


def linear_cross_entropy(
    x: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, "B T"],
    loss: LossConfig = CROSS_ENTROPY,
    cap: Cap | None = None,
) -> tuple[Scalar, Count]:
    """Returns the cross-entropy of the logits x table^T + bias, summed over the labels that count, and their number.

    The sum is in nats, with what `loss` adds to it. With a `cap` and its form, the logits are bounded (see `soft_cap`).
    """
    vocabulary = len(table)
    if x.dtype != accumulator(x.dtype):
        table = jnp.pad(table, ((0, -vocabulary % _LANES), (0, 0)))
    parts = _count_parts(x, len(table))
    rows, targets = _divide(x, parts, 0), _divide(labels, parts, IGNORED)
    return _summed(rows, table, bias, targets, vocabulary, loss, cap), (labels != IGNORED).sum()


@partial(jax.custom_jvp, nondiff_argnums=(4, 5, 6))
def _summed(
    x: Array, table: Array, bias: Array | None, labels: Array, vocabulary: int, config: LossConfig, cap: Cap | None
) -> Array:
    # XLA leaves out the gradients, which nobody asks for.
    return _with_gradients(x, table, bias, labels, vocabulary, config, cap)[0]


@partial(jax.custom_jvp, nondiff_argnums=(4, 5, 6))
def _with_gradients(
    x: Array, table: Array, bias: Array | None, labels: Array, vocabulary: int, config: LossConfig, cap: Cap | None
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    """Returns the loss, and its gradients by x, table and bias; x and labels are as `_divide` returns them."""
    high = accumulator(x.dtype)
    narrow = gather_features(table.astype(x.dtype))

    def add(sums: tuple[Array, Array, Array], part: tuple[Array, Array]) -> tuple[tuple[Array, Array, Array], Array]:
        loss, by_table, by_bias = sums
        rows, targets = part
        logits = _logits(rows, narrow, bias, vocabulary, cap)
        losses, by_logits = _losses(logits, targets, vocabulary, config)
        if cap is not None:
            # y' = 1 - y^2 where y = tanh x, and its power of 3/2 where y = x / sqrt(x^2 + 1); the columns beyond the
            # vocabulary have no gradient.
            size, form = cap
            slope = 1 - jnp.square(jnp.maximum(logits, -size) / size)
            by_logits = by_logits * (slope if form == "tanh" else slope**1.5)
        by_bias = by_bias + by_logits.sum(0)
        by_logits = by_logits.astype(x.dtype)
        by_table = by_table + jnp.einsum("nv,nd->vd", by_logits, rows, preferred_element_type=high)
        return (loss + losses.sum(), by_table, by_bias), by_logits @ narrow

    zeros = jnp.zeros((), high), jnp.zeros(table.shape, high), jnp.zeros(len(table), high)
    (loss, by_table, by_bias), by_x = jax.lax.scan(add, zeros, (x, labels))
    by_table = gather_features(by_table)
    gradients = by_x, by_table.astype(table.dtype), None if bias is None else by_bias[:vocabulary].astype(bias.dtype)
    return loss, gradients


@_with_gradients.defjvp
def _with_gradients_jvp(
    vocabulary: int, config: LossConfig, cap: Cap | None, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> Any:
    """Does what JAX would do by default, but makes JAX treat the function as a whole.

    Without this rule, reverse mode would move constants as large as a part of the logits out of the loop and keep them.
    """
    return jax.jvp(lambda *given: _with_gradients.fun(*given, vocabulary, config, cap), primals, tangents)


@partial(_summed.defjvp, symbolic_zeros=True)
def _summed_jvp(
    vocabulary: int, config: LossConfig, cap: Cap | None, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    """Returns the loss and its change, gradient * tangent, whose transpose in the backward pass is gradient * factor.

    Everything else is computed before the transposition, and so only once.
    """
    loss, gradients = _with_gradients(*primals, vocabulary, config, cap)
    moved = jnp.zeros_like(loss)
    for gradient, tangent in zip(gradients, tangents[:3], strict=True):
        if gradient is not None and not isinstance(tangent, SymbolicZero):
            moved = moved + (gradient.astype(loss.dtype) * tangent.astype(loss.dtype)).sum()
    return loss, moved


def _count_parts(x: Array, vocabulary: int) -> int:
    """Returns into how many parts the logits of `[B, T, D]` are divided, a power of two."""
    platform = jax.default_backend()
    # The devices of a CPU share its memory.
    devices = 1 if platform == "cpu" else batch_parts(x)
    at_once = LOGITS_AT_ONCE * MORE_AT_ONCE.get(platform, 1) * devices
    count = len(x) * x.shape[1]
    return min(1 << max(0, math.ceil(math.log2(count * vocabulary / at_once))), count)


def _divide(x: Array, parts: int, fill: int) -> Array:
    """Makes `[parts, N, ...]` of `[B, T, ...]`, with rows of `fill` at the end if they are not whole parts.

    Part p has the rows p, p + parts ... of all: with each device's positions together if the mesh splits rows along T,
    so that every device holds rows of every part.
    """
    flat = rearrange(x, "b (c t) ... -> (c b t) ...", c=context_parts())
    whole = jnp.pad(flat, ((0, -len(flat) % parts), *[(0, 0)] * (flat.ndim - 1)), constant_values=fill)
    return rearrange(whole, "(n p) ... -> p n ...", p=parts)


def _logits(x: Array, table: Array, bias: Array | None, vocabulary: int, cap: Cap | None) -> Float[Array, "N V"]:
    """Computes logits in at least float32; columns beyond the vocabulary are minus infinity."""
    logits = jnp.einsum("nd,vd->nv", x, table, preferred_element_type=accumulator(x.dtype))
    beyond = len(table) - vocabulary
    if bias is not None:
        logits = logits + jnp.pad(bias, (0, beyond)).astype(logits.dtype)[None]
    logits = logits if cap is None else soft_cap(logits, *cap)
    if not beyond:
        return logits
    return jnp.where((jnp.arange(len(table)) < vocabulary)[None], logits, -jnp.inf)


def _losses(logits: Array, labels: Array, vocabulary: int, config: LossConfig) -> tuple[Array, Array]:
    """Returns the loss of each row, and its gradient by the logits; both are zero if the label does not count."""
    counted = labels != IGNORED
    chosen = jnp.where(counted, labels, 0)
    largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    powers = jnp.exp(logits - largest)
    total = powers.sum(-1, keepdims=True)
    normaliser = (largest + jnp.log(total))[:, 0]
    losses = normaliser - jnp.take_along_axis(logits, chosen[:, None], axis=1)[:, 0]
    columns = jnp.arange(logits.shape[1])[None]
    target = (columns == chosen[:, None]).astype(logits.dtype)
    if (smoothing := config.label_smoothing) > 0:
        inside = columns < vocabulary
        average = jnp.where(inside, logits, 0).sum(-1) / vocabulary
        losses = (1 - smoothing) * losses + smoothing * (normaliser - average)
        target = (1 - smoothing) * target + jnp.where(inside, smoothing / vocabulary, 0).astype(logits.dtype)
    if config.z_loss > 0:
        losses = losses + config.z_loss * jnp.square(normaliser)
        powers = powers * (1 + 2 * config.z_loss * normaliser)[:, None]
    return jnp.where(counted, losses, 0), jnp.where(counted[:, None], powers / total - target, 0)
