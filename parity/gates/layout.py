"""How the numbers of one array lie in another: axes permuted, merged, split, or fused with those of others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

Groups = tuple[tuple[Any, ...], ...]
"""The axes of one array, each as the atoms that lie in it, the slowest first."""
Cut = int | tuple[int, int]
"""What is taken of an atom: an index, or rows from the first to before the second."""
Cuts = tuple[tuple[Any, Cut], ...]


@dataclass(frozen=True)
class Layout:
    """How the axes of theirs (one layer) become those of ours; both are made of the same atoms."""

    sizes: Any
    """Of each atom; of one that is cut, in the array that is fused."""
    theirs: Groups
    ours: Groups
    part: Cuts = ()
    """What of theirs is ours, where theirs is fused; of what is taken by index, ours has no atom."""
    into: Cuts = ()
    """Where in ours it lies, where ours is fused."""

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Their axes in the order in which they come on our side: (1, 0) is transposed."""
        ours = [*chain(*self.ours)]
        places = [[ours.index(atom) for atom in group if atom in ours] for group in self.theirs]
        return tuple(sorted((axis for axis, place in enumerate(places) if place), key=lambda axis: places[axis]))

    @cached_property
    def natural(self) -> bool:
        """Whether atoms of one axis keep their order: heads, then the numbers of a head."""
        ours, theirs = [*chain(*self.ours)], [*chain(*self.theirs)]
        return all(
            (kept := [other.index(atom) for atom in group if atom in other]) == sorted(kept)
            for side, other in ((self.theirs, ours), (self.ours, theirs))
            for group in side
        )

    @property
    def split(self) -> bool:
        """Whether an axis of one side is several of the other."""
        return any(len(group) > 1 for group in (*self.theirs, *self.ours))

    @cached_property
    def fused(self) -> tuple[int, ...]:
        """Their axes along which rows belong to several arrays."""
        into, cut = dict(self.into), set(dict(self.part))
        cut |= {atom for group in self.ours if into.keys() & {*group} for atom in group}
        return tuple(axis for axis, group in enumerate(self.theirs) if cut & {*group})

    @property
    def turned(self) -> "Layout":
        """From ours to theirs."""
        return Layout(self.sizes, self.ours, self.theirs, self.into, self.part)

    def of_one(self, numbers: Sequence[int]) -> "Layout":
        """Where ours are one array for each number of their first axes: of the one with these numbers."""
        cuts = [(group[0], number) for group, number in zip(self.ours, numbers, strict=False)]
        return replace(self, ours=self.ours[len(cuts) :], part=(*self.part, *cuts))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of ours."""
        return tuple(math.prod(self._size(atom, self.part) for atom in group) for group in self.ours)

    def seen(self, theirs: np.ndarray) -> np.ndarray:
        """What of theirs (one layer) is ours, by the atoms of ours: a view."""
        ours = [*chain(*self.ours)]
        shared = [atom for atom in chain(*self.theirs) if atom in ours]
        order = [shared.index(atom) for atom in ours if atom in shared]
        return self._apart(theirs, self.theirs, self.part, self.into).transpose(order)

    def place(self, ours: np.ndarray) -> np.ndarray:
        """Where that lies in ours (one layer): a view."""
        return self._apart(ours, self.ours, self.into, self.part)

    def _apart(self, array: np.ndarray, groups: Groups, own: Cuts, other: Cuts) -> np.ndarray:
        atoms, cuts = [*chain(*groups)], dict(own)
        chosen = [slice(*cut) if isinstance(cut := cuts.get(atom, (None,)), tuple) else cut for atom in atoms]
        view: np.ndarray = array.reshape([self._size(atom, other) for atom in atoms])[(*chosen, ...)]
        return view

    def _size(self, atom: Any, cuts: Cuts) -> int:
        """Of an atom in the array that is not fused by these cuts."""
        cut = dict(cuts).get(atom)
        return int(cut[1] - cut[0] if isinstance(cut, tuple) else self.sizes[atom])

    def pattern(self) -> tuple[str, dict[str, int], dict[str, Cut], dict[str, Cut]]:
        """(einops pattern from theirs to ours, sizes of axes that it splits, part, into): what a `Weight` takes."""
        indices = [atom for atom, cut in self.part if isinstance(cut, int)]
        words = dict(zip([*dict(self.into), *indices], ("part", "layer", "inner"), strict=False))
        few, many = iter("hc"), iter("abdefgjlmn")
        for axis, group in enumerate(self.theirs):
            rest = [atom for atom in group if atom not in words]
            words |= {atom: "oikw"[axis] if len(rest) == 1 else next(few, "") or next(many) for atom in rest}
        sides = [[[words[atom] for atom in group] for group in side] for side in (self.theirs, self.ours)]
        part, into = ({words[atom]: cut for atom, cut in cuts} for cuts in (self.part, self.into))
        sizes = {words[atom]: self._size(atom, self.into) for atom in chain(*self.theirs)}
        split = [word for group in sides[0] for word in group[:-1]]
        sides[1] = [[words[atom]] for atom in indices] + sides[1]
        axes = (" ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" if g else "1" for g in side) for side in sides)
        return " -> ".join(axes), {word: sizes[word] for word in split}, part, into
