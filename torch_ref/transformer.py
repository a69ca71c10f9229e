"""The three transformers, put together from `layers` and `attention`; beside jax_tformer/model/transformer.py."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from jax_tformer.config import StackConfig, TransformerConfig
from torch_ref.attention import Attention, position_ids, visible
from torch_ref.dropout import Dropout
from torch_ref.embedding import InputEmbedding
from torch_ref.heads import Classifier, Head, Pooler
from torch_ref.layers import FeedForward, Norm, high
from torch_ref.positions import RelativePositions


class Captured(NamedTuple):
    """Per layer: the residual stream after it `[B, T, D]` and its attention weights `[B, H, T, S]`."""

    hidden: list[Tensor]
    self_attention: list[Tensor]
    cross_attention: list[Tensor]


class Outputs(NamedTuple):
    """Logits (hidden states where there is no head), what the layers computed on the way, and the pooled texts."""

    logits: Tensor
    encoder: Captured | None
    decoder: Captured | None
    pooled: Tensor | None = None


class Block(nn.Module):
    """One layer: post-norm as in the paper, norm(x + f(x)), or pre-norm, x + f(norm(x))."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, cross: bool):
        super().__init__()
        self.self_attention, self.self_attention_norm = Attention(config, stack), Norm(config, stack)
        self.cross_attention = Attention(config, stack) if cross else None
        self.cross_attention_norm = Norm(config, stack) if cross else None
        self.feedforward, self.feedforward_norm = FeedForward(config, stack), Norm(config, stack)
        self.self_attention_residual_dropout = Dropout(config.dropout.residual)
        self.cross_attention_residual_dropout = Dropout(config.dropout.residual) if cross else None
        self.feedforward_residual_dropout = Dropout(config.dropout.residual)
        self.pre = stack.norm_placement == "pre"

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual stream after the layer, self-attention weights, cross-attention weights."""
        cross_weights = None
        h = self.self_attention_norm(x) if self.pre else x
        h, self_weights = self.self_attention(h, h, mask, positions, bias)
        x = self._add(x, self.self_attention_residual_dropout(h), self.self_attention_norm)
        if self.cross_attention is not None and self.cross_attention_norm is not None and memory is not None:
            assert self.cross_attention_residual_dropout is not None
            h = self.cross_attention_norm(x) if self.pre else x
            h, cross_weights = self.cross_attention(h, memory, memory_mask)
            x = self._add(x, self.cross_attention_residual_dropout(h), self.cross_attention_norm)
        h = self.feedforward(self.feedforward_norm(x) if self.pre else x)
        x = self._add(x, self.feedforward_residual_dropout(h), self.feedforward_norm)
        return x, self_weights, cross_weights

    def _add(self, x: Tensor, h: Tensor, norm: Norm) -> Tensor:
        return x + h if self.pre else norm(x + h)


class Stack(nn.Module):
    """num_layers blocks, then the final norm if there is one."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, causal: bool, cross: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, stack, cross) for _ in range(stack.num_layers))
        relative = stack.positions == "relative"
        self.relative_positions = RelativePositions(stack, causal) if relative else None
        self.final_norm = Norm(config, stack) if stack.final_norm else None
        self.final_dropout = Dropout(config.dropout.final)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Tensor, Captured]:
        captured = Captured([], [], [])
        bias = None if self.relative_positions is None else self.relative_positions(x.shape[1])
        for block in self.blocks:
            x, self_weights, cross_weights = block(x, mask, positions.to(high(x).dtype), memory, memory_mask, bias)
            captured.hidden.append(x)
            captured.self_attention.append(self_weights)
            if cross_weights is not None:
                captured.cross_attention.append(cross_weights)
        return self.final_dropout(x if self.final_norm is None else self.final_norm(x)), captured


class SingleStack(nn.Module):
    """What EncoderOnly and DecoderOnly share: everything but the name of the stack and its mask."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.embedding = InputEmbedding(config, config.output_stack)
        self.head = Head(config) if config.predicts_tokens else None

    def run(
        self,
        stack: Stack,
        tokens: Tensor,
        seen: Tensor | None,
        mask: Tensor | None,
        types: Tensor | None,
        segments: Tensor | None,
    ) -> tuple[Tensor, Captured]:
        """Logits, and what the layers computed on the way."""
        positions = position_ids(tokens, mask, segments)
        x = self.embedding(tokens, positions, self.embedding.tokens, types)
        x, captured = stack(x, seen, positions)
        return (x if self.head is None else self.head(x, self.embedding.tokens)), captured


class DecoderOnly(SingleStack):
    """logits = head(decoder(embedding(tokens))), causal: GPT's shape."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        assert config.decoder is not None
        self.decoder, self.window = Stack(config, config.decoder, causal=True), config.decoder.window

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        token_types: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
    ) -> Outputs:
        """`mask` is True at tokens; `segments` numbers the texts of a row; tokens of the `prefix` see one another."""
        seen = visible(tokens, causal=True, window=self.window, is_token=mask, segments=segments, prefix=prefix)
        logits, captured = self.run(self.decoder, tokens, seen, mask, token_types, segments)
        return Outputs(logits, None, captured)


class EncoderOnly(SingleStack):
    """output = encoder(embedding(tokens)), every position seeing every other: BERT's shape."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        assert config.encoder is not None
        self.encoder, self.window = Stack(config, config.encoder, causal=False), config.encoder.window
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
        seen = visible(tokens, causal=False, window=self.window, is_token=mask, segments=segments)
        x, captured = self.run(self.encoder, tokens, seen, mask, token_types, segments)
        pooled = None if self.pooler is None else self.pooler(x)
        logits = x if self.classifier is None else self.classifier(x if pooled is None else pooled)
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
        self.windows = config.encoder.window, config.decoder.window

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
        seen = visible(source, causal=False, window=self.windows[0], is_token=source_mask, segments=source_segments)
        memory, encoder = self.encoder(self.source_embedding(source, positions, source_table), seen, positions)

        table = self.target_embedding.tokens or source_table
        positions = position_ids(target, target_mask, target_segments)
        seen = visible(target, causal=True, window=self.windows[1], is_token=target_mask, segments=target_segments)
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
