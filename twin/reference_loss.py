"""Cross-entropy in a few lines of JAX: what the loss that trains is compared with."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_tformer.config import IGNORED
from jax_tformer.model.parameters import accumulator


def cross_entropy(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], label_smoothing: float = 0.0
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """The sum of -log p(label) over the labels that count, in nats, and how many these are.

    With smoothing e the target distribution is (1 - e) on the label plus e / V on every token (Szegedy et al., 2016,
    as in section 5.4 of the paper). Computed in at least float32.
    """
    counted = labels != IGNORED
    log_probabilities = jax.nn.log_softmax(logits.astype(accumulator(logits.dtype)), axis=-1)
    chosen = jnp.where(counted, labels, 0)[:, :, None]
    loss = -jnp.take_along_axis(log_probabilities, chosen, axis=-1)[:, :, 0]
    if label_smoothing > 0:
        loss = (1 - label_smoothing) * loss - label_smoothing * log_probabilities.mean(-1)
    return jnp.where(counted, loss, jnp.zeros_like(loss)).sum(), counted.sum()


def mean_cross_entropy(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], label_smoothing: float = 0.0
) -> Float[Array, ""]:
    """The mean over the labels that count; 0, with zero gradients, where none does."""
    total, count = cross_entropy(logits, labels, label_smoothing)
    return total / jnp.maximum(count, 1)
