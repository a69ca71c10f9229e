"""Looks at the place where two sides part, and makes the answer of it."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.differ.accepted import Accepted
from parity.differ.alignment import (
    Start,
    anchors,
    are_counterparts,
    match,
    paired,
    paired_backward,
    shared,
    starts_of_both,
)
from parity.differ.answer import Difference, Stage
from parity.differ.choices import before_choices, other_choice, other_rows, unmatched_choices
from parity.differ.conditioning import TABLE, as_rounded, explained_by_rounding, rounds_a_table
from parity.differ.confirmation import Change, Mended, mended
from parity.differ.element_order import distance, error_of
from parity.differ.fingerprints import BAR, times
from parity.differ.kinds import kind
from parity.differ.one_step import one_step_otherwise
from parity.differ.origin_of_order import Origin, first_move, is_in_order, lost_order, origin_of_order, reordered_choice
from parity.differ.parts import match_in_parts
from parity.differ.row_sets import is_routed
from parity.differ.substitution import GOES_ON, WAYS, copied_from, exchanged, experiment, of_same_weight, repaired
from parity.differ.values import Site, Value, Values
from parity.differ.weights import Held, other_layers, other_weights, read_by_both, unread_weights
from parity.gates.measure import ParityError

_TWO_WEIGHTS = "perhaps two weights are"
_POSITIONS = 500
"""With so many positions, angles that are a little wrong show."""
_PAIRS = 4
"""Starts of ours, at most, from which experiments are made."""
_OTHERS = 3
"""Other lines, at most, where an answer is not sure."""


def explain_outputs(
    ours: Values, theirs: Values, held_by: Held, name: str, accepted: Accepted | None = None
) -> Difference:
    """The answer to the way forward; raises ParityError for outputs without a common name, and for other shapes."""
    accepted = accepted or Accepted()
    common = [key for key in theirs.outputs if key in ours.outputs]
    if not common:
        raise ParityError(
            f"no output has one name on both sides: ours {list(ours.outputs)}, theirs {list(theirs.outputs)}"
        )
    errors = {}
    for key in common:
        here, there = ours.output(key), theirs.output(key)
        if here.shape != there.shape:
            raise ParityError(f"{key}: shapes differ: ours {list(here.shape)}, theirs {list(there.shape)}")
        if not np.isfinite(here).any() and not np.isfinite(there).any():
            raise ParityError(f"output {key} has no finite number on either side; there is nothing to compare")
        errors[key] = error_of(here, there)
    errors = {key: error for key, error in errors.items() if not error <= accepted.bar}
    rounded = explained_by_rounding((ours, theirs), errors, put=accepted.put)
    said = {key: f"{key}: {error:.1e}" for key, error in errors.items()}
    errors = {key: error for key, error in errors.items() if key not in rounded}
    if not errors:
        return Difference("none", name=name, rounded=as_rounded(said.values()), **counted(ours, theirs))
    differing = tuple(map(said.__getitem__, errors))
    bad = [ours.outputs[key] for key in errors], [theirs.outputs[key] for key in errors]
    return explain_stage((ours, theirs), bad, "forward", errors, differing, held_by, name, accepted)


def explain_stage(
    sides: tuple[Values, Values],
    bad: tuple[Sequence[int], Sequence[int]],
    stage: Stage,
    errors: Mapping[str, float],
    differing: tuple[str, ...],
    held_by: Held,
    name: str,
    accepted: Accepted,
) -> Difference:
    """The answer, from the outputs of both sides that differ, of which `errors` has the relative errors; no more than
    these where `accepted` postpones it, and that they are the same where a table in float32 explains it."""
    ours, theirs = sides
    finite = [error for error in errors.values() if np.isfinite(error)]
    most = max(BAR, accepted.bar)
    bar = min(most, max(max(finite, default=1.0) / 30, 1e-12)) if len(finite) == len(errors) else most
    about: dict[str, Any] = {"differing": differing, **counted(ours, theirs), "name": name}
    accepted.sides, accepted.error = sides, (stage, max(errors.values(), default=0.0))
    behind_tables = False
    while True:
        match(ours, theirs, bar)
        match_in_parts(ours, theirs)
        if accepted.postpones():
            return Difference(stage, **about)
        by_tables = explained_by_rounding(sides, errors, accepted.names, tables=True, put=accepted.put)
        if by_tables and len(by_tables) == len(errors):
            about["rounded"] = tuple(f"{each} (as float32 rounds a table)" for each in differing)
            return Difference("none", **{**about, "differing": ()})
        if not behind_tables and rounds_a_table(sides, errors):
            bar, behind_tables = TABLE, True
            continue
        found = starts_of_both(sides, bad, backward=stage == "backward")
        first, second, together = (paired_backward if stage == "backward" else paired)(*found)
        while stage == "forward" and together and first and second and (before := before_choices(first, second)):
            found = before
            first, second, together = paired(*found)
        while stage == "forward" and together and first and second and _is_taken_back(sides, first, second):
            others = [start for start in found[0] if start is not first], [s for s in found[1] if s is not second]
            if not all(others):
                break
            found = others
            first, second, together = paired(*found)
        for start in filter(None, (first, second)):
            # What is looked at below, in one run.
            start.values.want({start.number, *start.agreed, *start.row.inputs, *start.near})
        grown = bool(together and first and second and _is_inherited(first, second))
        if not grown or behind_tables or bar <= 1e-13:
            break
        bar /= 10
    accepted.starts = first, second
    about["unread"] = unread_weights(ours, theirs, held_by) if stage == "forward" else ()
    if first is not None and second is not None:
        parting = _Parting(stage, sides, held_by, about, found, first, second, together, grown)
        answer = parting.explained()
        if answer.sure and not all(side.values.partly.isdisjoint(side.agreed) for side in (first, second)):
            answer = replace(answer, sure=False, confirmed=False)  # an experiment does not see what is not compared
        if not (answer.sure or answer.others) and stage != "backward":
            answer = replace(answer, others=parting.other_lines(answer))
    elif stage == "forward" and (shown := experiment(sides, first, second, found)):
        answer = Difference(stage, shown.ours, shown.theirs, (), shown.said, shown.sure, shown.confirmed, **about)
    else:
        answer = _one_sided(stage, first or second, theirs if first else ours, about)
    told = answer.sure or (answer.kind or "").endswith(_TWO_WEIGHTS)
    return answer if answer.stage != "forward" or told else _with_one_step(sides, answer)


def _with_one_step(sides: tuple[Values, Values], answer: Difference) -> Difference:
    """The answer, or what one side does in one step, if all agrees where it does that otherwise. Another step may mend
    as much, as one that undoes what is wrong, so that it is never sure; the other lines are those that do, and where
    the search had come to."""
    ours, theirs = one_step_otherwise(*sides), one_step_otherwise(*sides[::-1])
    if not (ours or theirs):
        return answer
    said = "; ".join(each[0].said for each in (ours, theirs) if each)
    places = ours[0].site if ours else answer.ours, theirs[0].site if theirs else answer.theirs
    others = {(site.file, site.line): site for site in (*(each.site for each in ours), answer.ours) if site}
    told = [site for line, site in others.items() if places[0] and line != (places[0].file, places[0].line)]
    trust: dict[str, Any] = {"sure": False, "confirmed": False, "tried": True, "others": tuple(told[:_OTHERS])}
    return replace(answer, ours=places[0], theirs=places[1], kind=said, **trust)


@dataclass
class _Parting:
    """Two starts, where both sides part, to be explained."""

    stage: Stage
    sides: tuple[Values, Values]
    held_by: Held
    about: dict[str, Any]
    """What the answer says whatever it is."""
    starts: tuple[list[Start], list[Start]]
    """All of both sides."""
    first: Start
    second: Start
    together: bool
    """Whether the two belong together."""
    grown: bool
    """Whether what both read differs already, and by nearly as much."""

    def explained(self) -> Difference:
        """The answer: another order, another weight, a kind that the numbers prove, what an experiment shows; else the
        two lines."""
        first, second, forward = self.first, self.second, self.stage != "backward"
        if forward and (said := other_rows(first, second)):
            return self._confirmed(self.sides[0].made(first.number), said)
        origin = self._origin()
        if origin.inherited is not None and origin.checked:
            return self._in_other_order(*origin.inherited, origin)
        hidden = f"{first.row.operation} in JAX" in self.sides[0].opaque
        readable = self.together and not hidden
        if readable and forward and (said := other_layers(first, second, self.held_by)):
            return self._confirmed(self.sides[0].made(first.number), said)
        if forward and not hidden and (choice := other_choice(first, second)):
            return self._at_the_choice(*choice)
        wrong, code = read_by_both(first, second, self.held_by) if readable else (None, False)
        if wrong and self.stage == "forward" and experiment(self.sides, first, second, self.starts, (of_same_weight,)):
            wrong = None  # it is what is multiplied by the weight that is another
        proven = self.together and not (self.grown or wrong or origin.inherited)
        what, by_numbers = kind(first, second) if proven else (None, False)
        found = None
        if not (wrong or what or hidden or self.grown) and forward:
            found = self._by_experiment(origin)
            if found and (found.sure or found.confirmed):
                return found
        if origin.inherited is not None and wrong is None:
            i, j = origin.inherited
            said = f"{origin.said}: {_TWO_WEIGHTS}"
            places = self.sides[0].made(i), self.sides[1].made(j)
            return Difference(self.stage, *places, (), said, False, False, **self.about)
        if wrong is None and readable and forward:
            other, mends = other_weights(first, second, self.held_by)
            wrong = other if mends or not what else None
            by_numbers = by_numbers if wrong is None else mends
        else:
            by_numbers = by_numbers or bool(wrong)
        if forward and not (wrong or what or hidden) and (shown := exchanged(first, second)):
            return self._confirmed(*shown)
        lines = self._at_the_lines(wrong, code, what, by_numbers, hidden, origin)
        return lines if lines.sure or not found else found

    def other_lines(self, answer: Difference) -> tuple[Site, ...]:
        """The lines of ours beside that of an answer which may be the one."""
        ours, theirs = self.sides
        read = [i for i in self.first.agreed if i in ours.equal and ours.rows[i].data and ours.leaf(i) is None]
        ours.want(read)
        theirs.want(ours.equals(read))
        mixed = [first_move(ours, theirs, i) for i in read if not is_in_order(ours, theirs, i)]
        partly = sorted(ours.partly.intersection(self.first.agreed))
        numbers = (*mixed, *partly, *unmatched_choices(self.first, theirs), *(each.number for each in self.starts[0]))
        named = {(site.file, site.line): site for site in map(ours.made, numbers) if site.file}
        told = answer.ours and (answer.ours.file, answer.ours.line)
        return tuple(site for line, site in named.items() if line != told)[:_OTHERS]

    def _confirmed(self, place: Site, said: str) -> Difference:
        """At a line of ours and where theirs begins, what mends all."""
        agreed, theirs = _agreeing(self.first, self.second), self.sides[1].made(self.second.number)
        return Difference(self.stage, place, theirs, agreed, said, True, True, **self.about)

    def _at_the_choice(self, i: int, j: int, proved: bool) -> Difference:
        """Where both choose, and what theirs chooses mends all."""
        sites = self.sides[0].site(i), self.sides[1].site(j)
        said = f"the two choose otherwise here; with what theirs chooses{GOES_ON}"
        return Difference(self.stage, *sites, _agreeing(self.first, self.second), said, True, proved, **self.about)

    def _origin(self) -> Origin:
        if not self.together:
            return Origin(None, False)
        origin = origin_of_order(self.first, self.second)
        if self.stage == "forward" and not (origin.inherited and origin.checked):
            lost = lost_order(self.first, self.second)
            origin = lost if lost and (lost.inherited or not origin.inherited) else origin
        if origin.inherited is None:
            return origin
        chosen = not self.sides[0].reordered.keys().isdisjoint(self.sides[0].rows[origin.inherited[0]].inputs)
        routed = any(map(is_routed, self.sides, origin.inherited))
        found = reordered_choice(self.first, self.second, origin.inherited[0]) if routed or chosen else origin
        return found if found.inherited or routed else origin

    def _in_other_order(self, i: int, j: int, origin: Origin) -> Difference:
        """Where both computed the same numbers, or hold them as weights."""
        ours, theirs = self.sides
        order = f"the same numbers in another order{': ' * bool(origin.said)}{origin.said}"
        if ours.rows[i].kind != "parameter":
            sure = origin.mends > Mended.NOT_ALL and not ours.reads_complex(i)
            trust = sure, origin.mends is Mended.ALL
            return Difference(self.stage, ours.made(i), theirs.made(j), (), order, *trust, **self.about)
        held = order.removeprefix("the same numbers")
        told = f"{ours.rows[i].name} holds the numbers of {theirs.rows[j].name}{held}"
        places = ours.made(self.first.number), theirs.made(self.second.number)
        # What is multiplied by the weight may be in another order as well, where ours moves its axes.
        moved = _moved(self.first, (k for k in self.first.row.inputs if ours.parameter(k) is None))
        others, sure = tuple(map(ours.site, moved[:_OTHERS])), not moved
        return Difference("parameters", *places, (), order, sure, sure, (told,), others=others, **self.about)

    def _by_experiment(self, origin: Origin) -> Difference | None:
        here, there = self.starts
        # What begins elsewhere may be the difference, and before them although the sides read nothing in common there.
        pairs = [(self.first, self.second), (here[0], there[0])]
        elsewhere = (paired(here[k:], there) for k in range(1, min(len(here), _PAIRS)))
        pairs += [(one, other) for one, other, _ in elsewhere if one and other]
        ways = WAYS[: -1 if origin.inherited else None]
        best: Difference | None = None
        for one, other in dict.fromkeys(pairs[: 2 if origin.inherited else None]):
            if found := experiment(self.sides, one, other, self.starts, ways):
                trust, agreed = (found.sure, found.confirmed), _agreeing(one, other)
                told = Difference(self.stage, found.ours, found.theirs, agreed, found.said, *trust, **self.about)
                if told.sure or told.confirmed:
                    return told
                best = best or told
        return best

    def _at_the_lines(
        self, wrong: str | None, code: bool, what: str | None, by_numbers: bool, hidden: bool, origin: Origin
    ) -> Difference:
        """The lines of the two, and how far they can be trusted. `code`: it reads the `wrong` weight, not the map."""
        stage, first, second, what = self.stage, self.first, self.second, wrong or what
        if wrong and not code:
            stage, self.about["parameters"] = "parameters", (wrong,)
        if self.together and stage == "forward" and bool(first.constants) != bool(second.constants):
            # The table that one of them reads may be read by another start of the other side.
            first, second = map(_reading_constants, (first, second), self.starts)
        places, sure = _places(first, second), self.together and (bool(what) or are_counterparts(first, second))
        for side in (first, second):
            # Of complex numbers the absolute values are compared; of what agrees in some rows, the others may be wrong.
            of_complex = side.values.reads_complex(side.number) or (bool(what) and "complex" in side.row.dtype)
            sure = sure and not of_complex and side.values.partly.isdisjoint(side.agreed)
        # Patches that are cut are multiplied in an order that is not seen in them.
        cut = [bool(re.search("conv(?!ert)", side.row.operation)) for side in (first, second)]
        sure = sure and (
            bool(what) or not (cut[0] != cut[1] and any(_moved(side, side.agreed) for side in (first, second)))
        )
        # On the way back nothing is run on, so that no more is known.
        checked, sure = origin.checked and (bool(what) or stage == "forward"), sure and not origin.lost
        sure = sure and (by_numbers or not (wrong or (what and stage == "backward")))
        if sure and not by_numbers and stage == "forward" and first.row.again and second.row.again:
            # A formula may be arranged in another way until some line: nothing behind that line may be wrong.
            sure, mended = False, repaired(first, second)
            if mended is not None and not is_routed(self.sides[0], mended[0]):
                sites = self.sides[0].site(mended[0]), self.sides[1].site(mended[1])
                here = what or (not first.constants and sites[0].line == places[0].line)
                # Where the value is made of what begins on another line as well, that may be the difference.
                alone = bool(what) or not any(
                    side.values.is_made_of(made, each.number)
                    for side, made, starts in zip((first, second), mended[:2], self.starts, strict=True)
                    for each in starts
                    if each.row.place[:2] != side.row.place[:2]
                )
                sure = bool(here) and mended[2] > Mended.NOT_ALL
                checked = checked and mended[2] is Mended.ALL and alone
                places = sites if len(self.starts[0]) == 1 and not what else places
        adds = ["add" in side.row.operation for side in (first, second) if stage == "backward" and not what]
        # What is added to a gradient that agrees comes from elsewhere.
        sure = sure and not any(adds)
        if adds and all(adds):
            # Both add gradients that agree, but not the same ones: they part where one that both have is handed on.
            handed = ((_handing(first.values, i), _handing(second.values, j)) for i, j in shared(first, second))
            places = next(((here, there) for here, there in handed if here and there), places)
        doubted = (what or "").startswith("perhaps")
        sure = sure and not (self.grown or doubted) and (bool(what) or not hidden)
        if what and not (sure or wrong or doubted):
            what = f"perhaps {what}"
        agreed = _agreeing(self.first, self.second)
        return Difference(stage, *places, agreed, what, sure, sure and checked, **self.about)


def _is_taken_back(sides: tuple[Values, Values], first: Start, second: Start) -> bool:
    """Whether ours is theirs times one number, as its negative is, and parts as much without that: each side may
    subtract what the other one adds with the other sign."""
    factor, array = times(first.row.features, second.row.features), first.values.array(first.number)
    if factor is None or array is None or first.row.again is None or abs(factor - 1) <= BAR:
        return False
    return mended(sides, 0, Change(first.number, array / factor, {}), (first, second)) is Mended.NOT_ALL


def _moved(start: Start, read: Iterable[int]) -> list[int]:
    """Where the axes of what a start reads are moved."""
    rows = start.values.rows
    return [m for k in read for m in copied_from(start.values, k) if re.search("transpose|rev", rows[m].operation)]


def _is_inherited(first: Start, second: Start) -> bool:
    """Whether what both read differs already, by less than the bar, and what they make of it by not much more."""

    def apart(i: int, j: int) -> float:
        return distance(first.values.array(i), second.values.array(j))

    before = max((apart(i, j) for i, j in shared(first, second)), default=0.0)
    # What is left of a difference of large numbers has their rounding.
    rows = first.values.rows
    left = first.row.largest / max(first.row.largest, *(rows[i].largest for i in first.row.inputs), 1e-300)
    return 1e-12 < before < 1e-5 and left * apart(first.number, second.number) < 100 * before


def _agreeing(first: Start, second: Start) -> tuple[tuple[Site, Site], ...]:
    return tuple((first.values.site(i), second.values.site(j)) for i, j in shared(first, second))


def counted(ours: Values, theirs: Values) -> dict[str, Any]:
    """What an answer says of both sides whatever it is: how many values they have, and which hide a program."""
    opaque = tuple(dict.fromkeys([*ours.opaque, *theirs.opaque]))
    n = _positions(ours, theirs)
    few = (f"{n}, and angles part further on: give {_POSITIONS} or more",) if 1 < n < _POSITIONS else ()
    return {"opaque": opaque, "counts": (len(ours.rows), len(theirs.rows)), "few_positions": few}


def _positions(*sides: Values) -> int:
    """How many positions the inputs have, if angles are made of their numbers; else 0."""
    most = 0
    for values in sides:
        lengths = {size for row in values.rows if row.kind == "input" for size in row.shape}
        todo = [i for i in values.live() if re.fullmatch(r"(aten\.)?(sin|cos)", values.rows[i].operation)]
        seen = set(todo)
        while todo:
            before = {i for i in values.rows[todo.pop()].inputs if not values.rows[i].data} - seen
            seen |= before
            todo += before
        counted = {max(values.rows[i].shape, default=0) for i in seen if _counts(values.rows[i])}
        most = max(most, *(counted & lengths), 0)
    return most


def _counts(row: Value) -> bool:
    return row.kind == "input" or bool(re.search("iota|arange", row.operation))


def _reading_constants(start: Start, others: Sequence[Start]) -> Start:
    return next((each for each in (start, *others) if each.constants), start)


def _places(first: Start, second: Start) -> tuple[Site, Site]:
    """Both sites; those of constants without an equal, where both sides read some."""
    if first.constants and second.constants:
        return first.values.made(first.constants[0]), second.values.made(second.constants[0])
    if all(start.values.copies(start.number) for start in (first, second)):
        # Each takes other parts of what both read.
        return first.values.site(first.number), second.values.site(second.number)
    return first.values.shown(first.number), second.values.shown(second.number)


def _handing(values: Values, number: int) -> Site | None:
    """Where the value is made whose gradient this is: one of its size that the value reads whose derivative it is."""
    row = values.rows[number]
    before = () if row.forward is None else values.rows[row.forward].inputs
    of = [i for i in before if math.prod(values.rows[i].shape) == math.prod(row.shape) and values.leaf(i) is None]
    return values.site(of[0]) if of else None


def _one_sided(stage: Stage, start: Start | None, other: Values, about: dict[str, Any]) -> Difference:
    """One side computes what the other does not: where a gradient is cut, nothing is there to be compared."""
    assert start is not None
    values, row, forward = start.values, start.row, stage != "backward"
    met = [] if forward else [j for i in anchors(start) for j in values.equal[i]]
    cut = not forward and not (met and _hands_back(other, _around(other, met), row.shape))
    said = f"perhaps {values.side} hands a gradient back here, {other.side} does not" if cut else None
    site = other.made(met[0]) if met else None
    own: Site | None = values.site(start.number)
    pairs = [(i, j) for i in start.agreed for j in values.equal.get(i, ())[:1]]
    if not forward and "add" in row.operation:
        # What the other side adds to another gradient.
        apart = ((i, j) for i, j in pairs if any("add" in other.rows[k].operation for k in other.readers(j)))
        makers = ((_handing(values, i), _handing(other, j)) for i, j in apart)
        own, site = next(((here, there) for here, there in makers if here and there), (own, site))
    if site is None and pairs:
        site = other.site(_going_on(other, pairs[0][1]))
    sites: list[tuple[Site | None, Site | None]] = [
        (own, site),
        *((values.site(i), other.site(j)) for i, j in pairs),
    ]
    if values.side == "theirs":
        sites = [(theirs, ours) for ours, theirs in sites]
    agreed: Any = tuple(sites[1:])
    return Difference(stage, *sites[0], agreed, said, forward and bool(site and site.source), False, **about)


def _going_on(values: Values, number: int) -> int:
    """The first operation that makes something of a value that is returned; the value itself, where it is returned."""
    live = values.live()
    return next((k for k in values.readers(number) if k in live), number)


def _around(values: Values, numbers: Sequence[int]) -> set[int]:
    """These values and what they were made of, through the whole of a line, as a product and the sum it is part of are,
    and through all that this side hands no gradient back to."""
    handed = {row.forward for row in values.rows if row.backward}
    around, todo = set(numbers), list(numbers)
    while todo:
        number = todo.pop()
        row = values.rows[number]
        before = set(row.inputs) - around
        around |= before
        todo += [k for k in before if (row.place.file and values.rows[k].place == row.place) or k not in handed]
    return around


def _hands_back(values: Values, forward: Collection[int], shape: tuple[int, ...]) -> bool:
    """Whether a side computes some gradient of this size for these values; a derivative of one's own reads them."""
    return any(
        row.backward
        and row.forward in forward
        and row.features is not None
        and math.prod(row.shape) == math.prod(shape)
        for row in values.rows
    )
