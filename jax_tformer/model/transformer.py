"""The three transformers, made of embeddings, stacks and heads, the same as in torch_ref/transformer.py."""

from typing import NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from jax_tformer.cache import Cache, empty_cache, place_tokens
from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import require
from jax_tformer.model.blocks import Captured, Stack
from jax_tformer.model.embedding import InputEmbedding, Table
from jax_tformer.model.heads import Classifier, Head, Pooler
from jax_tformer.model.masks import Mask, position_ids
from jax_tformer.model.parameters import (
    DropoutKey,
    Ids,
    Marks,
    Memory,
    Numbers,
    SourceIds,
    SourceMarks,
    SourceNumbers,
    Stream,
)


class Outputs(NamedTuple):
    """The result of a forward pass."""

    logits: Float[Array, "B ... V"]
    """Logits of the vocabulary, `[B, T, V]`, or of classes, `[B, T, classes]` and for a whole text `[B, classes]`.

    Hidden states `[B, T, D]` if the model has no head.
    """
    hidden: Stream
    """The input of the vocabulary projection. Compiled code that uses only this computes no logits."""
    encoder: Captured | None = None
    """Captured from the encoder's layers, stacked along L; None without `capture`."""
    decoder: Captured | None = None
    """Captured from the decoder's layers, stacked along L; None without `capture`."""
    cache: Cache | None = None
    """The given cache with these tokens in it."""
    pooled: Float[Array, "B D"] | None = None
    """The result of the pooler; None if the model has none."""


class SingleStack(nnx.Module):
    """What EncoderOnly and DecoderOnly share: everything but the name of the stack and its mask."""

    def __init__(self, config: TransformerConfig) -> None:
        self.embedding = InputEmbedding(config, config.output_stack)
        self.head = Head(config) if config.predicts_tokens else None

    @property
    def table(self) -> Table:
        """The token table."""
        assert self.embedding.tokens is not None
        return self.embedding.tokens


class DecoderOnly(SingleStack):
    """logits = head(decoder(embedding(tokens))), causal, like GPT."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        assert config.decoder is not None
        self.decoder = Stack(config, config.decoder, causal=True)

    def __call__(
        self,
        tokens: Ids,
        *,
        mask: Marks = None,
        token_types: Numbers = None,
        segments: Numbers = None,
        prefix: Marks = None,
        dropout_key: DropoutKey = None,
        cache: Cache | None = None,
        capture: bool = False,
    ) -> Outputs:
        """Computes logits of the token after each of `tokens`, and the other outputs.

        `mask` is True at tokens and False at padding, on either side; positions then count only tokens. `segments`
        numbers the texts in a row: each sees only itself, and its positions begin at 0. Tokens of the `prefix` (True)
        see one another in both directions. A `dropout_key` turns dropout on. With a cache, the tokens come after those
        that it holds; a prefix must then come in one call, to see all of itself.

        Ids must be at least 0 and below vocab_size. Compiled code cannot check them: too large ones give NaN in their
        whole row, negative ones count from the table's end. `generate`, `stream`, `score` and train.py check theirs.
        """
        positions, cache = place_tokens(tokens, mask, segments, cache)
        seen = self.decoder.masks(tokens, mask, segments, prefix, cache)
        x = self.embedding(tokens, positions, self.table, token_types, dropout_key)
        x, captured, cache = self.decoder(x, seen, positions, dropout_key=dropout_key, cache=cache, capture=capture)
        return _outputs(self.head, x, self.table)._replace(decoder=captured, cache=cache)

    def new_cache(self, batch: int, slots: int) -> Cache:
        """Makes an empty cache for `batch` sequences of up to `slots` tokens, padding included."""
        return empty_cache(self.decoder.config, self.decoder.stack, batch, slots)


class EncoderOnly(SingleStack):
    """output = encoder(embedding(tokens)), like BERT: tokens see those before them and those after them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        assert config.encoder is not None
        self.encoder = Stack(config, config.encoder, causal=False)
        self.pooler = None if config.pooler == "none" else Pooler(config)
        self.classifier = None if config.classes is None else Classifier(config)

    def __call__(
        self,
        tokens: Ids,
        *,
        mask: Marks = None,
        token_types: Numbers = None,
        segments: Numbers = None,
        dropout_key: DropoutKey = None,
        capture: bool = False,
    ) -> Outputs:
        """Computes logits of tokens or classes, or hidden states; arguments are as in `DecoderOnly`."""
        positions = position_ids(tokens, mask, segments)
        seen = self.encoder.masks(tokens, mask, segments)
        x = self.embedding(tokens, positions, self.table, token_types, dropout_key)
        x, captured, _ = self.encoder(x, seen, positions, dropout_key=dropout_key, capture=capture)
        outputs = _outputs(self.head, x, self.table)
        pooled = None if self.pooler is None else self.pooler(outputs.hidden, dropout_key)
        if self.classifier is not None:
            classified = outputs.hidden if pooled is None else pooled
            outputs = outputs._replace(logits=self.classifier(classified, dropout_key))
        return outputs._replace(encoder=captured, pooled=pooled)


