"""Where the faults that the suite plants are: those that one forward and backward pass of a model can see."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

from jax_tformer.config import DropoutConfig, StackConfig, TransformerConfig
from jax_tformer.model.fast import rows
from parity.gates.pair import Tensors
from parity_tests import faults, library_faults, mask_faults, quiet_faults, random_faults
from parity_tests.faults import Fault, changed_weight, faulty
from parity_tests.small_configs import TWO_STACKS, of_one_length
from torch_ref import reference
from twin.bridge import Pair
from twin.cases import CONFIGS, VOCABULARY, Lengths, batch_for, weights_for


@dataclass(frozen=True)
class OwnFault:
    """A fault of the suite, and the places that may be named for it."""

    name: str
    model: str
    """Of MODELS."""
    plant: Callable[[Pair], AbstractContextManager[Any]]
    ours: frozenset[str]
    """Functions of the library, and the file of the fault where it is planted there."""
    theirs: frozenset[str]
    """Modules, functions, parameters; and the file of the fault."""
    planted: str = "theirs"


_WINDOWED = StackConfig(num_layers=1, num_heads=2, feedforward_width=12, positions="sinusoidal_interleaved", window=5)
_TEXT = TransformerConfig(vocab_size=VOCABULARY, d_model=8, decoder=_WINDOWED)
_PAIR = replace(_TEXT, encoder=replace(_WINDOWED, window=4))
_DROPS = replace(TWO_STACKS, dropout=DropoutConfig(0.1, 0.1, 0.1, 0.1))
_GROUPED = replace(CONFIGS["switches-decoder-only"], tied_head=True)


_MASKED = Lengths(batch=3, source=14, target=11)
MODELS: dict[str, tuple[TransformerConfig, Callable[[], Tensors]]] = {
    "two stacks": (TWO_STACKS, of_one_length),
    mask_faults.TEXT: (_TEXT, lambda: batch_for(_TEXT, "right segments prefix", 1, _MASKED)),
    mask_faults.PAIR: (_PAIR, lambda: batch_for(_PAIR, "none segments", 1, _MASKED)),
    "long": (_GROUPED, lambda: batch_for(_GROUPED, "none", lengths=Lengths(batch=2, source=150))),
    "grouped heads": (_GROUPED, lambda: batch_for(_GROUPED, "none")),
    "dropout": (_DROPS, lambda: batch_for(_DROPS, "none")),
}


@cache
def model(name: str) -> tuple[Pair, Tensors]:
    """The pair without a fault, and its batch."""
    config, batch = MODELS[name]
    seed = 0 if name == "dropout" else None
    return Pair(config, weights_for(config, 0.2), "float64", optimised=False, dropout_seed=seed), batch()


@contextmanager
def blocks_of_four() -> Iterator[None]:
    """Attention in blocks of 4 queries: short sequences would otherwise fit into one block."""
    with patch.object(rows, "block_length", lambda length: 4):
        yield


def _planted(fault: Fault) -> Callable[[Pair], AbstractContextManager[Any]]:
    @contextmanager
    def plant(pair: Pair) -> Iterator[None]:
        module = pair.module
        if fault.changes:
            pair.module = reference(faulty(pair.config, fault.changes)).eval()
            pair.module.load_state_dict(module.state_dict())
        try:
            with fault.plant():
                yield
        finally:
            pair.module = module

    return plant


def _own(fault: Fault, model: str, ours: str, theirs: str, planted: str = "ours") -> OwnFault:
    return OwnFault(fault.name, model, _planted(fault), frozenset(ours.split()), frozenset(theirs.split()), planted)


def _all_own(
    given: tuple[Fault, ...], model: str, places: Mapping[str, tuple[str, str]], planted: str = "ours"
) -> tuple[OwnFault, ...]:
    """Raises KeyError for a fault without a place."""
    return tuple(_own(fault, model, *places[fault.name], planted) for fault in given)


_NORM = "encoder.blocks.0.self_attention_norm"
_ENCODER, _DECODER = "encoder.blocks.0.self_attention", "decoder.blocks.0.self_attention"
_CROSS = "decoder.blocks.0.cross_attention"
_SCORES = "attend_in_rows attend"
_MASK = "Mask.boolean Mask.softmax masked_softmax"
_MODEL = {
    "GELU: tanh instead of erf": (
        "gelu activate",
        "encoder.blocks.0.feedforward encoder.blocks.0.feedforward.activation",
    ),
    "LayerNorm: eps 1e-6 instead of 1e-5": ("Norm.__call__", _NORM),
    "LayerNorm: unbiased variance": ("Norm.__call__", _NORM),
    "attention scaled by model width": (_SCORES, _ENCODER),
    "causal mask leaks one token": (_MASK, f"visible faults.py {_DECODER}"),
    "decoder ignores its padding mask": (_MASK, f"visible faults.py {_DECODER}"),
    "positions off by one": ("position_ids angles sinusoidal", "faults.py position_ids"),
    "rotary: interleaved instead of halves": ("rotate", "faults.py"),
    "cross-attention: query and memory swapped": (
        "Linear.__call__",
        f"faults.py {_CROSS} {_CROSS}.query {_CROSS}.key {_CROSS}.value",
    ),
    "tied head untied": ("Head.__call__ Table.__call__", "head faults.py"),
    "post-norm instead of pre-norm": (
        "Norm.__call__ Block.__call__ Block._add",
        f"{_NORM} {_ENCODER} {_ENCODER}.query {_ENCODER}.key {_ENCODER}.value encoder.blocks.0",
    ),
    "residual from the normalised input": ("Block._add", "faults.py encoder.blocks.0"),
    "padding_idx: one row gets no gradient": (
        "Table.__call__",
        "target_embedding target_embedding.tokens faults.py",
    ),
}
_BLOCKS = {
    "attention: later blocks see one key too many": (f"{_MASK} attend_in_rows", _DECODER),
    "attention: nothing hidden inside a block": (f"{_MASK} attend_in_rows", f"visible {_DECODER}"),
}
_SEEN = {
    "window: a place too many": (_MASK, "visible"),
    "window: blocks skip its furthest key": ("Mask.spanned attend_in_rows", _DECODER),
    "window: blocks skip what comes later": ("Mask.spanned attend_in_rows", _ENCODER),
    "segments: ignored": (_MASK, f"visible {_DECODER}"),
    "segments: those before are seen": (f"{_MASK} mask_faults.py", f"visible {_DECODER} {_ENCODER}"),
    "segments: positions go on": ("position_ids sinusoidal angles", "position_ids"),
    "segments: ignored by cross-attention": (f"{_MASK} mask_faults.py", f"visible {_CROSS}"),
    "prefix: seen in one direction only": (_MASK, "visible"),
    "prefix: sees what is behind it": (_MASK, "visible"),
    "prefix: blocks skip its later keys": ("Mask.spanned attend_in_rows", _DECODER),
    "queries that see nothing see everything": (f"{_MASK} mask_faults.py", _DECODER),
}
_KEPT = "drop Dropout.__call__ Dropout.keep keep_mask site_key layer_keys"
_DRAWN = {
    "forward pass drops by one key in all layers": (_KEPT, "forward Dropout.forward"),
    "forward pass drops one mask in both residual branches": (_KEPT, "forward Dropout.forward"),
    "forward pass drops by one key in encoder and decoder": (_KEPT, "forward Dropout.forward"),
    "forward pass drops the same in all rows": (_KEPT, "forward Dropout.forward"),
    "forward pass drops the same in all heads": (_KEPT, "forward Dropout.forward"),
}
_WEIGHTS = tuple(
    OwnFault(
        name,
        "two stacks",
        lambda pair, row=row: changed_weight(pair.module, *row),  # type: ignore[misc]
        frozenset({"Linear.__call__"}),
        frozenset({row[0], row[0].removesuffix(".weight")}),
        "weights",
    )
    for name, row in faults.WEIGHTS.items()
)
OWN = (
    *_all_own(faults.MODEL, "two stacks", _MODEL, "theirs"),
    *_WEIGHTS,
    *(_own(fault, kind, *_SEEN[fault.name]) for kind, fault in mask_faults.MASKS),
    _own(mask_faults.REFERENCE, mask_faults.TEXT, _MASK, "visible mask_faults.py", "theirs"),
    *_all_own(library_faults.BLOCKS, "long", _BLOCKS),
    *(
        _own(quiet_faults.GROUPED[name], "grouped heads", f"{_SCORES} quiet_faults.py", _DECODER)
        for name in ("einsum",)
    ),
    _own(faults.DROPOUT, "dropout", "drop Dropout.__call__", "faults.py", "theirs"),
    *_all_own(random_faults.FORWARD_DRAWS, "dropout", _DRAWN),
)
