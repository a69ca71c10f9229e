"""Functions that compute what `attend` writes out, faster, and products of few rows. Nobody needs to read them first.

Attention runs in blocks of queries on a CPU, over devices that split the positions of each row, and in the kernels of
others: those of cuDNN on an NVIDIA GPU (Dao et al., 2022) and of Pallas on a TPU. These never hold all weights of a
head at once, and cannot apply our dropout masks.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, get_abstract_mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jax_tformer.config import AttentionImplementation
from jax_tformer.config.errors import WHY, explained, require
from jax_tformer.model.masks import Mask
from jax_tformer.model.parameters import (
    KeyHeads,
    Queries,
    Shape,
    accumulator,
    context_parts,
    drop,
    has_our_axes,
    row_parts,
)
from jax_tformer.scan import ATTENTION_OUTPUT

Attend = Callable[..., tuple[Array, Any]]
"""A function with the arguments of `attend` and its result, but for the weights, which may be None."""
BLOCK = 128
"""The kernel of Pallas needs lengths that are multiples of this."""
READS = {
    "cudnn": ("causal", "window", "is_token", "segments", "prefix"),
    "pallas": ("causal", "is_token", "segments"),
}
"""The fields of a Mask that each kernel reads. It refuses a mask in which any other is set."""
FEW_ROWS = 64
"""Up to so many rows, `multiply_by_rows` is faster than an ordinary product."""


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
    return attend_by_cudnn if implementation == "cudnn" else attend_by_pallas


def choose_implementation(
    platform: str, dtype: jnp.dtype, query: Shape, key: Shape, mask: Mask, *, drops: bool
) -> AttentionImplementation:
    """Chooses the implementation for "auto" from the shapes of queries, `[B, T, H, C]`, and keys, `[B, S, K, C]`.

    `platform` is JAX's name of the kind of device ("cpu", "gpu", "tpu").
    """
    width = query[3]
    lengths = (query[1], key[1])
    if platform == "cpu" or context_parts() > 1:
        return "blocks"
    if platform == "gpu" and dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0 and width <= 128:
        # cuDNN's flash attention needs Ampere or newer.
        fits = not any(length % 2 for length in lengths) and capability() >= 8.0
        return "cudnn" if fits and _refusal("cudnn", mask, drops) is None else "einsum"
    if platform == "tpu" and dtype != jnp.float64 and not any(length % BLOCK for length in lengths):
        # Several devices can share the kernel only on a mesh that is set, and only if it divides the rows.
        fits = jax.device_count() == 1 or (has_our_axes() and query[0] % row_parts(get_abstract_mesh()) == 0)
        return "pallas" if fits and _refusal("pallas", mask, drops) is None else "einsum"
    return "einsum"


def capability() -> float:
    """Returns the CUDA compute capability of the first GPU; 0 for GPUs of other makers."""
    try:
        return float(jax.local_devices()[0].compute_capability)
    except (AttributeError, ValueError):
        return 0.0


def _refusal(implementation: str, mask: Mask, drops: bool) -> str | None:
    """Says why a kernel cannot compute this, as the end of a sentence; None if it can."""
    if context_parts() > 1:
        return "computes no rows split over devices (--mesh.context); expected 'auto', 'einsum' or 'blocks'"
    if drops:
        return "cannot drop attention weights; expected 'auto', 'einsum' or 'blocks', or dropout.attention 0"
    unknown = [field.name for field in fields(mask) if getattr(mask, field.name) is not field.default]
    unknown = [name for name in unknown if name not in READS[implementation]]
    mend = ", or score_cap None" * (unknown[:1] == ["cap"])
    return f"cannot take the {unknown[0]} of a mask; expected 'auto', 'einsum' or 'blocks'{mend}" if unknown else None


def block_length(length: int) -> int:
    """Returns the queries per block: small blocks skip more of what a mask hides, large ones multiply faster.

    There are at most 32 blocks, because each is compiled separately.
    """
    return max(32 if length <= 64 else 64 if length <= 512 else 128, -(-length // 32))


def attend_in_rows(
    query: Float[Array, "N T H C"],
    key: KeyHeads,
    value: KeyHeads,
    mask: Mask,
    scale: float,
    dropout_rate: float,
    keep: Bool[Array, "N H T S"] | None,
) -> tuple[Float[Array, "N T H C"], None]:
    """Computes `attend` with a row for each head of each sequence, a block of queries after the other.

    Multiplies a block of queries only with the keys that the mask may let it see. One leading axis, R = B * K, gives
    XLA's fast matrix products on CPU. The blocks are static, so plain differentiation gives the backward pass. N may be
    a multiple of B: then N/B neighbours attend to the same keys under one mask.
    """
    batch, slots, heads, _ = key.shape
    key, value = (rearrange(x, "b s k c -> (b k) s c") for x in (key, value))
    queries = rearrange(query, "(b n) t (k g) c -> (b k) g (n t) c", b=batch, k=heads)
    length = queries.shape[2]
    skips = (mask.causal or mask.window is not None) and isinstance(mask.first, int)
    step = block_length(length) if skips else length
    outputs = []
    for start in range(0, length, step):
        block = range(start, min(start + step, length))
        span = mask.spanned(block, slots)
        rows = slice(block.start, block.stop)
        columns = slice(span.start, span.stop)
        part = rearrange(queries[:, :, rows], "r g t c -> r (g t) c")
        scores = jnp.einsum("rtc,rsc->rts", part, key[:, columns], preferred_element_type=accumulator(query.dtype))
        apart_by_head = (scores * scale).reshape(batch, -1, len(block), len(span))
        weights = mask.softmax(apart_by_head, length, slots, rows, columns)
        dropped = drop(weights, dropout_rate, None if keep is None else keep[:, :, rows, columns])
        output = jnp.einsum("rts,rsc->rtc", dropped.astype(value.dtype).reshape(scores.shape), value[:, columns])
        outputs.append(rearrange(output, "r (g t) c -> r g t c", t=len(block)))
    together = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=2)
    output = rearrange(together, "(b k) g (n t) c -> (b n) t (k g) c", b=batch, t=query.shape[1])
    return checkpoint_name(output, ATTENTION_OUTPUT), None


def share_queries(compute: Attend) -> Attend:
    """Splits attention over the context axis of the mesh that is set; without one, returns `compute` itself.

    The compiler gathers keys and values, and adds up their gradients. If the mask hides keys by their distance, device
    i of n takes the queries at places i, i + n ... (Brandon et al., "Striped attention", 2023): all then see equally
    many keys, and skip the same ones. Otherwise each takes those that it holds.
    """
    parts = context_parts()

    def shared(
        query: Array, key: Array, value: Array, mask: Mask, scale: float, dropout_rate: float, keep: Array | None
    ) -> tuple[Array, Any]:
        if query.shape[1] % parts or not isinstance(mask.first, int):
            # Decoding: few queries, or keys of a cache.
            return compute(query, key, value, mask, scale, dropout_rate, keep)
        striped = mask.causal or mask.window is not None
        # Places apart of n devices, or n devices with places next to each other.
        places = "(t n)" if striped else "(n t)"

        def split(x: Array | None, axes: str) -> Array | None:
            """Makes `[n, *axes, T/n, ...]` of `[*axes, T, ...]`."""
            if x is None:
                return None
            free = [PartitionSpec.UNCONSTRAINED] * len(axes.split())
            x = jax.lax.with_sharding_constraint(x, PartitionSpec(*free, "context"))
            return rearrange(x, f"{axes} {places} ... -> n {axes} t ...", n=parts)

        nothing = None, None
        segments = mask.segments or nothing
        prefix = mask.prefix or nothing
        asking = *(split(x, "b") for x in (query, segments[0], prefix[0])), split(keep, "b h"), split(mask.bias, "b h")
        answering = key, value, segments[1], prefix[1], mask.is_token

        def attend_to_all(asking: Any, answering: Any) -> Array:
            query, of_queries, in_prefix, keep, bias = jax.tree.map(lambda x: x[0], asking)
            key, value, of_keys, key_in_prefix, is_token = answering
            # Where gradients of keys and values are added up over devices: once, and not for each block of queries, and
            # in at least float32.
            key, value = (
                jax.lax.pcast(x.astype(accumulator(x.dtype)), "context", to="varying").astype(x.dtype)
                for x in (key, value)
            )
            seen = replace(
                mask,
                is_token=is_token,
                segments=None if of_queries is None else (of_queries, of_keys),
                prefix=None if in_prefix is None else (in_prefix, key_in_prefix),
                bias=bias,
                stripe=(jax.lax.axis_index("context"), parts) if striped else (0, 1),
            )
            return compute(query, key, value, seen, scale, dropout_rate, keep)[0][None]

        one = PartitionSpec("context")
        all_keys = PartitionSpec()
        on_devices = jax.shard_map(attend_to_all, in_specs=(one, all_keys), out_specs=one, axis_names={"context"})
        return rearrange(on_devices(asking, answering), f"n b t ... -> b {places} ..."), None

    return compute if parts == 1 else shared


def attend_by_cudnn(
    query: Queries, key: KeyHeads, value: KeyHeads, mask: Mask, scale: float, *_: Any
) -> tuple[Queries, None]:
    """Computes `attend`; raises InputError if cuDNN cannot.

    It supports causal attention, with or without a window. JAX makes a bias of the booleans of any other mask.
    """
    simple = mask.prefix is None and mask.segments is None and (mask.window is None or mask.is_token is None)
    causal = mask.causal and simple
    window = None if mask.window is None or not causal else (mask.window - 1, 0)
    rest = Mask(is_token=mask.is_token) if causal else mask
    lengths = (query.shape[1], key.shape[1])
    allowed = rest.boolean(*lengths)
    allowed = None if allowed is None else jnp.broadcast_to(allowed, (*allowed.shape[:2], *lengths))
    with explained(
        f"attention is 'cudnn', which cannot compute this here ({WHY}); expected 'einsum'",
        (RuntimeError, ValueError),
    ):
        output = jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=allowed,
            scale=scale,
            is_causal=causal,
            local_window_size=window,
            implementation="cudnn",
        )
    # Not named for `rematerialize`, whose policy keeps all results of this kernel.
    return _without_blind(output, key.shape[1], mask), None


def attend_by_pallas(
    query: Queries, key: KeyHeads, value: KeyHeads, mask: Mask, scale: float, *_: Any
) -> tuple[Queries, None]:
    """Computes `attend`; padding becomes a segment of its own.

    The compiler cannot split a kernel over a mesh itself: here each device calls it for its own sequences, and for its
    own heads if the heads divide over the tensor axis, otherwise for all heads. Raises InputError for lengths that the
    kernel cannot take, and for rows that the devices cannot share.
    """
    lengths = (query.shape[1], key.shape[1])
    rows = len(query)
    mesh = get_abstract_mesh()
    ways = row_parts(mesh)
    require(
        not any(length % BLOCK for length in lengths),
        f"attention is 'pallas', for lengths that {BLOCK} divides, and these are {lengths[0]} and {lengths[1]}; "
        "expected 'auto' or other lengths",
    )
    require(
        rows % ways == 0,
        f"attention is 'pallas' for {rows} rows over {ways} devices (data x fsdp); expected a multiple of {ways}, or "
        "'auto' or 'einsum'",
    )
    segments = [numbers.astype(jnp.int32) for numbers in mask.segments or ()]
    if mask.is_token is not None:
        # Without segments every query, even at padding, is of the tokens' segment and sees tokens, as elsewhere.
        of_queries, of_keys = segments or (jnp.zeros(query.shape[:2], jnp.int32), 0)
        segments = [of_queries, jnp.where(mask.is_token, of_keys, jnp.iinfo(jnp.int32).min)]

    def compute(query: Queries, key: KeyHeads, value: KeyHeads, *segments: Array) -> Queries:
        # Imported here, because it takes half a second and only TPUs need it.
        from jax.experimental.pallas.ops.tpu import flash_attention

        groups = query.shape[2] // key.shape[2]
        repeated = (repeat(x, "b s k c -> b (k g) s c", g=groups) for x in (key, value))
        rows, columns = (max(size for size in (128, 256, 512) if length % size == 0) for length in lengths)
        by_rows = dict.fromkeys(("block_q", "block_q_major_dkv", "block_q_dkv", "block_q_dq"), rows)
        keys = ("block_k_major", "block_k", "block_k_major_dkv", "block_k_dkv", "block_k_major_dq", "block_k_dq")
        sizes = flash_attention.BlockSizes(block_b=1, **by_rows, **dict.fromkeys(keys, columns))
        output = flash_attention.flash_attention(
            rearrange(query, "b t h c -> b h t c"),
            *repeated,
            segment_ids=flash_attention.SegmentIds(*segments) if segments else None,
            causal=mask.causal,
            sm_scale=scale,
            block_sizes=sizes,
        )
        return rearrange(output, "b h t c -> b t h c")

    if not mesh.empty and mesh.size > 1:
        split = PartitionSpec(("data", "fsdp"))
        divide = not any(x.shape[2] % mesh.shape["tensor"] for x in (query, key))
        heads = PartitionSpec(split[0], None, "tensor") if divide else split
        # check_vma: the kernel does not declare the axes that its results vary over.
        compute = jax.shard_map(
            compute,
            mesh=mesh,
            in_specs=(heads, heads, heads, *[split] * len(segments)),
            out_specs=heads,
            check_vma=False,
        )
    output = _without_blind(compute(query, key, value, *segments), lengths[1], mask)
    return checkpoint_name(output, ATTENTION_OUTPUT), None


def _without_blind(output: Queries, slots: int, mask: Mask) -> Queries:
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
    return jnp.where(seeing[:, :, None, None], output, 0)


def multiply_by_rows(
    x: Float[Array, "N I"], matrix: Float[Array, "O I"], dtype: DTypeLike | None = None
) -> Float[Array, "N O"]:
    """Computes x W^T for a matrix W that has a row for each output; `dtype` is that of the result, by default x's.

    Few rows of x are multiplied by two or more parts of W at a time. XLA on CPU then reads W as it lies in memory, and
    copies no part of it.
    """
    parts = next((count for count in range(2, 65) if len(matrix) % count == 0), 1)
    if len(x) > FEW_ROWS or parts == 1 or jax.default_backend() != "cpu":
        return jnp.matmul(x, matrix.T, preferred_element_type=dtype)
    apart = matrix.reshape(parts, -1, x.shape[1])
    repeated = jnp.broadcast_to(x, (parts, *x.shape))
    return jnp.einsum("goi,gni->gon", apart, repeated, preferred_element_type=dtype).reshape(-1, len(x)).T


def multiply_new_tokens(
    x: Float[Array, "B T I"], matrix: Float[Array, "O I"], dtype: DTypeLike
) -> Float[Array, "B T O"]:
    """Computes x W^T; where each of several sequences has one token, as in decoding, by rows.

    Not elsewhere, since in training the gradients of x would be added up over the parts of W in the type of x.
    """
    flat = x.reshape(-1, x.shape[-1])
    by_rows = 1 < len(x) == len(flat)
    y = multiply_by_rows(flat, matrix, dtype) if by_rows else jnp.matmul(flat, matrix.T, preferred_element_type=dtype)
    return y.reshape(*x.shape[:-1], -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A kernel as its transposed matrix, the fastest layout to multiply few rows of x with (`multiply_by_rows`).

    `Linear` uses it like a matrix: it indexes it, reshapes it to inputs by outputs, casts it and multiplies.
    """

    matrix: Float[Array, "O I"]

    @staticmethod
    def of(kernel: Float[Array, "..."], inputs: int) -> "Transposed":
        """Transposes a kernel whose first axes have `inputs` elements together."""
        return Transposed(kernel.reshape(inputs, -1).T)

    def __getitem__(self, _: object) -> "Transposed":
        return self

    def reshape(self, *_: int) -> "Transposed":
        """Returns itself, because its shape is always that of a matrix."""
        return self

    def astype(self, dtype: DTypeLike) -> "Transposed":
        """Converts its numbers to another type."""
        return Transposed(self.matrix.astype(dtype))

    def __rmatmul__(self, x: Float[Array, "N I"]) -> Float[Array, "N O"]:
        return multiply_by_rows(x, self.matrix)
