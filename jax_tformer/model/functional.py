"""The functional interface of the models: a pure pair of init and apply, with a signature for each kind of model."""

import inspect
import math
import zlib
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jaxtyping import Array, Key

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.errors import InputError
from jax_tformer.model.layers import Start
from jax_tformer.model.masks import require_mask
from jax_tformer.model.transformer import DecoderOnly, EncoderDecoder, EncoderOnly

Params = dict[str, Any]
"""A plain nested dict of arrays; layers of a stack share one array with a leading L axis."""
Model = TypeVar("Model", DecoderOnly, EncoderOnly, EncoderDecoder)
Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")
Result = TypeVar("Result")


class Transformer(Generic[Model]):
    """A transformer as pure functions of its parameters, a plain nested dict of arrays.

    `init` and `apply` can be jitted, differentiated and vmapped, and keep no state. `bind` returns the Flax module,
    which returns more than logits: hidden states, attention weights, a cache.
    """

    kind: type[Model]
    """The Flax module's class."""
    origin: Any = None
    """What a pretrained folder held beyond the config, see `jax_tformer.pretrained.origin`; not part of equality."""

    def __init__(self, config: TransformerConfig) -> None:
        if config.vocab_size is None:
            raise InputError("vocab_size is None; a model needs a number: TransformerConfig(vocab_size=...)")
        self.config = config
        model = nnx.eval_shape(partial(self.kind, config))
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

    def init(self, key: Key[Array, ""]) -> Params:
        """Draws new parameters; on one platform, the same key gives the same bits."""
        params: Params = jax.jit(self._init)(key)
        return params

    def bind(self, params: Params) -> Model:
        """Returns the Flax module with these parameters, to call it or its parts by name."""
        return nnx.merge(self._graph, params)

    def _init(self, key: Key[Array, ""]) -> Params:
        params: Params = traverse_util.unflatten_dict(draw(key, self._declared), sep=".")
        return params


def _pure(
    forward: Callable[Concatenate[Any, Inputs], Output], result: Callable[[Output], Result]
) -> Callable[Concatenate[Any, Params, Inputs], Result]:
    """Makes a method of a Flax module a function of parameters and inputs, with the method's own signature.

    The function returns an array. It raises InputError for a cache or `capture`, which need more than an array, for a
    mask without the shape of its tokens, and for parameters with layers apart.
    """

    def call(net: Any, params: Params, /, *args: Inputs.args, **kwargs: Inputs.kwargs) -> Result:
        given = signature.bind(net, *args, **kwargs).arguments
        if given.get("capture") or given.get("cache") is not None:
            raise InputError("capture and cache return more than an array; expected net.bind(params)(...) for them")
        leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, tuple))
        if any(isinstance(leaf, tuple) for leaf in leaves):
            raise InputError("the parameters have layers apart, for generate and stream; expected those of init")
        for name, value in given.items():
            side, _, what = name.rpartition("_")
            if what in ("mask", "segments") or name == "prefix":
                ids: Any = given["tokens"] if not side else given.get(side, given.get("memory"))
                require_mask(name, value, ids.shape[:2])
        return result(forward(net.bind(params), *args, **kwargs))

    signature = inspect.signature(forward)
    parameters = [found for name, found in signature.parameters.items() if name not in ("capture", "cache")]
    parameters[0] = parameters[0].replace(kind=inspect.Parameter.POSITIONAL_ONLY)
    parameters.insert(1, inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY, annotation=Params))
    shown = signature.replace(parameters=parameters, return_annotation=Array)
    update_wrapper(call, forward).__signature__ = shown  # type: ignore[attr-defined]
    return call


class DecoderOnlyTransformer(Transformer[DecoderOnly]):
    """A decoder-only language model, like GPT."""

    kind = DecoderOnly
    apply = _pure(DecoderOnly.__call__, lambda outputs: outputs.logits)


class EncoderOnlyTransformer(Transformer[EncoderOnly]):
    """An encoder, like BERT."""

    kind = EncoderOnly
    apply = _pure(EncoderOnly.__call__, lambda outputs: outputs.logits)


