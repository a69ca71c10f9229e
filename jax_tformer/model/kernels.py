"""Fast implementations of attention, all of the function that `attend` writes out as "einsum".

Blocks of queries on a CPU, cuDNN's flash attention on an NVIDIA GPU, and on a TPU the Pallas kernel that comes with
JAX. The last two never hold all weights of a head at once, and cannot apply our dropout masks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import Array, Bool, Float, Int

from jax_tformer.config import AttentionImplementation
from jax_tformer.errors import InputError, require
from jax_tformer.model.layers import accumulator, dropout
from jax_tformer.model.masks import Mask

Kernel = Callable[[Array, Array, Array, Array | None, Array | None], Array]
"""(query, key, value, segments of the queries, segments of the keys) -> output."""
Split = Callable[[Kernel, tuple[int, ...], tuple[int, ...]], Kernel | str]
"""(kernel, shape of the queries, shape of the keys) -> the kernel as several devices share it, or why they cannot."""

_SPLIT: ContextVar[Split | None] = ContextVar("split", default=None)
_TPU_BLOCK = 128
"""The Pallas kernel takes lengths that this divides."""


@contextmanager
def split_by(split: Split) -> Iterator[None]:
    """Says how a kernel that the compiler cannot split is shared by devices, for what is traced inside."""
    token = _SPLIT.set(split)
    try:
        yield
    finally:
        _SPLIT.reset(token)


def choose_implementation(
    platform: str, dtype: jnp.dtype, query: tuple[int, ...], key: tuple[int, ...], mask: Mask, *, drops: bool
) -> AttentionImplementation:
    """What "auto" stands for, given the shapes `[B, T, H, C]` of queries and `[B, S, K, C]` of keys.

    `platform` is JAX's name of the kind of device ("cpu", "gpu", "tpu"); `drops`: attention weights are dropped.
    """
    width, lengths = query[3], (query[1], key[1])
    if platform == "cpu":
        return "blocks"
    if platform == "gpu" and dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0 and width <= 128:
        # cuDNN's flash attention begins with Ampere.
        fits = not any(length % 2 for length in lengths) and _capability() >= 8.0
        return "cudnn" if fits and _refusal("cudnn", mask, drops) is None else "einsum"
    if platform == "tpu" and dtype != jnp.float64 and not any(length % _TPU_BLOCK for length in lengths):
        split = _SPLIT.get()
        # Several devices share the kernel only where `split_by` says how.
        shared = split is not None and not isinstance(split(_flash_attention(mask, 1.0), query, key), str)
        fits = jax.device_count() == 1 or shared
        return "pallas" if fits and _refusal("pallas", mask, drops) is None else "einsum"
    return "einsum"


def _capability() -> float:
    """The CUDA compute capability of the first GPU; 0 for GPUs of other makers."""
    try:
        return float(jax.local_devices()[0].compute_capability)
    except (AttributeError, ValueError):
        return 0.0


def _refusal(implementation: str, mask: Mask, drops: bool) -> str | None:
    """Why a kernel cannot compute this, as the end of a sentence; None where it can."""
    if drops:
        return "cannot drop attention weights; expected 'auto', 'einsum' or 'blocks', or dropout.attention 0"
    if mask.bias is not None:
        return "adds no bias; expected 'auto', 'einsum' or 'blocks'"
    if implementation == "pallas" and (mask.window is not None or mask.prefix is not None):
        return "knows neither windows nor prefixes; expected 'auto' or 'einsum'"
    return None


def flat(x: Float[Array, "B T K C"]) -> Float[Array, "R T C"]:
    """A row for each head of each sequence, R = B * K."""
    return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3])


def block_length(length: int) -> int:
    """How many queries are computed at a time: small blocks skip more of what a mask hides, large ones multiply faster.

    There are at most 32 blocks, since each is compiled by itself.
    """
    return max(64 if length <= 512 else 128, -(-length // 32))


def attend_in_rows(
    query: Float[Array, "N T H C"],
    key: Float[Array, "R S C"],
    value: Float[Array, "R S C"],
    mask: Mask,
    *,
    heads: int,
    scale: float,
    dropout_rate: float = 0.0,
    keep: Bool[Array, "N H T S"] | None = None,
) -> Float[Array, "N T H C"]:
    """`attend` where keys and values have a row for each of `heads` heads of each sequence, R = B * K; N = B or more.

    A block of queries is multiplied only with the keys that the mask may let it see. XLA on CPU has its fast matrix
    products for one leading axis. The blocks are static: nothing depends on a loop's counter, and plain differentiation
    gives the backward pass. Where N is a multiple of B, N/B neighbours attend to the same keys under one mask.
    """
    width, slots = query.shape[3], key.shape[1]
    batch, groups = len(key) // heads, query.shape[2] // heads
    apart = query.reshape(batch, -1, heads, groups, width).transpose(0, 2, 3, 1, 4)
    queries, length = apart.reshape(len(key), groups, -1, width), apart.shape[3]
    skips = (mask.causal or mask.window is not None) and isinstance(mask.first, int)
    step = block_length(length) if skips else length
    outputs = []
    for start in range(0, length, step):
        block = range(start, min(start + step, length))
        span = mask.spanned(block, slots)
        rows, columns = slice(block.start, block.stop), slice(span.start, span.stop)
        part = queries[:, :, rows].reshape(len(key), -1, width)
        scores = jnp.einsum("rtc,rsc->rts", part, key[:, columns], preferred_element_type=accumulator(query.dtype))
        apart_by_head = (scores * scale).reshape(batch, -1, len(block), len(span))
        weights = mask.softmax(apart_by_head, length, slots, rows, columns)
        dropped = dropout(weights, dropout_rate, None if keep is None else keep[:, :, rows, columns])
        output = jnp.einsum("rts,rsc->rtc", dropped.astype(value.dtype).reshape(scores.shape), value[:, columns])
        outputs.append(output.reshape(len(key), groups, len(block), width))
    joined = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=2)
    return joined.reshape(apart.shape).transpose(0, 3, 1, 2, 4).reshape(query.shape)


def kernel(
    implementation: AttentionImplementation,
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Mask,
    *,
    scale: float,
    drops: bool,
) -> Float[Array, "B T H C"]:
    """`attend` by cuDNN or Pallas; raises InputError, which says what this kernel cannot do.

    Queries that may attend to nothing get zeros, with zero gradients; kernels alone give an average of padding.
    """
    refusal = _refusal(implementation, mask, drops)
    require(refusal is None, f"attention is {implementation!r}, which {refusal}")
    compute = _attend_by_cudnn if implementation == "cudnn" else _attend_by_pallas
    output = compute(query, key, value, mask, scale)
    if mask.is_token is None and (mask.causal or mask.segments is None):
        # Every query sees itself, or all keys.
        return output
    plain = mask.window is None and mask.segments is None and mask.prefix is None
    if mask.is_token is not None and mask.causal and plain:
        seeing = jnp.cumsum(mask.is_token, axis=1) > 0
    else:
        allowed = mask.boolean(query.shape[1], key.shape[1])
        assert allowed is not None
        seeing = allowed.any(axis=3)[:, 0]
    return jnp.where(seeing[:, :, None, None], output, jnp.zeros((), output.dtype))


def _attend_by_cudnn(query: Array, key: Array, value: Array, mask: Mask, scale: float) -> Array:
    """cuDNN's flash attention (Dao et al., 2022), in bfloat16 or float16.

    It knows causal attention, with a window or without. Any other mask goes in as booleans, which JAX makes a bias.
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


