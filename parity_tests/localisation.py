"""Holds `first_difference` against faults whose place is known: named right, not sure, wrong, or missed."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from parity import Difference, Site, Weight, first_difference
from parity.differ.first_difference import difference_of
from parity.gates.weight_map import Weights, paths
from parity_tests.known_kinds import KINDS
from parity_tests.known_places import OWN, OwnFault, blocks_of_four, model
from parity_tests.mask_faults import PAIR, TEXT
from parity_tests.other_pairs.backward_faults import BACKWARD
from parity_tests.other_pairs.forward_faults import FORWARD
from parity_tests.other_pairs.pair import OtherPair
from parity_tests.other_pairs.planting import PairFault, Planted, lines_with, planted
from parity_tests.training_places import FAULTS as TRAINED
from parity_tests.training_places import TrainingFault, difference_of_training

TRAINING = "our training"
Verdict = Literal["right", "not sure", "wrong", "missed"]
"""Wrong is the worst: another place, said without a doubt, or a kind that is not so."""
Stage = Literal["forward", "backward"]


@dataclass(frozen=True)
class Located:
    """What was said of one fault, and whether that is so."""

    pair: str
    fault: str
    planted: str
    """In ours, in theirs, or in the weights."""
    verdict: Verdict
    difference: Difference
    seconds: float


class Case(NamedTuple):
    """A fault to ask about."""

    pair: str
    fault: str
    ask: Callable[[], Located]


def located(fault: PairFault, stage: Stage) -> Located:
    """Plants the fault in its pair, asks where the two sides part, and judges the answer."""
    with planted(fault) as found:
        before = time.perf_counter()
        difference = asked(found.pair, fault)
        seconds = time.perf_counter() - before
        verdict = judged(difference, fault, found, stage)
    where = {"ours": "ours", "theirs": "theirs", "library": "theirs", "weights": "weights"}[fault.side]
    return Located(fault.pair, fault.name, where, verdict, difference, seconds)


def asked(pair: OtherPair, fault: PairFault | None = None) -> Difference:
    """The answer for a pair; with parameters that were converted wrongly, where the fault is of this kind."""
    params = None
    if fault is not None and fault.converted is not None:
        named = [*pair.theirs.named_parameters(), *pair.theirs.named_buffers()]
        tensors = {name: tensor.detach().numpy() for name, tensor in named if tensor.is_floating_point()}
        buffers = [name for name, _ in pair.theirs.named_buffers()]
        params = Weights(pair.weights, tensors, like=pair.like, optional=buffers).into(tensors)
        params = _replaced(params, fault.converted({path: np.asarray(leaf) for path, leaf in paths(params).items()}))
    return first_difference(pair.ours, pair.theirs, pair.weights, pair.inputs, params=params, like=pair.like)


def judged(difference: Difference, fault: PairFault, found: Planted, stage: Stage) -> Verdict:
    """Whether the places that were named, on both sides, are those of the fault."""
    if fault.side == "weights":
        names = _their_names(found.pair, fault.parameters)
        right = difference.stage == "parameters" and all(
            any(name in said for said in difference.parameters) for name in names
        )
    else:
        file, lines = found.faulty
        right = (stage == "backward") == (difference.stage == "backward") and (
            _ours_named(difference.ours, fault, found)
            and (
                _theirs_named(difference.theirs, fault, found)
                or (fault.side != "ours" and _at(difference.theirs, file, lines))
            )
        )
    return verdict_of(difference, right, KINDS.get((fault.pair, fault.name), ()))


def verdict_of(difference: Difference, right: bool, kinds: Collection[str]) -> Verdict:
    """In words, from whether the places are right; a kind that is not one of `kinds` is wrong whatever they are."""
    if not difference:
        return "missed"
    if difference.kind and not any(kind in difference.kind for kind in kinds):
        return "wrong"
    return "right" if right else "wrong" if difference.sure else "not sure"


def _ours_named(site: Site | None, fault: PairFault, found: Planted) -> bool:
    file, lines = found.faulty
    also = frozenset(line for piece in fault.ours for line in lines_with(Path(found.file), piece))
    return (fault.side == "ours" and _at(site, file, lines)) or _at(site, found.file, also)


def _theirs_named(site: Site | None, fault: PairFault, found: Planted) -> bool:
    if site is None:
        return False
    modules, pieces = ([place for place in fault.theirs if (" " in place) == has] for has in (False, True))
    return site.module in modules or any(_at(site, found.file, lines_with(Path(found.file), p)) for p in pieces)


def _at(site: Site | None, file: str, lines: frozenset[int]) -> bool:
    return site is not None and Path(site.file).name == Path(file).name and site.line in lines


def _their_names(pair: OtherPair, ours: tuple[str, ...]) -> set[str]:
    """The module's tensors that these parameters of ours hold; of layers that are stacked, how all names end."""
    rows = [row for path, row in pair.weights.items() if path in ours and row is not None]
    named = {row.name if isinstance(row, Weight) else row if isinstance(row, str) else row[0] for row in rows}
    return {name.rpartition("{layer}")[2] for name in named}


def _replaced(params: Any, others: Mapping[str, np.ndarray]) -> Any:
    leaves = [others.get(path, leaf) for path, leaf in paths(params).items()]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def own_located(fault: OwnFault) -> Located:
    """The same for a fault of the suite, planted in one of our models, in its reference or in their weights."""
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
    name = f"our {fault.model}"
    verdict = verdict_of(difference, right, KINDS.get((name, fault.name), ()))
    return Located(name, fault.name, fault.planted, verdict, difference, seconds)


def _own_named(site: Site | None, places: frozenset[str]) -> bool:
    return site is not None and bool({site.module, site.function, Path(site.file).name} & places)


def training_located(fault: TrainingFault) -> Located:
    """The same for a fault of training: of the loss, or of the first update."""
    with fault.plant():
        before = time.perf_counter()
        difference = difference_of_training(fault.fault.name)
        seconds = time.perf_counter() - before
    right = difference.stage == fault.stage and (
        _own_named(difference.ours, fault.ours) and _own_named(difference.theirs, fault.theirs)
    )
    verdict = verdict_of(difference, right, KINDS.get((TRAINING, fault.fault.name), ()))
    return Located(TRAINING, fault.fault.name, fault.planted, verdict, difference, seconds)


def cases() -> list[Case]:
    """All faults: of the six pairs, forward and backward, and those of the suite."""
    named: tuple[tuple[Sequence[PairFault], Stage], ...] = ((FORWARD, "forward"), (BACKWARD, "backward"))
    return [
        *(
            Case(fault.pair, fault.name, lambda fault=fault, stage=stage: located(fault, stage))  # type: ignore[misc]
            for faults, stage in named
            for fault in faults
        ),
        *(Case(f"our {f.model}", f.name, lambda f=f: own_located(f)) for f in OWN),  # type: ignore[misc]
        *(Case(TRAINING, f.fault.name, lambda f=f: training_located(f)) for f in TRAINED),  # type: ignore[misc]
    ]
