"""The one projection that everything else is made of."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jax_tformer.config import TransformerConfig
from jax_tformer.nn.arrays import accumulator, dtype_of
from jax_tformer.nn.parameters import ZEROS, parameter, projection_start

PROJECTION = "projection"
"""What `stacks.rematerialized` knows the result of a Linear by, bias included."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A kernel as its transposed matrix in G parts: the fastest form to multiply a single row of x with, on CPU.

    XLA reads it at nearly the speed of the memory, and an ordinary kernel at three quarters of that. For two rows and
    more it is the other way round. Without parts, XLA would fuse the product with what is around it, into a loop on one
    core.
    """

    parts: Float[Array, "*L G o I"]

    @staticmethod
    def of(matrix: Float[Array, "I O"]) -> "Transposed":
        """The kernel that is this matrix otherwise."""
        width, outputs = matrix.shape
        return Transposed(matrix.T.reshape(math.gcd(outputs, 8), -1, width))

    def __call__(self, x: Float[Array, "N I"]) -> Float[Array, "N O"]:
        """x times the kernel."""
        parts = self.parts.astype(x.dtype)
        if len(x) > 1:
            return x @ parts.reshape(-1, x.shape[1]).T
        y = jnp.einsum("gni,goi->gno", jnp.broadcast_to(x, (len(parts), *x.shape)), parts)
        return y.swapaxes(0, 1).reshape(len(x), -1)


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
        flat, kernel = x.reshape(-1, width).astype(dtype), self.kernel.get_value()
        y = kernel(flat) if isinstance(kernel, Transposed) else flat @ kernel.reshape(width, -1).astype(dtype)
        if self.bias is not None:
            # The sum over tokens that is the bias's gradient has the type of this addition: bfloat16 would lose it.
            high = accumulator(dtype)
            y = (y.astype(high) + self.bias[...].reshape(1, -1).astype(high)).astype(dtype)
        return checkpoint_name(y, PROJECTION).reshape(leading + self.outputs)
