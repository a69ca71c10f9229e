"""The three transformers, put together from embeddings, stacks and heads; beside jax_tformer/model/transformer.py."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from jax_tformer.config import TransformerConfig
from torch_ref.blocks import Captured, Stack
from torch_ref.embedding import InputEmbedding
from torch_ref.heads import Classifier, Head, Pooler
from torch_ref.masks import position_ids


class Outputs(NamedTuple):
    """Logits (hidden states where there is no head), what the layers computed on the way, and the pooled texts."""

    logits: Tensor
    encoder: Captured | None
    decoder: Captured | None
    pooled: Tensor | None = None


class SingleStack(nn.Module):
    """What EncoderOnly and DecoderOnly share: everything but the name of the stack and its mask."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.embedding = InputEmbedding(config, config.output_stack)
        self.head = Head(config) if config.predicts_tokens else None


class DecoderOnly(SingleStack):
    """logits = head(decoder(embedding(tokens))), causal: GPT's shape."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        assert config.decoder is not None
        self.decoder = Stack(config, config.decoder, causal=True)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        token_types: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
    ) -> Outputs:
        """`mask` is True at tokens; `segments` numbers the texts of a row; tokens of the `prefix` see one another."""
        positions = position_ids(tokens, mask, segments)
        seen = self.decoder.masks(tokens, is_token=mask, segments=segments, prefix=prefix)
        x = self.embedding(tokens, positions, self.embedding.tokens, token_types)
        x, captured = self.decoder(x, seen, positions)
        return Outputs(x if self.head is None else self.head(x, self.embedding.tokens), None, captured)


class EncoderOnly(SingleStack):
    """output = encoder(embedding(tokens)), every position seeing every other: BERT's shape."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        assert config.encoder is not None
        self.encoder = Stack(config, config.encoder, causal=False)
        self.pooler = None if config.pooler == "none" else Pooler(config)
        self.classifier = None if config.classes is None else Classifier(config)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        token_types: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Outputs:
        """`mask` is True at tokens; `segments` numbers the texts of a row."""
        positions = position_ids(tokens, mask, segments)
        seen = self.encoder.masks(tokens, is_token=mask, segments=segments)
        x = self.embedding(tokens, positions, self.embedding.tokens, token_types)
        x, captured = self.encoder(x, seen, positions)
        pooled = None if self.pooler is None else self.pooler(x)
        logits = x if self.head is None else self.head(x, self.embedding.tokens)
        logits = logits if self.classifier is None else self.classifier(x if pooled is None else pooled)
        return Outputs(logits, captured, None, pooled)


class EncoderDecoder(nn.Module):
    """logits = decode(target, encode(source)): "Attention is all you need"."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        assert config.encoder is not None
        assert config.decoder is not None
        self.source_embedding = InputEmbedding(config, config.encoder)
        self.encoder = Stack(config, config.encoder, causal=False)
        self.target_embedding = InputEmbedding(config, config.decoder, tokens=not config.shared_embedding)
        self.decoder = Stack(config, config.decoder, causal=True, cross=True)
        self.head = Head(config) if config.predicts_tokens else None

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        source_segments: Tensor | None = None,
        target_segments: Tensor | None = None,
    ) -> Outputs:
        """Masks are True at tokens; a target's segment sees the source's segment of the same number."""
        source_table = self.source_embedding.tokens
        positions = position_ids(source, source_mask, source_segments)
        seen = self.encoder.masks(source, is_token=source_mask, segments=source_segments)
        memory, encoder = self.encoder(self.source_embedding(source, positions, source_table), seen, positions)

        table = self.target_embedding.tokens or source_table
        positions = position_ids(target, target_mask, target_segments)
        seen = self.decoder.masks(target, is_token=target_mask, segments=target_segments)
        memory_mask = None if source_mask is None else source_mask[:, None, None]
        if source_segments is not None and target_segments is not None:
            same = target_segments[:, None, :, None] == source_segments[:, None, None, :]
            memory_mask = same if memory_mask is None else same & memory_mask
        x = self.target_embedding(target, positions, table)
        x, decoder = self.decoder(x, seen, positions, memory, memory_mask)
        return Outputs(x if self.head is None else self.head(x, table), encoder, decoder)


def reference(config: TransformerConfig) -> DecoderOnly | EncoderOnly | EncoderDecoder:
    """The reference model that `config` describes, in its parameter dtype, with every weight still to be loaded."""
    if config.encoder is None:
        model: DecoderOnly | EncoderOnly | EncoderDecoder = DecoderOnly(config)
    else:
        model = EncoderOnly(config) if config.decoder is None else EncoderDecoder(config)
    return model.to(getattr(torch, config.compute.parameter_dtype))
