"""The functional interface of the models: a pure pair of init and apply, with a signature for each kind of model."""

from typing import Any, Generic, TypeVar

import jax
from flax import nnx
from jaxtyping import Array, Float

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError, require
from jax_tformer.model.parameters import (
    Declared,
    DropoutKey,
    Ids,
    Marks,
    Numbers,
    RandomKey,
    SourceIds,
    SourceMarks,
    SourceNumbers,
    draw,
    flatten,
    name_sites,
    unflatten,
)
from jax_tformer.model.transformer import DecoderOnly, EncoderDecoder, EncoderOnly

Params = dict[str, Any]
"""A plain nested dict of arrays; layers of a stack share one array with a leading L axis."""
Model = TypeVar("Model", DecoderOnly, EncoderOnly, EncoderDecoder)


class Transformer(Generic[Model]):
    """A transformer as pure functions of its parameters, a plain nested dict of arrays.

    `init` and `apply` can be jitted, differentiated and vmapped, and keep no state. `bind` returns the Flax module,
    which returns more than logits: hidden states, attention weights, a cache.

    `apply` and its like raise InputError for a mask without the shape of its tokens.
    """

    kind: type[Model]
    """The Flax module's class."""
    origin: Any = None
    """What a pretrained folder held beyond the config, see `jax_tformer.hub.folder`; not part of equality."""

    def __init__(self, config: TransformerConfig) -> None:
        if config.vocab_size is None:
            raise InputError("vocab_size is None; a model needs a number: TransformerConfig(vocab_size=...)")
        self.config = config
        model = nnx.eval_shape(lambda: name_sites(self.kind(config)))
        graph, state = nnx.split(model, nnx.Param)
        self._graph: nnx.GraphDef[Model] = graph
        self._declared = {
            ".".join(map(str, path)): Declared(variable.shape, variable.dtype, variable.get_metadata("start"))
            for path, variable in nnx.to_flat_state(state)
        }
        self.shapes: Params = nnx.to_pure_dict(state)
        """The parameters as jax.ShapeDtypeStruct: names, shapes and dtypes without the numbers."""

    def __eq__(self, other: object) -> bool:
        """Models with equal configs are equal, and share compiled functions."""
        return isinstance(other, Transformer) and self.config == other.config

    def __hash__(self) -> int:
        return hash(self.config)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(\n{short_summary(self.config, self.shapes)}\n)"

    def summary(self) -> str:
        """Returns a table of all parameters by name: shape, number and bytes of each, with the sums of each part."""
        return f"{short_summary(self.config, self.shapes)}\n\n{parameter_table(self.shapes)}"

    def init(self, key: RandomKey) -> Params:
        """Draws new parameters; on one platform, the same key gives the same bits."""
        return jax.jit(self._init)(key)

    def bind(self, params: Params) -> Model:
        """Returns the Flax module with these parameters, to call it or its parts by name."""
        return nnx.merge(self._graph, params)

    def _init(self, key: RandomKey) -> Params:
        return unflatten(draw(key, self._declared))

    def _bind(self, params: Params, ids: Array, **marks: Array | None) -> Model:
        """Binds parameters with stacked layers; `marks` must have the shape of `ids`, and None is left out."""
        require(
            not any(isinstance(leaf, tuple) for leaf in flatten(params).values()),
            "the parameters have layers apart, for generate and stream; expected those of init",
        )
        for name, mark in marks.items():
            if mark is not None and jax.numpy.shape(mark) != ids.shape[:2]:
                what = ": True at tokens, False at padding" if name.endswith("mask") else ""
                found = f"{name} has the shape {list(jax.numpy.shape(mark))}"
                raise InputError(f"{found}; expected {list(ids.shape[:2])}, that of its tokens{what}")
        return self.bind(params)


class DecoderOnlyTransformer(Transformer[DecoderOnly]):
    """A decoder-only language model, like GPT."""

    kind = DecoderOnly

    def apply(
        self,
        params: Params,
        tokens: Ids,
        *,
        mask: Marks = None,
        token_types: Numbers = None,
        segments: Numbers = None,
        prefix: Marks = None,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "B T V"]:
        """Computes logits of the token after each of `tokens`; see `DecoderOnly.__call__`."""
        model = self._bind(params, tokens, mask=mask, segments=segments, prefix=prefix)
        outputs = model(
            tokens, mask=mask, token_types=token_types, segments=segments, prefix=prefix, dropout_key=dropout_key
        )
        return outputs.logits


class EncoderOnlyTransformer(Transformer[EncoderOnly]):
    """An encoder, like BERT."""

    kind = EncoderOnly

    def apply(
        self,
        params: Params,
        tokens: Ids,
        *,
        mask: Marks = None,
        token_types: Numbers = None,
        segments: Numbers = None,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "B ... V"]:
        """Computes logits of tokens or classes, or hidden states; see `EncoderOnly.__call__`."""
        model = self._bind(params, tokens, mask=mask, segments=segments)
        return model(tokens, mask=mask, token_types=token_types, segments=segments, dropout_key=dropout_key).logits


