"""The encoder alone: every position sees every other, BERT's shape."""

from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jax_tformer.config import TransformerConfig
from jax_tformer.models.outputs import Outputs
from jax_tformer.nn.blocks import Context
from jax_tformer.nn.dropout import split_key
from jax_tformer.nn.embedding import Head, InputEmbedding
from jax_tformer.nn.masks import padding_mask
from jax_tformer.nn.positions import position_ids
from jax_tformer.nn.stacks import Stack


class EncoderOnly(nnx.Module):
    """output = encoder(embedding(tokens)); with a head, logits of the token that stands (or stood) at each position."""

    def __init__(self, config: TransformerConfig):
        assert config.encoder is not None
        self.embedding = InputEmbedding(config, config.encoder)
        self.encoder = Stack(config, config.encoder, cross=False)
        self.head = Head(config) if config.head != "none" else None

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        mask: Bool[Array, "B T"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        token_types: Int[Array, "B T"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
        capture: bool = False,
        project: bool = True,
    ) -> Float[Array, "B T V"] | Outputs:
        """Logits `[B, T, V]` (without a head: hidden states `[B, T, D]`); with `capture`, Outputs.

        Without `project`, what the vocabulary projection would be given `[B, T, D]` (see `projection`).

        `mask` is True at tokens and False at padding, on either side; positions then count tokens only.
        """
        embedding_key, encoder_key = split_key(dropout_key, 2)
        positions = position_ids(tokens.shape[1], mask) if positions is None else positions
        keep = self.embedding.draw_keep(embedding_key, tokens)
        x = self.embedding(tokens, positions, token_types=token_types, keep=keep)
        context = Context(causal=False, self_mask=padding_mask(mask), rotation=self.encoder.rotation(positions))
        x, captured = self.encoder(x, context, dropout_key=encoder_key, capture=capture)
        if self.head is not None:
            x = self.head(x, self.embedding.table) if project else self.head.transformed(x)
        return Outputs(x, encoder=captured, embedding_dropout={"embedding": keep}) if capture else x

    def projection(self) -> tuple[Float[Array, "V D"], Float[Array, " V"] | None]:
        """The matrix and the bias of the vocabulary projection, which must exist."""
        assert self.head is not None
        return self.head.projection(self.embedding.table)
