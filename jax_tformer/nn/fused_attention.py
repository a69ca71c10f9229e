"""Attention as one kernel, where the accelerator has one, and which implementation suits which case.

On an NVIDIA GPU this is cuDNN's flash attention, on a TPU the Pallas kernel that comes with JAX: neither ever holds all
weights of a head at once. Kernels know no dropout mask of ours, so that dropped weights are computed in the open.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, PartitionSpec, get_abstract_mesh
from jaxtyping import Array, Bool, Float

from jax_tformer.config import AttentionImplementation
from jax_tformer.errors import InputError

_TPU_BLOCK = 128
"""The Pallas kernel takes lengths that this divides."""
_SPLIT = PartitionSpec(("data", "fsdp"), None, "tensor")
"""How `[B, T, H, C]` lies on the mesh (see sharding.py): sequences over two of its axes, heads over the third."""


def choose_implementation(
    platform: str, dtype: jnp.dtype, query: tuple[int, ...], key: tuple[int, ...], *, drops: bool
) -> AttentionImplementation:
    """What "auto" stands for, given the shapes `[B, T, H, C]` of queries and `[B, S, K, C]` of keys.

    `platform` is JAX's name of the kind of device ("cpu", "gpu", "tpu"); `drops`: attention weights are dropped.
    """
    width, lengths = query[3], (query[1], key[1])
    half = dtype in (jnp.bfloat16, jnp.float16)
    if drops:
        return "blocks" if platform == "cpu" else "einsum"
    if platform == "gpu" and half and width % 8 == 0 and width <= 128 and not any(n % 2 for n in lengths):
        # cuDNN's flash attention begins with Ampere.
        return "cudnn" if _capability() >= 8.0 else "einsum"
    if platform == "tpu" and dtype != jnp.float64 and not any(n % _TPU_BLOCK for n in lengths):
        # Several share the work only where it is said how: see attend_by_pallas.
        shares = _known(mesh := get_abstract_mesh()) and query[0] % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0
        return "pallas" if jax.device_count() == 1 or shares else "einsum"
    return "blocks" if platform == "cpu" else "einsum"


def _known(mesh: AbstractMesh) -> bool:
    """Whether it has the axes of sharding.py; without `jax.set_mesh` it has none."""
    return {"data", "fsdp", "tensor"} <= set(mesh.axis_names)


def _capability() -> float:
    """NVIDIA's number of what the first GPU can do; 0 for GPUs of others."""
    try:
        return float(jax.local_devices()[0].compute_capability)
    except (AttributeError, ValueError):
        return 0.0


def require_no_dropout(implementation: str, keep: Array | None) -> None:
    """Raises InputError where attention weights are to be dropped: a kernel cannot do that by our masks."""
    if keep is not None:
        raise InputError(
            f"attention is {implementation!r}, which cannot drop attention weights; expected 'auto', 'einsum' or "
            "'blocks', or dropout.attention 0"
        )


def attend_by_xla(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Bool[Array, "B 1 1 S"] | None,
    *,
    causal: bool,
    scale: float,
) -> Float[Array, "B T H C"]:
    """`jax.nn.dot_product_attention` as XLA compiles it, on any platform."""
    if query.dtype == jnp.float64:
        raise InputError("attention is 'xla', whose softmax runs in float32; for float64 expected 'einsum' or 'blocks'")
    output = jax.nn.dot_product_attention(
        query, key, value, mask=mask, scale=scale, is_causal=causal, implementation="xla"
    )
    return _zero_where_blind(output, mask, causal=causal)


