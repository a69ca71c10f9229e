"""Whether what two places read is in one order; else where the order was lost before them."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations, islice, permutations, product
from typing import NamedTuple

import numpy as np

from parity.differ.alignment import Start
from parity.differ.confirmation import Change, Mended, most_mended
from parity.differ.element_order import (
    NEARLY,
    distance,
    exchanged_axes,
    layouts,
    order,
    swapped_blocks,
    with_axes_as,
    without_copies,
)
from parity.differ.fingerprints import finite
from parity.differ.row_sets import is_whole
from parity.differ.substitution import Experiments
from parity.differ.values import ROW, Values

_STEPS = 50
"""Values to go back or on, at most."""
_FAR = 400
"""Values, at most, that are computed anew to see whether an order matters, or are looked at on the way back."""
_WANTED = 40
"""Values, at most, for which a side runs again at once."""
_TRIED = 24
"""Orders of axes, at most."""
_SMALL = 1 << 14
"""Elements, at most, of a value that is tried in all orders of its axes."""
_FEW = 4
"""Orders of axes of each of several arrays."""
_LARGEST = 1 << 22
"""Elements; the order of a larger value is not looked at."""
_CONFIRMED = 4
"""Orders, at most, with which a side is run to the end."""
_AXES = 5
"""Axes, at most, that are tried in every order."""
_MOVED = {"gather", "rev", "sort"}
_MOVERS = {"concatenate", "tile", *_MOVED}
"""Operations, beside copies, that give numbers another order."""


class Origin(NamedTuple):
    """Where two values with the same numbers came into different orders."""

    inherited: tuple[int, int] | None
    """(ours, theirs): the first such values; None where the inputs are in one order."""
    checked: bool
    """Whether at least one input was compared element by element, and no weights may be meant by what is exchanged."""
    said: str = ""
    mends: Mended = Mended.ALL
    """What the order of theirs mends there; ALL where nothing can be run on."""
    lost: bool = False
    """Whether ours goes on as theirs does with an input in the order of theirs, and nobody knows where it was lost."""


def origin_of_order(first: Start, second: Start) -> Origin:
    """Looks at what both places read; walks back from an input that is in another order to where that begins."""
    ours, theirs = first.values, second.values
    checked = moved = False
    for i in first.agreed:
        common = [j for j in ours.equal.get(i, ()) if j in second.agreed][:1]
        # Of what theirs does not read there, the numbers are known, and not whether they were moved rightly.
        moved |= not common and ours.rows[i].data and ours.rows[i].operation in _MOVED
        for j in common:
            state = _order(ours, theirs, i, j)
            checked |= state == "same"
            if state == "merged":
                # Only what can be run on shows whether the right port merges other axes as well.
                runs = ours.rows[i].data and not first.row.backward and not ours.rows[i].backward
                moved, state = moved or not runs, "other" if runs and ours.again is not None else state
            # Numbers that repeat themselves, and lie in no layout that both have.
            moved |= state == "unknown" and NEARLY < distance(ours.array(i), theirs.array(j)) < np.inf
            if state in ("exchanged", "other"):
                return _walk(first, second, i, j, state)
    for i in first.row.inputs if checked else ():
        for j in [] if ours.rows[i].data else [j for j in ours.equal.get(i, ()) if j in second.row.inputs][:1]:
            if _order(ours, theirs, i, j) == "other":
                return _walk(first, second, i, j, "other")
    return Origin(None, checked and not moved)


def lost_order(first: Start, second: Start) -> Origin | None:
    """Where ours came into an order in which the operations that follow do not give what theirs give, and would in
    theirs; `lost` where that is known and not the place; None where order is not what parts them.

    What both read is put into the order of theirs, axis by axis, and ours goes on from there: where it then computes a
    value of theirs that it did not, the order was wrong. What merges and splits axes, as a layout of heads or of
    rotated halves does, may give another order and be right.
    """
    ours, theirs = first.values, second.values
    experiments = Experiments(ours, theirs)
    read = [i for i in dict.fromkeys((*first.agreed, *first.row.inputs)) if i in ours.equal and _tells(ours, i)]
    ours.want(read)
    theirs.want(ours.equals(read))
    mixed = [i for i in read if not is_in_order(ours, theirs, i, exchanged=True)]
    pairs = [(i, j) for i in mixed for j in sorted(ours.equal[i], key=lambda j: (j not in second.agreed, -j))]
    # What goes on is shown better than what comes to one value, which may be another one transposed.
    for shows in (experiments.goes_on, experiments.reached):
        for i, j in pairs:
            here, there = ours.array(i), theirs.array(j)
            candidates = [] if here is None or there is None else _layouts(here, there)
            # What is the same but for a mask is in one order.
            if here is None or any(_close(here, array) and not _is_near(here, array) for array in candidates):
                continue
            shown = [array for array in candidates if shows(i, array) is not None]
            if shown:
                shown = _furthest(experiments, i, shown)
                moved = first_move(ours, theirs, i)
                # What computes moves nothing: theirs has sorted what it reads.
                moves = ours.copies(moved) or ours.rows[moved].operation in _MOVERS
                if not moves:
                    return Origin(None, False, lost=True)
                return Origin((moved, j), True, mends=_mends(first, second, moved, i, shown))
    return None


def _mends(first: Start, second: Start, moved: int, number: int, candidates: Sequence[np.ndarray]) -> Mended:
    """What one of these orders of a value mends, if what the operation that moved it reads is in theirs."""
    ours, theirs = first.values, second.values
    read = [k for k in ours.rows[moved].inputs if _tells(ours, k)]
    if not all(k in ours.equal and is_in_order(ours, theirs, k) for k in read):
        return Mended.NOT_ALL
    if moved != number:
        # What was made of it may be in an order that another operation is wrong about.
        candidates = [array for j in ours.equal.get(moved, ()) for array in _mending(ours, theirs, moved, j)]
    changes = [Change(moved, array, {}) for array in candidates]
    line = ours.rows[moved].place[:2], ours.rows[moved].operation
    alike = [k for k in ours.equal if (ours.rows[k].place[:2], ours.rows[k].operation) == line]
    if 1 < len(alike) <= _WANTED:  # keys and values, say
        ours.want(alike)
        theirs.want(ours.equals(alike))
        arrays = [(ours.array(k), [theirs.array(j) for j in ours.equal[k]]) for k in alike]
        known = [[each for y in there for each in _in_axes_of(x, y)] for x, there in arrays]
        together = islice(zip(*known, strict=False), _CONFIRMED)
        changes += [Change(alike[0], one, dict(zip(alike[1:], more, strict=True))) for one, *more in together]
    return most_mended((ours, theirs), changes, (first, second))


def _in_axes_of(here: np.ndarray | None, there: np.ndarray | None) -> list[np.ndarray]:
    return [] if here is None or there is None else with_axes_as(here, there)


def _mending(ours: Values, theirs: Values, i: int, j: int) -> list[np.ndarray]:
    """A value in those orders of theirs with which ours goes on as theirs does, those first with which it goes
    furthest: what is sorted, as sequences by their length are, is in another order in the right port, too."""
    experiments, candidates = Experiments(ours, theirs, _FAR), _in_their_order(ours.array(i), theirs.array(j))
    return _furthest(experiments, i, [array for array in candidates if experiments.reached(i, array) is not None])


def _furthest(experiments: Experiments, number: int, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The few with which ours goes on furthest in the place of a value, the best first."""
    agreeing = [agreement.agreeing if (agreement := experiments.goes_on(number, array)) else 0 for array in arrays]
    return [arrays[n] for n in sorted(range(len(arrays)), key=lambda n: -agreeing[n])][:_CONFIRMED]


