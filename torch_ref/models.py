"""The three transformers, put together from `layers`."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jax_tformer.config import StackConfig, TransformerConfig
from torch_ref.dropout import Dropout
from torch_ref.layers import Block, Norm, activation, high, sinusoidal


class Captured(NamedTuple):
    """Per layer: the residual stream after it `[B, T, D]` and its attention weights `[B, H, T, S]`."""

    hidden: list[Tensor]
    self_attention: list[Tensor]
    cross_attention: list[Tensor]


class Output(NamedTuple):
    """Logits (hidden states where there is no head), and what the layers computed on the way."""

    logits: Tensor
    encoder: Captured | None
    decoder: Captured | None


class InputEmbedding(nn.Module):
    """Token + position + token-type embeddings, then norm and dropout."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, tokens: bool = True):
        super().__init__()
        assert config.vocab_size is not None
        self.tokens = nn.Embedding(config.vocab_size, config.d_model) if tokens else None
        learned = stack.positions == "learned"
        self.positions = nn.Embedding(stack.max_positions or 0, config.d_model) if learned else None
        self.token_types = nn.Embedding(stack.token_types, config.d_model) if stack.token_types else None
        self.norm = Norm(config, stack) if stack.embedding_norm else None
        self.dropout = Dropout(config.dropout.embedding)
        self.stack = stack

    def forward(self, ids: Tensor, positions: Tensor, table: nn.Embedding, types: Tensor | None = None) -> Tensor:
        x = table(ids)
        if self.stack.embedding_scale:
            x = x * math.sqrt(x.shape[-1])
        if self.positions is not None:
            x = x + self.positions(positions)
        elif self.stack.positions.startswith("sinusoidal"):
            interleaved = self.stack.positions == "sinusoidal_interleaved"
            times = positions.to(high(x).dtype)
            x = x + sinusoidal(times, x.shape[-1], self.stack.position_base, interleaved).to(x.dtype)
        if self.token_types is not None:
            x = x + self.token_types(torch.zeros_like(ids) if types is None else types)
        return self.dropout(x if self.norm is None else self.norm(x))


class Stack(nn.Module):
    """num_layers blocks, then the final norm if there is one."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, cross: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, stack, cross) for _ in range(stack.num_layers))
        self.final_norm = Norm(config, stack) if stack.final_norm else None

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Tensor, Captured]:
        captured = Captured([], [], [])
        for block in self.blocks:
            x, self_weights, cross_weights = block(x, mask, positions.to(high(x).dtype), memory, memory_mask)
            captured.hidden.append(x)
            captured.self_attention.append(self_weights)
            if cross_weights is not None:
                captured.cross_attention.append(cross_weights)
        return (x if self.final_norm is None else self.final_norm(x)), captured


class Head(nn.Module):
    """logits = W x (+ b); W may be the token table; BERT's head first transforms x."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        assert config.vocab_size is not None
        transform, stack = config.head == "transform", config.output_stack
        self.dense = nn.Linear(config.d_model, config.d_model) if transform else None
        self.norm = Norm(config, stack) if transform else None
        self.weight = None if config.tied_head else nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.head_bias else None
        self.activation = activation(stack.activation)

    def forward(self, x: Tensor, table: nn.Embedding) -> Tensor:
        if self.dense is not None and self.norm is not None:
            x = self.norm(self.activation(self.dense(x)))
        weight, bias = table.weight if self.weight is None else self.weight, self.bias
        return high(F.linear(high(x), high(weight), None if bias is None else high(bias)))


def position_ids(ids: Tensor, tokens: Tensor | None) -> Tensor:
    """0, 1, 2 ... along the tokens of each row; padding (False) on the left does not count."""
    if tokens is None:
        return torch.arange(ids.shape[1], device=ids.device)[None]
    return (tokens.cumsum(dim=1) - 1).clamp(min=0)


def causal(ids: Tensor, tokens: Tensor | None) -> Tensor:
    """Position t sees positions 0 .. t, and of these the tokens."""
    length = ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()[None, None]
    return mask if tokens is None else mask & tokens[:, None, None]


class SingleStack(nn.Module):
    """What EncoderOnly and DecoderOnly share: everything but the name of the stack and its mask."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.embedding = InputEmbedding(config, config.output_stack)
        self.head = Head(config) if config.head != "none" else None

    def run(
        self, stack: Stack, ids: Tensor, mask: Tensor | None, tokens: Tensor | None, types: Tensor | None
    ) -> tuple[Tensor, Captured]:
        positions = position_ids(ids, tokens)
        x = self.embedding(ids, positions, self.embedding.tokens, types)
        x, captured = stack(x, mask, positions)
        return (x if self.head is None else self.head(x, self.embedding.tokens)), captured


class DecoderOnly(SingleStack):
    """logits = head(decoder(embedding(tokens))), causal: GPT's shape."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        assert config.decoder is not None
        self.decoder = Stack(config, config.decoder)

    def forward(self, ids: Tensor, mask: Tensor | None = None, token_types: Tensor | None = None) -> Output:
        logits, captured = self.run(self.decoder, ids, causal(ids, mask), mask, token_types)
        return Output(logits, None, captured)


class EncoderOnly(SingleStack):
    """output = encoder(embedding(tokens)), every position seeing every other: BERT's shape."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        assert config.encoder is not None
        self.encoder = Stack(config, config.encoder)

    def forward(self, ids: Tensor, mask: Tensor | None = None, token_types: Tensor | None = None) -> Output:
        seen = None if mask is None else mask[:, None, None]
        logits, captured = self.run(self.encoder, ids, seen, mask, token_types)
        return Output(logits, captured, None)


class EncoderDecoder(nn.Module):
    """logits = decode(target, encode(source)): "Attention is all you need"."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        assert config.encoder is not None
        assert config.decoder is not None
        self.source_embedding = InputEmbedding(config, config.encoder)
        self.encoder = Stack(config, config.encoder)
        self.target_embedding = InputEmbedding(config, config.decoder, tokens=not config.shared_embedding)
        self.decoder = Stack(config, config.decoder, cross=True)
        self.head = Head(config) if config.head != "none" else None

    def forward(
        self, source: Tensor, target: Tensor, source_mask: Tensor | None = None, target_mask: Tensor | None = None
    ) -> Output:
        seen = None if source_mask is None else source_mask[:, None, None]
        source_table = self.source_embedding.tokens
        positions = position_ids(source, source_mask)
        memory, encoder = self.encoder(self.source_embedding(source, positions, source_table), seen, positions)

        table = self.target_embedding.tokens or source_table
        positions = position_ids(target, target_mask)
        x = self.target_embedding(target, positions, table)
        x, decoder = self.decoder(x, causal(target, target_mask), positions, memory, seen)
        return Output(x if self.head is None else self.head(x, table), encoder, decoder)


def reference(config: TransformerConfig) -> DecoderOnly | EncoderOnly | EncoderDecoder:
    """The reference model that `config` describes, in its parameter dtype, with every weight still to be loaded."""
    if config.encoder is None:
        model: DecoderOnly | EncoderOnly | EncoderDecoder = DecoderOnly(config)
    else:
        model = EncoderOnly(config) if config.decoder is None else EncoderDecoder(config)
    return model.to(getattr(torch, config.compute.parameter_dtype))