class EncoderDecoderTransformer(Transformer[EncoderDecoder]):
    """The encoder-decoder of "Attention is all you need"."""

    kind = EncoderDecoder
    apply = _pure(EncoderDecoder.__call__, lambda outputs: outputs.logits)
    encode = _pure(EncoderDecoder.encode, lambda encoded: encoded[0])
    decode = _pure(EncoderDecoder.decode, lambda outputs: outputs.logits)


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


class Declared(NamedTuple):
    """The declaration of a parameter."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    start: Start


def draw(key: Key[Array, ""], declared: Mapping[str, Declared]) -> dict[str, Array]:
    """Draws parameters by path. Each one depends only on the key and on its path, shape and start.

    Drawing outside the modules lets parameters of one size share a compiled generator, which is most of the cost of
    an init.
    """
    drawn = {}
    groups: dict[tuple[int, jnp.dtype, str], list[str]] = {}
    for path, (shape, dtype, start) in declared.items():
        if start.kind == "constant":
            drawn[path] = jnp.full(shape, start.size, dtype)
        else:
            groups.setdefault((math.prod(shape), dtype, start.kind), []).append(path)
    for (size, dtype, kind), paths in groups.items():
        seeds = jnp.array([zlib.crc32(path.encode()) for path in paths], jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, seeds)
        # Flat, then reshaped: XLA on CPU takes six times as long to compile a generator of four axes.
        numbers = jax.vmap(partial(_standard, kind=kind, size=size, dtype=dtype))(keys)
        for row, path in enumerate(paths):
            shape, dtype, start = declared[path]
            drawn[path] = (numbers[row] * jnp.asarray(start.size, dtype)).reshape(shape)
    return drawn


def _standard(key: Key[Array, ""], *, kind: str, size: int, dtype: jnp.dtype) -> Array:
    if kind == "normal":
        return jax.random.normal(key, (size,), dtype)
    return jax.random.uniform(key, (size,), dtype, -1, 1)


def short_summary(config: TransformerConfig, shapes: Params) -> str:
    """Lists the stacks with their widths, the types, and the number of parameters of each part, a line each."""
    stacks = [
        f"  {name}: {_stack(config, stack)}"
        for name, stack in (("encoder", config.encoder), ("decoder", config.decoder))
        if stack is not None
    ]
    chosen = f"{config.vocab_size:,} tokens" if config.predicts_tokens else f"{config.classes} classes"
    head = "none" if config.head == "none" else f"{config.head}, {chosen}"
    head += "" if config.pooler == "none" else f", of the text pooled with {config.pooler}"
    tied = ", tied to the token table" if config.tied_head else ""
    types = f"  parameters in {config.compute.parameter_dtype}, computed in {config.compute.dtype}"
    parts = {name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree)) for name, tree in shapes.items()}
    counts = ", ".join(f"{name} {count:,}" for name, count in parts.items())
    return "\n".join([*stacks, f"  head: {head}{tied}", types, f"  {sum(parts.values()):,} parameters: {counts}"])


def parameter_table(shapes: Params) -> str:
    """Lists each parameter with its shape, number and bytes, and then the sums of each part and of all."""
    flat = {".".join(path): leaf for path, leaf in traverse_util.flatten_dict(shapes).items()}
    rows = [("parameter", "shape", "number", "bytes")]
    rows += [(name, str(list(leaf.shape)), *_sizes(leaf)) for name, leaf in flat.items()]
    rows += [("", "", "", "")]
    rows += [(name, "", *_sizes(tree)) for name, tree in shapes.items()] if len(shapes) > 1 else []
    rows += [("all", "", *_sizes(shapes))]
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
    numbers = [math.prod(leaf.shape) for leaf in leaves]
    size = sum(number * leaf.dtype.itemsize for number, leaf in zip(numbers, leaves, strict=True))
    return f"{sum(numbers):,}", f"{size:,}"
