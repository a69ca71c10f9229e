"""Splits arrays over devices: one table from parameter names to logical axes, one from these to mesh axes.

The model never mentions devices. One device is the mesh 1 x 1 x 1, with the same code path.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from jax_tformer.errors import InputError
from jax_tformer.experiment import MeshConfig
from jax_tformer.model.functional import Params
from jax_tformer.model.kernels import Kernel, split_by

LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "query.kernel": ("embed", "heads", None),
    "key.kernel": ("embed", "heads", None),
    "value.kernel": ("embed", "heads", None),
    "output.kernel": ("heads", None, "embed"),
    "query.bias": ("heads", None),
    "key.bias": ("heads", None),
    "value.bias": ("heads", None),
    "gate.kernel": ("embed", "feedforward"),
    "up.kernel": ("embed", "feedforward"),
    "down.kernel": ("feedforward", "embed"),
    "query.lora.a": ("embed", None),
    "key.lora.a": ("embed", None),
    "value.lora.a": ("embed", None),
    "output.lora.a": ("heads", None, None),
    "gate.lora.a": ("embed", None),
    "up.lora.a": ("embed", None),
    "down.lora.a": ("feedforward", None),
    "query.lora.b": (None, "heads", None),
    "key.lora.b": (None, "heads", None),
    "value.lora.b": (None, "heads", None),
    "output.lora.b": (None, "embed"),
    "gate.lora.b": (None, "feedforward"),
    "up.lora.b": (None, "feedforward"),
    "down.lora.b": (None, "embed"),
    "gate.bias": ("feedforward",),
    "up.bias": ("feedforward",),
    "tokens.embedding": ("vocabulary", "embed"),
    "head.kernel": ("embed", "vocabulary"),
    "relative_positions.embedding": (None, "heads"),
}
"""The end of a parameter's path -> names of its last axes; every device holds any other parameter whole."""

MESH_AXES = {"embed": "fsdp", "heads": "tensor", "feedforward": "tensor", "vocabulary": "tensor"}
"""Logical axis -> the mesh axis that splits it."""

BATCH = PartitionSpec(("data", "fsdp"))
"""The rows of a batch are split over both axes."""


def make_mesh(config: MeshConfig, rows: int) -> Mesh:
    """Makes the mesh data x fsdp x tensor for batches computed `rows` at a time (batch size / accumulation).

    If `config.data` is None, takes the largest number that the devices and the rows allow. Raises InputError if there
    are fewer devices than the mesh needs, or if the rows do not divide over data x fsdp.
    """
    devices, others = jax.device_count(), config.fsdp * config.tensor
    fitting = [data for data in range(1, devices // others + 1) if rows % (data * config.fsdp) == 0]
    data = config.data or max(fitting, default=1)
    if data * others > devices:
        raise InputError(
            f"the mesh is data {data} x fsdp {config.fsdp} x tensor {config.tensor} = {data * others} devices, but "
            f"there are {devices}; expected at most {devices}; lower --mesh.data, --mesh.fsdp or --mesh.tensor"
        )
    if rows % (data * config.fsdp):
        raise InputError(
            f"a batch of {rows} rows (batch_size / accumulation) does not divide over {data * config.fsdp} devices "
            f"(data x fsdp); expected a multiple of {data * config.fsdp}"
        )
    shape, names = (data, config.fsdp, config.tensor), ("data", "fsdp", "tensor")
    used = jax.devices()[: data * others]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=used)


@contextmanager
def computing_on(mesh: Mesh) -> Iterator[None]:
    """Inside, everything is traced and computed for `mesh`, kernels that the compiler cannot split included."""
    with jax.set_mesh(mesh), split_by(split_kernel):
        yield


def split_kernel(kernel: Kernel, query: tuple[int, ...], key: tuple[int, ...]) -> Kernel | str:
    """Splits an attention kernel over the mesh; a sentence's end if the rows do not divide over data x fsdp.

    `query` and `key` are the shapes `[B, T, H, C]` and `[B, S, K, C]`. Each device calls the kernel for its own
    sequences, and for its own heads if the heads divide over the tensor axis, otherwise for all heads.
    """
    mesh = get_abstract_mesh()
    if mesh.size == 1:
        return kernel
    if query[0] % (ways := mesh.shape["data"] * mesh.shape["fsdp"]):
        return f"{query[0]} rows over {ways} devices (data x fsdp); expected a multiple of {ways}"
    divide = not any(shape[2] % mesh.shape["tensor"] for shape in (query, key))
    rows, heads = BATCH, PartitionSpec(BATCH[0], None, "tensor") if divide else BATCH
    # check_vma: the kernel does not declare the axes that its results vary over.
    return jax.shard_map(
        kernel, mesh=mesh, in_specs=(heads, heads, heads, rows, rows), out_specs=heads, check_vma=False
    )


def require_memory(asked: int, what: str, mend: str, device: jax.Device | None = None) -> None:
    """Raises InputError if `what` takes more bytes (`asked`) than there are on `device`; None: on this machine.

    Without this check it would fail after minutes, or the system would kill the process without a message.
    """
    if device is None or device.platform == "cpu":
        limit, where = host_memory(), "here"
    else:
        limit, where = (device.memory_stats() or {}).get("bytes_limit", asked), "on each device"
    if asked > limit:
        told = f"{what} take {asked / 2**30:,.1f} GiB, and there are {limit / 2**30:,.1f} GiB {where}"
        raise InputError(f"{told}; {mend}")


def host_memory() -> int:
    """Returns the bytes of memory of the machine, or of the container if those are fewer."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return machine


def parameter_shardings(mesh: Mesh, shapes: Params) -> Params:
    """The NamedSharding of every parameter; an axis that its mesh axis does not divide stays whole."""
    shardings: Params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, _partition(mesh, ".".join(key.key for key in path), leaf.shape)), shapes
    )
    return shardings


def place_batch(mesh: Mesh, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Puts a batch on the devices, split by rows."""
    placed: dict[str, jax.Array] = jax.device_put(dict(batch), NamedSharding(mesh, BATCH))
    return placed


def abstract_batch(mesh: Mesh, batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes, types and shardings of `place_batch(mesh, batch)`."""
    sharding = NamedSharding(mesh, BATCH)
    return {name: jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=sharding) for name, rows in batch.items()}


def _partition(mesh: Mesh, path: str, shape: tuple[int, ...]) -> PartitionSpec:
    logical = next((axes for name, axes in LOGICAL_AXES.items() if f".{path}".endswith(f".{name}")), ())
    whole = (None,) * (len(shape) - len(logical))
    axes = [
        MESH_AXES[axis] if axis and size % mesh.shape[MESH_AXES[axis]] == 0 else None
        for axis, size in zip(logical, shape[len(whole) :], strict=True)
    ]
    return PartitionSpec(*whole, *axes)
