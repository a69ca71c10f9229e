"""In which ways the numbers of one array can lie in another: axes permuted, merged, split, or fused with others."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import permutations, product

import einops
import numpy as np

Groups = tuple[tuple[int, ...], ...]
"""The axes of one array, each as the atoms that lie in it, the slowest first."""
MOST_AXES = 5
"""Arrays of more axes than this are matched as they are."""


@dataclass(frozen=True)
class Layout:
    """How the axes of theirs (one layer) become those of ours; both are made of the same atoms."""

    sizes: tuple[int, ...]
    """Of each atom; atoms are counted in the order of our axes."""
    theirs: Groups
    ours: Groups
    fused: tuple[int, int, int] | None = None
    """(axis of theirs, place among its atoms, number of parts): an atom that counts parts; only one part is ours."""
    part: int | tuple[int, int] | None = None
    """Which part it is; (start, stop) where the parts are rows of an atom, and differ in number."""
    rows: int | None = None
    """The atom that `part` takes rows of."""

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Their axes in the order in which they come on our side: (1, 0) is transposed."""
        flat = [atom for group in self.ours for atom in group]
        places = {axis: [flat.index(atom) for atom in group] for axis, group in enumerate(self.theirs) if group}
        return tuple(sorted(places, key=lambda axis: places[axis]))

    @property
    def split(self) -> bool:
        """Whether an axis of one side is several of the other."""
        return any(len(group) > 1 for group in (*self.theirs, *self.ours))

    @cached_property
    def natural(self) -> bool:
        """Whether atoms of one axis keep their order: heads, then the numbers of a head."""
        flat = [atom for group in self.ours for atom in group]
        by_theirs = all([flat.index(a) for a in group] == sorted(flat.index(a) for a in group) for group in self.theirs)
        lay = [atom for group in self.theirs for atom in group]
        return by_theirs and all([lay.index(a) for a in g] == sorted(lay.index(a) for a in g) for g in self.ours)

    def pattern(self) -> tuple[str, dict[str, int], dict[str, int | tuple[int, int]]]:
        """(einops pattern from theirs to ours, sizes of axes that it splits, part)."""
        if not self.theirs and not self.ours:
            return "... -> ...", {}, {}
        words = self._names()
        size_of = dict(zip(words, self.sizes, strict=False))
        theirs, ours = ([[words[atom] for atom in group] for group in side] for side in (self.theirs, self.ours))
        split = [word for group in theirs for word in group[1:]]
        part: dict[str, int | tuple[int, int]] = {}
        if self.fused is not None:
            axis, place, number = self.fused
            split = [*theirs[axis][1:], *split, "part", *theirs[axis][:place]]
            theirs[axis].insert(place, "part")
            ours.insert(0, ["part"])
            size_of["part"] = number
            part = {} if self.part is None else {"part": self.part}
        elif self.rows is not None and self.part is not None:
            row = words[self.rows]
            part = {row: self.part}
            # How many rows there are in all follows from the shape; the rest of the axis is said.
            split = [word for group in theirs for word in (group if row in group else group[1:]) if word != row]
        return f"{_side(theirs)} -> {_side(ours)}", {word: size_of[word] for word in split}, part

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Theirs (one layer) in our layout."""
        pattern, sizes, part = self.pattern()
        after = einops.rearrange(np.asarray(array), pattern, **sizes)
        for name, rows in part.items():
            axis = pattern.split(" -> ")[1].split().index(name)
            after = np.take(after, rows if isinstance(rows, int) else np.arange(*rows), axis)
        return after

    def _names(self) -> list[str]:
        atoms = sum(map(len, self.ours))
        split = [axis for axis in self.theirs if len(axis) > 1]
        if atoms == 2 and not split:
            return ["o", "i"] if self.order == (0, 1) else ["i", "o"]
        if len(split) == 1 and len(split[0]) == 2 and atoms <= 3:
            names = ["i"] * atoms
            names[split[0][0]], names[split[0][1]] = "h", "c"
            if atoms == 3 and 2 not in split[0]:
                names[2] = "o"
            return names
        if atoms == 4 and not split and self.order in ((2, 3, 1, 0), (0, 1, 2, 3)):
            return list("hwio" if self.order == (2, 3, 1, 0) else "oihw")
        return list("abcdefghijk"[:atoms]) if atoms > 1 else ["n"]


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


@lru_cache(maxsize=4096)
def parts(
    theirs: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], index: int, heads: tuple[int, ...] = ()
) -> tuple[Layout, ...]:
    """How `theirs` can hold arrays of these shapes, fused along one axis, and where in it number `index` lies.

    The parts lie one after the other; or, where all are of one size, each head has its own (`heads` lists numbers of
    heads to try where the shapes do not say it).
    """
    counts = [math.prod(shape) for shape in shapes]
    if sum(counts) != math.prod(theirs):
        return ()
    ours, number = shapes[index], len(shapes)
    found = []
    for axis, size in enumerate(theirs):
        rest = math.prod(theirs) // size if size else 0
        if not rest or any(count % rest for count in counts):
            continue
        rows = [count // rest for count in counts]
        smaller = (*theirs[:axis], rows[index], *theirs[axis + 1 :])
        for layout in layouts(smaller, ours):
            if not layout.natural or not layout.theirs[axis]:
                continue
            if len(set(rows)) == 1:
                found.append(replace(layout, fused=(axis, 0, number), part=index))
                if len(layout.theirs[axis]) > 1:
                    found.append(replace(layout, fused=(axis, 1, number), part=index))
                else:
                    found += [
                        replace(split, fused=(axis, 1, number), part=index)
                        for split in (_split(layout, axis, count) for count in heads if 1 < count < rows[index])
                        if split is not None
                    ]
            else:
                slowest = layout.theirs[axis][0]
                unit = rows[index] // layout.sizes[slowest]
                if any(count % unit for count in rows):
                    continue
                start = sum(rows[:index]) // unit
                found.append(replace(layout, part=(start, start + layout.sizes[slowest]), rows=slowest))
    return tuple(found)


def _split(layout: Layout, axis: int, heads: int) -> Layout | None:
    """The same layout with the only atom of one of their axes split into heads and the rest."""
    (atom,) = layout.theirs[axis]
    if layout.sizes[atom] % heads:
        return None
    sizes = (*layout.sizes[:atom], heads, layout.sizes[atom] // heads, *layout.sizes[atom + 1 :])

    def renumbered(groups: Groups) -> Groups:
        return tuple(
            tuple(new for old in group for new in ((atom, atom + 1) if old == atom else (old + (old > atom),)))
            for group in groups
        )

    return Layout(sizes, renumbered(layout.theirs), renumbered(layout.ours))
