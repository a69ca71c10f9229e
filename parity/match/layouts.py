"""In which ways the numbers of one array can lie in another: axes permuted, merged, split, or fused with others."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, permutations, product

import numpy as np

from parity.gates.weight_map import Part, across, apart

Groups = tuple[tuple[int, ...], ...]
"""The axes of one array, each as the atoms that lie in it, the slowest first."""
Cuts = tuple[tuple[int, int | tuple[int, int]], ...]
"""Atoms of a fused array, each with what of it lies in the other array: an index (which has no such atom), or rows."""
MOST_AXES = 5
"""Arrays of more axes than this are matched as they are."""


@dataclass(frozen=True)
class Layout:
    """How the axes of theirs (one layer) become those of ours; both are made of the same atoms."""

    sizes: tuple[int, ...]
    """Of each atom; of one that is cut, in the array that is fused."""
    theirs: Groups
    ours: Groups
    part: Cuts = ()
    """What of theirs is ours, where theirs is fused."""
    into: Cuts = ()
    """Where in ours it lies, where ours is fused."""

    @cached_property
    def _shared(self) -> set[int]:
        """The atoms of both sides."""
        return {atom for group in self.ours for atom in group} & {atom for group in self.theirs for atom in group}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Their axes in the order in which they come on our side: (1, 0) is transposed."""
        flat = [atom for group in self.ours for atom in group]
        places = [[flat.index(atom) for atom in group if atom in self._shared] for group in self.theirs]
        return tuple(sorted((axis for axis, place in enumerate(places) if place), key=lambda axis: places[axis]))

    @property
    def split(self) -> bool:
        """Whether an axis of one side is several of the other."""
        return any(len(group) > 1 for group in (*self.theirs, *self.ours))

    @cached_property
    def natural(self) -> bool:
        """Whether atoms of one axis keep their order: heads, then the numbers of a head."""
        sides = [[[atom for atom in g if atom in self._shared] for g in side] for side in (self.theirs, self.ours)]
        flat = [{atom: place for place, atom in enumerate(chain(*side))} for side in sides]
        kept = [
            [place[atom] for atom in group] for side, place in zip(sides, reversed(flat), strict=True) for group in side
        ]
        return all(places == sorted(places) for places in kept)

    @cached_property
    def fused(self) -> tuple[int, ...]:
        """Their axes along which rows belong to several arrays."""
        cut = {atom for atom, _ in self.part} | {
            other for atom, _ in self.into for group in self.ours if atom in group for other in group
        }
        return tuple(axis for axis, group in enumerate(self.theirs) if cut & {*group})

    @property
    def turned(self) -> "Layout":
        """From ours to theirs."""
        return Layout(self.sizes, self.ours, self.theirs, self.into, self.part)

    def of_one(self, numbers: Sequence[int]) -> "Layout":
        """Where ours are one array for each number of their first axes: of the one with these numbers."""
        cuts = [(group[0], number) for group, number in zip(self.ours, numbers, strict=False)]
        return replace(self, ours=self.ours[len(cuts) :], part=(*self.part, *cuts)) if cuts else self

    def pattern(self) -> tuple[str, dict[str, int], Part, Part]:
        """(einops pattern from theirs to ours, sizes of axes that it splits, part, into): what a `Weight` takes."""
        if not self.theirs and not self.ours:
            return "... -> ...", {}, {}, {}
        words = self._names()
        theirs, ours = ([[words[atom] for atom in group] for group in side] for side in (self.theirs, self.ours))
        part, into = ({words[atom]: cut for atom, cut in cuts} for cuts in (self.part, self.into))
        sizes = {words[atom]: size for atom, size in self._sizes(self.into).items()}
        split = [word for group in theirs for word in (group[:-1] if part.keys() & {*group} else group[1:])]
        dropped = [[word] for word, cut in part.items() if isinstance(cut, int)]
        return f"{_side(theirs)} -> {_side(dropped + ours)}", {word: sizes[word] for word in split}, part, into

    def _sizes(self, cuts: Cuts) -> dict[int, int]:
        """Of each atom in the array that is not fused by these cuts."""
        rows = {atom: cut[1] - cut[0] for atom, cut in cuts if isinstance(cut, tuple)}
        return dict(enumerate(self.sizes)) | rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Of ours."""
        sizes = self._sizes(self.part)
        return tuple(math.prod(sizes[atom] for atom in group) for group in self.ours)

    def seen(self, theirs: np.ndarray) -> np.ndarray:
        """What of theirs (one layer) is ours, by the atoms of ours: a view."""
        chosen = {atom: slice(*cut) if isinstance(cut, tuple) else cut for atom, cut in self.part}
        return across(apart(theirs, self.theirs, self._sizes(self.into), chosen), self.theirs, self.ours)

    def place(self, ours: np.ndarray) -> np.ndarray:
        """Where that lies in ours (one layer): a view."""
        chosen = {atom: slice(*cut) if isinstance(cut, tuple) else cut for atom, cut in self.into}
        return apart(ours, self.ours, self._sizes(self.part), chosen)

    def _names(self) -> list[str]:
        indices = [atom for atom, cut in self.part if isinstance(cut, int)]
        words = dict(zip([*(atom for atom, _ in self.into), *indices], ("part", "layer", "inner"), strict=False))
        rest = [atom for atom in range(len(self.sizes)) if atom not in words]
        groups = [[atom for atom in axis if atom in rest] for axis in self.theirs]
        split = [axis for axis in groups if len(axis) > 1]
        names = list("abcdefghijk") if len(rest) > 1 else ["n"]
        if len(rest) == 2 and not split:
            flat = [atom for group in groups for atom in group]
            names = ["o", "i"] if flat == rest else ["i", "o"]
        elif len(split) == 1 and len(split[0]) == 2 and len(rest) <= 3:
            others = [atom for atom in rest if atom not in split[0]]
            words |= {split[0][0]: "h", split[0][1]: "c"} | {atom: "o" if atom == rest[-1] else "i" for atom in others}
            return [words[atom] for atom in range(len(self.sizes))]
        elif len(rest) == 4 and not split and self.order in ((2, 3, 1, 0), (0, 1, 2, 3)):
            names = list("hwio" if self.order == (2, 3, 1, 0) else "oihw")
        words |= dict(zip(rest, names, strict=False))
        return [words[atom] for atom in range(len(self.sizes))]


def _side(groups: Sequence[Sequence[str]]) -> str:
    return " ".join("1" if not group else group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)


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
    real = [axis for axis, size in enumerate(ours) if size > 1]
    theirs_real = [axis for axis, size in enumerate(theirs) if size > 1]
    if max(len(real), len(theirs_real)) > MOST_AXES:
        return (same(ours),) if theirs == ours else ()
    found = []
    for pairs in _pairings(tuple(theirs_real), tuple(real), theirs, ours):
        found += list(_ordered(pairs, theirs, ours))
    unique = list(dict.fromkeys(found))
    return tuple(sorted(unique, key=lambda one: (not one.natural, one.order != tuple(sorted(one.order)))))


_Pairs = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""(axes of theirs, axes of ours) that are the same numbers; one of the two is a single axis."""


