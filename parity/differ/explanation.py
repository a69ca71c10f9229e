"""Looks at the place where two sides part, and makes the answer of it."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from parity.differ import kinds
from parity.differ.alignment import Equal, Start, anchors, made_of, paired, paired_backward, starts
from parity.differ.answer import Difference, Stage
from parity.differ.divergence import Divergence
from parity.differ.fingerprints import BAR, Index, fingerprint
from parity.differ.origin_of_order import Origin, origin_of_order
from parity.differ.values import Site, Values
from parity.differ.weights import is_code, other_weights

_ROUNDS = 100
"""Values that are computed in parts on the other side, at most, one after the other."""


class Runs(Protocol):
    """What can be run again, to look at values that were let go."""

    held_by: dict[str, list[tuple[str, int | None]]]

    def run_ours(self, backward: bool, keep: frozenset[int] = ...) -> Values:
        """Our values."""

    def run_theirs(self, backward: bool, keep: frozenset[int] = ...) -> Values:
        """Their values."""


class Explainer:
    """Looks at the place where two sides part."""

    def __init__(self, sides: Runs, ours: Values, theirs: Values, *, backward: bool) -> None:
        self.sides, self.ours, self.theirs, self.backward = sides, ours, theirs, backward

    def want(self, ours: Sequence[int], theirs: Sequence[int]) -> None:
        """Sees to it that the numbers of these values are there; a side that has let them go runs again."""
        for values, numbers, run in (
            (self.ours, ours, self.sides.run_ours),
            (self.theirs, theirs, self.sides.run_theirs),
        ):
            missing = frozenset(n for n in numbers if n not in values.arrays)
            if missing:
                again = run(self.backward, missing)
                values.arrays |= {n: array for n, array in again.arrays.items() if n in missing}

    def array(self, values: Values, number: int) -> np.ndarray | None:
        """The numbers of a value; None for what has none."""
        if number not in values.arrays:
            self.want([number] if values is self.ours else [], [number] if values is self.theirs else [])
        return values.arrays.get(number)

    def explain(
        self,
        stage: Stage,
        bad_ours: Sequence[int],
        bad_theirs: Sequence[int],
        differing: tuple[str, ...],
        errors: Mapping[str, float],
        name: str,
    ) -> Difference:
        """The answer, from the outputs that differ."""
        ours, theirs = self.ours, self.theirs
        finite = [error for error in errors.values() if np.isfinite(error)]
        bar = min(BAR, max(max(finite, default=1.0) / 30, 1e-12)) if len(finite) == len(errors) else BAR
        equal = Equal.of(ours, theirs, bar)
        here, there = self._starts(equal, bad_ours, bad_theirs)
        if self.backward:
            first, second, together = paired_backward(ours, theirs, here, there, equal)
        else:
            first, second, together = paired(here, there, equal)
        about: dict[str, Any] = {
            "differing": differing,
            "opaque": opaque(ours, theirs),
            "counts": (len(ours.rows), len(theirs.rows)),
            "name": name,
        }
        if first is None or second is None:
            return self._one_sided(stage, first, second, equal, about)
        origin = origin_of_order(ours, theirs, equal, first, second, self.array) if together else Origin(None, False)
        if origin.inherited is not None:
            i, j = origin.inherited
            said = f": {origin.said}" if origin.said else ""
            weights = (f"{ours.rows[i].name} holds the numbers of {theirs.rows[j].name} in another order{said}",)
            leaf = ours.rows[i].kind != "operation"
            about |= {"parameters": weights} if leaf else {}
            site = (first.number, second.number) if leaf else (i, j)
            order = f"the same numbers in another order{said}"
            places = self._made(ours, site[0]), self._made(theirs, site[1])
            return Difference("parameters" if leaf else stage, *places, (), order, True, True, **about)
        wrong, code = self._read_by_both(first, second, equal) if together else (None, False)
        if origin.exchanged and wrong is None:
            places = self._places(first, second, None)
            return Difference(stage, *places, (), f"{origin.said}: perhaps two weights are", False, False, **about)
        at = Divergence(ours, theirs, equal, first, second, self.array)
        if wrong is None and together and not self.backward:
            wrong = other_weights(ours, theirs, at.ours_near, at.theirs_near, self.sides.held_by)
        kind = wrong or (kinds.kind(at) if together else None)
        places = self._places(first, second, kind)
        agreed = tuple((ours.site(i), theirs.site(j)) for i, j in at.shared)
        if wrong and not code:
            stage = "parameters"
            about |= {"parameters": (wrong,)}
        return Difference(stage, *places, agreed, kind, together, together and origin.checked, **about)

    def _starts(
        self, equal: Equal, bad_ours: Sequence[int], bad_theirs: Sequence[int]
    ) -> tuple[list[Start], list[Start]]:
        """Where the unmatched values of both sides begin.

        An output that differs by name may have an equal within the other side: what is added to that there is missing.
        """
        forced = (
            [i for i in bad_ours if not equal.ours.get(i) or set(equal.ours[i]) & set(bad_theirs)],
            [j for j in bad_theirs if not equal.theirs.get(j) or set(equal.theirs[j]) & set(bad_ours)],
        )
        indices = self.ours.index(), self.theirs.index()
        for _ in range(_ROUNDS):
            here = starts(self.ours, equal.ours, forced[0], backward=self.backward)
            there = starts(self.theirs, equal.theirs, forced[1], backward=self.backward)
            together = self._in_parts(self.ours, here, forced[0], indices[1], equal.ours, equal.theirs)
            together |= self._in_parts(self.theirs, there, forced[1], indices[0], equal.theirs, equal.ours)
            if not together:
                break
        return here, there

    def _in_parts(
        self,
        values: Values,
        found: Sequence[Start],
        forced: Sequence[int],
        other_side: Index,
        same: dict[int, list[int]],
        other: dict[int, list[int]],
    ) -> bool:
        """Notes the starts that the other side computes part by part; whether there were any."""
        any_found = False
        for start in found:
            array = self.array(values, start.number) if start.number not in forced else None
            for number in made_of(array, other_side) if array is not None else []:
                same.setdefault(start.number, []).append(number)
                other.setdefault(number, []).append(start.number)
                any_found = True
        return any_found

    def _places(self, first: Start, second: Start, kind: str | None) -> tuple[Site, Site]:
        """Both sites; those of constants without an equal, where both sides read some."""
        if first.constants and second.constants:
            return self._origin(self.ours, first), self._origin(self.theirs, second)
        alone = re.match("(ours|theirs) (multiplies by|adds) .* (does not|goes on without it)", kind or "")
        lacks = "" if alone is None else "theirs" if alone[1] == "ours" else "ours"
        return self._shown(self.ours, first, lacks == "ours"), self._shown(self.theirs, second, lacks == "theirs")

    @staticmethod
    def _origin(values: Values, start: Start) -> Site:
        """Where a constant is made; of one that was given, where it is read."""
        return Explainer._made(values, start.constants[0])

    @staticmethod
    def _made(values: Values, number: int) -> Site:
        """The place of a value; of one that was given, where it is read first."""
        while values.rows[number].kind != "operation" and (after := values.readers(number)):
            number = after[0]
        return values.site(number)

    @staticmethod
    def _shown(values: Values, start: Start, lacks_something: bool) -> Site:
        """The place of a start; a slice or a view shows nothing: what it is of, or what is made of it."""
        number = start.number
        if not values.copies(number):
            return values.site(number)
        before = [i for i in start.agreed if values.rows[i].kind == "operation"]
        if lacks_something and before:
            return values.site(before[0])
        while values.copies(number) and (after := values.readers(number)):
            number = after[0]
        return values.site(number)

    def _read_by_both(self, first: Start, second: Start, equal: Equal) -> tuple[str | None, bool]:
        """What is wrong with the weights that the two places read, another one or transposed; whether the code is."""
        held = {path: key for key, rows in self.sides.held_by.items() for path, _ in rows}
        for i in first.agreed:
            leaf = self.ours.leaf(i)
            if leaf is None or self.ours.rows[leaf].kind != "parameter":
                continue
            same = {self.theirs.leaf(j) for j in equal.ours.get(i, ())}
            for j in second.agreed:
                other = self.theirs.leaf(j)
                if other is None or self.theirs.rows[other].kind != "parameter":
                    continue
                mine, their = self.ours.rows[leaf].name, self.theirs.rows[other].name
                if other not in same and (same - {None}) and self.ours.rows[i].shape and held:
                    right = ", ".join(sorted(self.theirs.rows[k].name for k in same if k is not None))
                    if self._would_agree(first, i, second, j):
                        code = is_code(self.ours, mine, their, self.sides.held_by)
                        return f"ours reads {right}, as {mine}, where theirs reads {their}", code
                if other in same and self._would_agree(first, i, second, j, transposed=True):
                    return f"{mine} holds {their} transposed", False
        return None, False

    def _would_agree(self, first: Start, i: int, second: Start, j: int, *, transposed: bool = False) -> bool:
        """Whether our product with their weight (or with ours transposed) has the numbers of their product."""
        weight = self.array(self.theirs, j) if not transposed else self.array(self.ours, i)
        target = self.theirs.rows[second.number].features
        if weight is None or target is None:
            return False
        weight = weight.squeeze()
        for k in first.agreed:
            x = self.array(self.ours, k) if k != i else None
            if x is None or weight.ndim != 2:
                continue
            for matrix in (weight.T,) if transposed else (weight, weight.T):
                if x.shape[-1] != matrix.shape[0] or (transposed and matrix.shape[0] != matrix.shape[1]):
                    continue
                features, _ = fingerprint(x.reshape(-1, x.shape[-1]) @ matrix, depends_on_data=True)
                if features is not None and float(np.abs(features - target).max()) < BAR:
                    return True
        return False

    def _one_sided(
        self, stage: Stage, first: Start | None, second: Start | None, equal: Equal, about: dict[str, Any]
    ) -> Difference:
        """One side computes what the other does not: where a gradient is cut, nothing is there to be compared."""
        start = first or second
        if start is None:
            return Difference(stage, kind=None, **about)
        values, other = (self.ours, self.theirs) if first else (self.theirs, self.ours)
        same = equal.ours if first else equal.theirs
        name, without = ("ours", "theirs") if first else ("theirs", "ours")
        forward = values.rows[start.number].forward
        site, kind, sure = None, None, True
        if stage == "backward":
            kind = f"{name} hands a gradient back here, {without} does not"
            met = [j for i in ([forward] if forward is not None else []) for j in same.get(i, ())]
            met = met or [j for i in anchors(values, start, same) for j in same[i]]
            if met:
                cut = _cuts(other, met)
                site = other.site((cut or _operations(other, met))[0])
                if cut:
                    kind += ": it is detached"
                elif _hands_back(other, met, values.rows[start.number].shape):
                    kind, sure = None, False
        if site is None:
            partners = [j for i in start.agreed for j in same.get(i, ())]
            site = other.site(partners[0]) if partners else None
        mine = values.site(start.number)
        ours, theirs = (mine, site) if first else (site, mine)
        pairs = tuple((self.ours.site(i), self.theirs.site(j)) for i, j in self._shared(start, same, bool(first)))
        return Difference(stage, ours, theirs, pairs, kind, sure and bool(site and site.source), False, **about)

    def _shared(self, start: Start, same: Mapping[int, list[int]], ours: bool) -> list[tuple[int, int]]:
        found = [(i, j) for i in start.agreed for j in same.get(i, ())[:1]]
        return found if ours else [(j, i) for i, j in found]


def _cuts(values: Values, numbers: Sequence[int]) -> list[int]:
    """Where a gradient is stopped: next to these values, before or after them.

    What autograd saves is detached as well; nothing on the way forward is made of that.
    """
    around, todo = set(numbers), list(numbers)
    while todo:
        # The whole of a line: a product and the sum that it is part of.
        row = values.rows[todo.pop()]
        before = set(row.inputs) - around
        around |= before
        todo += [k for k in before if row.place.file and values.rows[k].place == row.place]
    read = {k for row in values.rows if not row.backward for k in row.inputs}
    return [
        k
        for k, row in enumerate(values.rows)
        if re.search("stop_grad|detach", row.operation) and k in read and (k in around or around & set(row.inputs))
    ]


def _operations(values: Values, numbers: Sequence[int]) -> list[int]:
    """Those that are operations; of weights and inputs the operations that read them."""
    found = [i for i in numbers if values.rows[i].kind == "operation"]
    return found or [k for k, row in enumerate(values.rows) if set(row.inputs) & set(numbers)] or list(numbers)


def _hands_back(values: Values, forward: Sequence[int], shape: tuple[int, ...]) -> bool:
    """Whether a side computes some gradient of this size for these values of the forward pass."""
    size = math.prod(shape)
    near, todo = set(forward), list(forward)
    while todo:
        # A derivative of one's own reads what the function reads.
        row = values.rows[todo.pop()]
        before = set(row.inputs) - near
        near |= before
        todo += [k for k in before if row.place.file and values.rows[k].place == row.place]
    return any(
        row.backward and row.forward in near and row.features is not None and math.prod(row.shape) == size
        for row in values.rows
    )


def opaque(ours: Values, theirs: Values) -> tuple[str, ...]:
    """Operations of both sides that count as one value."""
    return tuple(dict.fromkeys([*ours.opaque, *theirs.opaque]))
