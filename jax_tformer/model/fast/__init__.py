"""Functions that compute what `attend` writes out, faster. Nobody needs to read them first.

They are blocks of queries on a CPU (rows.py), and the kernels of cuDNN on an NVIDIA GPU and of Pallas on a
TPU. The last two never hold all weights of a head at once, and cannot apply our dropout masks.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, Bool, Float

from jax_tformer.config import AttentionImplementation
from jax_tformer.config.errors import require
from jax_tformer.model.fast.context import Attend
from jax_tformer.model.fast.kernels import (
    BLOCK,
    attend_by_cudnn,
    attend_by_pallas,
    capability,
    flash_kernel,
    share_kernel,
)
from jax_tformer.model.fast.rows import attend_in_rows
from jax_tformer.model.masks import Mask
from jax_tformer.model.parameters import context_parts
from jax_tformer.scan import ATTENTION_OUTPUT


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
