"""Random architectures: any legal config of small size, any batch, for gates 1 and 2."""

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

import jax_tformer.config as described
from jax_tformer.config import ComputeConfig, DropoutConfig, LoraConfig, RotaryConfig, StackConfig, TransformerConfig
from twin.cases import Lengths, kinds


@dataclass(frozen=True)
class Case:
    """An architecture, its weights and its batch; `repr` is Python, to be pasted into a test."""

    config: TransformerConfig
    std: float
    """Of the weights."""
    seed: int
    """Of weights and batch."""
    kind: str
    """Of the batch (see `batch_for`)."""
    lengths: Lengths
    dropout_seed: int | None


def one_of(literal):
    """Any value of a Literal type."""
    return st.sampled_from(get_args(literal))


def few(*numbers):
    """One of these."""
    return st.sampled_from(numbers)


def free(draw, kind):
    """The fields of a config that are true or false, or one of some words: any value."""
    of = {bool: lambda _: st.booleans(), Literal: one_of}
    hints = {name: (get_origin(hint) or hint, hint) for name, hint in get_type_hints(kind).items()}
    return {name: draw(of[origin](hint)) for name, (origin, hint) in hints.items() if origin in of}


@st.composite
def stacks(draw, longest, *, may_be_parallel=True):
    """A StackConfig for sequences of up to `longest`; every field is drawn."""
    drawn, heads = free(draw, StackConfig), draw(few(1, 2, 4))
    norm, positions, placement = drawn["norm"], drawn["positions"], drawn["norm_placement"]
    # Those of an encoder are for two sides.
    shared, buckets = draw(few(None, 1, 2)), draw(few(4, 6, 10, 32))
    width = draw(few(None, 2, 4, 6) if positions == "rotary" else few(None, 1, 3, 4))
    layers, window = draw(st.integers(1, 3)), draw(few(None, None, 1, 2, 4))
    # The norm behind a branch of one number leaves its sign: its gradient is what eps makes of rounding.
    least = 5 if placement == "sandwich" else 1
    width = 3 if width == 1 and placement == "sandwich" else width
    # RMSNorm of one number leaves its sign, as LayerNorm of two: its gradient is what eps makes of rounding.
    normed = (width or 8 // heads) > (1 if norm == "rmsnorm" else 2) and drawn["query_key_norm"]
    patterns = [(True, False), (False, True), (False, True, True)] if window is not None else []
    drawn |= {
        "num_layers": layers,
        "num_heads": heads,
        "feedforward_width": max(draw(few(1, 5, 16)), least),
        "key_value_heads": shared if shared is None or heads % shared == 0 else None,
        "head_width": width,
        "window": window,
        "window_layers": draw(few(None, *(each for each in patterns if len(each) <= layers))),
        "attention_scale": draw(one_of(described.AttentionScale) | few(3, 0.7)),
        "score_cap": draw(few(None, None, 2.0)),
        "query_key_norm": normed,
        "query_key_scale": not normed or drawn["query_key_scale"],
        "parallel": may_be_parallel and placement == "pre" and drawn["parallel"],
        "norm_eps": draw(few(1e-12, 1e-6, 1e-5, 1e-2)),
        "norm_bias": norm != "rmsnorm" and drawn["norm_bias"],
        "max_positions": draw(st.integers(longest, longest + 3)) if positions == "learned" or draw(few(0, 1)) else None,
        "position_offset": draw(few(0, 2)) if positions == "learned" else 0,
        "position_base": draw(few(10000.0, 10.0, 500000.0)),
        "relative_buckets": buckets,
        # Beyond the distances with a bucket each, even if all buckets are for one side.
        "relative_max_distance": buckets // 2 + draw(few(1, 4, 96)),
        "rotary": draw(rotations(window)) if positions == "rotary" else RotaryConfig(),
        "token_types": draw(few(0, 1, 3)),
    }
    return StackConfig(**drawn)


@st.composite
def loras(draw, config):
    """Adapters that fit all matrices of `config`, or none."""
    if draw(few(True, True, False)):
        return None
    found = [config.projections(stack) for stack in config.stacks.values()]
    names = sorted({name for projections in found for name in projections})
    chosen = draw(st.just(["all"]) | st.lists(st.sampled_from(names), min_size=1, unique=True))
    smallest = min(min(sizes) for projections in found for sizes in projections.values())
    return LoraConfig(
        rank=draw(st.integers(1, min(3, smallest))),
        alpha=draw(few(1.0, 3.0)),
        targets=tuple(chosen),
        dropout=draw(few(0.0, 0.3)),
        rank_stabilized=draw(st.booleans()),
    )


@st.composite
def rotations(draw, window):
    """What rotary positions turn and how they are scaled; short waves and long ones, and some in between."""
    scaling = draw(one_of(described.RotaryScaling))
    long = {"low_frequency_factor": 0.5, "high_frequency_factor": 2.0, "original_positions": 9}
    return RotaryConfig(
        width=draw(few(None, 2)),
        scaling=scaling,
        factor=1.0 if scaling == "none" else draw(few(4.0, 0.5)),
        window_base=None if window is None else draw(few(None, 100.0)),
        **(long if scaling == "llama3" else {}),
    )


@st.composite
def configs(draw, longest):
    """A TransformerConfig; every field is drawn."""
    kind, drawn = draw(few("encoder-decoder", "decoder-only", "encoder-only")), free(draw, TransformerConfig)
    encoder = None if kind == "decoder-only" else draw(stacks(longest))
    decoder = None
    if kind != "encoder-only":
        decoder = draw(stacks(longest, may_be_parallel=kind == "decoder-only"))
    alone = kind == "encoder-only"
    head = draw(one_of(described.Head).filter(lambda head: alone or not head.startswith("classify")))
    poolers = {"classify_text": few("tanh", "relu"), "none": one_of(described.Pooler) if alone else few("none")}
    pooler = draw(poolers.get(head, few("none")))
    cap = draw(few(None, None, 2.0)) if head in ("linear", "transform") else None
    predicts, classifies = head in ("linear", "transform"), head.startswith("classify")
    # A rate that nothing reads is refused.
    drops = {"pooler": pooler != "none", "classifier": classifies}
    # A width that suits the heads of both stacks, the halves of a rotation and the pairs of sinusoids.
    drawn |= {
        "vocab_size": draw(few(2, 7, 61)),
        "d_model": draw(few(8, 16)),
        "encoder": encoder,
        "decoder": decoder,
        "shared_embedding": kind == "encoder-decoder" and drawn["shared_embedding"],
        "head": head,
        "pooler": pooler,
        "classes": draw(few(2, 5)) if classifies else None,
        "tied_head": predicts and drawn["tied_head"],
        "head_bias": predicts and drawn["head_bias"],
        "head_scale": predicts and drawn["head_scale"],
        "logit_cap": cap,
        "logit_cap_form": drawn["logit_cap_form"] if cap else "tanh",
        "initializer_std": draw(few(0.02, 1.0)),
        "dropout": DropoutConfig(
            **{rate.name: draw(few(0.0, 0.3)) if drops.get(rate.name, True) else 0.0 for rate in fields(DropoutConfig)}
        ),
        # Other kinds of attention are kernels of accelerators, or know float32 alone.
        "compute": ComputeConfig(
            attention=draw(few("auto", "einsum", "blocks")), remat=draw(one_of(described.Remat)), unroll=draw(few(1, 2))
        ),
    }
    config = TransformerConfig(**drawn)
    return replace(config, lora=draw(loras(config)))


@st.composite
def cases(draw):
    """An architecture with weights and a batch for it."""
    lengths = Lengths(draw(st.integers(2, 4)), draw(st.integers(2, 9)), draw(st.integers(2, 9)))
    config = draw(configs(max(lengths.source, lengths.target)))
    return Case(
        config=config,
        std=draw(few(0.02, 0.2)),
        seed=draw(st.integers(0, 999)),
        kind=draw(st.sampled_from(kinds(config))),
        lengths=lengths,
        dropout_seed=draw(st.none() | st.integers(0, 99)),
    )
