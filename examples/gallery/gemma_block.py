"""Two norms in the wrong order: the story is in docs/gallery.md.

https://github.com/google/flax/issues/4567
https://github.com/google/flax/pull/4830
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

WIDTH = 12


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * (1 + scale)


def attention(params, x):
    q, k, v = (x @ params[name] for name in ("q", "k", "v"))
    return jax.nn.softmax(q @ k.swapaxes(1, 2) / WIDTH**0.5) @ v


def ours(params, x):
    read = attention(params["attention"], rms_norm(x, params["pre_attention_norm"]))
    # The bug. Mended: x = x + rms_norm(read, params["post_attn_norm"])
    x = x + read
    # The bug. Mended: hidden = rms_norm(x, params["pre_ffw_norm"])
    hidden = rms_norm(rms_norm(x, params["pre_ffw_norm"]), params["post_attn_norm"])
    hidden = jax.nn.gelu(hidden @ params["up"]) @ params["down"]
    return x + rms_norm(hidden, params["post_ffw_norm"])


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) / 10)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qkv")
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = Norm(), Norm()

    def forward(self, x):
        hidden = self.input_layernorm(x)
        q, k, v = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        read = (q @ k.transpose(1, 2) / WIDTH**0.5).softmax(-1) @ v
        x = x + self.post_attention_layernorm(read)
        hidden = self.pre_feedforward_layernorm(x)
        hidden = self.down_proj(nn.functional.gelu(self.up_proj(hidden), approximate="tanh"))
        return x + self.post_feedforward_layernorm(hidden)


WEIGHTS = {f"attention.{name}": (f"{name}_proj.weight", "o i -> i o") for name in "qkv"}
WEIGHTS |= {name: (f"{name}_proj.weight", "o i -> i o") for name in ("up", "down")} | {
    "pre_attention_norm": "input_layernorm.weight",
    "post_attn_norm": "post_attention_layernorm.weight",
    "pre_ffw_norm": "pre_feedforward_layernorm.weight",
    "post_ffw_norm": "post_feedforward_layernorm.weight",
}
INPUTS = [np.random.default_rng(0).standard_normal((2, 5, WIDTH))]