def _in_their_order(here: np.ndarray | None, there: np.ndarray | None) -> list[np.ndarray]:
    """Their array in our shape, in each order of axes; of shapes that have no axes in common, in some."""
    if here is None or there is None:
        return []
    return with_axes_as(here, there) or _layouts(here, there)


def _layouts(here: np.ndarray, there: np.ndarray) -> list[np.ndarray]:
    return layouts(here, there)[: _TRIED if here.size > _SMALL else None]


def _made_in_their_order(first: Start, second: Start) -> list[np.ndarray]:
    """What ours makes, and theirs makes too, of several values that it reads there in the order of theirs, such as
    queries and keys."""
    ours, theirs = first.values, second.values
    given: list[list[np.ndarray]] = []
    mixed = 0
    for i in first.row.inputs:
        here, equal = ours.array(i), [j for j in ours.equal.get(i, ()) if j in second.agreed]
        moved = _in_their_order(here, theirs.array(equal[0]))[:_FEW] if equal else []
        mixed += here is not None and bool(moved) and not any(_close(here, array) for array in moved)
        given.append(moved or ([] if here is None else [here]))
    if mixed < 2 or first.row.again is None or not all(given):
        return []
    made = []
    for arrays in islice(product(*given), _TRIED):
        with suppress(Exception):
            made.append(np.asarray(first.row.again(arrays)))
    return [array for array in made if Experiments(ours, theirs).reached(first.number, array) is not None]


