"""The arrays of a model: the shapes that its functions share, how parameters are declared and drawn, and dropout.

Whatever is drawn has a name, from which its numbers follow, inside a model and outside.

One table says what each axis of each parameter is; sharding, weight decay, LoRA and the names of weights read it. D
model width, H heads, K key/value heads, C head width, F feed-forward width, V vocabulary, N classes, P positions, Y
token types, U buckets of distances, E width of what `dense` makes, R rank of an adapter. `inputs -> outputs` is a
matrix x W; other parameters are vectors, or tables with a row for each index. The leading L axis of stacked layers is
not written. Of activations, B is rows, T target or only text, S source.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, get_abstract_mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from jax_tformer.config import TransformerConfig

Model = TypeVar("Model", bound=nnx.Module)
RandomKey = Key[Array, ""]
DropoutKey = RandomKey | None
"""Turns dropout on: of the forward pass or, inside a layer, of the layer."""
Ids = Int[Array, "B T"]
Marks = Bool[Array, "B T"] | None
"""True at tokens, or at those of a prefix; None: all, or none."""
Numbers = Int[Array, "B T"] | None
"""Of segments, or token types."""
SourceIds = Int[Array, "B S"]
SourceMarks = Bool[Array, "B S"] | None
SourceNumbers = Int[Array, "B S"] | None
Positions = Int[Array, "#B T"]
Stream = Float[Array, "B T D"]
"""The residual stream, and what enters and leaves the parts of a layer."""
Memory = Float[Array, "B S D"] | None
"""The encoder's output; None: the cache holds its keys and values."""
Shape = tuple[int, ...]
"""The lengths of axes."""
Queries = Float[Array, "B T H C"]
KeyHeads = Float[Array, "B S K C"]
"""Keys or values."""
Count = Int[Array, ""]
Scalar = Float[Array, ""]

AXES = {
    "query.kernel": "D -> H C",
    "key.kernel": "D -> K C",
    "value.kernel": "D -> K C",
    "output.kernel": "H C -> D",
    "gate.kernel": "D -> F",
    "up.kernel": "D -> F",
    "down.kernel": "F -> D",
    "dense.kernel": "D -> E",
    "head.kernel": "D -> V",
    "classifier.kernel": "D -> N",
    "query.bias": "H C",
    "key.bias": "K C",
    "value.bias": "K C",
    "gate.bias": "F",
    "up.bias": "F",
    "head.bias": "V",
    "classifier.bias": "N",
    "query_norm.scale": "C",
    "query_norm.bias": "C",
    "key_norm.scale": "C",
    "key_norm.bias": "C",
    "tokens.embedding": "V D",
    "positions.embedding": "P D",
    "token_types.embedding": "Y D",
    "relative_positions.embedding": "U H",
    "scale": "D",
    "bias": "D",
}
"""The end of a parameter's path -> its axes; the first that fits. Adapters follow from the matrix that they change."""


def axes_of(path: str) -> str:
    """Returns the axes of the parameter at `path`, such as `decoder.blocks.feedforward.up.kernel`.

    Raises KeyError for a parameter that the table does not have.
    """
    module, _, leaf = path.rpartition(".lora.")
    if module:
        inputs, outputs = axes_of(f"{module}.kernel").split(" -> ")
        return f"{inputs} -> R" if leaf == "a" else f"R -> {outputs}"
    try:
        return next(axes for name, axes in AXES.items() if f".{path}".endswith(f".{name}"))
    except StopIteration:
        raise KeyError(path) from None


def is_vector(path: str) -> bool:
    """Whether the parameter is a bias or the scale of a norm: neither a matrix nor a table."""
    return f".{path}".endswith((".bias", ".scale"))


def kind_of(path: str) -> Literal["matrices", "tables", "head", "vectors"]:
    """Returns the kind of the parameter at `path`, for optimizers, as `OptimizerConfig.rates` calls it."""
    if is_vector(path):
        return "vectors"
    outputs = axes_of(path).partition(" -> ")[2]
    return "tables" if not outputs else "head" if outputs in ("V", "N") else "matrices"


