"""Where one side alone stops a gradient, as `stop_gradient` and `detach` do."""

import re
from collections.abc import Iterator
from dataclasses import replace

from parity.differ.answer import Difference
from parity.differ.row_sets import is_whole
from parity.differ.values import GRADIENT, Values
from parity.differ.weights import Held

Gradients = tuple[set[str], set[str]]
"""The weights of theirs whose gradients differ, and all that have a gradient."""


def where_one_stops(
    ours: Values, theirs: Values, answer: Difference, gradients: Gradients, held_by: Held, *, runs: bool
) -> Difference:
    """The place where one side alone stops a gradient, if that hides all that differs; likely, if it may hide more, and
    not sure where the way back `runs` without it, and does not agree, unless it is that of a weight. Else the answer as
    it is: both may stop the maximum in a softmax, or one, which changes nothing."""
    found = [
        (one, other, *place, *_hidden_by(one, place[0], theirs, gradients, held_by))
        for one, other in ((ours, theirs), (theirs, ours))
        for place in _stopped_alone(one, other)
    ]
    for one, other, stop, reader, hidden, differing in sorted(found, key=lambda each: each[4] != each[5]):
        if hidden >= differing:
            said = f"{other.side} hands a gradient back here, {one.side} does not: it is detached"
            own = answer.theirs if one is ours else answer.ours
            places = one.site(stop), own if reader is None else other.made(reader)
            here, there = places if one is ours else places[::-1]
            sure = not runs or any(one.rows[i].kind == "parameter" for i in one.rows[stop].inputs)
            said, proved = "perhaps " * (not sure) + said, sure and hidden == differing
            return replace(answer, ours=here, theirs=there, agreed=(), kind=said, sure=sure, confirmed=proved)
    return answer


def _hidden_by(
    one: Values, stop: int, theirs: Values, gradients: Gradients, held_by: Held
) -> tuple[set[str], set[str]]:
    """The weights to which a line may hand no gradient back, as it stops it; those whose gradients differ."""
    line = [i for k, i in _stopped(one) if one.rows[k].place[:2] == one.rows[stop].place[:2]]
    differing, trained = gradients
    equals = [j for i in line for j in one.equal.get(i, ())[:1]]
    if one is not theirs and len(equals) == len(line):
        one, line = theirs, equals
    if one is not theirs:
        # Layers that ours has stacked have one path.
        differing, trained = ({path for key in keys for path, _ in held_by.get(key, ())} for keys in gradients)
    return set().union(*(_weights_behind(one, i) for i in line)) & trained, differing


def _stopped(values: Values) -> list[tuple[int, int]]:
    """(where a gradient is stopped, that of what) on one side, the last first.

    What autograd saves is detached as well; nothing on the way forward but derivatives is made of that.
    """
    read = {k for row in values.rows if not (row.backward or row.derived) for k in row.inputs}
    stops = [k for k in read if re.search("stop_grad|detach", values.rows[k].operation)]
    return [(k, i) for k in sorted(stops, reverse=True) for i in values.rows[k].inputs]


def _stopped_alone(values: Values, other: Values) -> Iterator[tuple[int, int | None]]:
    """(where this side alone stops a gradient, what reads its equal on the other side), the last such place first.

    The other side hands to that value, or to what it is the sum of, a gradient that this side computes nowhere.
    """
    alone = {n for n, row in enumerate(other.rows) if row.features is not None and n not in other.equal}
    handed = {other.rows[n].forward for n in alone}
    handed |= {n for n, row in enumerate(other.rows) if other.outputs.get(GRADIENT + row.name) in alone}
    both = {j for _, j in _stopped(other)}
    for k, i in _stopped(values):
        equal = values.equal.get(values.unscaled(i), [])
        added = list(equal)
        for j in added:
            # A sum hands on what it is handed, and nothing is computed for it; what others read as well has more.
            hands_on = "add" in other.rows[j].operation or other.copies(j)
            added += [m for m in other.rows[j].inputs if hands_on and len(other.used(m)) == 1]
        if both.isdisjoint(equal) and not handed.isdisjoint(added) and not _cancels(values, k):
            yield k, next((m for m in other.used(equal[0]) if m in handed), equal[0])
        elif values.rows[i].kind == "parameter" and not equal:
            yield k, None  # a weight of zeros has no fingerprint


def _cancels(values: Values, number: int) -> bool:
    """Whether it is the maximum that is subtracted before an exponential, whose gradient is zero in the end, or is
    subtracted from itself, so that a sum has its gradient and not its number."""
    rows, [of] = values.rows, values.rows[number].inputs
    most = any("max" in rows[i].operation for i in (of, *rows[of].inputs))
    less = [k for k in values.used(number) if "sub" in rows[k].operation]
    from_what = [i for k in less for i in rows[k].inputs if i != number]
    from_what += [m for i in from_what if "add" in rows[i].operation for m in rows[i].inputs]
    itself = any(values.copied(i) == values.copied(of) and not values.is_made_of(i, number) for i in from_what)
    return itself or (most and any("exp" in rows[m].operation for k in less for m in values.used(k)))


def _weights_behind(values: Values, number: int) -> set[str]:
    """The weights that a gradient of a value is handed back to."""
    seen, todo = {number}, [number]
    for i in todo:
        before = [] if re.search("stop_grad|detach", values.rows[i].operation) else values.rows[i].inputs
        todo += [k for k in dict.fromkeys(before) if k not in seen and not is_whole(values.rows[k].dtype)]
        seen.update(todo)
    return {values.rows[i].name for i in seen if values.rows[i].kind == "parameter"}
