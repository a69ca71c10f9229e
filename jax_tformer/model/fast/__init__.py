"""Functions that compute what `attend` writes out, faster. Nobody needs to read them first.

They are blocks of queries on a CPU (rows.py), rows split over devices (context.py) and, here, the kernels of others:
those of cuDNN on an NVIDIA GPU (Dao et al., 2022) and of Pallas on a TPU. These never hold all weights of a head at
once, and cannot apply our dropout masks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, get_abstract_mesh
from jaxtyping import Array, Bool, Float, Int

from jax_tformer.config import AttentionImplementation
from jax_tformer.config.errors import InputError, require
from jax_tformer.model.fast.context import Attend
from jax_tformer.model.fast.rows import attend_in_rows
from jax_tformer.model.masks import Mask
from jax_tformer.model.parameters import context_parts
from jax_tformer.scan import ATTENTION_OUTPUT

Kernel = Callable[[Array, Array, Array, Array | None, Array | None], Array]
"""(query, key, value, segments of the queries, segments of the keys) -> output."""
BLOCK = 128
"""The kernel needs lengths that are multiples of this."""


def lookup(
    implementation: AttentionImplementation, query: Array, key: Array, mask: Mask, *, drops: bool
) -> Attend | None:
    """Returns the function that computes attention as `implementation` says; None: `attend` itself.

    "auto" is what suits the platform, the types and the shapes; `drops` says whether weights are dropped. Raises
    InputError if the given implementation cannot compute this.
    """
    if implementation == "auto":
        platform = jax.default_backend()
        implementation = choose_implementation(platform, query.dtype, query.shape, key.shape, mask, drops=drops)
    if implementation == "einsum":
        return None
    if implementation == "blocks":
        return attend_in_rows
    refusal = _refusal(implementation, mask, drops)
    require(refusal is None, f"attention is {implementation!r}, which {refusal}")
    return _attend_by_cudnn if implementation == "cudnn" else _attend_by_pallas


def choose_implementation(
    platform: str, dtype: jnp.dtype, query: tuple[int, ...], key: tuple[int, ...], mask: Mask, *, drops: bool
) -> AttentionImplementation:
    """Chooses the implementation for "auto" from the shapes of queries, `[B, T, H, C]`, and keys, `[B, S, K, C]`.

    `platform` is JAX's name of the kind of device ("cpu", "gpu", "tpu").
    """
    width, lengths = query[3], (query[1], key[1])
    if platform == "cpu" or context_parts() > 1:
        return "blocks"
    if platform == "gpu" and dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0 and width <= 128:
        # cuDNN's flash attention needs Ampere or newer.
        fits = not any(length % 2 for length in lengths) and capability() >= 8.0
        return "cudnn" if fits and _refusal("cudnn", mask, drops) is None else "einsum"
    if platform == "tpu" and dtype != jnp.float64 and not any(length % BLOCK for length in lengths):
        # Several devices can share the kernel only on a mesh that is set.
        shared = not get_abstract_mesh().empty and not isinstance(
            share_kernel(flash_kernel(mask, 1.0), query, key), str
        )
        fits = jax.device_count() == 1 or shared
        return "pallas" if fits and _refusal("pallas", mask, drops) is None else "einsum"
    return "einsum"


def _refusal(implementation: str, mask: Mask, drops: bool) -> str | None:
    """Says why a kernel cannot compute this, as the end of a sentence; None if it can."""
    if context_parts() > 1:
        return "computes no rows split over devices (--mesh.context); expected 'auto', 'einsum' or 'blocks'"
    if drops:
        return "cannot drop attention weights; expected 'auto', 'einsum' or 'blocks', or dropout.attention 0"
    if mask.bias is not None:
        return "adds no bias; expected 'auto', 'einsum' or 'blocks'"
    if mask.cap is not None:
        return "bounds no scores; expected 'auto', 'einsum' or 'blocks', or score_cap None"
    if implementation == "pallas" and (mask.window is not None or mask.prefix is not None):
        return "knows neither windows nor prefixes; expected 'auto' or 'einsum'"
    return None


def _attend_by_cudnn(query: Array, key: Array, value: Array, mask: Mask, scale: float, *_: Any) -> tuple[Array, None]:
    # Not named for `rematerialize`, whose policy keeps all results of this kernel.
    return _without_blind(attend_by_cudnn(query, key, value, mask, scale), key.shape[1], mask), None


def _attend_by_pallas(query: Array, key: Array, value: Array, mask: Mask, scale: float, *_: Any) -> tuple[Array, None]:
    output = _without_blind(attend_by_pallas(query, key, value, mask, scale), key.shape[1], mask)
    return checkpoint_name(output, ATTENTION_OUTPUT), None


def _without_blind(output: Float[Array, "B T H C"], slots: int, mask: Mask) -> Float[Array, "B T H C"]:
    """Zeroes queries that may attend to nothing, and their gradients; the kernels alone would average padding."""
    if mask.is_token is None and (mask.causal or mask.segments is None):
        # Every query sees itself, or all keys.
        return output
    plain = mask.window is None and mask.segments is None and mask.prefix is None
    seeing: Bool[Array, "B T"]
    if mask.is_token is not None and mask.causal and plain:
        seeing = jnp.cumsum(mask.is_token, axis=1) > 0
    else:
        allowed = mask.boolean(output.shape[1], slots)
        assert allowed is not None
        seeing = allowed.any(axis=3)[:, 0]
    return jnp.where(seeing[:, :, None, None], output, jnp.zeros((), output.dtype))


def attend_by_pallas(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Mask,
    scale: float,
) -> Float[Array, "B T H C"]:
    """Computes `attend`, but for queries that see nothing; padding becomes a segment of its own.

    Raises InputError for lengths that the kernel cannot take, and for rows that the devices cannot share.
    """
    lengths = query.shape[1], key.shape[1]
    require(
        not any(length % BLOCK for length in lengths),
        f"attention is 'pallas', for lengths that {BLOCK} divides, and these are {lengths[0]} and {lengths[1]}; "
        "expected 'auto' or other lengths",
    )
    query_segments = key_segments = None
    if mask.segments is not None:
        query_segments, key_segments = (numbers.astype(jnp.int32) for numbers in mask.segments)
    if mask.is_token is not None:
        # Without segments every query, even at padding, is of the tokens' segment and sees tokens, as elsewhere.
        query_segments = jnp.zeros(query.shape[:2], jnp.int32) if query_segments is None else query_segments
        key_segments = jnp.where(mask.is_token, 0 if key_segments is None else key_segments, jnp.iinfo(jnp.int32).min)
    shared = share_kernel(flash_kernel(mask, scale), query.shape, key.shape)
    if isinstance(shared, str):
        raise InputError(f"attention is 'pallas' for {shared}, or 'auto' or 'einsum'")
    return shared(query, key, value, query_segments, key_segments)


def share_kernel(kernel: Kernel, query: tuple[int, ...], key: tuple[int, ...]) -> Kernel | str:
    """Splits a kernel over the mesh that is set; a sentence's end if the rows do not divide over data x fsdp.

    The compiler cannot do that itself. `query` and `key` are the shapes `[B, T, H, C]` and `[B, S, K, C]`. Each device
    calls the kernel for its own sequences, and for its own heads if the heads divide over the tensor axis, otherwise
    for all heads.
    """
    mesh = get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return kernel
    if query[0] % (ways := mesh.shape["data"] * mesh.shape["fsdp"]):
        return f"{query[0]} rows over {ways} devices (data x fsdp); expected a multiple of {ways}"
    rows = PartitionSpec(("data", "fsdp"))
    divide = not any(shape[2] % mesh.shape["tensor"] for shape in (query, key))
    heads = PartitionSpec(rows[0], None, "tensor") if divide else rows
    # check_vma: the kernel does not declare the axes that its results vary over.
    return jax.shard_map(
        kernel, mesh=mesh, in_specs=(heads, heads, heads, rows, rows), out_specs=heads, check_vma=False
    )


def flash_kernel(mask: Mask, scale: float) -> Kernel:
    """Makes the kernel for one device."""

    def compute(
        query: Float[Array, "B T H C"],
        key: Float[Array, "B S K C"],
        value: Float[Array, "B S K C"],
        q_segments: Int[Array, "B T"] | None,
        k_segments: Int[Array, "B S"] | None,
    ) -> Float[Array, "B T H C"]:
        # Imported here, because it takes half a second and only TPUs need it.
        from jax.experimental.pallas.ops.tpu import flash_attention

        groups = query.shape[2] // key.shape[2]
        heads_first = [x.transpose(0, 2, 1, 3) for x in (query, *(jnp.repeat(x, groups, axis=2) for x in (key, value)))]
        segments = (
            None if q_segments is None or k_segments is None else flash_attention.SegmentIds(q_segments, k_segments)
        )
        rows, columns = (max(size for size in (128, 256, 512) if x.shape[1] % size == 0) for x in (query, key))
        by_rows = dict.fromkeys(("block_q", "block_q_major_dkv", "block_q_dkv", "block_q_dq"), rows)
        keys = ("block_k_major", "block_k", "block_k_major_dkv", "block_k_dkv", "block_k_major_dq", "block_k_dq")
        sizes = flash_attention.BlockSizes(block_b=1, **by_rows, **dict.fromkeys(keys, columns))
        output: Array = flash_attention.flash_attention(
            *heads_first, segment_ids=segments, causal=mask.causal, sm_scale=scale, block_sizes=sizes
        )
        return output.transpose(0, 2, 1, 3)

    return compute


def attend_by_cudnn(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Mask,
    scale: float,
) -> Float[Array, "B T H C"]:
    """Computes `attend`, but for queries that see nothing; raises InputError if cuDNN cannot.

    It supports causal attention, with or without a window. JAX makes a bias of the booleans of any other mask.
    """
    simple = mask.prefix is None and mask.segments is None and (mask.window is None or mask.is_token is None)
    causal = mask.causal and simple
    window = None if mask.window is None or not causal else (mask.window - 1, 0)
    rest, lengths = Mask(is_token=mask.is_token) if causal else mask, (query.shape[1], key.shape[1])
    allowed = rest.boolean(*lengths)
    allowed = None if allowed is None else jnp.broadcast_to(allowed, (*allowed.shape[:2], *lengths))
    try:
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=allowed,
            scale=scale,
            is_causal=causal,
            local_window_size=window,
            implementation="cudnn",
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise InputError(
            f"attention is 'cudnn', which cannot compute this here ({' '.join(str(error).split())}); expected 'einsum'"
        ) from error


def capability() -> float:
    """Returns the CUDA compute capability of the first GPU; 0 for GPUs of other makers."""
    try:
        return float(jax.local_devices()[0].compute_capability)
    except (AttributeError, ValueError):
        return 0.0
