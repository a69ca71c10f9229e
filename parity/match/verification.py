"""Puts a proposed weight map to the test: are both sides the same with it, and if not, which row is wrong?

Ties are decided without a search. Every weight that could stand for another gets the same numbers, which look alike in
every layout in question: then no tie matters, and both sides must agree. Their gradients are then equal numbers of the
same weight, in the layout that is right, and so the matcher finds by them what it could not find by names.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from parity.gates.measure import FLOAT64_BAR
from parity.gates.pytrees import Tensors
from parity.match.candidates import Candidate, Parameter, Proposal, Tensor
from parity.match.proposals import ROTARY, proposed
from parity.match.runs import SHOWN, Runs
from parity.match.weight_match import as_row, as_weights, said

SMALL = 1e-3
"""Below this an error is one of rounding: a wrong row changes outputs by far more."""


def verified(
    runs: Runs, proposals: Sequence[Proposal], sides: tuple[Sequence[Parameter], Sequence[Tensor]]
) -> tuple[list[Proposal], bool, str, dict[str, bool]]:
    """(the rows as running both leaves them, whether gate 1 is green, what was seen, which of the rest matter).

    The rest are trained parameters that no row takes, and matter where outputs depend on them; told where it is green.
    """
    found = list(proposals)
    error = _gate(runs, found)
    tried = ""
    if error > SMALL:
        found, lost, apart = _decided(runs, found, sides)
        if apart > SMALL:
            why = "the functions differ, or a row of another shape is wrong: first_difference says where"
            return found, False, f"gate 1 is red, {error:.1e}, and {apart:.1e} where no tie matters: {why}", {}
        error = _gate(runs, found)
        tried = " after a test of every row" + (f"; nothing fits {', '.join(lost)}" if lost else "")
    if runs.torch.wide:
        tried += ", with the module's casts to float32 taken out"
    if runs.left_out:
        tried += f"; not compared: {', '.join(sorted(runs.left_out))}"
    if error > FLOAT64_BAR:
        little = "; so little is rather rounding, or an eps, than a wrong row" if error <= SMALL else ""
        return found, False, f"gate 1 is red, {error:.1e}{tried}{little}", {}
    taken = _taken(found)
    rest = [one.name for one in sides[1] if one.trained and one.name not in taken]
    depend = runs.depends_on({*taken, *rest}, runs.shaken(taken))
    found = [replace(one, free=not all(_each_layer(one, depend))) for one in found]
    return found, True, f"gate 1 is green, {error:.1e}{tried}", {name: bool(depend[name].any()) for name in rest}


def _gate(runs: Runs, proposals: Sequence[Proposal]) -> float:
    weights = runs.shaken(_taken(proposals))
    error, *_ = runs.run(proposals, weights)
    if FLOAT64_BAR < error <= SMALL and not runs.torch.wide:
        runs.torch.wide = True
        exact, *_ = runs.run(proposals, weights)
        runs.torch.wide = exact <= FLOAT64_BAR
        error = exact if runs.torch.wide else error
    return error


def _taken(proposals: Sequence[Proposal]) -> list[str]:
    return [name for one in proposals for name in one.chosen.tensor.members]


def _each_layer(one: Proposal, where: Tensors) -> list[bool]:
    """Whether it is true anywhere in what a row takes, for each layer of each tensor."""
    return [bool(layout.seen(where[name]).any()) for tensor, layout in one.chosen.pieces for name in tensor.members]


def _decided(
    runs: Runs, proposals: Sequence[Proposal], sides: tuple[Sequence[Parameter], Sequence[Tensor]]
) -> tuple[list[Proposal], list[str], float]:
    """(the rows as gradients show them, the tensors that nothing fits, how far apart the sides are without ties)."""
    apart, ours, theirs = runs.run(proposals, _alike(proposals), backward=True)
    if apart > SMALL:
        return [*proposals], [], apart
    rest = {tensor.name: np.broadcast_to(0.0, tensor.shape) for tensor in sides[1]}
    by_name = {one.chosen.ours.name: one for one in proposals}
    largest = max(float(np.abs(array).max()) for array in theirs.values())
    shows = {name: np.abs(array) > SHOWN * largest for name, array in theirs.items()}
    found, lost = [], []
    for one in proposed(*sides, ours, rest | theirs, max(1e-6, 10 * apart)):
        was = by_name.get(one.chosen.ours.name)
        how = "tie broken by running both" if one.chosen.equal else "left over by rows that running both decided"
        if was is None or (was.chosen.column, was.chosen.layout) != (one.chosen.column, one.chosen.layout):
            named = f"; by name it would be {_told(was.chosen, one.chosen)}" if was is not None and was.sure else ""
            reason, sure = how + named, one.chosen.equal
        elif one.chosen.equal:
            reason, sure = was.reason if was.sure else how, True
        elif any(_each_layer(one, shows)):
            reason, sure = "unsure: running both with it differs", False
            lost.append(one.chosen.tensor.name)
        else:
            reason, sure = was.reason, was.sure
        found.append(replace(one, reason=reason, sure=sure))
    return found, lost, apart


def _told(named: Candidate, chosen: Candidate) -> str:
    """In what the candidate that names speak for differs from the one that was chosen."""
    moved = named.tensor.name == chosen.tensor.name
    return said(as_row(as_weights(named))) if moved else named.tensor.name


def _alike(proposals: Sequence[Proposal]) -> Tensors:
    """Numbers for each tensor that are the same for all that could stand in its place, and in all its layouts."""
    found: Tensors = {}
    for one in proposals:
        same = [each for each in (one.chosen, *one.others) if each.tensor.name == one.chosen.tensor.name]
        turned = next((each.layout.theirs for each in same if ROTARY in each.style), ())
        rotary = tuple(axis for axis, group in enumerate(turned) if len(group) > 1)
        for tensor, layout in one.chosen.pieces:
            # Along an axis that is fused, or whose rows rotary embeddings may order, every row is alike; where it may
            # be another axis, every number. Then it does not matter which rows are whose.
            axes = layout.fused or rotary
            everywhere = axes and len({each.layout.order for each in same}) > 1
            sizes = [1 if everywhere or axis in axes else size for axis, size in enumerate(tensor.shape)]
            found |= dict.fromkeys(tensor.members, np.broadcast_to(_numbers_of(sizes), tensor.shape))
    return found


def _numbers_of(sizes: list[int]) -> np.ndarray:
    """Numbers that are the same where the first two axes are exchanged."""
    rng = np.random.default_rng([len(sizes), *sorted(sizes)])
    if len(sizes) < 2:
        return np.asarray(0.8 + 0.4 * rng.random(sizes))
    few, many = sorted(sizes[:2])
    array: np.ndarray = rng.standard_normal((few, many, *sizes[2:])) / np.sqrt(max(16, np.prod(sizes) / few))
    if few == many:
        array = (array + array.swapaxes(0, 1)) / np.sqrt(2)
    return array if sizes[0] == few else array.swapaxes(0, 1)
