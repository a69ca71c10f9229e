"""Holds `first_difference` against faults whose place is known: named right, not sure, wrong, or missed."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from parity import Difference, Site, Weight, first_difference
from parity.difference import difference_of
from parity.weight_maps import Weights, paths
from parity_tests.known_places import OwnFault, blocks_of_four, model
from parity_tests.mask_faults import PAIR, TEXT
from parity_tests.other_pairs.pair import OtherPair
from parity_tests.other_pairs.planting import PairFault, Planted, lines_with, planted

Verdict = Literal["right", "not sure", "wrong", "missed"]
"""Wrong is the worst: another place, said without a doubt."""
Stage = Literal["forward", "backward"]


@dataclass(frozen=True)
class Located:
    """What was said of one fault, and whether that is so."""

    pair: str
    fault: str
    stage: str
    """At which the difference was told: parameters, forward or backward."""
    verdict: Verdict
    ours: str
    """The place that was named, and likewise theirs."""
    theirs: str
    kind: str
    seconds: float


def located(fault: PairFault, stage: Stage) -> Located:
    """Plants the fault, asks where the two sides part, and judges the answer."""
    with planted(fault) as found:
        before = time.perf_counter()
        difference = asked(found.pair, fault)
        seconds = time.perf_counter() - before
        verdict = judged(difference, fault, found, stage)
        places = shown(difference.ours), shown(difference.theirs)
        return Located(fault.pair, fault.name, difference.stage, verdict, *places, difference.kind or "", seconds)


def asked(pair: OtherPair, fault: PairFault | None = None) -> Difference:
    """The answer for a pair; with parameters that were converted wrongly, where the fault is of this kind."""
    params = None
    if fault is not None and fault.converted is not None:
        tensors = {name: tensor.detach().numpy() for name, tensor in floating(pair.theirs).items()}
        buffers = [name for name, _ in pair.theirs.named_buffers()]
        params = Weights(pair.weights, tensors, like=pair.like, optional=buffers).into(tensors)
        params = _replaced(params, fault.converted({path: np.asarray(leaf) for path, leaf in paths(params).items()}))
    return first_difference(pair.ours, pair.theirs, pair.weights, pair.inputs, params=params, like=pair.like)


def floating(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, but for whole numbers."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in named if tensor.is_floating_point()}


def judged(difference: Difference, fault: PairFault, found: Planted, stage: Stage) -> Verdict:
    """Whether the places that were named, on both sides, are those of the fault."""
    if not difference:
        return "missed"
    if fault.side == "weights":
        right = difference.stage == "parameters" and all(
            any(name in said for said in difference.parameters) for name in _their_names(found.pair, fault.parameters)
        )
    else:
        right = (stage == "backward") == (difference.stage == "backward") and _named(difference, fault, found)
    if right:
        return "right"
    return "wrong" if difference.sure else "not sure"


def _named(difference: Difference, fault: PairFault, found: Planted) -> bool:
    file, lines = found.faulty
    return _ours_named(difference.ours, fault, found) and (
        _theirs_named(difference.theirs, fault, found)
        or (fault.side != "ours" and difference.theirs is not None and _at(difference.theirs, file, lines))
    )


def _ours_named(site: Site | None, fault: PairFault, found: Planted) -> bool:
    if site is None:
        return False
    file, lines = found.faulty
    also = frozenset(line for piece in fault.ours for line in lines_with(Path(found.file), piece))
    return (fault.side == "ours" and _at(site, file, lines)) or _at(site, found.file, also)


def _theirs_named(site: Site | None, fault: PairFault, found: Planted) -> bool:
    if site is None:
        return False
    pieces = [place for place in fault.theirs if " " in place]
    return site.module in [place for place in fault.theirs if " " not in place] or any(
        _at(site, found.file, lines_with(Path(found.file), piece)) for piece in pieces
    )


def _at(site: Site, file: str, lines: frozenset[int]) -> bool:
    return Path(site.file).name == Path(file).name and site.line in lines


def _their_names(pair: OtherPair, ours: tuple[str, ...]) -> set[str]:
    """The module's tensors that these parameters of ours hold; of layers that are stacked, how all names end."""
    rows = [row for path, row in pair.weights.items() if path in ours and row is not None]
    named = {row.name if isinstance(row, Weight) else row if isinstance(row, str) else row[0] for row in rows}
    return {name.rpartition("{layer}")[2] for name in named}


def _replaced(params: Any, others: Mapping[str, np.ndarray]) -> Any:
    import jax

    leaves = [others.get(path, leaf) for path, leaf in paths(params).items()]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def shown(site: Site | None) -> str:
    """A place in a few words: the line itself, and the module or the function."""
    if site is None:
        return ""
    about = site.module or site.function
    return f"{site.source} ({about})" if about else site.source


def own_located(fault: OwnFault) -> Located:
    """The same for a fault of the suite, planted in one of our models or in its reference."""
    pair, batch = model(fault.model)
    with ExitStack() as stack:
        if fault.model in (TEXT, PAIR):
            stack.enter_context(blocks_of_four())
        stack.enter_context(fault.plant(pair))
        before = time.perf_counter()
        pair.share_masks(batch)
        difference = difference_of(pair, batch, name=fault.name)
        seconds = time.perf_counter() - before
    right = _own_named(difference.ours, fault.ours) and _own_named(difference.theirs, fault.theirs)
    verdict: Verdict = "right" if right else "wrong" if difference.sure else "not sure"
    places = shown(difference.ours), shown(difference.theirs)
    stage, kind = difference.stage, difference.kind or ""
    return Located(fault.model, fault.name, stage, verdict if difference else "missed", *places, kind, seconds)


def _own_named(site: Site | None, places: frozenset[str]) -> bool:
    return site is not None and bool({site.module, site.function, Path(site.file).name} & places)