class EncoderDecoder(nnx.Module):
    """logits = decode(target, encode(source)): "Attention is all you need" (Vaswani et al., 2017, section 3)."""

    def __init__(self, config: TransformerConfig) -> None:
        assert config.encoder is not None
        assert config.decoder is not None
        self.source_embedding = InputEmbedding(config, config.encoder)
        self.encoder = Stack(config, config.encoder, causal=False)
        self.target_embedding = InputEmbedding(config, config.decoder, tokens=not config.shared_embedding)
        self.decoder = Stack(config, config.decoder, causal=True, cross=True)
        self.head = Head(config) if config.predicts_tokens else None

    @property
    def table(self) -> Table:
        """The decoder's token table, which may be the encoder's."""
        table = self.target_embedding.tokens or self.source_embedding.tokens
        assert table is not None
        return table

    def __call__(
        self,
        source: SourceIds,
        target: Ids,
        *,
        source_mask: SourceMarks = None,
        target_mask: Marks = None,
        source_segments: SourceNumbers = None,
        target_segments: Numbers = None,
        dropout_key: DropoutKey = None,
        cache: Cache | None = None,
        capture: bool = False,
    ) -> Outputs:
        """Computes logits of the token after each of `target` (shifted right: it begins with the start token).

        A target's segment sees the source's segment of the same number; other arguments are as in `DecoderOnly`. A
        cache also holds the encoded source, so that `decode` can continue.
        """
        memory, encoder = self.encode(source, source_mask, source_segments, dropout_key, capture)
        marks = source_mask, target_mask, source_segments, target_segments
        return self.decode(target, memory, *marks, dropout_key, cache, capture)._replace(encoder=encoder)

    def encode(
        self,
        source: SourceIds,
        source_mask: SourceMarks = None,
        source_segments: SourceNumbers = None,
        dropout_key: DropoutKey = None,
        capture: bool = False,
    ) -> tuple[Float[Array, "B S D"], Captured | None]:
        """Returns the memory that `decode` attends to, and what `capture` asks for."""
        assert self.source_embedding.tokens is not None
        positions = position_ids(source, source_mask, source_segments)
        seen = self.encoder.masks(source, source_mask, source_segments)
        x = self.source_embedding(source, positions, self.source_embedding.tokens, None, dropout_key)
        memory, captured, _ = self.encoder(x, seen, positions, dropout_key=dropout_key, capture=capture)
        return memory, captured

    def decode(
        self,
        target: Ids,
        memory: Memory,
        source_mask: SourceMarks = None,
        target_mask: Marks = None,
        source_segments: SourceNumbers = None,
        target_segments: Numbers = None,
        dropout_key: DropoutKey = None,
        cache: Cache | None = None,
        capture: bool = False,
    ) -> Outputs:
        """Computes outputs for the target from `memory`, the encoded source; None: the source that the cache holds."""
        positions, cache = place_tokens(target, target_mask, target_segments, cache)
        seen = self.decoder.masks(target, target_mask, target_segments, None, cache)
        if cache is not None:
            cache = cache if memory is None else cache._replace(source_is_token=source_mask)
            source_mask = cache.source_is_token
        require(
            (source_segments is None) == (target_segments is None),
            "there are segments of one side alone; expected source_segments and target_segments, or neither",
        )
        segments = None if source_segments is None or target_segments is None else (target_segments, source_segments)
        memory_mask = Mask(is_token=source_mask, segments=segments, cap=self.decoder.stack.score_cap)
        x = self.target_embedding(target, positions, self.table, None, dropout_key)
        x, captured, cache = self.decoder(x, seen, positions, memory, memory_mask, dropout_key, cache, capture)
        return _outputs(self.head, x, self.table)._replace(decoder=captured, cache=cache)

    def new_cache(self, batch: int, slots: int, source_slots: int) -> Cache:
        """Makes an empty cache for `batch` targets of up to `slots` tokens, and sources of `source_slots`."""
        return empty_cache(self.decoder.config, self.decoder.stack, batch, slots, source_slots)


def _outputs(head: Head | None, x: Stream, table: Table) -> Outputs:
    """Returns the logits and hidden states of the last stack's output."""
    if head is None:
        return Outputs(x, x)
    hidden = head.transform(x)
    return Outputs(head(hidden, table), hidden)