def matrix_shape(path: str, shape: Shape) -> Shape:
    """Returns the shape `[..., inputs, outputs]` of the parameter as a matrix or table, `[..., N]` as a vector.

    The axis of stacked layers, if there is one, stays first.
    """
    axes = axes_of(path)
    sides = axes.split(" -> ") if " -> " in axes or is_vector(path) else axes.split()
    first = len(shape) - len(axes.replace("->", "").split())
    ends = [first + len(" ".join(sides[:n]).split()) for n in range(len(sides) + 1)]
    return *shape[:first], *(math.prod(shape[start:end]) for start, end in pairwise(ends))


def as_matrix(path: str, x: Array) -> Array:
    """Returns the parameter in the shape of `matrix_shape`."""
    return x.reshape(matrix_shape(path, x.shape))


def flatten(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the leaves of a nested dict by path, such as `decoder.blocks.feedforward.up.kernel`."""
    return traverse_util.flatten_dict(params, sep=".")


def unflatten(leaves: dict[str, Any]) -> dict[str, Any]:
    """Inverts `flatten`."""
    return traverse_util.unflatten_dict(leaves, sep=".")


def dtype_of(name: str) -> jnp.dtype:
    """Returns the dtype called `name`; raises ValueError for float64 if JAX would silently use float32."""
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError('float64 needs jax.config.update("jax_enable_x64", True) before anything is traced')
    return jnp.dtype(name)


BATCH = PartitionSpec(("data", "fsdp"), "context")
"""How rows `[B, T, ...]` lie on a mesh: both first axes split B, the third one T."""


def context_parts() -> int:
    """Returns over how many devices the mesh that is set splits the positions of each row."""
    return get_abstract_mesh().shape.get("context", 1)


def row_parts(mesh: Mesh | AbstractMesh | None) -> int:
    """Returns into how many parts a mesh splits the rows of a batch; one that has other axes, or none, leaves them."""
    shape = {} if mesh is None else mesh.shape
    return shape.get("data", 1) * shape.get("fsdp", 1)


def split_over_mesh(x: Array) -> Array:
    """Splits `[B, T, ...]` over the mesh that is set as `BATCH` says, if it has these axes and they divide B and T.

    Otherwise the compiler may split features, as it finds the parameters split, and compute all rows on every device.
    """
    return x if batch_parts(x) == 1 else jax.lax.with_sharding_constraint(x, BATCH)


def batch_parts(x: Array) -> int:
    """Returns over how many devices `split_over_mesh` splits `[B, T, ...]`."""
    rows, positions = row_parts(get_abstract_mesh()), context_parts()
    splits = has_our_axes() and len(x) % rows == 0 == x.shape[1] % positions
    return rows * positions if splits else 1


def gather_features(table: Array) -> Array:
    """Gathers the features of a table `[V, D]` that the mesh that is set splits over "fsdp".

    A loop that reads the table then finds it whole; otherwise the compiler gathers it anew in every iteration.
    """
    if not has_our_axes() or get_abstract_mesh().shape["fsdp"] == 1:
        return table
    return jax.lax.with_sharding_constraint(table, PartitionSpec(PartitionSpec.UNCONSTRAINED, None))


def has_our_axes() -> bool:
    """Whether the compiler splits arrays over a mesh like ours: a user's may have other axes, or be of shard_map."""
    return {"data", "fsdp", "context"} <= set(get_abstract_mesh().auto_axes)


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Returns the type in which norms, softmax and losses of `dtype` are computed, at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


@dataclass(frozen=True)
class Start:
    """The distribution of a fresh parameter: `constant` everywhere, N(0, size^2), or U(-size, size)."""

    kind: Literal["constant", "normal", "uniform"]
    size: float


STANDARD: dict[str, Callable[..., Array]] = {
    "normal": jax.random.normal,
    "uniform": partial(jax.random.uniform, minval=-1, maxval=1),
}
"""Kind of start -> what draws it with size 1."""
ZEROS = Start("constant", 0.0)
ONES = Start("constant", 1.0)


def parameter(shape: Shape, config: TransformerConfig, start: Start) -> nnx.Param[Array]:
    """Declares a parameter that starts as `start`; it is zero until `draw` fills it."""
    return nnx.Param(jnp.zeros(shape, dtype_of(config.compute.parameter_dtype)), start=start)


def projection_start(config: TransformerConfig, fan_in: int, fan_out: int, scale: float = 1.0) -> Start:
    """Returns the start of a projection: normal with the config's deviation, or uniform by Glorot & Bengio (2010)."""
    if config.initializer == "normal":
        return Start("normal", scale * config.initializer_std)
    return Start("uniform", scale * (6 / (fan_in + fan_out)) ** 0.5)


class Declared(NamedTuple):
    """The declaration of a parameter."""

    shape: Shape
    dtype: jnp.dtype
    start: Start


def draw(key: RandomKey, declared: Mapping[str, Declared]) -> dict[str, Array]:
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
        numbers = jax.vmap(partial(STANDARD[kind], shape=(size,), dtype=dtype))(keys)
        for row, path in enumerate(paths):
            shape, dtype, start = declared[path]
            drawn[path] = (numbers[row] * jnp.asarray(start.size, dtype)).reshape(shape)
    return drawn


class Dropout(nnx.Module):
    """Zeroes elements with probability `rate` and divides the others by 1 - rate (paper, section 5.4).

    Without a key, drops nothing.
    """

    site: str
    """Its path in the model, which `name_sites` gives it."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, x: Float[Array, "..."], key: DropoutKey) -> Float[Array, "..."]:
        """Drops elements of x; `key` is that of the forward pass or, inside a layer, of the layer."""
        return drop(x, self.rate, self.keep(key, x.shape))

    def keep(self, key: DropoutKey, shape: Shape) -> Bool[Array, "..."] | None:
        """Draws the mask of an array of this shape, True = kept; None if nothing is dropped."""
        return None if key is None or self.rate == 0 else keep_mask(site_key(key, self.site), self.rate, shape)


def drop(x: Array, rate: float, keep: Bool[Array, "..."] | None) -> Array:
    """Zeroes elements that `keep` drops and divides the rest by 1 - rate; with None, returns x unchanged."""
    return x if keep is None else jnp.where(keep, x / (1 - rate), 0)


def name_sites(model: Model) -> Model:
    """Gives every dropout site of the model its name, such as `decoder.blocks.feedforward.dropout`."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Dropout):
            module.site = ".".join(map(str, path))
    return model


def site_key(key: RandomKey, site: str) -> RandomKey:
    """Returns the key of a site: that of the forward pass, folded with the layer's number, then with the name.

    From outside, `decoder.blocks.3.feedforward.dropout` names a site with its layer.
    """
    parts = site.split(".")
    key = reduce(layer_key, (int(part) for part in parts if part.isdigit()), key)
    return jax.random.fold_in(key, zlib.crc32(".".join(part for part in parts if not part.isdigit()).encode()))


def layer_key(key: RandomKey, layer: int | Array) -> RandomKey:
    """Returns the key of one layer of a stack."""
    return jax.random.fold_in(key, layer)


def layer_keys(key: DropoutKey, layers: int) -> Key[Array, " L"] | None:
    """Returns the keys of all layers of a stack; None without dropout."""
    return None if key is None else jax.vmap(layer_key, (None, 0))(key, jnp.arange(layers))


def keep_mask(key: RandomKey, rate: float, shape: Shape) -> Bool[Array, "..."]:
    """Draws True (kept) with probability 1 - rate for each element."""
    # Drawn flat, then reshaped: XLA on CPU takes six times as long to compile a generator of four axes. Devices that
    # share the positions of a row can draw their parts, the same numbers, only of an array with its axes.
    drawn = shape if context_parts() > 1 else (math.prod(shape),)
    return jax.random.bernoulli(key, 1 - rate, drawn).reshape(shape)
