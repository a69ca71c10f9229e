"""What a model returns when it is asked for more than its logits."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float

from jax_tformer.nn.blocks import Captured


class Outputs(NamedTuple):
    """The result of `apply(..., capture=True)`."""

    logits: Float[Array, "B T V"]
    """Logits, or hidden states where the model has no head."""
    encoder: Captured | None = None
    """Hidden states, attention weights and dropout masks of the encoder's layers, stacked along L."""
    decoder: Captured | None = None
    """Hidden states, attention weights and dropout masks of the decoder's layers, stacked along L."""
    embedding_dropout: dict[str, Bool[Array, "B T D"] | None] | None = None
    """The dropout mask of each input embedding, by its name in the model."""

    def dropout_masks(self) -> dict[str, Bool[Array, "..."]]:
        """Every dropout mask that was drawn (True = kept), by the name of its site.

        `decoder.blocks.3.self_attention.dropout` is the site inside a layer's self-attention,
        `decoder.blocks.3.self_attention_residual_dropout` the one after it, `embedding.dropout` that of the input.
        """
        masks = {f"{name}.dropout": mask for name, mask in (self.embedding_dropout or {}).items()}
        for side, captured in (("encoder", self.encoder), ("decoder", self.decoder)):
            for kind, stacked in captured.dropout._asdict().items() if captured else ():
                site = f"{kind}_dropout" if kind.endswith("_residual") else f"{kind}.dropout"
                for layer in range(0 if stacked is None else stacked.shape[0]):
                    masks[f"{side}.blocks.{layer}.{site}"] = stacked[layer]
        return {site: mask for site, mask in masks.items() if mask is not None}
