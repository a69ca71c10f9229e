"""Puts a proposed weight map to the test: are both sides the same with it, and if not, which row is wrong?

Ties are decided one by one, without a search. First every weight that could stand for another gets the same numbers,
which look alike in every layout in question: then no tie matters, and both sides must agree. Then the weights get other
numbers again, one at a time: where both sides still agree the row is right, and where they do not another candidate is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from parity.gates.measure import FLOAT64_BAR
from parity.match.candidates import Candidate, Proposal
from parity.match.proposals import ROTARY
from parity.match.runs import SHOWN, Runs, converted, held, worst
from parity.match.weight_match import as_row, as_weights, said

SMALL = 1e-3
"""Below this an error is one of rounding: a wrong row changes outputs by far more."""
AGREED = 1e-6
"""How near both sides come, relative to what a weight changed, where its row is right."""


def verified(runs: Runs, proposals: Sequence[Proposal]) -> tuple[list[Proposal], bool, str]:
    """(the rows as running both leaves them, whether gate 1 is green with them, what was seen)."""
    found = list(proposals)
    error = _gate(runs, found)
    tried = ""
    if error > SMALL:
        ties = Ties(runs, found)
        apart = ties.base_error()
        if apart > SMALL and any(_turns(one) for one in found):
            ties = Ties(runs, found, rotary=True)
            apart = min(apart, ties.base_error())
        if apart > SMALL:
            why = "the functions differ, or a row of another shape is wrong: first_difference says where"
            return found, False, f"gate 1 is red, {error:.1e}, and {apart:.1e} where no tie matters: {why}"
        found, lost = ties.decide()
        error = _gate(runs, found)
        tried = " after a test of every row" + (f"; nothing fits {', '.join(lost)}" if lost else "")
    if runs.wide:
        tried += ", with the module's casts to float32 taken out"
    if runs.left_out:
        tried += f"; not compared: {', '.join(sorted(runs.left_out))}"
    if error <= FLOAT64_BAR:
        return _with_dependence(runs, found), True, f"gate 1 is green, {error:.1e}{tried}"
    little = "; so little is rather rounding, or an eps, than a wrong row" if error <= SMALL else ""
    return found, False, f"gate 1 is red, {error:.1e}{tried}{little}"


def _gate(runs: Runs, proposals: Sequence[Proposal]) -> float:
    weights = runs.shaken(proposals)
    flat = converted(proposals, weights)
    error = worst(*runs.both(flat, weights))
    if FLOAT64_BAR < error <= SMALL and not runs.wide:
        runs.wide = True
        exact = worst(*runs.both(flat, weights))
        runs.wide = exact <= FLOAT64_BAR
        error = exact if runs.wide else error
    return error


def _with_dependence(runs: Runs, proposals: Sequence[Proposal]) -> list[Proposal]:
    """Marks the rows of which gate 1 says nothing, since the outputs do not depend on them (in every layer)."""
    weights = runs.shaken(proposals)
    depend = runs.depend_on(list(weights), weights)
    return [
        replace(
            one,
            free=not all(
                layout.seen(depend[name]).any() for tensor, layout in one.chosen.pieces for name in tensor.members
            ),
        )
        for one in proposals
    ]


def _turns(one: Proposal) -> tuple[int, ...]:
    """The axes of the tensor along which the rows of heads may be in the other order of rotary embeddings."""
    axes = [
        [axis for axis, group in enumerate(other.layout.theirs) if len(group) > 1]
        for other in one.others
        if ROTARY in other.style and other.tensor.name == one.chosen.tensor.name
    ]
    return tuple(axes[0]) if axes else ()


class Ties:
    """Decides, for rows that could be exchanged, which is right."""

    def __init__(self, runs: Runs, proposals: Sequence[Proposal], *, rotary: bool = False) -> None:
        self.runs, self.proposals = runs, list(proposals)
        self._rotary = rotary
        self.users: dict[str, list[Proposal]] = {}
        for one in self.proposals:
            self.users.setdefault(one.chosen.tensor.name, []).append(one)
        self.base = {name: value for one in proposals for name, value in self._alike(one)}
        self.flat = converted(proposals, self.base)
        self.leaves = {one.leaf.path: one.leaf for one in proposals}
        self.ours, self.before = runs.both(self.flat, self.base)

    def base_error(self) -> float:
        """How far the two sides are apart where no tie matters."""
        return worst(self.ours, self.before)

    def decide(self) -> tuple[list[Proposal], list[str]]:
        """The rows as running both shows them, and the names of tensors for which nothing fits."""
        fixed: dict[str, Candidate] = {}
        free: set[str] = set()
        wrong = []
        for group in self.users.values():
            probe = _Probe(self, group[0].chosen)
            if not probe.shows:
                free |= {one.leaf.path for one in group}
            elif probe.agrees({one.leaf.path: one.chosen for one in group}):
                fixed |= {one.leaf.path: one.chosen for one in group}
            else:
                wrong.append((group, probe))
        lost = []
        for group, probe in wrong:
            found = next((each for each in self._alternatives(group, fixed) if probe.agrees(each)), None)
            fixed |= found or {}
            lost += [] if found else [group[0].chosen.tensor.name]
        return self._settled(fixed, free), lost

    def _alternatives(self, group: list[Proposal], fixed: Mapping[str, Candidate]) -> Iterator[dict[str, Candidate]]:
        """What else a tensor could be: another layout of the same leaves, or what other leaves of the shape hold."""
        name = group[0].chosen.tensor.name
        if group[0].chosen.role is not None and len(group) > 1:
            others = [other for other in self.users.values() if other is not group and len(other) == len(group)]
            for leaves in (group, *others):
                if not any(one.leaf.path in fixed for one in leaves):
                    yield from _shared_out(name, leaves)
            return
        found = [
            (candidate.score, one.leaf.path, candidate)
            for one in self.proposals
            if one.leaf.path not in fixed
            for candidate in (one.chosen, *one.others)
            if candidate.tensor.name == name and candidate is not group[0].chosen
        ]
        for _, path, candidate in sorted(found, key=lambda each: -each[0]):
            yield {path: candidate}

    def _alike(self, one: Proposal) -> Iterator[tuple[str, np.ndarray]]:
        """Numbers for a tensor that are the same for all that could stand in its place, and in all its layouts."""
        orders = {each.layout.order for each in (one.chosen, *one.others) if each.tensor is one.chosen.tensor}
        for tensor, layout in one.chosen.pieces:
            shape, flat = tensor.shape, layout.fused or (_turns(one) if self._rotary else ())
            # Along an axis that is fused every row is alike, and where it may be another axis every number: then it
            # does not matter which rows are whose.
            flat = tuple(range(len(shape))) if flat and len(orders) > 1 else flat
            own = [1 if axis in flat else size for axis, size in enumerate(shape)]
            wide = [*sorted(own[:2]), *own[2:]]
            rng = np.random.default_rng([len(shape), *sorted(own)])
            if len(shape) < 2:
                array = 0.8 + 0.4 * rng.random(wide)
            else:
                fan = np.prod(wide[:1] + wide[2:]) if not flat else max(wide[1:]) if max(wide) > 1 else 16
                array = rng.standard_normal(wide) / np.sqrt(fan)
                if wide[0] == wide[1]:
                    array = (array + array.swapaxes(0, 1)) / np.sqrt(2)
                array = array if wide == own else array.swapaxes(0, 1)
            for name in tensor.members:
                yield name, np.array(np.broadcast_to(array, shape))

    def _settled(self, fixed: Mapping[str, Candidate], free: set[str]) -> list[Proposal]:
        """All rows with what was found; leaves that nothing decides take what is left, by their module."""
        taken = {one.column for one in fixed.values()}
        modules = {
            one.leaf.meaning.parent: fixed[one.leaf.path].tensor.meaning.parent
            for one in self.proposals
            if one.leaf.path in fixed
        }
        settled = []
        for one in self.proposals:
            path, chosen = one.leaf.path, fixed.get(one.leaf.path)
            if chosen is None:
                rest = [each for each in (one.chosen, *one.others) if each.column not in taken and each.layout.natural]
                home = modules.get(one.leaf.meaning.parent)
                near = [each for each in rest if each.tensor.meaning.parent == home]
                same = [each for each in near if each.tensor.meaning.leaf == one.leaf.meaning.leaf]
                chosen = (same or near or rest or [one.chosen])[0]
                taken.add(chosen.column)
            new = replace(one, chosen=chosen, free=path in free)
            if (chosen.column, chosen.layout) != (one.chosen.column, one.chosen.layout):
                how = "tie broken by running both" if path in fixed else "left over by rows that running both decided"
                named = _told(one.chosen, chosen)
                new.reason = f"{how}; by name it would be {named}" if one.sure else how
                new.sure = path in fixed
            elif path in fixed and not one.sure:
                new.reason, new.sure = "tie broken by running both", True
            elif path not in free and path not in fixed:
                new.reason, new.sure = "unsure: running both with it differs", False
            settled.append(new)
        return settled


def _shared_out(name: str, leaves: Sequence[Proposal]) -> Iterator[dict[str, Candidate]]:
    """Every way in which these leaves can be the parts of one tensor: layouts, and which part is whose."""
    ways: dict[object, dict[str, Candidate]] = {}
    for one in leaves:
        for candidate in (one.chosen, *one.others):
            if candidate.tensor.name == name and candidate.role is not None:
                way = candidate.style, candidate.layout.fused, candidate.layout.order
                ways.setdefault(way, {})[one.leaf.path] = candidate
    yield from (way for way in ways.values() if len(way) == len(leaves))


def _told(named: Candidate, chosen: Candidate) -> str:
    """In what the candidate that names speak for differs from the one that was chosen."""
    moved = named.tensor is chosen.tensor
    return said(as_row(as_weights(named))) if moved else named.tensor.name


class _Probe:
    """One of the module's tensors (of all layers) with other numbers, while all the rest look alike."""

    def __init__(self, ties: Ties, candidate: Candidate) -> None:
        self._ties, changed = ties, {}
        for name in candidate.tensor.members:
            array, rng = ties.base[name], np.random.default_rng([1, len(name), *name.encode()])
            # Upwards, so that variances stay positive.
            changed[name] = array + 0.5 * float(np.abs(array).max()) * rng.random(array.shape)
        self._weights = ties.base | changed
        _, self._after = ties.runs.paired(ties.ours, ties.runs.theirs(self._weights))
        self._effect = max(float(np.abs(after - ties.before[key]).max()) for key, after in self._after.items())
        scale = max(float(np.abs(after).max()) for after in self._after.values())
        self.shows = self._effect > SHOWN * scale
        """Whether the outputs depend on the tensor."""

    def agrees(self, chosen: Mapping[str, Candidate]) -> bool:
        """Whether our outputs change like theirs if these leaves hold the tensor like this."""
        ties = self._ties
        flat = dict(ties.flat)
        for path, one in chosen.items():
            flat |= held(ties.leaves[path], one, self._weights)
        ours, theirs = ties.runs.paired(ties.runs.ours(flat), self._after)
        # What changes is compared, so that functions that differ a little do not hide which row is right.
        allowed = self._effect * max(AGREED, 10 * ties.base_error())
        changes = {key: (ours[key] - ties.ours[key]) - (theirs[key] - ties.before[key]) for key in theirs}
        return all(float(np.abs(change).max()) < allowed for change in changes.values())
