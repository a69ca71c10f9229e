"""The layers of "Attention is all you need" and its descendants, the same as in torch_ref/layers.py.

Norms and activations compute in at least float32, whatever the type of x.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Key

from jax_tformer.config import Activation, LoraConfig, LoraTarget, StackConfig, TransformerConfig

PROJECTION = "projection"
"""The name of the result of a Linear, bias included, by which `rematerialized` makes the backward pass keep it."""

FEW_ROWS = 64
"""Up to so many rows, `multiply_by_rows` is faster than an ordinary product."""


def dtype_of(name: str) -> jnp.dtype:
    """Returns the dtype called `name`; raises ValueError for float64 if JAX would silently use float32."""
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError('float64 needs jax.config.update("jax_enable_x64", True) before anything is traced')
    return jnp.dtype(name)


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Returns the type in which norms, softmax and losses of `dtype` are computed, at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


@dataclass(frozen=True)
class Start:
    """The distribution of a fresh parameter: `constant` everywhere, N(0, size^2), or U(-size, size)."""

    kind: Literal["constant", "normal", "uniform"]
    size: float


ZEROS, ONES = Start("constant", 0.0), Start("constant", 1.0)


def parameter(shape: tuple[int, ...], config: TransformerConfig, start: Start) -> nnx.Param[Array]:
    """Declares a parameter that starts as `start`; it is zero until `init` (functional.py) fills it."""
    return nnx.Param(jnp.zeros(shape, dtype_of(config.compute.parameter_dtype)), start=start)


def projection_start(config: TransformerConfig, fan_in: int, fan_out: int, scale: float = 1.0) -> Start:
    """Returns the start of a projection: normal with the config's deviation, or uniform by Glorot & Bengio (2010)."""
    if config.initializer == "normal":
        return Start("normal", scale * config.initializer_std)
    return Start("uniform", scale * (6 / (fan_in + fan_out)) ** 0.5)


def site_key(key: Key[Array, ""] | None, name: str | int) -> Key[Array, ""] | None:
    """Returns the dropout key of the part called `name`, given the key of its module; None without dropout.

    The key of `decoder.blocks.3.feedforward.dropout` is that of the forward pass, folded with each of these words and
    numbers in turn. With this key, `keep_mask` draws the same mask again, from outside.
    """
    if key is None:
        return None
    return jax.random.fold_in(key, name if isinstance(name, int) else zlib.crc32(name.encode()))


def keep_mask(key: Key[Array, ""] | None, rate: float, shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
    """Draws True (kept) with probability 1 - rate for each element; returns None without a key or if rate is 0."""
    if key is None or rate == 0:
        return None
    # Drawn flat, then reshaped: XLA on CPU takes six times as long to compile a generator of four axes.
    return jax.random.bernoulli(key, 1 - rate, (math.prod(shape),)).reshape(shape)


def dropout(x: Array, rate: float, keep: Bool[Array, "..."] | None) -> Array:
    """Zeroes elements that `keep` drops and divides the rest by 1 - rate; with None, returns x unchanged."""
    return x if keep is None else jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


class Dropout(nnx.Module):
    """Dropout (paper, section 5.4) with a mask drawn from the given key; without a key it drops nothing."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, x: Float[Array, "..."], key: Key[Array, ""] | None) -> Float[Array, "..."]:
        """Drops elements of x; `key` is that of this site (`site_key`)."""
        return dropout(x, self.rate, self.keep(key, x.shape))

    def keep(self, key: Key[Array, ""] | None, shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
        """Returns the dropout mask for an array of this shape."""
        return keep_mask(key, self.rate, shape)


def multiply_by_rows(
    x: Float[Array, "N I"], matrix: Float[Array, "O I"], dtype: DTypeLike | None = None
) -> Float[Array, "N O"]:
    """Computes x W^T for a matrix W that has a row for each output; `dtype` is that of the result, by default x's.

    XLA on CPU multiplies few rows of x fastest by two or more parts of W, each output's N numbers side by side: it then
    reads W as it lies in memory, and copies no part of it.
    """
    parts = next((count for count in range(2, 65) if len(matrix) % count == 0), 1)
    if len(x) > FEW_ROWS or parts == 1 or jax.default_backend() != "cpu":
        return jnp.matmul(x, matrix.T, preferred_element_type=dtype)
    apart, repeated = matrix.reshape(parts, -1, x.shape[1]), jnp.broadcast_to(x, (parts, *x.shape))
    return jnp.einsum("goi,gni->gon", apart, repeated, preferred_element_type=dtype).reshape(-1, len(x)).T


class Linear(nnx.Module):
    """y = x W + b, from the axes `inputs` to the axes `outputs` (heads x head width, say).

    The product runs on flattened tokens, `[B*T, in] @ [in, out]`: XLA then transposes the small weight gradient
    and not the large activations. `residual_branches` is the number of branches in the stack if this projection ends
    one of them (see `residual_init_scale`), otherwise 1. `target` is its name among the targets of LoRA; None: it never
    has adapters.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
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
        self.dtype, self.inputs, self.outputs, self.target = config.compute.dtype, inputs, outputs, target
        lora = config.lora
        self.lora = Adapter(inputs, outputs, config, lora) if lora is not None and lora.adapts(target) else None

    def __call__(self, x: Float[Array, "..."], dropout_key: Key[Array, ""] | None = None) -> Float[Array, "..."]:
        """Projects `[..., *inputs]` to `[..., *outputs]`; `dropout_key` is that of the module around this one."""
        dtype, width = dtype_of(self.dtype), math.prod(self.inputs)
        leading = x.shape[: x.ndim - len(self.inputs)]
        x = x.reshape(-1, width).astype(dtype)
        y = x @ self.kernel[...].reshape(width, -1).astype(dtype)
        # The bias's gradient is a sum over tokens in the type of this addition; bfloat16 would round it away.
        high = accumulator(dtype)
        if self.bias is not None:
            y = y.astype(high) + self.bias[...].reshape(1, -1).astype(high)
        if self.lora is not None and self.target is not None:
            y = y.astype(high) + self.lora(x, site_key(site_key(dropout_key, self.target), "lora"))
        named: Array = checkpoint_name(y.astype(dtype), PROJECTION)
        return named.reshape(leading + self.outputs)


class Adapter(nnx.Module):
    """scale * (x A) B, of rank R: what LoRA (Hu et al., 2021, section 4.1) adds to a frozen projection x W.

    B starts at zero, so that training starts from the projection alone, and A as in PEFT: U(-a, a), a = inputs^-0.5.
    A B is never added to W here: the gradient of W, as large as W, would then be computed on the way to theirs.
    """

    def __init__(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...], config: TransformerConfig, lora: LoraConfig
    ) -> None:
        start = Start("uniform", math.prod(inputs) ** -0.5)
        self.a = parameter((*inputs, lora.rank), config, start)
        self.b = parameter((lora.rank, *outputs), config, ZEROS)
        self.scale, self.rank = lora.scale, lora.rank
        self.dropout = Dropout(lora.dropout)

    def __call__(self, x: Float[Array, "N I"], dropout_key: Key[Array, ""] | None) -> Float[Array, "N O"]:
        """Computes the change of the projection of flattened tokens, in at least float32."""
        x = self.dropout(x, site_key(dropout_key, "dropout"))
        narrow = checkpoint_name(x @ self.a[...].reshape(-1, self.rank).astype(x.dtype), PROJECTION)
        wide = narrow @ self.b[...].reshape(self.rank, -1).astype(x.dtype)
        scaled: Array = wide.astype(accumulator(x.dtype)) * self.scale
        return scaled


