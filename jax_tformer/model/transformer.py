"""The three transformers, made of embeddings, stacks and heads, the same as in torch_ref/transformer.py."""

from jaxtyping import Array, Bool, Float, Int, Key

from jax_tformer.config import TransformerConfig
from jax_tformer.errors import require
from jax_tformer.model.attention import Cache, Captured, empty_cache, within
from jax_tformer.model.blocks import Stack
from jax_tformer.model.embedding import InputEmbedding, Table
from jax_tformer.model.heads import Outputs, ReadOut
from jax_tformer.model.layers import site_key
from jax_tformer.model.masks import Mask


class SingleStack(ReadOut):
    """What EncoderOnly and DecoderOnly share: everything but the name of the stack and its mask."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.embedding = InputEmbedding(config, config.output_stack)

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
        self.decoder = Stack(config, config.decoder)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        mask: Bool[Array, "B T"] | None = None,
        token_types: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        prefix: Bool[Array, "B T"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
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
        positions, seen, cache = within(self.decoder.stack, tokens, mask, segments, prefix, cache, causal=True)
        x = self.embedding(tokens, positions, self.table, token_types, site_key(dropout_key, "embedding"))
        key = site_key(dropout_key, "decoder")
        x, captured, cache = self.decoder(x, seen, positions, dropout_key=key, cache=cache, capture=capture)
        return self.outputs(x, None, captured, cache)

    def new_cache(self, batch: int, slots: int) -> Cache:
        """Makes an empty cache for `batch` sequences of up to `slots` tokens, padding included."""
        return empty_cache(self.decoder.config, self.decoder.stack, batch, slots)


class EncoderOnly(SingleStack):
    """output = encoder(embedding(tokens)), every position sees every other, like BERT."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        assert config.encoder is not None
        self.encoder = Stack(config, config.encoder)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        mask: Bool[Array, "B T"] | None = None,
        token_types: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
        capture: bool = False,
    ) -> Outputs:
        """Computes logits of tokens or classes, or hidden states; arguments are as in `DecoderOnly`."""
        positions, seen, _ = within(self.encoder.stack, tokens, mask, segments, causal=False)
        x = self.embedding(tokens, positions, self.table, token_types, site_key(dropout_key, "embedding"))
        x, captured, _ = self.encoder(x, seen, positions, dropout_key=site_key(dropout_key, "encoder"), capture=capture)
        return self.outputs(x, captured, None, None, dropout_key)


class EncoderDecoder(ReadOut):
    """logits = decode(target, encode(source)): "Attention is all you need" (Vaswani et al., 2017, section 3)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        assert config.encoder is not None
        assert config.decoder is not None
        self.source_embedding = InputEmbedding(config, config.encoder)
        self.encoder = Stack(config, config.encoder)
        self.target_embedding = InputEmbedding(config, config.decoder, tokens=not config.shared_embedding)
        self.decoder = Stack(config, config.decoder, cross=True)

    @property
    def table(self) -> Table:
        """The decoder's token table, which may be the encoder's."""
        table = self.target_embedding.tokens or self.source_embedding.tokens
        assert table is not None
        return table

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        source_mask: Bool[Array, "B S"] | None = None,
        target_mask: Bool[Array, "B T"] | None = None,
        source_segments: Int[Array, "B S"] | None = None,
        target_segments: Int[Array, "B T"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
        cache: Cache | None = None,
        capture: bool = False,
    ) -> Outputs:
        """Computes logits of the token after each of `target` (shifted right: it begins with the start token).

        A target's segment sees the source's segment of the same number; other arguments are as in `DecoderOnly`. A
        cache also holds the encoded source, so that `decode` can continue.
        """
        memory, encoder = self.encode(source, source_mask, source_segments, dropout_key, capture)
        masks = source_mask, target_mask, source_segments, target_segments
        outputs = self.decode(target, memory, *masks, dropout_key, cache, capture)
        return outputs._replace(encoder=encoder)

    def encode(
        self,
        source: Int[Array, "B S"],
        source_mask: Bool[Array, "B S"] | None = None,
        source_segments: Int[Array, "B S"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
        capture: bool = False,
    ) -> tuple[Float[Array, "B S D"], Captured | None]:
        """Returns the memory that `decode` attends to, and what `capture` asks for."""
        assert self.source_embedding.tokens is not None
        positions, seen, _ = within(self.encoder.stack, source, source_mask, source_segments, causal=False)
        key = site_key(dropout_key, "source_embedding")
        x = self.source_embedding(source, positions, self.source_embedding.tokens, dropout_key=key)
        key = site_key(dropout_key, "encoder")
        memory, captured, _ = self.encoder(x, seen, positions, dropout_key=key, capture=capture)
        return memory, captured

    def decode(
        self,
        target: Int[Array, "N T"],
        memory: Float[Array, "N S D"] | None,
        source_mask: Bool[Array, "N S"] | None = None,
        target_mask: Bool[Array, "N T"] | None = None,
        source_segments: Int[Array, "N S"] | None = None,
        target_segments: Int[Array, "N T"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
        cache: Cache | None = None,
        capture: bool = False,
    ) -> Outputs:
        """Computes outputs for the target from `memory`, the encoded source; None: the source that the cache holds."""
        positions, seen, cache = within(
            self.decoder.stack, target, target_mask, target_segments, cache=cache, causal=True
        )
        if cache is not None:
            cache = cache if memory is None else cache._replace(source_is_token=source_mask)
            source_mask = cache.source_is_token
        message = "there are segments of one side alone; expected source_segments and target_segments, or neither"
        require((source_segments is None) == (target_segments is None), message)
        segments = None if source_segments is None or target_segments is None else (target_segments, source_segments)
        memory_mask = Mask(is_token=source_mask, segments=segments, cap=self.decoder.stack.score_cap)
        key = site_key(dropout_key, "decoder")
        x = self.target_embedding(target, positions, self.table, dropout_key=site_key(dropout_key, "target_embedding"))
        x, captured, cache = self.decoder(
            x, seen, positions, memory, memory_mask, dropout_key=key, cache=cache, capture=capture
        )
        return self.outputs(x, None, captured, cache)

    def new_cache(self, batch: int, slots: int, source_slots: int) -> Cache:
        """Makes an empty cache for `batch` targets of up to `slots` tokens, and sources of `source_slots`."""
        return empty_cache(self.decoder.config, self.decoder.stack, batch, slots, source_slots)