def _pairings(
    here: tuple[int, ...], there: tuple[int, ...], sizes: tuple[int, ...], other: tuple[int, ...]
) -> Iterator[_Pairs]:
    """Which axes of theirs are together which axes of ours: one to one, one to several, several to one."""
    if not here:
        if not there:
            yield []
        return
    first, rest = here[0], here[1:]
    for more in ((), *_subsets(rest)):
        whole = math.prod(sizes[axis] for axis in (first, *more))
        for chosen in _subsets(there):
            if (more and len(chosen) > 1) or math.prod(other[axis] for axis in chosen) != whole:
                continue
            left = tuple(a for a in rest if a not in more), tuple(a for a in there if a not in chosen)
            for tail in _pairings(*left, sizes, other):
                yield [((first, *more), chosen), *tail]


def _subsets(axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for bits in range(1, 2 ** len(axes)):
        yield tuple(axis for place, axis in enumerate(axes) if bits >> place & 1)


def _ordered(pairs: _Pairs, theirs: tuple[int, ...], ours: tuple[int, ...]) -> Iterator[Layout]:
    """The layouts of one pairing: the atoms that share an axis may lie in it in any order."""
    turned = [list(product(permutations(here), permutations(there))) for here, there in pairs]
    for chosen in product(*turned):
        # An atom by the axes that it is in; in the order in which it lies in theirs.
        atoms = [atom for here, there in chosen for atom in product(here, there)]
        counted = sorted(atoms, key=lambda atom: atom[1])
        yield Layout(
            tuple(min(theirs[a], ours[b]) for a, b in counted),
            tuple(tuple(counted.index(atom) for atom in atoms if atom[0] == axis) for axis in range(len(theirs))),
            tuple(tuple(n for n, atom in enumerate(counted) if atom[1] == axis) for axis in range(len(ours))),
        )


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
    found: dict[tuple[Layout, ...], Fusion] = {}
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
        for order in dict.fromkeys(layout.order for layout in natural[0]):
            alike = [[layout for layout in each if layout.order == order] for each in natural]
            if not all(alike):
                continue
            plain = tuple(each[0] for each in alike)
            # The same with heads, of which the first has as many as is said.
            split = [plain] + [
                tuple(_refined(layout, axis, (n // width,)) for layout, n in zip(plain, rows, strict=True))
                for width in dict.fromkeys(rows[0] // number for number in heads if rows[0] % number == 0)
                if all(n % width == 0 for n in rows)
            ]
            for one in filter(all, split):
                for fusion in _taking_turns(one, axis, rows, turning, bool(heads)):
                    if one is plain or fusion.groups > 1 or fusion.rotary:
                        found.setdefault(fusion.layouts, fusion)
    return tuple(found.values())


def _taking_turns(
    held: tuple[Layout, ...], axis: int, rows: Sequence[int], turning: tuple[int, ...], by_heads: bool
) -> Iterator[Fusion]:
    """The fusions along an axis of arrays that have these layouts by themselves."""
    each = [[layout.sizes[atom] for atom in layout.theirs[axis]] for layout in held]
    counts = {1, *(sizes[0] for sizes in each if len(sizes) > 1)} | (set() if by_heads else {min(rows)})
    width = math.prod(each[0][1:])
    for groups in sorted(counts):
        per = [n // groups for n in rows]
        if any(n % groups or (groups > 1 and n // groups % width) for n in rows):
            continue
        units = [math.prod(each[0][place:]) for place in range(len(each[0]) + 1)]
        unit = per[0] if len(set(per)) == 1 else next(unit for unit in units if all(n % unit == 0 for n in per))
        total, lengths = sum(per) // unit, [n // unit for n in per]
        for order in permutations(range(len(rows))):
            starts = [sum(lengths[other] for other in order[: order.index(index)]) for index in range(len(rows))]
            cut = [
                _cut(layout, axis, groups, start, length, total)
                for layout, start, length in zip(held, starts, lengths, strict=True)
            ]
            for kind in (0, 1, 2) if turning and len(each[0]) > 1 else (0,):
                made = [
                    layout if layout is None or not kind or index not in turning else _rotary(layout, axis, kind)
                    for index, layout in enumerate(cut)
                ]
                if all(made):
                    yield Fusion(tuple(filter(None, made)), groups, order, (kind, width) if kind else ())


def _cut(layout: Layout, axis: int, groups: int, start: int, length: int, total: int) -> Layout | None:
    """The same numbers as rows of a fused axis: of each group, of `total` units these."""
    refined = _refined(layout, axis, (groups, groups * length))
    if refined is None:
        return None
    held, before, place = refined.theirs[axis], 1, 0
    while before < groups:
        before, place = before * refined.sizes[held[place]], place + 1
    if length > 1:
        atom = held[place]
        if refined.sizes[atom] != length:
            return None
        sizes = (*refined.sizes[:atom], total, *refined.sizes[atom + 1 :])
        return replace(refined, sizes=sizes, part=((atom, (start, start + length)),))
    new = len(refined.sizes)
    theirs = (*refined.theirs[:axis], (*held[:place], new, *held[place:]), *refined.theirs[axis + 1 :])
    return replace(refined, sizes=(*refined.sizes, total), theirs=theirs, part=((new, start),))


def rotaries(layout: Layout, heads: Sequence[int]) -> Iterator[tuple[tuple[int, int], Layout]]:
    """The layouts in which the rows of each head are in another order, with its kind and the rows of a head.

    Rotary embeddings turn pairs of rows: row 0 with row 1 (Meta's Llama), or row 0 with the first of the second half
    (Hugging Face). 1: theirs holds halves and ours pairs; 2: the reverse.
    """
    for axis, group in enumerate(layout.theirs):
        rows = math.prod(layout.sizes[atom] for atom in group)
        split = [layout, *(_refined(layout, axis, (n,)) for n in heads if len(group) == 1 and rows % n == 0)]
        for one, kind in product(filter(None, split), (1, 2)):
            if group and (turned := _rotary(one, axis, kind)):
                yield (kind, one.sizes[one.theirs[axis][-1]]), turned


def _rotary(layout: Layout, axis: int, kind: int) -> Layout | None:
    last = layout.theirs[axis][-1]
    size = layout.sizes[last]
    if size % 2 or size < 4 or any(atom == last for atom, _ in layout.part):
        return None
    split = _split(layout, last, 2 if kind == 1 else size // 2)
    ours = [list(group) for group in split.ours]
    for group in ours:
        if last in group:
            place = group.index(last)
            group[place : place + 2] = [last + 1, last]
    return replace(split, ours=tuple(map(tuple, ours)))


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
    sizes = (*layout.sizes[:atom], number, layout.sizes[atom] // number, *layout.sizes[atom + 1 :])

    def renumbered(groups: Groups) -> Groups:
        return tuple(
            tuple(new for old in group for new in ((atom, atom + 1) if old == atom else (old + (old > atom),)))
            for group in groups
        )

    part = tuple((old + (old > atom), cut) for old, cut in layout.part)
    return Layout(sizes, renumbered(layout.theirs), renumbered(layout.ours), part)
