"""Fast implementations of attention. All compute the function that `attend` writes out as "einsum".

They are blocks of queries on a CPU, cuDNN's flash attention on an NVIDIA GPU, and JAX's Pallas kernel on a TPU. The
last two never hold all weights of a head at once, and cannot apply our dropout masks.
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
"""(kernel, shape of the queries, shape of the keys) -> the kernel split over devices, or why it cannot be split."""

_SPLIT: ContextVar[Split | None] = ContextVar("split", default=None)
_TPU_BLOCK = 128
"""The Pallas kernel needs lengths that are multiples of this."""


@contextmanager
def split_by(split: Split) -> Iterator[None]:
    """Inside, traced code uses `split` for kernels that the compiler cannot split over devices."""
    token = _SPLIT.set(split)
    try:
        yield
    finally:
        _SPLIT.reset(token)


def choose_implementation(
    platform: str, dtype: jnp.dtype, query: tuple[int, ...], key: tuple[int, ...], mask: Mask, *, drops: bool
) -> AttentionImplementation:
    """Chooses the implementation for "auto" from the shapes of queries, `[B, T, H, C]`, and keys, `[B, S, K, C]`.

    `platform` is JAX's name of the kind of device ("cpu", "gpu", "tpu"); `drops` says whether weights are dropped.
    """
    width, lengths = query[3], (query[1], key[1])
    if platform == "cpu":
        return "blocks"
    if platform == "gpu" and dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0 and width <= 128:
        # cuDNN's flash attention needs Ampere or newer.
        fits = not any(length % 2 for length in lengths) and _capability() >= 8.0
        return "cudnn" if fits and _refusal("cudnn", mask, drops) is None else "einsum"
    if platform == "tpu" and dtype != jnp.float64 and not any(length % _TPU_BLOCK for length in lengths):
        split = _SPLIT.get()
        # Several devices can share the kernel only inside `split_by`.
        shared = split is not None and not isinstance(split(_flash_attention(mask, 1.0), query, key), str)
        fits = jax.device_count() == 1 or shared
        return "pallas" if fits and _refusal("pallas", mask, drops) is None else "einsum"
    return "einsum"


def _capability() -> float:
    """Returns the CUDA compute capability of the first GPU; 0 for GPUs of other makers."""
    try:
        return float(jax.local_devices()[0].compute_capability)
    except (AttributeError, ValueError):
        return 0.0


def _refusal(implementation: str, mask: Mask, drops: bool) -> str | None:
    """Says why a kernel cannot compute this, as the end of a sentence; None if it can."""
    if drops:
        return "cannot drop attention weights; expected 'auto', 'einsum' or 'blocks', or dropout.attention 0"
    if mask.bias is not None:
        return "adds no bias; expected 'auto', 'einsum' or 'blocks'"
    if mask.cap is not None:
        return "bounds no scores; expected 'auto', 'einsum' or 'blocks', or score_cap None"
    if implementation == "pallas" and (mask.window is not None or mask.prefix is not None):
        return "knows neither windows nor prefixes; expected 'auto' or 'einsum'"
    return None


def flat(x: Float[Array, "B T K C"]) -> Float[Array, "R T C"]:
    """A row for each head of each sequence, R = B * K."""
    return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3])


def block_length(length: int) -> int:
    """Returns the queries per block: small blocks skip more of what a mask hides, large ones multiply faster.

    There are at most 32 blocks, because each is compiled separately.
    """
    return max(32 if length <= 64 else 64 if length <= 512 else 128, -(-length // 32))


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
    """Computes `attend` for keys and values with a row for each of `heads` heads of each sequence, R = B * K.

    Multiplies a block of queries only with the keys that the mask may let it see. One leading axis gives XLA's fast
    matrix products on CPU. The blocks are static, so plain differentiation gives the backward pass. N may be a multiple
    of B: then N/B neighbours attend to the same keys under one mask.
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
    """Computes `attend` by cuDNN or Pallas; raises InputError if this kernel cannot compute it.

    Queries that may attend to nothing get zeros, with zero gradients; the kernels alone would average padding.
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
    """Computes cuDNN's flash attention (Dao et al., 2022), in bfloat16 or float16.

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


def _attend_by_pallas(query: Array, key: Array, value: Array, mask: Mask, scale: float) -> Array:
    """Computes JAX's flash attention for TPUs; padding becomes a segment of its own.

    The compiler cannot split the kernel over devices; `split_by` does.
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
        # Without segments every query, even at padding, is of the tokens' segment and sees tokens, as elsewhere.
        query_segments = jnp.zeros(query.shape[:2], jnp.int32) if query_segments is None else query_segments
        key_segments = jnp.where(mask.is_token, 0 if key_segments is None else key_segments, jnp.iinfo(jnp.int32).min)
    compute, split = _flash_attention(mask, scale), _SPLIT.get()
    shared = compute if split is None else split(compute, query.shape, key.shape)
    if isinstance(shared, str):
        raise InputError(f"attention is 'pallas' for {shared}, or 'auto' or 'einsum'")
    return shared(query, key, value, query_segments, key_segments)


def _flash_attention(mask: Mask, scale: float) -> Kernel:
    """Makes the kernel for TPUs, for one device."""

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


def is_kernel(primitive: Primitive, *_: object, **__: object) -> bool:
    """A rematerialisation policy that keeps the results of cuDNN's forward pass, including the softmax's statistics.

    The Pallas kernel runs again instead: it writes its statistics 128 times over, nearly as much as all else that is
    kept of a layer.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"
