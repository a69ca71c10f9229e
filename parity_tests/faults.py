"""The faults that the gates must catch: each one small, planted in one framework, one at a time.

A fault is a context manager around the run of one side. These are planted in the reference, mostly by replacing one of
its functions; library_faults.py has those of arithmetic.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

from torch_ref import attention, blocks, heads, reference, training, transformer
from torch_ref.layers import Dropout


class Fault(NamedTuple):
    """What goes wrong, and how to make it go wrong."""

    name: str
    plant: Callable[..., AbstractContextManager[Any]]
    """Whatever runs inside has the fault. It is given the pair, which some faults need."""


def config_fault(name, **changes):
    """The reference reads a config in which these fields of both stacks differ from ours."""

    def plant(pair):
        stacks = {side: replace(stack, **changes) for side, stack in pair.config.stacks.items()}
        return reads(pair, replace(pair.config, **stacks))

    return Fault(name, plant)


def weight_fault(name, weight, change):
    """The reference has another matrix by this name: no check of shapes sees that."""
    return Fault(name, lambda pair: reads(pair, pair.config, weight, change))


def code_fault(name, owner, attribute, wrong):
    """`owner.attribute` is `wrong(right)` instead."""
    return Fault(name, lambda *_: patch.object(owner, attribute, wrong(getattr(owner, attribute))))


def call_fault(name, owner, attribute, wrong):
    """`owner.attribute(...)` is `wrong(right, ...)` instead, `right` being the function that stands there."""
    return code_fault(name, owner, attribute, lambda right: lambda *args, **given: wrong(right, *args, **given))


def reads(pair, config, weight=None, change=None):
    """While this is on, the pair's reference reads this config; its weights are what they were, but for one."""
    weights = pair.module.state_dict()
    if change:
        weights[weight] = change(weights[weight])
    module = reference(config).eval()
    module.load_state_dict(weights)
    return patch.object(pair, "module", module)


# Of the model, in the reference.


def unbiased_variance(right, x, shape, weight, bias, eps):
    normalised = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=True, keepdim=True) + eps).sqrt()
    return normalised * weight + (0 if bias is None else bias)


def leaking_causal_mask(right, ids, *, causal, **given):
    seen = right(ids, causal=False, **given)
    leaking = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril(diagonal=1)[None, None]
    return seen if not causal else leaking if seen is None else leaking & seen


def interleaved_rotation(right, x, angle):
    angle = angle[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()
    return torch.stack(turned, dim=-1).flatten(-2)


def swapped_cross_attention(right, self, x, memory, mask, *own):
    # Only cross-attention has no positions; both sequences must be of one length for this to run at all.
    return right(self, x, memory, mask, *own) if own else right(self, memory, x, mask)


def untied_head(right, self, x, table):
    """The head has the numbers of the table, but not the table: its gradient does not come this way."""
    return right(self, x, nn.Embedding.from_pretrained(table.weight.detach()))


def swapped_residual(right, self, x, h, norm):
    """The residual stream comes from the normalised input."""
    return norm(x + h) if self.placement == "post" else norm(x) + h


def first_two_heads_swapped(weight):
    """Of four."""
    first, second, *others = weight.chunk(4)
    return torch.cat([second, first, *others])


# Of the loss and the optimizer, in the reference.


def smoothing_without_the_label(right, logits, labels, label_smoothing=0.0):
    """eps / (V - 1) on every token but the label."""
    log_p, vocabulary = logits.log_softmax(-1), logits.shape[-1]
    chosen = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    spread = (log_p.sum(-1) - chosen) / (vocabulary - 1)
    loss = -(1 - label_smoothing) * chosen - label_smoothing * spread
    return torch.where(labels != -100, loss, torch.zeros_like(loss)).sum()


def clip_without_epsilon(right, parameters, limit):
    gradients = [p.grad for p in parameters]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((limit / norm).clamp(max=1.0))
    return norm


class EpsilonInsideTheRoot(torch.optim.AdamW):
    """m / sqrt(v + eps^2) where AdamW has m / (sqrt(v) + eps)."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"n": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["n"] += 1
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].lerp_(p.grad.square(), 1 - beta2)
                m, v = state["m"] / (1 - beta1 ** state["n"]), state["v"] / (1 - beta2 ** state["n"])
                p.mul_(1 - rate * group["weight_decay"]).sub_(rate * m / (v + group["eps"] ** 2).sqrt())


def decay_everywhere(right, model, config):
    optimizer = right(model, config)
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay
    return optimizer


MODEL = (
    config_fault("GELU: tanh instead of erf", activation="gelu_tanh"),
    config_fault("LayerNorm: eps 1e-6 instead of 1e-5", norm_eps=1e-6),
    call_fault("LayerNorm: unbiased variance", F, "layer_norm", unbiased_variance),
    config_fault("attention scaled by model width", attention_scale="model_width"),
    call_fault("causal mask leaks one token", blocks, "visible", leaking_causal_mask),
    call_fault(
        "decoder ignores its padding mask",
        blocks,
        "visible",
        lambda right, ids, *, causal, is_token, **given: right(
            ids, causal=causal, is_token=None if causal else is_token, **given
        ),
    ),
    call_fault("positions off by one", transformer, "position_ids", lambda right, *args: right(*args) + 1),
    call_fault("rotary: interleaved instead of halves", attention, "rotate", interleaved_rotation),
    call_fault("cross-attention: query and memory swapped", attention.Attention, "forward", swapped_cross_attention),
    call_fault("tied head untied", heads.Head, "forward", untied_head),
    config_fault("post-norm instead of pre-norm", norm_placement="post"),
    call_fault("residual from the normalised input", blocks.Block, "_add", swapped_residual),
    call_fault(
        "padding_idx: one row gets no gradient",
        F,
        "embedding",
        lambda right, ids, table, padding_idx=None, *rest: right(ids, table, 0, *rest),
    ),
)
"""Gates 1 and 2."""
_CROSS = "decoder.blocks.1.cross_attention"
WEIGHTS = (
    weight_fault("one layer's square matrix transposed", f"{_CROSS}.output.weight", torch.t),
    weight_fault("two heads swapped", f"{_CROSS}.query.weight", first_two_heads_swapped),
)
"""Gates 1 and 2."""
TRAINING = (
    code_fault("AdamW: eps inside the root", torch.optim, "AdamW", lambda right: EpsilonInsideTheRoot),
    code_fault("L2 in the gradient instead of decoupled decay", torch.optim, "AdamW", lambda right: torch.optim.Adam),
    call_fault("decay of biases and norms too", training, "adamw", decay_everywhere),
    call_fault(
        "schedule off by one", training, "learning_rate", lambda right, config, n, steps: right(config, n + 1, steps)
    ),
    call_fault("clip: norm + 0 instead of norm + 1e-6", training, "clip_grad_norm_", clip_without_epsilon),
    call_fault("label smoothing eps / (V - 1)", training, "summed_cross_entropy", smoothing_without_the_label),
    call_fault(
        "loss over all tokens, not those that count",
        training,
        "counted",
        lambda right, labels: torch.tensor(labels.numel()),
    ),
)
"""Gate 5."""
DROPOUT = call_fault(
    "dropout without dividing by 1 - rate",
    Dropout,
    "forward",
    lambda right, self, x: x if self.keep is None else x.masked_fill(~self.keep, 0.0),
)
"""Gate 7."""
