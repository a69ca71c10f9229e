"""The position-wise feed-forward layer (paper, section 3.3) and its gated form (Shazeer, 2020)."""

import math
from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float

from jax_tformer.config import Activation, StackConfig, TransformerConfig
from jax_tformer.nn.arrays import accumulator
from jax_tformer.nn.dropout import dropout
from jax_tformer.nn.linear import Linear


def activate(x: Array, activation: Activation) -> Array:
    """ReLU, GELU (Hendrycks & Gimpel, 2016; exact or in the tanh approximation) or SiLU, in at least float32."""
    functions: dict[str, Callable[[Array], Array]] = {
        "relu": jax.nn.relu,
        "gelu_erf": gelu,
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "silu": jax.nn.silu,
    }
    function, high = functions[activation], accumulator(x.dtype)
    if x.dtype == high or activation == "relu":
        return function(x)
    # The backward pass keeps x alone, in its own type, and nothing of what lies between in float32.
    return jax.checkpoint(lambda x: function(x.astype(high)).astype(x.dtype), prevent_cse=False)(x)


def gelu(x: Array) -> Array:
    """x Phi(x), with the error function; `jax.nn.gelu` has its complement, which takes 2.6 times as long on CPU."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


class FeedForward(nnx.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) where the stack is gated."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, residual_branches: int):
        model, inner, bias = (config.d_model,), (stack.feedforward_width,), stack.feedforward_bias
        self.gate = Linear(model, inner, config, bias=bias) if stack.gated else None
        self.up = Linear(model, inner, config, bias=bias)
        self.down = Linear(inner, model, config, bias=bias, residual_branches=residual_branches)
        self.activation = stack.activation
        self.dropout_rate = config.dropout.feedforward

    def __call__(self, x: Float[Array, "B T D"], *, keep: Bool[Array, "B T F"] | None = None) -> Float[Array, "B T D"]:
        """The same two (or three) projections at every position; `keep` is the dropout mask of what lies between."""
        if self.gate is None:
            hidden = activate(self.up(x), self.activation)
        else:
            hidden = activate(self.gate(x), self.activation) * self.up(x)
        return self.down(dropout(hidden, self.dropout_rate, keep))
