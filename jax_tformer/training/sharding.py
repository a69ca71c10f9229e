"""Splits arrays over devices: one table from the axes of parameters to those of the mesh.

Of the mesh, the model knows the axes alone. One device is the mesh 1 x 1 x 1 x 1, with the same code path.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jax_tformer.config.errors import require
from jax_tformer.config.experiment import MeshConfig
from jax_tformer.files import shortened
from jax_tformer.functional import Params
from jax_tformer.model.parameters import BATCH, Shape, axes_of, flatten, row_parts
from jax_tformer.training.processes import require_device_each

T = TypeVar("T")
MESH_AXES = {"D": "fsdp", "H": "tensor", "K": "tensor", "F": "tensor", "V": "tensor"}
"""An axis of parameters (`jax_tformer.model.parameters`) -> the mesh axis that splits it; other axes stay whole."""

_EXCHANGES = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
"""XLA's names of the operations in which devices exchange arrays."""

ROWS = PartitionSpec(BATCH[0])


def make_mesh(config: MeshConfig, rows: int = 0) -> Mesh:
    """Makes the mesh data x fsdp x context x tensor for batches computed `rows` at a time (batch size / accumulation).

    If `config.data` is None, takes the largest number that the devices and the rows allow; 0 rows allow any. Raises
    InputError if there are fewer devices than the mesh needs, if the rows do not divide over data x fsdp, or if a
    process would have none.
    """
    devices = jax.device_count()
    others = config.fsdp * config.context * config.tensor
    fitting = [data for data in range(1, devices // others + 1) if rows % (data * config.fsdp) == 0]
    data = config.data or max(fitting, default=1)
    shape = {"data": data, "fsdp": config.fsdp, "context": config.context, "tensor": config.tensor}
    split = _describe(shape)
    require(
        data * others <= devices,
        f"the mesh is {split} = {data * others} devices, but there are {devices}; expected at most {devices}; "
        "lower --mesh.data, --mesh.fsdp, --mesh.context or --mesh.tensor",
    )
    require(
        rows % (data * config.fsdp) == 0,
        f"a batch of {rows} rows (batch_size / accumulation) does not divide over {data * config.fsdp} devices "
        f"(data x fsdp); expected a multiple of {data * config.fsdp}",
    )
    used = jax.devices()[: data * others]
    require_device_each(used, f"the mesh is {split}")
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape), devices=used)


def parameter_shardings(mesh: Mesh, shapes: Params) -> Params:
    """The NamedSharding of every parameter; an axis that its mesh axis does not divide stays whole."""

    def place(name: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        splits = _splits(name, leaf.shape)
        whole = (None,) * (len(leaf.shape) - len(splits))
        named = (name if name and size % mesh.shape[name] == 0 else None for _, size, name in splits)
        return NamedSharding(mesh, PartitionSpec(*whole, *named))

    return by_path(place, shapes)


def on_mesh(mesh: Mesh | None, shapes: Params) -> Params:
    """Returns abstract parameters with the shardings of `parameter_shardings`; as they are without a mesh."""
    if mesh is None:
        return shapes
    return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, parameter_shardings(mesh, shapes))


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """The rows of a batch that are on devices of this process, int[R], in rising order."""
    parts = NamedSharding(mesh, ROWS).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[part] for part in parts if part is not None]))


