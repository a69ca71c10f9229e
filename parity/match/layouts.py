"""In which ways the numbers of one array can lie in another: axes permuted, merged, split, or fused with others."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, permutations, product
from operator import mul

from parity.gates.layout import Layout

MOST_AXES = 5
"""Arrays of more axes than this are matched as they are."""


def same(shape: Sequence[int]) -> Layout:
    """Nothing moves."""
    groups = tuple((axis,) for axis in range(len(shape)))
    return Layout(tuple(shape), groups, groups)


@lru_cache(maxsize=4096)
def layouts(theirs: tuple[int, ...], ours: tuple[int, ...]) -> tuple[Layout, ...]:
    """Every way in which an array of shape `theirs` can lie in one of shape `ours`: natural orders first.

    An axis of one side is one or several axes of the other; axes of size 1 come and go.
    """
    if math.prod(theirs) != math.prod(ours):
        return ()
    real = [[axis for axis, size in enumerate(shape) if size > 1] for shape in (theirs, ours)]
    if max(map(len, real)) > MOST_AXES:
        return (same(ours),) if theirs == ours else ()
    orders = product(permutations(real[0]), permutations(real[1]))
    unique = filter(None, dict.fromkeys(_aligned(here, there, theirs, ours) for here, there in orders))
    return tuple(sorted(unique, key=lambda one: (not one.natural, one.order != tuple(sorted(one.order)))))


def _aligned(
    here: tuple[int, ...], there: tuple[int, ...], theirs: tuple[int, ...], ours: tuple[int, ...]
) -> Layout | None:
    """The layout in which the axes of both sides, in these orders, are one sequence of numbers, if it is one."""
    ends = [list(accumulate((shape[axis] for axis in axes), mul)) for axes, shape in ((here, theirs), (there, ours))]
    found, before = [], 1
    for end in sorted({*ends[0], *ends[1]}):
        if end % before:
            return None
        found.append((here[bisect_left(ends[0], end)], there[bisect_left(ends[1], end)], end // before))
        before = end
    number = {atom: n for n, atom in enumerate(sorted(found))}
    one, other = (
        tuple(tuple(number[atom] for atom in found if atom[side] == axis) for axis in range(len(shape)))
        for side, shape in enumerate((theirs, ours))
    )
    if any(len(one[a]) > 1 < len(other[b]) for a, b, _ in found):
        return None
    return Layout(tuple(size for _, _, size in number), one, other)


@dataclass(frozen=True)
class Fusion:
    """One way in which an array holds others, fused along one axis."""

    layouts: tuple[Layout, ...]
    """From the fused array to each of the others."""
    groups: int
    """How many times the others take turns along the axis: 1 where they lie one after the other, else their heads or
    groups of heads."""
    order: tuple[int, ...]
    """Which of them comes first, second ..."""
    rotary: tuple[int, ...] = ()
    """Where the rows of its heads are in another order: the kind of `rotaries`, and the rows of a head."""


@lru_cache(maxsize=4096)
def fusions(
    whole: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], turning: tuple[int, ...], heads: tuple[int, ...]
) -> tuple[Fusion, ...]:
    """How an array can hold arrays of these shapes: one after the other, or taking turns, by heads or groups of heads.

    `heads` lists numbers of heads to try where the shapes do not say it; without any, single rows may take turns. Rows
    of those that `turning` lists (queries and keys) may be in either order of rotary embeddings.
    """
    counts = [math.prod(shape) for shape in shapes]
    if sum(counts) != math.prod(whole):
        return ()
    found: list[Fusion] = []
    for axis, size in enumerate(whole):
        rest = math.prod(whole) // size if size else 0
        if not rest or any(count % rest for count in counts):
            continue
        rows = [count // rest for count in counts]
        natural = [
            [
                layout
                for layout in layouts((*whole[:axis], number, *whole[axis + 1 :]), shape)
                if layout.natural and (layout.theirs[axis] or number == 1)
            ]
            for number, shape in zip(rows, shapes, strict=True)
        ]
        for axes in dict.fromkeys(layout.order for layout in natural[0]):
            alike = [next((one for one in each if one.order == axes), None) for each in natural]
            found += _taking_turns([one for one in alike if one], axis, rows, turning, heads) if all(alike) else []
    return tuple(found)


def _taking_turns(
    alike: Sequence[Layout], axis: int, rows: Sequence[int], turning: tuple[int, ...], heads: tuple[int, ...]
) -> Iterator[Fusion]:
    """The fusions along an axis of arrays that have these layouts by themselves."""
    said = math.prod(alike[0].sizes[atom] for atom in alike[0].theirs[axis][1:])
    hinted = [rows[0] // number for number in heads if said == 1 and rows[0] % number == 0]
    for width in dict.fromkeys((said, *hinted)):
        if any(n % width for n in rows):
            continue
        units = [n // width for n in rows]
        for groups in {1, min(units)} if width > 1 or not heads else {1}:
            held = [_refined(layout, axis, (groups, unit)) for layout, unit in zip(alike, units, strict=True)]
            if None in held or any(unit % groups for unit in units):
                continue
            for order, kind in product(permutations(range(len(rows))), (0, 1, 2) if turning and width > 1 else (0,)):
                if width != said and groups == 1 and not kind:
                    continue  # the same as without heads
                made, start = {}, 0
                for index in order:
                    length = units[index] // groups
                    cut = _cut(held[index], axis, groups, start, length, sum(units) // groups)  # type: ignore[arg-type]
                    made[index] = _rotary(cut, axis, kind) if kind and index in turning else cut
                    start += length
                layouts = tuple(made[index] for index in range(len(rows)))
                if None not in layouts:
                    yield Fusion(layouts, groups, order, (kind, width) if kind else ())  # type: ignore[arg-type]


def _cut(layout: Layout, axis: int, groups: int, start: int, length: int, total: int) -> Layout:
    """The same numbers as rows of a fused axis: of each group, of `total` units these."""
    held, sizes = layout.theirs[axis], layout.sizes
    place = next(n for n in range(len(held) + 1) if math.prod(sizes[atom] for atom in held[:n]) == groups)
    if length > 1:
        atom = held[place]
        return replace(
            layout, sizes=(*sizes[:atom], total, *sizes[atom + 1 :]), part=((atom, (start, start + length)),)
        )
    theirs = (*layout.theirs[:axis], (*held[:place], len(sizes), *held[place:]), *layout.theirs[axis + 1 :])
    return replace(layout, sizes=(*sizes, total), theirs=theirs, part=((len(sizes), start),))


@lru_cache(maxsize=4096)
def rotaries(layout: Layout, heads: tuple[int, ...]) -> tuple[tuple[tuple[int, int], Layout], ...]:
    """The layouts in which the rows of each head are in another order, with its kind and the rows of a head.

    Rotary embeddings turn pairs of rows: row 0 with row 1 (Meta's Llama), or row 0 with the first of the second half
    (Hugging Face). 1: theirs holds halves and ours pairs; 2: the reverse.
    """
    found = []
    for axis, group in enumerate(layout.theirs):
        rows = math.prod(layout.sizes[atom] for atom in group)
        split = [layout, *(_refined(layout, axis, (n,)) for n in heads if len(group) == 1 and rows % n == 0)]
        for one, kind in product(filter(None, split), (1, 2)):
            if group and (turned := _rotary(one, axis, kind)):
                found.append(((kind, one.sizes[one.theirs[axis][-1]]), turned))
    return tuple(found)


def _rotary(layout: Layout, axis: int, kind: int) -> Layout | None:
    last, new = layout.theirs[axis][-1], len(layout.sizes)
    size = layout.sizes[last]
    if size % 2 or size < 4 or last in dict(layout.part):
        return None
    split = _split(layout, last, 2 if kind == 1 else size // 2)
    swapped = {last: new, new: last}
    return replace(split, ours=tuple(tuple(swapped.get(atom, atom) for atom in group) for group in split.ours))


def _refined(layout: Layout, axis: int, boundaries: Sequence[int]) -> Layout | None:
    """The same layout with atoms of one of their axes split, so that some make up each of these numbers of rows."""
    for boundary in boundaries:
        before = 1
        for atom in layout.theirs[axis]:
            size = layout.sizes[atom]
            if before < boundary < before * size:
                if boundary % before or size % (boundary // before):
                    return None
                layout = _split(layout, atom, boundary // before)
                break
            before *= size
        else:
            if boundary > before:
                return None
    return layout


def _split(layout: Layout, atom: int, number: int) -> Layout:
    """The same layout with one atom as two, the first of this size."""
    new, sizes = len(layout.sizes), (*layout.sizes, layout.sizes[atom] // number)
    theirs, ours = (
        tuple(tuple(n for old in group for n in ((old, new) if old == atom else (old,))) for group in side)
        for side in (layout.theirs, layout.ours)
    )
    return replace(layout, sizes=(*sizes[:atom], number, *sizes[atom + 1 :]), theirs=theirs, ours=ours)