class Norm(nnx.Module):
    """LayerNorm (Ba et al., 2016), scale * (x - mean) / sqrt(var + eps) + bias, or RMSNorm (Zhang & Sennrich, 2019).

    RMSNorm has neither mean nor bias. With `norm_unit_offset`, 1 + scale takes the place of scale. The variance is the
    mean of squared deviations, in two passes, because mean(x^2) - mean(x)^2 loses all digits if the mean is large.
    `width` is that of the last axis; None: D.
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, width: int | None = None) -> None:
        shape = (width or config.d_model,)
        self.scale = parameter(shape, config, ZEROS if stack.norm_unit_offset else ONES)
        self.bias = parameter(shape, config, ZEROS) if stack.norm_bias else None
        self.kind, self.eps, self.offset = stack.norm, stack.norm_eps, stack.norm_unit_offset

    def __call__(self, x: Float[Array, "B T *D"]) -> Float[Array, "B T *D"]:
        """Normalises over the last axis."""
        high = x.astype(accumulator(x.dtype))
        if self.kind == "layernorm":
            high = high - high.mean(-1, keepdims=True)
        high = high * jax.lax.rsqrt(jnp.square(high).mean(-1, keepdims=True) + self.eps)
        last = (1,) * (x.ndim - 1) + (-1,)
        scale = self.scale[...].reshape(last).astype(high.dtype)
        high = high * (1 + scale if self.offset else scale)
        if self.bias is not None:
            high = high + self.bias[...].reshape(last).astype(high.dtype)
        return high.astype(x.dtype)


class FeedForward(nnx.Module):
    """down(activation(up(x))) (paper, section 3.3), or down(activation(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, residual_branches: int) -> None:
        model, inner, bias = (config.d_model,), (stack.feedforward_width,), stack.feedforward_bias
        self.gate = Linear(model, inner, config, bias=bias, target="gate") if stack.gated else None
        self.up = Linear(model, inner, config, bias=bias, target="up")
        self.down = Linear(inner, model, config, bias=bias, residual_branches=residual_branches, target="down")
        self.activation = stack.activation
        self.dropout = Dropout(config.dropout.feedforward)

    def __call__(self, x: Float[Array, "B T D"], dropout_key: Key[Array, ""] | None = None) -> Float[Array, "B T D"]:
        """Applies the same two (or three) projections at every position."""
        if self.gate is None:
            hidden = activate(self.up(x, dropout_key), self.activation)
        else:
            hidden = activate(self.gate(x, dropout_key), self.activation) * self.up(x, dropout_key)
        return self.down(self.dropout(hidden, site_key(dropout_key, "dropout")), dropout_key)


def activate(x: Array, activation: Activation) -> Array:
    """Applies ReLU, GELU (Hendrycks & Gimpel, 2016; exact or with tanh) or SiLU, in at least float32."""
    functions: dict[str, Callable[[Array], Array]] = {
        "relu": jax.nn.relu,
        "gelu_erf": gelu,
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "silu": jax.nn.silu,
    }
    function, high = functions[activation], accumulator(x.dtype)
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


def soft_cap(x: Array, cap: float) -> Array:
    """Bounds x smoothly by -cap and cap: cap * tanh(x / cap) (Gemma 2, 2024, section 2)."""
    return cap * jnp.tanh(x / cap)