def reordered_choice(first: Start, second: Start, number: int) -> Origin:
    """Where a value is chosen by whole numbers that theirs has in another order, if they make ours go on as theirs."""
    ours, theirs = first.values, second.values
    todo = [number]
    for i in todo:
        for k in ours.rows[i].inputs:
            for m in ours.reordered.get(k, ()):
                kept = np.asarray(ours.array(k)).dtype
                changes = (Change(k, array.astype(kept), {}) for array in _mending(ours, theirs, k, m))
                mends = most_mended((ours, theirs), changes, (first, second))
                if mends > Mended.NOT_ALL:
                    return _first_choice(ours, theirs, (k, m), mends)
            todo += [k] if ours.copies(i) and k not in todo else []
    return Origin(None, False)


def _first_choice(ours: Values, theirs: Values, met: tuple[int, int], mends: Mended) -> Origin:
    """Where whole numbers came into another order: back through such as theirs has in another order, too. If what they
    are made of does not agree, that is what chooses otherwise."""
    k, m = met
    while read := [i for i in ours.rows[k].inputs if ours.rows[i].data]:
        moved = [(i, j) for i in read for j in ours.reordered.get(i, ())]
        if not moved:
            break
        k, m = moved[0]
    known = all(i in ours.equal and (is_whole(ours.rows[i].dtype) or is_in_order(ours, theirs, i)) for i in read)
    return Origin((k, m), True, mends=mends if known else Mended.NOT_ALL)


def _close(here: np.ndarray, there: np.ndarray) -> bool:
    return _is_near(finite(here), finite(there))


def _is_near(here: np.ndarray, there: np.ndarray) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(np.abs(here - there).max() <= NEARLY * (np.abs(finite(here)).max() + 1e-300))


def first_move(ours: Values, theirs: Values, number: int) -> int:
    """The operation that put numbers into another order: the last one before a value whose inputs are in theirs; of a
    transpose and a reshape that belong together, the transpose."""
    for _ in range(_FAR):
        met = _met_behind(ours, number)[:_WANTED]
        ours.want(met)
        theirs.want(ours.equals(met))
        mixed = next((i for i in met if not is_in_order(ours, theirs, i)), None)
        if mixed is None:
            break
        number = mixed
    last = [i for i in ours.rows[number].inputs if ours.rows[i].operation == "transpose"]
    return last[0] if last and ours.rows[number].operation == "reshape" else number


def _met_behind(values: Values, number: int) -> list[int]:
    """The values with an equal that a value was made of, directly or through such as have none."""
    found = [number]
    for i in found:
        follows = (i == number or i not in values.equal) and len(found) < _FAR
        found += [k for k in values.rows[i].inputs if follows and _tells(values, k) and k not in found]
    return [i for i in found[1:] if i in values.equal]


def _tells(values: Values, number: int) -> bool:
    """Whether a value has numbers whose order can be looked at; each side chooses by whole ones in its own way."""
    row = values.rows[number]
    return not is_whole(row.dtype) and (row.data or row.features is not None)


def is_in_order(ours: Values, theirs: Values, number: int, *, exchanged: bool = False) -> bool:
    """Whether some equal value of theirs has the same numbers in the same order, up to the order of axes: those of the
    side that has fewer, as another one may have merged what is moved. Two of one size are not taken for each other,
    unless they may be `exchanged`. Of a step's part of what theirs has as a whole, nothing is known."""
    here = ours.array(number)
    if here is None or here.size > _LARGEST or ours.rows[number].operation == ROW:
        return True
    known = (there for j in ours.equal[number] if (there := theirs.array(j)) is not None)
    pairs = (pair for there in known for pair in _splitting(here, there, ours.rows[number].data, exchanged))
    return any(_close(many, few.reshape(many.shape)) for few, many in pairs)