def _attend_by_pallas(query: Array, key: Array, value: Array, mask: Mask, scale: float) -> Array:
    """The flash attention for TPUs that comes with JAX; padding goes in as segments of their own.

    The compiler cannot split the kernel: on several devices it is shared as `split_by` says.
    """
    lengths = query.shape[1], key.shape[1]
    require(
        not any(length % _TPU_BLOCK for length in lengths),
        f"attention is 'pallas', for lengths that {_TPU_BLOCK} divides, and these are {lengths[0]} and {lengths[1]}; "
        "expected 'auto' or other lengths",
    )
    query_segments = key_segments = None
    if mask.segments is not None:
        query_segments, key_segments = (numbers.astype(jnp.int32) for numbers in mask.segments)
    if mask.is_token is not None:
        # Without segments every query is of the tokens' segment, at padding too: those see tokens, as everywhere else.
        query_segments = jnp.zeros(query.shape[:2], jnp.int32) if query_segments is None else query_segments
        key_segments = jnp.where(mask.is_token, 0 if key_segments is None else key_segments, jnp.iinfo(jnp.int32).min)
    compute, split = _flash_attention(mask, scale), _SPLIT.get()
    shared = compute if split is None else split(compute, query.shape, key.shape)
    if isinstance(shared, str):
        raise InputError(f"attention is 'pallas' for {shared}, or 'auto' or 'einsum'")
    return shared(query, key, value, query_segments, key_segments)


def _flash_attention(mask: Mask, scale: float) -> Kernel:
    """The kernel for TPUs, on one device."""

    def compute(
        query: Float[Array, "B T H C"],
        key: Float[Array, "B S K C"],
        value: Float[Array, "B S K C"],
        q_segments: Int[Array, "B T"] | None,
        k_segments: Int[Array, "B S"] | None,
    ) -> Float[Array, "B T H C"]:
        # Here and not above: importing it takes half a second, which only a TPU is to pay.
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


def is_kernel(primitive: Primitive, *_: object, **__: object) -> bool:
    """A policy of rematerialisation: keeps what cuDNN's forward pass computes, the statistics of its softmax included.

    The Pallas kernel is run again instead: it writes its statistics 128 times over, nearly as much as all that is kept
    of a layer otherwise.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"
