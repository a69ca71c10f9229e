"""cuDNN's flash attention (Dao et al., 2022), for NVIDIA GPUs, in bfloat16 or float16."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_tformer.config.errors import InputError
from jax_tformer.model.masks import Mask


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
