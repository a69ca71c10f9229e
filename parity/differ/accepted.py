"""Differences that somebody accepts: theirs goes on with the numbers of ours from there, and the search behind them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from parity.differ.alignment import REACH, Paired, Start, match
from parity.differ.answer import Difference
from parity.differ.element_order import with_axes_as
from parity.differ.values import Site, Values, short
from parity.gates.measure import FLOAT64_BAR

_TRIED = 8
"""Pairs of values, at most, that the two sides may come together again at."""
_MOST = 100
"""Places that are passed, at most."""
_KINDS = {"epsilon": "another constant is added"}
"""What a kind is called elsewhere."""


@dataclass
class Accepted:
    """What is passed: places and kinds, and differences up to a bar; and what was."""

    ignore: Sequence[str] = ()
    bar: float = FLOAT64_BAR
    put: dict[int, np.ndarray] = field(default_factory=dict)
    """Values of theirs -> the numbers of ours that stand for them."""
    passed: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Of ours, which were passed forward: their derivatives differ, too."""
    said: set[str] = field(default_factory=set)
    """Of `ignore`, what was met."""

    def behind(
        self,
        found: Difference,
        pair: Paired,
        theirs_again: Callable[[], Values],
        search: Callable[[], Difference],
    ) -> Difference:
        """What `search` finds behind a place that is ignored; `found` itself where it is not, or where the two sides
        do not come together behind it."""
        items = [*self.ignore, *(self.lines if found.stage == "backward" else ())]
        item = next((item for item in items if _is_kind(item, found) or _sides(item, found)), None)
        if item is None or not found:
            return found
        self.said.add(item)
        self.lines += [f"{site.file}:{site.line}" for site in (found.ours,) if site]
        place = next(f"{short(site.file)}:{site.line}" for site in (found.ours, found.theirs) if site)
        first, second, _ = pair
        near = [] if first is None or second is None else _candidates(item, found, first, second)
        near = [each for each in near if each[1] not in self.put][: _TRIED if len(self.put) < _MOST else 0]
        said = f"{place} ({found.kind or 'what follows from it'})"
        for i, j, array in near:
            ours = replace(first.values, equal={})
            self.put[j] = array
            match(ours, theirs_again())
            if _meets_again(ours, i):
                self.passed.append(said)
                return search()
            del self.put[j]
        if not near:
            self.passed.append(f"{place}, and nothing on the two sides belongs together there: the search ends here")
            return found
        # Perhaps the next difference stands right behind this one.
        self.put[near[0][1]] = near[0][2]
        self.passed.append(f"{said}, behind which the two sides do not come together at once")
        return replace(search(), sure=False, confirmed=False)

    def noted(self, found: Difference) -> Difference:
        """An answer that says what was ignored, and what of it was never met."""
        never = [f"nothing that is {item!r}" for item in self.ignore if item not in self.said]
        return replace(found, ignored=tuple(dict.fromkeys([*self.passed, *never])))


def _is_kind(item: str, found: Difference) -> bool:
    return _KINDS.get(item, item).lower() in (found.kind or "").lower()


def _sides(item: str, found: Difference) -> list[Site]:
    """The places of an answer that an item names."""
    return [site for site in (found.ours, found.theirs) if site is not None and _names(item, site)]


def _names(item: str, site: Site) -> bool:
    """Whether an item is the line of a place (`file.py:12`), a function around it, its layer, or a module's path."""
    line = f"/{site.file}:{site.line}".endswith(f"/{item}")
    layer = any(item == f"layer {n}" for n in site.layer[:1])
    return line or layer or item in site.chain or f"{site.module}.".startswith(f"{item}.")


def _candidates(item: str, found: Difference, first: Start, second: Start) -> list[tuple[int, int, np.ndarray]]:
    """(value of ours, value of theirs, the numbers of ours in the axes of theirs) that may be the result of what is
    ignored: first those that are nearest, in the order of execution."""
    ours, theirs = (list(_within(item, found, start)) for start in (first, second))
    near = []
    for i, j in product(ours, theirs):
        same = np.prod(first.values.rows[i].shape) == np.prod(second.values.rows[j].shape)
        here, there = (first.values.array(i), second.values.array(j)) if same else (None, None)
        if here is not None and there is not None:
            scale = np.linalg.norm(there) + 1e-300
            near += [(float(np.linalg.norm(x - there) / scale), i, j, x) for x in with_axes_as(there, here)]
    least = min((distance for distance, *_ in near), default=0.0)
    return [each[1:] for each in sorted(near, key=lambda each: (max(each[0], 4 * least), each[1], each[2]))]


def _within(item: str, found: Difference, start: Start) -> Iterator[int]:
    """What follows from a start: within what is ignored, or on its line where a kind is; anywhere on the side that the
    item does not name."""
    values = start.values
    named = _sides(item, found)
    here = found.ours if values.side == "ours" else found.theirs
    for i in start.near:
        site = values.site(i)
        stays = _names(item, site) if here in named else bool(named) or values.rows[i].place == start.row.place
        if stays and not values.copies(i):
            yield i


def _meets_again(values: Values, number: int) -> bool:
    """Whether something that follows from a value has an equal; or nothing that tells follows."""
    after, tells = {number}, False
    for k in range(number + 1, min(number + REACH, len(values.rows))):
        if not after.isdisjoint(values.rows[k].inputs):
            after.add(k)
            tells |= values.rows[k].features is not None
            if k in values.equal:
                return True
    return not tells
