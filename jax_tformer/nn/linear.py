"""The one projection that everything else is made of, and how weights start."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from jax_tformer.config import TransformerConfig
from jax_tformer.nn.arrays import dtype_of


def initial_kernel(
    key: Key[Array, ""], shape: tuple[int, ...], config: TransformerConfig, fans: tuple[int, int], scale: float = 1.0
) -> Array:
    """A projection's first weights: `scale` x N(0, initializer_std^2), or Glorot & Bengio's (2010) uniform."""
    dtype = dtype_of(config.compute.parameter_dtype)
    if config.initializer == "normal":
        return scale * config.initializer_std * jax.random.normal(key, shape, dtype)
    bound = scale * math.sqrt(6 / sum(fans))
    return jax.random.uniform(key, shape, dtype, -bound, bound)


class Linear(nnx.Module):
    """y = x W + b, from the axes `inputs` to the axes `outputs` (heads x head width, say).

    The product runs on flattened tokens, `[B*T, in] @ [in, out]`: XLA then transposes the small weight gradient
    and not the large activations. `residual_branches` is the number of branches in the stack where this projection
    ends one of them (see `residual_init_scale`), else 1.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        config: TransformerConfig,
        *,
        bias: bool,
        rngs: nnx.Rngs,
        residual_branches: int = 1,
    ) -> None:
        fans = (math.prod(inputs), math.prod(outputs))
        scale = residual_branches**-0.5 if config.residual_init_scale else 1.0
        self.kernel = nnx.Param(initial_kernel(rngs.params(), inputs + outputs, config, fans, scale))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype_of(config.compute.parameter_dtype))) if bias else None
        self.dtype = config.compute.dtype
        self.inputs, self.outputs = inputs, outputs

    def __call__(self, x: Array) -> Array:
        """`[..., *inputs]` -> `[..., *outputs]`."""
        dtype = dtype_of(self.dtype)
        width = math.prod(self.inputs)
        leading = x.shape[: x.ndim - len(self.inputs)]
        y = x.reshape(-1, width).astype(dtype) @ self.kernel[...].reshape(width, -1).astype(dtype)
        if self.bias is not None:
            y = y + self.bias[...].reshape(1, -1).astype(dtype)
        return y.reshape(leading + self.outputs)
