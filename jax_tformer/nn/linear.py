"""The one projection that everything else is made of."""

import math

from flax import nnx
from jaxtyping import Array

from jax_tformer.config import TransformerConfig
from jax_tformer.nn.arrays import accumulator, dtype_of
from jax_tformer.nn.parameters import ZEROS, parameter, projection_start


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
        residual_branches: int = 1,
    ) -> None:
        scale = residual_branches**-0.5 if config.residual_init_scale else 1.0
        start = projection_start(config, math.prod(inputs), math.prod(outputs), scale)
        self.kernel = parameter(inputs + outputs, config, start)
        self.bias = parameter(outputs, config, ZEROS) if bias else None
        self.dtype = config.compute.dtype
        self.inputs, self.outputs = inputs, outputs

    def __call__(self, x: Array) -> Array:
        """`[..., *inputs]` -> `[..., *outputs]`."""
        dtype = dtype_of(self.dtype)
        width = math.prod(self.inputs)
        leading = x.shape[: x.ndim - len(self.inputs)]
        y = x.reshape(-1, width).astype(dtype) @ self.kernel[...].reshape(width, -1).astype(dtype)
        if self.bias is not None:
            # The sum over tokens that is the bias's gradient has the type of this addition: bfloat16 would lose it.
            high = accumulator(dtype)
            y = (y.astype(high) + self.bias[...].reshape(1, -1).astype(high)).astype(dtype)
        return y.reshape(leading + self.outputs)
