"""The layers of "Attention is all you need" and its descendants, the same as in torch_ref/layers.py.

Norms and activations compute in at least float32, whatever the type of x.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jax_tformer.config import Activation, CapForm, LoraTarget, NormKind, Pooler, StackConfig, TransformerConfig
from jax_tformer.lora import Adapter
from jax_tformer.model.parameters import (
    ONES,
    ZEROS,
    Dropout,
    DropoutKey,
    Shape,
    Stream,
    accumulator,
    context_parts,
    dtype_of,
    parameter,
    projection_start,
)
from jax_tformer.scan import PROJECTION


class Linear(nnx.Module):
    """y = x W + b, from the axes `inputs` to the axes `outputs` (heads x head width, say).

    The product runs on flattened tokens, `[B*T, in] @ [in, out]`: XLA then transposes the small weight gradient
    and not the large activations. `residual_branches` is the number of branches in the stack if this projection ends
    one of them (see `residual_init_scale`), otherwise 1. `target` is its name among the targets of LoRA; None: it never
    has adapters.
    """

    def __init__(
        self,
        inputs: Shape,
        outputs: Shape,
        config: TransformerConfig,
        *,
        bias: bool,
        residual_branches: int = 1,
        target: LoraTarget | None = None,
    ) -> None:
        scale = residual_branches**-0.5 if config.residual_init_scale else 1.0
        start = projection_start(config, math.prod(inputs), math.prod(outputs), scale)
        self.kernel = parameter(inputs + outputs, config, start)
        self.bias = parameter(outputs, config, ZEROS) if bias else None
        lora = config.lora
        self.lora = Adapter(inputs, outputs, config, lora) if lora is not None and lora.adapts(target) else None
        self.dtype = config.compute.dtype
        self.inputs = inputs
        self.outputs = outputs

    def __call__(self, x: Float[Array, "..."], dropout_key: DropoutKey = None) -> Float[Array, "..."]:
        """Projects `[..., *inputs]` to `[..., *outputs]`."""
        dtype = dtype_of(self.dtype)
        width = math.prod(self.inputs)
        leading = x.shape[: x.ndim - len(self.inputs)]
        # The compiler cannot flatten rows that are split over devices along both axes.
        x = x.reshape(*(leading if context_parts() > 1 else (-1,)), width).astype(dtype)
        y = x @ self.kernel[...].reshape(width, -1).astype(dtype)
        # The bias's gradient is a sum over tokens in the type of this addition; bfloat16 would round it away.
        high = accumulator(dtype)
        if self.bias is not None:
            y = y.astype(high) + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,)).astype(high)
        if self.lora is not None:
            y = y.astype(high) + self.lora(x, dropout_key)
        return checkpoint_name(y.astype(dtype), PROJECTION).reshape(leading + self.outputs)


SUBTRACTS_MEAN: dict[NormKind, bool] = {"layernorm": True, "rmsnorm": False}
"""Kind of normalisation -> whether it subtracts the mean."""


class Norm(nnx.Module):
    """LayerNorm (Ba et al., 2016), scale * (x - mean) / sqrt(var + eps) + bias, or RMSNorm (Zhang & Sennrich, 2019).

    RMSNorm has neither mean nor bias. With `norm_unit_offset`, 1 + scale takes the place of scale. The variance is the
    mean of squared deviations, in two passes, because mean(x^2) - mean(x)^2 loses all digits if the mean is large.
    `width` is that of the last axis; None: D. Without `scales` it has neither scale nor bias.
    """

    def __init__(
        self, config: TransformerConfig, stack: StackConfig, width: int | None = None, *, scales: bool = True
    ) -> None:
        shape = (width or config.d_model,)
        self.scale = parameter(shape, config, ZEROS if stack.norm_unit_offset else ONES) if scales else None
        self.bias = parameter(shape, config, ZEROS) if scales and stack.norm_bias else None
        self.kind = stack.norm
        self.eps = stack.norm_eps
        self.offset = stack.norm_unit_offset

    def __call__(self, x: Float[Array, "B T *D"]) -> Float[Array, "B T *D"]:
        """Normalises over the last axis."""
        high = x.astype(accumulator(x.dtype))
        if SUBTRACTS_MEAN[self.kind]:
            high = high - high.mean(-1, keepdims=True)
        high = high * jax.lax.rsqrt(jnp.square(high).mean(-1, keepdims=True) + self.eps)
        last = (1,) * (x.ndim - 1) + (-1,)
        if self.scale is not None:
            scale = self.scale[...].reshape(last).astype(high.dtype)
            high = high * (1 + scale if self.offset else scale)
        if self.bias is not None:
            high = high + self.bias[...].reshape(last).astype(high.dtype)
        return high.astype(x.dtype)


class FeedForward(nnx.Module):
    """down(activation(up(x))) (paper, section 3.3), or down(activation(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, residual_branches: int) -> None:
        model = (config.d_model,)
        inner = (stack.feedforward_width,)
        bias = stack.feedforward_bias
        self.gate = Linear(model, inner, config, bias=bias, target="gate") if stack.gated else None
        self.up = Linear(model, inner, config, bias=bias, target="up")
        self.down = Linear(inner, model, config, bias=bias, residual_branches=residual_branches, target="down")
        self.activation = stack.activation
        self.dropout = Dropout(config.dropout.feedforward)

    def __call__(self, x: Stream, dropout_key: DropoutKey = None) -> Stream:
        """Applies the same two (or three) projections at every position."""
        if self.gate is None:
            hidden = activate(self.up(x, dropout_key), self.activation)
        else:
            hidden = activate(self.gate(x, dropout_key), self.activation) * self.up(x, dropout_key)
        return self.down(self.dropout(hidden, dropout_key), dropout_key)


def activate(x: Array, activation: Activation | Pooler) -> Array:
    """Applies ReLU, its square (So et al., 2021), GELU (Hendrycks & Gimpel, 2016; exact or with tanh), SiLU or tanh.

    They compute in at least float32.
    """
    functions: dict[str, Callable[[Array], Array]] = {
        "relu": jax.nn.relu,
        "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
        "gelu_erf": gelu,
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "silu": jax.nn.silu,
        "tanh": jnp.tanh,
    }
    function = functions[activation]
    high = accumulator(x.dtype)
    if x.dtype == high or activation == "relu":
        return function(x)
    # The backward pass keeps only x, in its own type, and no intermediate values in float32.
    again: Callable[[Array], Array] = jax.checkpoint(
        lambda x: function(x.astype(high)).astype(x.dtype), prevent_cse=False
    )
    return again(x)


def gelu(x: Array) -> Array:
    """Computes x Phi(x) by the error function; `jax.nn.gelu` uses its complement, 2.6 times as slow on CPU."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def soft_cap(x: Array, cap: float, form: CapForm = "tanh") -> Array:
    """Bounds x smoothly by -cap and cap: cap * tanh(x / cap) (Gemma 2, 2024, section 2), or the same with a root."""
    return cap * jnp.tanh(x / cap) if form == "tanh" else cap * x * jax.lax.rsqrt(jnp.square(x) + cap**2)


def identity(x: Array) -> Array:
    """Returns x: takes the place of a norm that a stack does not have."""
    return x
