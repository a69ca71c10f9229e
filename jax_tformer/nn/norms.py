"""LayerNorm (Ba et al., 2016) and RMSNorm (Zhang & Sennrich, 2019), computed in at least float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.nn.arrays import accumulator
from jax_tformer.nn.parameters import ONES, ZEROS, parameter


class Norm(nnx.Module):
    """scale * (x - mean) / sqrt(var + eps) + bias; for RMSNorm without mean and bias.

    The variance is the mean of squared deviations, in two passes: mean(x^2) - mean(x)^2 loses all digits where the
    mean is large.
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig) -> None:
        self.scale = parameter((config.d_model,), config, ONES)
        self.bias = parameter((config.d_model,), config, ZEROS) if stack.norm_bias else None
        self.centered = stack.norm == "layernorm"
        self.eps = stack.norm_eps

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Normalises over the last axis."""
        high = x.astype(accumulator(x.dtype))
        if self.centered:
            high = high - high.mean(-1, keepdims=True)
        high = high * jax.lax.rsqrt(jnp.square(high).mean(-1, keepdims=True) + self.eps)
        high = high * self.scale[...].reshape(1, 1, -1).astype(high.dtype)
        if self.bias is not None:
            high = high + self.bias[...].reshape(1, 1, -1).astype(high.dtype)
        return high.astype(x.dtype)