def _splitting(
    here: np.ndarray, there: np.ndarray, of_data: bool, exchanged: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The two arrays, the one with fewer axes first, in those orders of its axes in which the other's are parts of
    them."""
    here, there = without_copies(here).squeeze(), without_copies(there).squeeze()
    if here.size != there.size:
        return
    few, many = (there, here) if there.ndim <= here.ndim else (here, there)
    orders = permutations(range(few.ndim)) if few.ndim <= _AXES else [(*range(few.ndim),)]
    moved = [few.transpose(axes) for axes in orders if exchanged or not _exchanges(axes, few.shape)]
    # Of batches in batches, one side may have merged the axes in another order.
    wholes = [many, many.swapaxes(0, 1)] if of_data and many.shape[:1] < few.shape[:1] else [many]
    yield from ((x, y) for x, y in product(moved, wholes) if _splits(x, y))


def _exchanges(axes: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether an order of axes exchanges two of one size, as a transpose of an image does."""
    return any(shape[a] == shape[b] and a > b for a, b in combinations(axes, 2))


def _splits(few: np.ndarray, many: np.ndarray) -> bool:
    """Whether the axes of one array are those of another one, merged."""
    return {*np.cumprod(few.shape)} <= {*np.cumprod(many.shape)}


def _order(ours: Values, theirs: Values, i: int, j: int) -> str:
    """What `order` says of two values; "exchanged" where it is the same but for two axes of one size, and "merged"
    where axes were exchanged before they were merged."""
    here, there = ours.array(i), theirs.array(j)
    if here is None or there is None:
        return "unknown"
    state = order(here, there)
    if state == "same" and exchanged_axes(here, there):
        return "exchanged"
    pairs = [*_splitting(here, there, ours.rows[i].data, exchanged=True)] if state == "same" else []
    if pairs and not any(_close(many, few.reshape(many.shape)) for few, many in pairs):
        return "merged"
    if state != "unknown":
        return state
    # A table repeats some of its numbers, and a token that is learnt stands in every sequence, so that not every order
    # shows; whole parts do.
    varied = len(np.unique(here)) > (here.size // 2 if ours.rows[i].data else 2)
    return "other" if varied and swapped_blocks(here, there) else state


def _walk(first: Start, second: Start, i: int, j: int, state: str) -> Origin:
    """Back to the first two values that are in such a `state`, each made of what is not.

    Ours goes on as theirs does with them in the order of theirs; else they are in another order in the right port, too.
    An exchange is checked where the line does it to the one thing that it reads, because two operands of a product may
    be exchanged themselves, as their weights are.
    """
    ours, theirs = first.values, second.values
    met = [(i, j)]
    while len(met) < _STEPS and (before := _mixed_before(ours, theirs, *met[-1], state)):
        met.append(before)
    # One table may be read beside another that is in a wrong order, too; a side that was recorded cannot run again.
    sorts = ours.rows[i].data and not first.row.backward and not ours.rows[i].backward and ours.again is not None
    i, j = met[-1]
    number, orders = i, _mending(ours, theirs, i, j) if sorts else []
    if sorts and not orders:
        number, orders = first.number, _made_in_their_order(first, second)
        if not orders:
            return Origin(None, False)
    here, there = ours.array(i), theirs.array(j)
    assert here is not None
    assert there is not None
    if state == "other":
        sorts = sorts and ours.parameter(i) is None
        mends = _mends(first, second, i, number, orders) if sorts else Mended.ALL
        # Of what is joined, one part may have its axes exchanged, which is no other order on its own.
        if mends is not Mended.ALL or ours.rows[i].operation in ("concatenate", "reshape"):
            i = first_move(ours, theirs, i)
            mends = _mends(first, second, i, number, orders) if sorts else Mended.ALL
        return Origin((i, j), True, swapped_blocks(here, there) or "", mends)
    axes, checked = exchanged_axes(here, there), False
    if len(ours.rows[i].inputs) == 1 and ours.parameter(i) is None:
        [k] = ours.rows[i].inputs
        for x, y in ((ours.array(k), theirs.array(m)) for m in ours.equal.get(k, ())):
            same = x is not None and y is not None and x.squeeze().shape == y.squeeze().shape
            checked |= same and distance(x, y) <= NEARLY
    return Origin((i, j), checked, f"axes {' and '.join(map(str, axes))} are exchanged")


def _mixed_before(ours: Values, theirs: Values, i: int, j: int, state: str) -> tuple[int, int] | None:
    """An input of ours whose equal among their inputs, near or far, is in such a state."""
    table = not ours.rows[i].data
    moved = state == "other" and ours.parameter(i) is None
    behind = [j] * (table or moved) + _behind(theirs, j)
    # Each side runs again, if it must, for many steps.
    far = {m for k in _behind(ours, i, _STEPS) for m in ours.equal.get(k, ())} & {*_behind(theirs, j, _STEPS)}
    ours.want(k for m in sorted(far)[-_WANTED:] for k in theirs.equal.get(m, ()))
    theirs.want(sorted(far)[-_WANTED:])
    for k in [i] * table + _behind(ours, i):
        for m in ours.equal.get(k, ()):
            # Ours alone may move the numbers, if they were in another order before; a table may be copied to the shape
            # of what it is added to.
            met = m in behind and (k, m) != (i, j) and _order(ours, theirs, k, m) == state
            if met and (m != j or table or not is_in_order(ours, theirs, k)):
                return k, m
    return None


def _behind(values: Values, number: int, depth: int = 6) -> list[int]:
    """The values that a value was made from, near ones first."""
    found, layer = [], [number]
    data = values.rows[number].data
    for _ in range(depth):
        layer = [k for i in layer for k in values.rows[i].inputs if values.rows[k].data == data and k not in found]
        found += layer
    return list(dict.fromkeys(found))