class EncoderDecoderTransformer(Transformer[EncoderDecoder]):
    """The encoder-decoder of "Attention is all you need"."""

    kind = EncoderDecoder

    def apply(
        self,
        params: Params,
        source: SourceIds,
        target: Ids,
        *,
        source_mask: SourceMarks = None,
        target_mask: Marks = None,
        source_segments: SourceNumbers = None,
        target_segments: Numbers = None,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "B T V"]:
        """Computes logits of the token after each of `target`; see `EncoderDecoder.__call__`."""
        memory = self.encode(params, source, source_mask, source_segments, dropout_key)
        marks = source_mask, target_mask, source_segments, target_segments
        return self.decode(params, target, memory, *marks, dropout_key)

    def encode(
        self,
        params: Params,
        source: SourceIds,
        source_mask: SourceMarks = None,
        source_segments: SourceNumbers = None,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "B S D"]:
        """Returns the memory that `decode` attends to."""
        model = self._bind(params, source, source_mask=source_mask, source_segments=source_segments)
        return model.encode(source, source_mask, source_segments, dropout_key)[0]

    def decode(
        self,
        params: Params,
        target: Ids,
        memory: Float[Array, "B S D"],
        source_mask: SourceMarks = None,
        target_mask: Marks = None,
        source_segments: SourceNumbers = None,
        target_segments: Numbers = None,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "B T V"]:
        """Computes logits of the token after each of `target` from `memory`, the encoded source."""
        self._bind(params, memory, source_mask=source_mask, source_segments=source_segments)
        model = self._bind(params, target, target_mask=target_mask, target_segments=target_segments)
        marks = source_mask, target_mask, source_segments, target_segments
        return model.decode(target, memory, *marks, dropout_key).logits


DecoderTransformer = DecoderOnlyTransformer | EncoderDecoderTransformer
AnyTransformer = DecoderTransformer | EncoderOnlyTransformer


def transformer(config: TransformerConfig) -> AnyTransformer:
    """Makes the transformer of `config`: `net.init(key)` draws parameters, `net.apply(params, ...)` computes logits.

    The config's stacks decide which of the three classes it is. If you know the class, call it by its name, so that
    your editor knows the arguments of `apply`.
    """
    if config.encoder is None:
        return DecoderOnlyTransformer(config)
    return EncoderOnlyTransformer(config) if config.decoder is None else EncoderDecoderTransformer(config)


def short_summary(config: TransformerConfig, shapes: Params) -> str:
    """Lists the stacks with their widths, the types, and the number of parameters of each part, a line each."""
    stacks = [f"  {name}: {_stack(config, stack)}" for name, stack in config.stacks.items()]
    chosen = f"{config.vocab_size:,} tokens" if config.predicts_tokens else f"{config.classes} classes"
    head = "none" if config.head == "none" else f"{config.head}, {chosen}"
    head += "" if config.pooler == "none" else f", of the text pooled with {config.pooler}"
    tied = ", tied to the token table" if config.tied_head else ""
    types = f"  parameters in {config.compute.parameter_dtype}, computed in {config.compute.dtype}"
    parts = {name: sum(leaf.size for leaf in jax.tree.leaves(tree)) for name, tree in shapes.items()}
    counts = ", ".join(f"{name} {count:,}" for name, count in parts.items())
    return "\n".join([*stacks, f"  head: {head}{tied}", types, f"  {sum(parts.values()):,} parameters: {counts}"])


def parameter_table(shapes: Params) -> str:
    """Lists each parameter with its shape, number and bytes, and then the sums of each part and of all."""
    parts = shapes if len(shapes) > 1 else {}
    rows = [
        ("parameter", "shape", "number", "bytes"),
        *((name, str(list(leaf.shape)), *_sizes(leaf)) for name, leaf in flatten(shapes).items()),
        ("", "", "", ""),
        *((name, "", *_sizes(tree)) for name, tree in {**parts, "all": shapes}.items()),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = (
        f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {number:>{widths[2]}}  {size:>{widths[3]}}"
        for name, shape, number, size in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _stack(config: TransformerConfig, stack: StackConfig) -> str:
    groups = "" if stack.key_value_heads is None else f" ({stack.key_value_heads} of keys and values)"
    inner = f"{'gated ' if stack.gated else ''}feed-forward {stack.feedforward_width:,} {stack.activation}"
    rows = "" if stack.max_positions is None else f"{stack.max_positions:,} "
    positions = f"{rows}{'no' if stack.positions == 'none' else stack.positions} positions"
    return (
        f"{stack.num_layers} layers of {config.d_model:,}, {stack.num_heads} heads of "
        f"{config.head_width(stack)}{groups}, {inner}, {stack.norm_placement}-{stack.norm}, {positions}"
    )


def _sizes(tree: Params | jax.ShapeDtypeStruct) -> tuple[str, str]:
    leaves = jax.tree.leaves(tree)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return f"{sum(leaf.size for leaf in leaves):,}", f"{size:,}"