def attend_by_cudnn(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Bool[Array, "B 1 1 S"] | None,
    *,
    causal: bool,
    scale: float,
) -> Float[Array, "B T H C"]:
    """cuDNN's flash attention (Dao et al., 2022), in bfloat16 or float16; padding goes in as a bias."""
    whole = None if mask is None else jnp.broadcast_to(mask, (*mask.shape[:2], query.shape[1], mask.shape[3]))
    try:
        output = jax.nn.dot_product_attention(
            query, key, value, mask=whole, scale=scale, is_causal=causal, implementation="cudnn"
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise InputError(
            f"attention is 'cudnn', which cannot compute this here ({' '.join(str(error).split())}); expected 'einsum'"
        ) from error
    return _zero_where_blind(output, mask, causal=causal)


def attend_by_pallas(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Bool[Array, "B 1 1 S"] | None,
    *,
    causal: bool,
    scale: float,
) -> Float[Array, "B T H C"]:
    """The flash attention for TPUs that comes with JAX; padding goes in as segments of their own.

    The compiler cannot split the kernel. So on a mesh of several devices, which `jax.set_mesh` has to name, each calls
    it for its own sequences, and for its own heads where they divide, or else for all.
    """
    lengths = query.shape[1], key.shape[1]
    if any(length % _TPU_BLOCK for length in lengths):
        raise InputError(
            f"attention is 'pallas', for lengths that {_TPU_BLOCK} divides, and these are {lengths[0]} and "
            f"{lengths[1]}; expected 'auto' or other lengths"
        )
    compute, mesh = partial(_flash_attention, causal=causal, scale=scale), get_abstract_mesh()
    if mesh.size > 1 and _known(mesh):
        if len(query) % (ways := mesh.shape["data"] * mesh.shape["fsdp"]):
            raise InputError(
                f"attention is 'pallas' for {len(query)} rows over {ways} devices (data x fsdp); expected a multiple "
                f"of {ways}, or 'auto' or 'einsum'"
            )
        heads_divide = not any(x.shape[2] % mesh.shape["tensor"] for x in (query, key))
        split = _SPLIT if heads_divide else PartitionSpec(_SPLIT[0])
        given = (split, split, split, PartitionSpec(_SPLIT[0]))
        # check_vma: the kernel does not say over what its results vary.
        compute = jax.shard_map(compute, mesh=mesh, in_specs=given, out_specs=split, check_vma=False)
    return _zero_where_blind(compute(query, key, value, mask), mask, causal=causal)


def _flash_attention(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Bool[Array, "B 1 1 S"] | None,
    *,
    causal: bool,
    scale: float,
) -> Float[Array, "B T H C"]:
    """The kernel for TPUs, on one device."""
    # Here and not above: importing it takes half a second, which only a TPU is to pay.
    from jax.experimental.pallas.ops.tpu import flash_attention

    groups = query.shape[2] // key.shape[2]
    heads_first = [x.transpose(0, 2, 1, 3) for x in (query, *(jnp.repeat(x, groups, axis=2) for x in (key, value)))]
    segments = None
    if mask is not None:
        tokens = mask[:, 0, 0].astype(jnp.int32)
        # Every query is of the tokens' segment: also those at padding see tokens, as everywhere else.
        segments = flash_attention.SegmentIds(jnp.ones(query.shape[:2], jnp.int32), tokens)
    rows, columns = (max(size for size in (128, 256, 512) if x.shape[1] % size == 0) for x in (query, key))
    sizes = flash_attention.BlockSizes(
        block_b=1,
        block_q=rows,
        block_k_major=columns,
        block_k=columns,
        block_q_major_dkv=rows,
        block_q_dkv=rows,
        block_k_major_dkv=columns,
        block_k_dkv=columns,
        block_q_dq=rows,
        block_k_major_dq=columns,
        block_k_dq=columns,
    )
    output = flash_attention.flash_attention(
        *heads_first, segment_ids=segments, causal=causal, sm_scale=scale, block_sizes=sizes
    )
    return output.transpose(0, 2, 1, 3)


FUSED: dict[str, Callable[..., Array]] = {"xla": attend_by_xla, "cudnn": attend_by_cudnn, "pallas": attend_by_pallas}
"""The implementations that are one call to others' code; none of them can drop weights or knows float64."""


def is_kernel(primitive: Primitive, *_: Any, **__: Any) -> bool:
    """A policy of rematerialisation: keeps what cuDNN's forward pass computes, the statistics of its softmax included.

    The Pallas kernel is run again instead: it writes its statistics 128 times over, nearly as much as all that is kept
    of a layer otherwise.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"


def _zero_where_blind(
    output: Float[Array, "B T H C"], mask: Bool[Array, "B 1 1 S"] | None, *, causal: bool
) -> Float[Array, "B T H C"]:
    """Zeros, with zero gradients, for queries that may attend to nothing: kernels give them an average of padding."""
    if mask is None:
        return output
    tokens = mask[:, 0, 0]
    seeing = jnp.cumsum(tokens, axis=1) > 0 if causal else tokens.any(axis=1, keepdims=True)
    return jnp.where(seeing[:, :, None, None], output, jnp.zeros((), output.dtype))
