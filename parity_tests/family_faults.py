"""Faults of what single families of Hugging Face models have: kinds of layers by turns, caps, norms, rotation."""

from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

from torch import nn

from jax_tformer.config import RotaryConfig, StackConfig, TransformerConfig
from parity_tests.faults import Fault, call_fault, reads
from parity_tests.pairs import random_pair
from torch_ref import attention, blocks, embedding
from twin.cases import SWITCHES, VOCABULARY

GEMMA = TransformerConfig(
    vocab_size=VOCABULARY,
    d_model=24,
    decoder=StackConfig(
        num_layers=3,
        num_heads=2,
        key_value_heads=1,
        head_width=8,
        feedforward_width=32,
        window=3,
        window_layers=(True, False),
        attention_scale=12,
        score_cap=2.0,
        query_key_norm=True,
        activation="gelu_tanh",
        gated=True,
        norm="rmsnorm",
        norm_bias=False,
        norm_placement="sandwich",
        norm_unit_offset=True,
        final_norm=True,
        embedding_scale=True,
        positions="rotary",
        rotary=RotaryConfig(
            scaling="llama3",
            factor=4.0,
            low_frequency_factor=0.05,
            high_frequency_factor=2.0,
            original_positions=12,
            window_base=100.0,
        ),
    ),
    tied_head=True,
    logit_cap=3.0,
)
"""All that Gemma 2 and 3 and Llama 3 have at once. An odd number of layers cuts the pattern off."""
NEOX = TransformerConfig(
    vocab_size=VOCABULARY,
    d_model=24,
    decoder=StackConfig(
        num_layers=2,
        num_heads=3,
        feedforward_width=32,
        activation="gelu_erf",
        norm_placement="pre",
        parallel=True,
        final_norm=True,
        positions="rotary",
        rotary=RotaryConfig(width=4),
    ),
)
"""GPT-NeoX's parallel branches, and a part of each head that turns."""
_CROSSED = StackConfig(
    num_layers=1,
    num_heads=6,
    key_value_heads=3,
    feedforward_width=32,
    score_cap=2.0,
    norm_placement="sandwich",
    positions="relative",
    relative_buckets=6,
    relative_max_distance=8,
)
CROSSED = TransformerConfig(vocab_size=VOCABULARY, d_model=24, encoder=_CROSSED, decoder=_CROSSED)
"""No family has these together: capped scores with a bias, and caps and sandwiches around attention to a source."""


BOUNDED = SWITCHES["switches-bounded"]
"""What modded-nanogpt has."""


pair = cache(random_pair)
"""Both sides of one of these configs, once for all its faults."""


def otherwise(config, name, stack=None, **model):
    """The reference of `config` reads one in which these fields of its decoder, or of the model, differ from ours."""

    def plant(*_):
        right = pair(config)
        decoder = replace(right.config.decoder, **(stack or {}))
        return reads(right, replace(right.config, decoder=decoder, **model))

    return Fault(name, plant)


def _rotary(**changes):
    return {"rotary": replace(GEMMA.decoder.rotary, **changes)}


def heads_as_they_are(right, self, x):
    """Queries and keys, `[B, H, T, C]`, are not normalised; the residual stream is."""
    return x if x.ndim == 4 else right(self, x)


def cap_twice(right, x, cap):
    return right(right(x, cap), cap)


def last_columns_turned(right, x, angle):
    return right(x.flip(-1), angle).flip(-1)


def scaled_everywhere(right, config, stack, at, window):
    """The angles of layers with the window are stretched like those of the others."""
    if window is None:
        return right(config, stack, at, window)
    base = stack.rotary.window_base or stack.position_base
    return embedding.angles(at, stack.rotary.width or config.head_width(stack), base, stack.rotary)


def without(norm):
    """Layers without this norm."""

    def forward(right, self, *args):
        with patch.object(self, norm, nn.Identity()):
            return right(self, *args)

    return forward


def summed_in_parallel(right, self, x, norm):
    """Both branches read the norm of the first."""
    return right(self, x, self.self_attention_norm)


def cross_uncapped(right, self, x, memory, mask, *own):
    """Only cross-attention has no positions."""
    with patch.object(self, "stack", self.stack if own else replace(self.stack, score_cap=None)):
        return right(self, x, memory, mask, *own)


_FEEDFORWARD, _CROSS = "feedforward_output_norm", "cross_attention_output_norm"
in_gemma, in_neox, in_bounded = (partial(otherwise, config) for config in (GEMMA, NEOX, BOUNDED))
FAULTS = {
    GEMMA: (
        in_gemma("windows: the pattern begins a layer late", {"window_layers": (False, True)}),
        in_gemma("windows: in all layers", {"window_layers": None}),
        in_gemma("rotary: one base for all layers", _rotary(window_base=None)),
        in_gemma("rotary: base of the layers with a window in the others", {"position_base": 100.0}),
        in_gemma("rotary: long waves not stretched", _rotary(factor=1.0)),
        in_gemma("rotary: frequencies between not mixed", _rotary(low_frequency_factor=1.99)),
        in_gemma("scores: scaled by the head's width", {"attention_scale": "head_width"}),
        in_gemma("scores: not capped", {"score_cap": None}),
        in_gemma("logits: not capped", logit_cap=None),
        in_gemma("norm: offset of the scale forgotten", {"norm_unit_offset": False}),
        call_fault("rotary: scaled in layers with the window too", attention, "rotary_angles", scaled_everywhere),
        call_fault("sandwich: feed-forward's output not normalised", blocks.Block, "forward", without(_FEEDFORWARD)),
        call_fault("queries and keys not normalised", attention.Norm, "forward", heads_as_they_are),
        call_fault("scores: capped twice", attention, "soft_cap", cap_twice),
    ),
    NEOX: (
        in_neox("parallel: the feed-forward reads the sum", {"parallel": False}),
        call_fault("rotary: the last columns turn", attention, "rotate", last_columns_turned),
        call_fault("parallel: one norm for both branches", blocks.Block, "_before", summed_in_parallel),
    ),
    BOUNDED: (
        in_bounded("scores: scaled by the head's width, not 0.12", {"attention_scale": "head_width"}),
        in_bounded("rotary: all columns turn, not half", {"rotary": RotaryConfig()}),
        in_bounded("ReLU not squared", {"activation": "relu"}),
        in_bounded("logits: bounded by tanh, not by a root", logit_cap_form="tanh"),
        call_fault("queries and keys without a scale not normalised", attention.Norm, "forward", heads_as_they_are),
    ),
    CROSSED: (
        call_fault("sandwich: cross-attention's output not normalised", blocks.Block, "forward", without(_CROSS)),
        call_fault("scores: cross-attention not capped", attention.Attention, "forward", cross_uncapped),
    ),
}
"""Gates 1 and 2."""