def place_batch(mesh: Mesh, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Puts the rows that this process has made (`local_rows`) on its devices, as its part of the whole batch."""
    sharding = NamedSharding(mesh, BATCH)
    if sharding.is_fully_addressable:
        return jax.device_put(dict(batch), sharding)
    shapes = {name: rows.shape for name, rows in abstract_batch(mesh, batch).items()}
    return jax.make_array_from_process_local_data(sharding, dict(batch), shapes)


def mesh_of(tree: PyTree) -> Mesh | None:
    """Returns the mesh over which the arrays of `tree` are spread; None if one device holds them."""
    mesh = getattr(getattr(jax.tree.leaves(tree)[0], "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


def use_mesh_of(tree: PyTree) -> AbstractContextManager[Any]:
    """Returns a context in which programs are compiled for the mesh of `mesh_of`, if there is one."""
    mesh = mesh_of(tree)
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def split_rows(tree: T, rows: int) -> T:
    """Splits arrays of so many sequences, or of their heads `[R, ...]`, over the mesh in use, if it divides them.

    Heads are split over "tensor" too, unless XLA would have to gather them for each token. It is for compiled code that
    runs in `use_mesh_of`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or rows % row_parts(mesh):
        return tree

    def split(leaf: jax.Array) -> jax.Array:
        further = len(leaf) > rows and row_parts(mesh) in (1, rows)
        further = further and len(leaf) % (row_parts(mesh) * mesh.shape["tensor"]) == 0
        where = PartitionSpec((*ROWS[0], "tensor")) if further else ROWS
        return jax.lax.with_sharding_constraint(leaf, where)

    return jax.tree.map(split, tree)


def replicate(tree: T) -> T:
    """Makes arrays whole on every device of the mesh in use, so that every process can read them. For compiled code."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.lax.with_sharding_constraint(tree, PartitionSpec())


def abstract_batch(mesh: Mesh, batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of whole batches, of which `batch` has the rows of this process, with their types and shardings."""
    sharding = NamedSharding(mesh, BATCH)
    parts = row_parts(mesh)
    mine = len(local_rows(mesh, parts))
    return {
        name: jax.ShapeDtypeStruct((len(rows) * parts // mine, *rows.shape[1:]), rows.dtype, sharding=sharding)
        for name, rows in batch.items()
    }


def shape_of(batch: Mapping[str, Any]) -> frozenset[Any]:
    """Returns the names and shapes of the arrays of a batch."""
    return frozenset((name, rows.shape) for name, rows in batch.items())


def describe_shards(mesh: Mesh, state: PyTree, params: Params, program: str) -> list[str]:
    """Says what each device holds and what a step exchanges, a line each; nothing for one device.

    `state` is abstract and has shardings, `params` is a part of it, and `program` is the compiled step as text.
    """
    if mesh.size == 1:
        return []
    share = bytes_per_device(state)
    exchanges = Counter(_EXCHANGES.findall(program))
    told = ", ".join(f"{number} {name}" for name, number in sorted(exchanges.items())) or "nothing"
    split = _describe(mesh.shape)
    lines = [f"mesh {split}: each device holds {share / 2**20:,.1f} MiB of the state; a step exchanges {told}"]
    whole = [
        f"{name} ({axis} is {size})"
        for name, leaf in flatten(params).items()
        for axis, size, mesh_axis in _splits(name, leaf.shape)
        if mesh_axis is not None and size % mesh.shape[mesh_axis]
    ]
    if whole:
        lines.append(f"whole on every device, because the mesh does not divide them: {shortened(whole)}")
    return lines


def bytes_per_device(tree: PyTree) -> int:
    """The bytes of arrays, abstract and with shardings, on each device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def _describe(shape: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in shape.items())


def by_path(function: Callable[..., Any], params: Params, *more: Params) -> Any:
    """Returns the tree of `function(path, leaf, ...)` over trees of parameters, or over one that holds such trees."""
    return jax.tree.map_with_path(lambda path, *leaves: function(name_of(path), *leaves), params, *more)


def name_of(path: tuple[Any, ...]) -> str:
    """Returns the name of a parameter at `path` of their tree, or of one that holds such trees, as optimizers do."""
    keys = takewhile(lambda key: isinstance(key, jax.tree_util.DictKey), reversed(path))
    return ".".join(str(key.key) for key in [*keys][::-1])


def _splits(path: str, shape: Shape) -> list[tuple[str, int, str | None]]:
    """Returns (axis, size, the mesh axis that would split it, if any) for each axis but that of layers."""
    axes = axes_of(path).replace("->", "").split()
    # A vector of the model's width is not worth gathering.
    names = {} if axes == ["D"] else MESH_AXES
    return [(axis, size, names.get(axis)) for axis, size in zip(axes, shape[len(shape) - len(axes) :], strict=True)]
