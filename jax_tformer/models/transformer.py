"""The functional face of the models: a pure pair of init and apply."""

import math
from typing import Any

import jax
from flax import nnx, traverse_util
from jaxtyping import Array, Key

from jax_tformer.config import TransformerConfig
from jax_tformer.errors import InputError
from jax_tformer.models.decoder_only import DecoderOnly
from jax_tformer.models.encoder_decoder import EncoderDecoder
from jax_tformer.models.encoder_only import EncoderOnly
from jax_tformer.models.summary import short_summary, summary
from jax_tformer.nn.arrays import Params
from jax_tformer.nn.cache import Cache
from jax_tformer.nn.linear import Linear, Transposed
from jax_tformer.nn.masks import require_mask
from jax_tformer.nn.parameters import Declared, draw

Model = EncoderDecoder | DecoderOnly | EncoderOnly


class Transformer:
    """A transformer as pure functions of its parameters, a plain nested dict of arrays.

    `init` and `apply` can be jitted, differentiated and vmapped; nothing is kept between calls.
    """

    def __init__(self, config: TransformerConfig) -> None:
        if config.vocab_size is None:
            raise InputError("vocab_size is None; a model needs a number: TransformerConfig(vocab_size=...)")
        self.config = config
        model = nnx.eval_shape(lambda: _model(config))
        self._graph, state = nnx.split(model, nnx.Param)
        self._kernels = {
            path[2:]: math.prod(module.inputs)
            for path, module in nnx.iter_modules(model)
            if isinstance(module, Linear) and path[:2] == ("decoder", "blocks")
        }
        """The input width of every projection in a layer of the decoder."""
        self._declared = {
            ".".join(map(str, path)): Declared(variable.shape, variable.dtype, variable.get_metadata("start"))
            for path, variable in nnx.to_flat_state(state)
        }
        self.shapes: Params = nnx.to_pure_dict(state)
        """The parameters as jax.ShapeDtypeStruct: names, shapes and dtypes without the numbers."""

    def __eq__(self, other: object) -> bool:
        """Equal configs make equal models: what was compiled for one serves the other."""
        return isinstance(other, Transformer) and self.config == other.config

    def __hash__(self) -> int:
        return hash(self.config)

    def __repr__(self) -> str:
        return f"Transformer(\n{short_summary(self.config, self.shapes)}\n)"

    def summary(self) -> str:
        """A table of all parameters by name: shape, number and bytes of each, with the sums of each part."""
        return f"{short_summary(self.config, self.shapes)}\n\n{summary(self.shapes)}"

    def init(self, key: Key[Array, ""]) -> Params:
        """Fresh parameters; the same key gives the same parameters, to the bit, on one platform."""
        return jax.jit(self._init)(key)

    def apply(self, params: Params, *inputs: Array, **options: Any) -> Any:
        """The model's logits; inputs and options are those of the model's kind.

        Encoder-decoder: `apply(params, source, target, source_mask=, target_mask=)`; one stack:
        `apply(params, tokens, mask=, positions=, token_types=)`; all: `dropout_key=` (absent = deterministic) and
        `capture=True` (returns Outputs, with every layer's hidden states and attention weights).

        Masks are True at tokens and False at padding; raises InputError for one of another shape than its tokens. Ids
        must be from 0 to below vocab_size: compiled code cannot refuse others, and gives NaN all along their row (a
        negative one counts from the table's end). `generate`, `stream`, `score` and train.py check theirs.
        """
        both = self.config.encoder is not None and self.config.decoder is not None
        for name, tokens in zip(("source_mask", "target_mask") if both else ("mask",), inputs, strict=False):
            require_mask(name, options.get(name), tokens.shape)
        return self.bind(params)(*inputs, **options)

    def projection(self, params: Params) -> tuple[Array, Array | None]:
        """The matrix `[V, D]` and the bias `[V]` that `apply(..., project=False)` stops short of."""
        return self.bind(params).projection()

    def encode(self, params: Params, source: Array, **options: Any) -> Array:
        """The encoder's output `[B, S, D]` of an encoder-decoder."""
        require_mask("source_mask", options.get("source_mask"), source.shape)
        return self._encoder_decoder(params).encode(source, **options)

    def decode(self, params: Params, target: Array, memory: Array, **options: Any) -> Array:
        """Logits `[B, T, V]` of an encoder-decoder, given `memory`, the result of `encode`."""
        require_mask("source_mask", options.get("source_mask"), memory.shape[:2])
        require_mask("target_mask", options.get("target_mask"), target.shape)
        return self._encoder_decoder(params).decode(target, memory, **options)

    def new_cache(self, params: Params, *inputs: Any, **options: Any) -> Cache:
        """A cache to decode with: `new_cache(params, batch, slots)` for a decoder alone, for an encoder-decoder
        `new_cache(params, source, slots, source_mask=)`."""
        if options.get("source_mask") is not None:
            require_mask("source_mask", options["source_mask"], inputs[0].shape)
        return self._decoder(params).new_cache(*inputs, **options)

    def extend(self, params: Params, tokens: Array, cache: Cache, **options: Any) -> tuple[Array, Cache]:
        """Logits `[B, T, V]` after each of `tokens`, which come after those in `cache`, and the cache with them in it.

        `mask=` marks tokens among padding; `only_last=True` gives the logits of the last position alone.
        """
        require_mask("mask", options.get("mask"), tokens.shape)
        return self._decoder(params).extend(tokens, cache, **options)

    def unstacked(self, params: Params, *, single: bool = False) -> Params:
        """`params` with the decoder's layers apart: tuples of L arrays in place of arrays with a leading L axis.

        All functions take either form; this one spares `generate` and `stream` a copy of the weights in every call.
        With `single`, kernels are also transposed (see Transposed), with which one sequence alone is decoded fastest.
        """

        def apart(path: tuple[str, ...], leaf: Any) -> tuple[Any, ...]:
            if isinstance(leaf, tuple):
                return leaf
            if single and path[:-1] in self._kernels and path[-1] == "kernel":
                return tuple(Transposed.of(kernel.reshape(self._kernels[path[:-1]], -1)) for kernel in leaf)
            return tuple(leaf)

        decoder = params["decoder"]
        blocks = traverse_util.flatten_dict(decoder["blocks"])
        blocks = traverse_util.unflatten_dict({path: apart(path, leaf) for path, leaf in blocks.items()})
        return {**params, "decoder": {**decoder, "blocks": blocks}}

    def bind(self, params: Params) -> Any:
        """The Flax module with these parameters in it, to call parts of it by name."""
        return nnx.merge(self._graph, params)

    def _encoder_decoder(self, params: Params) -> EncoderDecoder:
        if self.config.encoder is None or self.config.decoder is None:
            raise TypeError("encode and decode need a model with an encoder and a decoder")
        return self.bind(params)

    def _decoder(self, params: Params) -> DecoderOnly | EncoderDecoder:
        if self.config.decoder is None:
            raise TypeError("new_cache and extend need a model with a decoder")
        return self.bind(params)

    def _init(self, key: Key[Array, ""]) -> Params:
        return traverse_util.unflatten_dict(draw(key, self._declared), sep=".")


def _model(config: TransformerConfig) -> Model:
    if config.encoder is None:
        return DecoderOnly(config)
    return EncoderOnly(config) if config.decoder is None else EncoderDecoder(config)


def transformer(config: TransformerConfig) -> Transformer:
    """The transformer that `config` describes: `net.init(key)` gives parameters, `net.apply(params, ...)` logits."""
    return Transformer(config)
