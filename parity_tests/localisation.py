"""Holds `first_difference` against faults whose place is known: named right, not sure, wrong, or missed."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from parity import Difference, Weight, first_difference
from parity.gates.torch_side import tensors_of
from parity.gates.weight_map import Weights, paths
from parity_tests.known_places import OWN
from parity_tests.other_pairs.faults import FAULTS
from parity_tests.other_pairs.planting import lines_with, planted


class Located(NamedTuple):
    """What was said of one fault, and whether that is so."""

    pair: str
    fault: str
    planted: str
    """In ours, in theirs, or in the weights."""
    verdict: str
    """right, not sure, missed, or wrong: another place, said without a doubt, or a kind that is not so."""
    difference: Difference


def located(fault):
    """Plants the fault in its pair, asks where the two sides part, and judges the answer."""
    with planted(fault) as found:
        difference = asked(found.pair, fault.converted)
        verdict = judged(difference, fault, found)
    planted_in = "theirs" if fault.side == "library" else fault.side
    return Located(fault.pair, fault.name, planted_in, verdict, difference)


def asked(pair, converted=None):
    """The answer for a pair; with parameters that were converted wrongly, where some are `converted`."""
    params = None
    if converted:
        weights, tensors = weights_of(pair)
        params = weights.into(tensors)
        right = {path: np.asarray(leaf) for path, leaf in paths(params).items()}
        leaves = [converted[path](right) if path in converted else leaf for path, leaf in paths(params).items()]
        params = jax.tree.unflatten(jax.tree.structure(params), leaves)
    return first_difference(pair.ours, pair.theirs, pair.weights, pair.inputs, params=params, like=pair.like)


def weights_of(pair):
    """(the weight map of a pair, the module's floating tensors)."""
    parameters, buffers = tensors_of(pair.theirs)
    tensors = {name: x for name, x in (parameters | buffers).items() if np.issubdtype(x.dtype, np.floating)}
    return Weights(pair.weights, tensors, like=pair.like, optional=list(buffers)), tensors


def judged(difference, fault, found):
    """Whether the places that were named, on both sides, are those of the fault."""
    if fault.side == "weights":
        rows = [pair for path, pair in found.pair.weights.items() if path in fault.converted]
        names = [row.name if isinstance(row, Weight) else row if isinstance(row, str) else row[0] for row in rows]
        # Of layers that are stacked, how all names end.
        ends = [name.rpartition("{layer}")[2] for name in names]
        right = difference.stage == "parameters" and all(
            any(end in said for said in difference.parameters) for end in ends
        )
    else:
        backward = difference.stage == "backward"
        right = backward == (fault.stage == "backward") and all(
            _is_named(site, fault, found, side)
            for site, side in ((difference.ours, "ours"), (difference.theirs, "theirs"))
        )
    return verdict_of(difference, right, fault.kinds)


def _is_named(site, fault, found, side):
    """Whether a site is where the fault is, or one of the places that may be named on this side."""
    if site is None:
        return False
    pieces = [piece for piece in getattr(fault, side).split(" | ") if piece]
    if side == "theirs":
        if site.module in pieces:
            return True
        pieces = [piece for piece in pieces if " " in piece]
    file, lines = found.faulty
    if (side == "ours") == (fault.side == "ours") and _is_at(site, file, lines):
        return True
    return any(_is_at(site, found.file, lines_with(Path(found.file), piece)) for piece in pieces)


def _is_at(site, file, lines):
    return Path(site.file).name == Path(file).name and site.line in lines


def verdict_of(difference, right, kinds):
    """In words, from whether the places are right; a kind that is not one of `kinds` is wrong whatever they are."""
    if not difference:
        return "missed"
    if difference.kind and not any(kind in difference.kind for kind in kinds.split(" | ") if kind):
        return "wrong"
    return "right" if right else "wrong" if difference.sure else "not sure"


def own_located(fault):
    """The same for a fault of the suite, planted in one of our models, in its reference, weights or training."""
    difference = fault.ask()
    right = fault.stage in ("", difference.stage) and all(
        site is not None and {site.module, site.function, Path(site.file).name} & set(places.split())
        for site, places in ((difference.ours, fault.ours), (difference.theirs, fault.theirs))
    )
    verdict = verdict_of(difference, right, fault.kinds)
    return Located(fault.pair, fault.name, fault.planted, verdict, difference)


CASES = {f"{f.pair}: {f.name}": partial(located, f) for f in FAULTS}
CASES |= {f"{f.pair}: {f.name}": partial(own_located, f) for f in OWN}
"""Pair and fault -> asks about it: all faults of the pairs of others, forward and backward, and those of the suite."""
