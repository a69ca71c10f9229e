"""What a model returns when it is asked for more than its logits."""

from typing import NamedTuple

from jaxtyping import Array, Float

from jax_tformer.nn.blocks import Captured


class Outputs(NamedTuple):
    """The result of `apply(..., capture=True)`."""

    logits: Float[Array, "B T V"]
    """Logits, or hidden states where the model has no head."""
    encoder: Captured | None = None
    """Hidden states and attention weights of the encoder's layers, stacked along L."""
    decoder: Captured | None = None
    """Hidden states and attention weights of the decoder's layers, stacked along L."""
