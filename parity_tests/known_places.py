"""Where the faults that the suite plants are: those that one forward and backward pass of a model can see."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from jax_tformer.config import DropoutConfig
from parity import Difference
from parity.differ.first_difference import difference_of
from parity_tests import faults, library_faults, mask_faults, quiet_faults, random_faults
from parity_tests.faults import planted_in
from parity_tests.pairs import random_pair
from parity_tests.small_configs import MASKED, TWO_STACKS, of_one_length
from twin.cases import CONFIGS, Lengths, batch_for


class OwnFault(NamedTuple):
    """A fault of the suite, and the places that may be named for it, with blanks between them."""

    name: str
    pair: str
    """"our " with one of MODELS, or "our training"."""
    planted: str
    ask: Callable[[], Difference]
    """Asks where the two sides part while the fault is planted."""
    ours: str
    """Functions of the library, and the file of the fault where it is planted there."""
    theirs: str
    """Modules, functions, parameters; and the file of the fault."""
    kinds: str = ""
    """What may be said of its kind: pieces with " | " between them; else nothing may be said."""
    stage: str = ""
    """In which it has to show, where that is asked."""


_DROPS = replace(TWO_STACKS, dropout=DropoutConfig(0.1, 0.1, 0.1, 0.1))
_GROUPED = replace(CONFIGS["switches-decoder-only"], tied_head=True)
MODELS = {
    "two stacks": (TWO_STACKS, of_one_length),
    **MASKED,
    "long": (_GROUPED, lambda: batch_for(_GROUPED, "none", lengths=Lengths(batch=2, source=150))),
    "grouped heads": (_GROUPED, lambda: batch_for(_GROUPED, "none")),
    "dropout": (_DROPS, lambda: batch_for(_DROPS, "none")),
}


@cache
def model(name):
    """The pair without a fault, and its batch."""
    config, batch = MODELS[name]
    seed = 0 if name == "dropout" else None
    return random_pair(config, dropout_seed=seed), batch()


def _ask(name, kind, plant):
    """Where one of our models parts from its reference while the fault is planted."""
    pair, batch = model(kind)
    with mask_faults.blocks_of_four() if kind in MASKED else nullcontext(), plant(pair):
        pair.share_masks(batch)
        return difference_of(pair, batch, name=name)


_NORM = "encoder.blocks.0.self_attention_norm"
_ENCODER, _DECODER = "encoder.blocks.0.self_attention", "decoder.blocks.0.self_attention"
_CROSS = "decoder.blocks.0.cross_attention"
_SCORES = "attend_in_rows attend"
_MASK = "Mask.boolean Mask.softmax masked_softmax"
_KEPT = (
    "drop Dropout.__call__ Dropout.keep keep_mask site_key layer_keys",
    "forward Dropout.forward",
    "in its place",
)
_PLACES = {
    "GELU: tanh instead of erf": (
        "gelu activate",
        "encoder.blocks.0.feedforward encoder.blocks.0.feedforward.activation",
        "GELU (erf) in ours, GELU (tanh) in theirs",
    ),
    "LayerNorm: eps 1e-6 instead of 1e-5": ("Norm.__call__", _NORM, "1e-05 in ours, 1e-06 in theirs"),
    "LayerNorm: unbiased variance": ("Norm.__call__", _NORM),
    "attention scaled by model width": (_SCORES, _ENCODER, "ours is 2"),
    "causal mask leaks one token": (_MASK, f"visible faults.py {_DECODER}", "only ours masks key 1 from query 0"),
    "decoder ignores its padding mask": (
        _MASK,
        f"visible faults.py {_DECODER}",
        "the mask differs at 264 of 972 places: only ours",
    ),
    "positions off by one": ("position_ids angles sinusoidal", "faults.py position_ids", "in its place"),
    "rotary: interleaved instead of halves": ("rotate", "faults.py"),
    "cross-attention: query and memory swapped": (
        "Linear.__call__",
        f"faults.py {_CROSS} {_CROSS}.query {_CROSS}.key {_CROSS}.value",
    ),
    "tied head untied": (
        "Head.__call__ Table.__call__ multiply_new_tokens",
        "head faults.py",
        "ours hands a gradient back here, theirs does not",
    ),
    "post-norm instead of pre-norm": (
        "Norm.__call__ Block.__call__ Block._add",
        f"{_NORM} {_ENCODER} {_ENCODER}.query {_ENCODER}.key {_ENCODER}.value encoder.blocks.0",
        "high.mean(-1, keepdims=True)` here; without that, ours goes on as theirs does",
    ),
    "residual from the normalised input": ("Block._add", "faults.py encoder.blocks.0", "in its place"),
    "padding_idx: one row gets no gradient": (
        "Table.__call__",
        "target_embedding target_embedding.tokens faults.py",
        "row 0 is zero in theirs only",
    ),
    "attention: later blocks see one key too many": (f"{_MASK} attend_in_rows", _DECODER),
    "attention: nothing hidden inside a block": (
        f"{_MASK} attend_in_rows",
        f"visible {_DECODER}",
        "only theirs masks here",
    ),
    "window: a place too many": (_MASK, "visible", "the mask differs at 24 of 1176 places: only theirs masks"),
    "window: blocks skip its furthest key": ("Mask.spanned attend_in_rows", _DECODER),
    "window: blocks skip what comes later": ("Mask.spanned attend_in_rows", _ENCODER),
    "segments: ignored": (
        _MASK,
        f"visible {_DECODER}",
        "the mask differs at 52 of 1176 places: only theirs masks",
    ),
    "segments: those before are seen": (
        f"{_MASK} mask_faults.py",
        f"visible {_DECODER} {_ENCODER}",
        "the mask differs at 66 of 1176 places: only theirs masks",
    ),
    "segments: positions go on": ("position_ids sinusoidal angles", "position_ids", "in its place"),
    "segments: ignored by cross-attention": (
        f"{_MASK} mask_faults.py",
        f"visible {_CROSS}",
        "only theirs masks here",
    ),
    "prefix: seen in one direction only": (
        _MASK,
        "visible",
        "the mask differs at 60 of 1176 places: only ours masks",
    ),
    "prefix: sees what is behind it": (_MASK, "visible", "the mask differs at 8 of 1176 places: only theirs masks"),
    "prefix: blocks skip its later keys": ("Mask.spanned attend_in_rows", _DECODER),
    "queries that see nothing see everything": (f"{_MASK} mask_faults.py", _DECODER, "only theirs masks"),
    mask_faults.REFERENCE.name: (
        _MASK,
        "visible mask_faults.py",
        "the mask differs at 24 of 1176 places: only ours",
    ),
    "grouped heads tiled: einsum": (f"{_SCORES} quiet_faults.py", _DECODER, "exchanged"),
    faults.DROPOUT.name: ("drop Dropout.__call__", "faults.py", "1.1111 | 0.9 | a dropout of 0.1"),
    "forward pass drops by one key in all layers": _KEPT,
    "forward pass drops one mask in both residual branches": _KEPT,
    "forward pass drops by one key in encoder and decoder": _KEPT,
    "forward pass drops the same in all rows": _KEPT,
    "forward pass drops the same in all heads": _KEPT,
}
"""What may be named in ours and in theirs, and what may be said of the kind, of every fault of the code."""
_OF_MODELS = [
    *(("two stacks", fault, "theirs") for fault in faults.MODEL),
    *((kind, fault, "ours") for kind, fault in mask_faults.MASKS),
    (mask_faults.TEXT, mask_faults.REFERENCE, "theirs"),
    *(("long", fault, "ours") for fault in library_faults.BLOCKS),
    ("grouped heads", quiet_faults.GROUPED["einsum"], "ours"),
    ("dropout", faults.DROPOUT, "theirs"),
    *(("dropout", fault, "ours") for fault in random_faults.FORWARD_DRAWS),
]
_KINDS_OF_WEIGHTS = {
    "one layer's square matrix transposed": "output.weight transposed",
    "two heads swapped": "the same numbers in another order",
}
OWN = [
    OwnFault(
        fault.name,
        f"our {kind}",
        planted,
        partial(_ask, fault.name, kind, partial(planted_in, fault=fault)),
        *_PLACES[fault.name],
    )
    for kind, fault, planted in _OF_MODELS
]
OWN += [
    OwnFault(
        name,
        "our two stacks",
        "weights",
        partial(_ask, name, "two stacks", lambda pair, row=row: faults.changed_weight(pair.module, *row)),
        "Linear.__call__",
        f"{row[0]} {row[0].removesuffix('.weight')}",
        _KINDS_OF_WEIGHTS[name],
    )
    for name, row in faults.WEIGHTS.items()
]
