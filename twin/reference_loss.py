"""Cross-entropy in a few lines of JAX: what the loss that trains is compared with."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_tformer.config import IGNORED
from jax_tformer.config.experiment import CROSS_ENTROPY, LossConfig
from jax_tformer.model.parameters import accumulator


def token_losses(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], loss: LossConfig = CROSS_ENTROPY
) -> Float[Array, "B T"]:
    """-log p(label) in nats, and 0 for labels that do not count.

    With smoothing e the target distribution is (1 - e) on the label plus e / V on every token (Szegedy et al., 2016,
    as in section 5.4 of the paper). The z-loss adds its factor times the square of the logits' log-sum-exp. Computed in
    at least float32.
    """
    counted = labels != IGNORED
    log_probabilities = jax.nn.log_softmax(logits.astype(accumulator(logits.dtype)), axis=-1)
    chosen = jnp.where(counted, labels, 0)[:, :, None]
    losses = -jnp.take_along_axis(log_probabilities, chosen, axis=-1)[:, :, 0]
    if (smoothing := loss.label_smoothing) > 0:
        losses = (1 - smoothing) * losses - smoothing * log_probabilities.mean(-1)
    if loss.z_loss > 0:
        losses += loss.z_loss * jnp.square(jax.nn.logsumexp(logits.astype(losses.dtype), axis=-1))
    return jnp.where(counted, losses, jnp.zeros_like(losses))


def cross_entropy(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], loss: LossConfig = CROSS_ENTROPY
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """The sum over the labels that count, and how many these are."""
    return token_losses(logits, labels, loss).sum(), (labels != IGNORED).sum()


def mean_cross_entropy(logits: Float[Array, "B T V"], labels: Int[Array, "B T"]) -> Float[Array, ""]:
    """The mean over the labels that count; 0, with zero gradients, where none does."""
    total, count = cross_entropy(logits, labels)
    return total / jnp.maximum(count, 1)
