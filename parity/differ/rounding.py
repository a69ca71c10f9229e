"""Rounding or a bug? What two sides compute in the types that they have, judged by what they compute in float64."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import numpy as np
import torch
from torch import nn

from parity.differ.alignment import match
from parity.differ.answer import Difference
from parity.differ.fingerprints import finite
from parity.differ.first_difference import followed, followed_pair
from parity.differ.forward_and_backward import located
from parity.differ.traced_sides import Sides
from parity.differ.values import Site, Values, short
from parity.gates.weight_map import WeightMap

_TIMES = 3.0
"""A value that is so many times as far from its float64 as the other side's has lost digits."""
_SHOWN = 5
_COARSE = 64
"""A product of matrices that errs by so many units in the last place of its type was computed in another one."""
_PRODUCTS = ("dot_general", "conv_general_dilated", "aten.mm", "aten.bmm", "aten.addmm", "aten.convolution")


@dataclass(frozen=True)
class Grown:
    """How far a value that both sides compute is from what float64 gives: relative, in root mean square."""

    ours: Site
    theirs: Site
    our_error: float
    their_error: float


@dataclass(frozen=True)
class Explanation:
    """Why two sides differ in the types that they have; true where rounding does not explain it."""

    kind: Literal["a bug", "lost digits", "rounding"]
    gaps: Mapping[str, tuple[float, float, float]]
    """Of each output: how far the sides are apart as they are, and ours and theirs each from its own float64."""
    difference: Difference
    """What is found in float64; false, unless it is a bug."""
    uneven: Grown | None = None
    """The first value of which one side has fewer digits than its type has, and than the other side."""
    growth: tuple[Grown, ...] = ()
    """The values at which the error of ours doubles, from the first on."""
    most: tuple[tuple[str, Site, float], ...] = ()
    """(side, line, error that it adds) of the lines that round most."""
    coarse: tuple[Site, ...] = ()
    """Products of matrices in fewer digits than their type has, as TF32 and the default precision of JAX are."""
    name: str = "pair"

    def __bool__(self) -> bool:
        """Whether there is something to mend."""
        return self.kind != "rounding"

    def __str__(self) -> str:
        """The verdict, and why, for a terminal."""
        lines = [f"{self.name}: {self._verdict}"]
        for key, (gap, ours, theirs) in self.gaps.items():
            lines.append(f"  {key}: {_said(gap)} apart; JAX is {_said(ours)} from float64, PyTorch {_said(theirs)}")
        if self.kind == "a bug":
            return "\n".join([*lines, *(f"  {line}" for line in str(self.difference).splitlines())])
        if self.uneven:
            lines.append(f"  uneven:  {_said(self.uneven.our_error)}  JAX: {self.uneven.ours}")
            lines.append(f"           {_said(self.uneven.their_error)}  PyTorch: {self.uneven.theirs}")
        lines += [
            f"  grows:   {_said(each.our_error)} ({_said(each.their_error)})  {each.ours}" for each in self.growth
        ]
        lines += [f"  rounds:  {_said(error)}  {side}: {site}" for side, site, error in self.most]
        places = dict.fromkeys(f"{short(site.file)}:{site.line}" for site in self.coarse)
        if places:
            lines.append(
                f"  products of matrices have fewer digits than their type: {', '.join([*places][:_SHOWN])}; "
                'jax.default_matmul_precision("highest") and torch.backends.cuda.matmul.allow_tf32 say how many'
            )
        return "\n".join(lines)

    @property
    def _verdict(self) -> str:
        if self.kind == "a bug":
            return "a bug: in float64, without rounding, they differ as well"
        if self.kind == "rounding":
            return "rounding: in float64 they are the same, and each is as far from that as the other"
        _, ours, theirs = max(self.gaps.values(), key=lambda gap: max(gap[1:]))
        far, near = ("ours", "theirs") if ours > theirs else ("theirs", "ours")
        return f"lost digits: in float64 they are the same, but {far} is much farther from that than {near}"

    def as_json(self) -> dict[str, Any]:
        """The fields, as JSON has them, and the verdict."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {**fields, "verdict": self._verdict}


def explain(
    ours: Callable[..., Any],
    theirs: nn.Module,
    weights: WeightMap | None = None,
    inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    params: Any = None,
    like: Any = None,
    name: str = "pair",
) -> Explanation:
    """Says whether `ours(params, *inputs)` and `theirs(*inputs)` differ by rounding or by a bug.

    Both run as they are, in the type of the module's weights (bfloat16, float16 or float32) and on this device, and
    once more with the same numbers in float64. Where float64 differs, that is a bug, and `first_difference` says where.
    Otherwise every value's error is its distance from its own float64, and it counts which side has more of it, where
    that begins, where it grows and which lines round most.

    Arguments are those of `first_difference`, floating inputs are rounded to the type of the weights; forward only,
    without dropout. Raises ParityError as it does.
    """
    kind = next((p.dtype for p in theirs.parameters() if p.is_floating_point()), torch.float32)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        held_by = str(kind).removeprefix("torch.")
        pair = followed_pair(ours, theirs, weights, inputs, params=params, like=like, held_by=held_by)
        sides = pair.sides()
        sides.widen = ()  # every cast to fewer digits is lifted
        found = followed(lambda: located(sides, backward=False, name=name))
        sides.sketched = True
        wide = [] if found else [sides.run_ours(False), sides.run_theirs(False)]
        exact = [{key: side.output(key) for key in side.outputs} for side in wide] or sides.returned()
    narrow = pair.sides(wide=False)
    gaps = _gaps(narrow, exact)
    if found:
        return Explanation("a bug", gaps, found, name=name)
    narrow.sketched = True
    rounding = [_Errors(side, run(False)) for side, run in zip(wide, (narrow.run_ours, narrow.run_theirs), strict=True)]
    match(wide[0], wide[1])
    grown = [
        Grown(wide[0].site(i), wide[1].site(j), rounding[0].of[i], rounding[1].of[j])
        for i, equal in sorted(wide[0].equal.items())
        for j in equal[:1]
        if i in rounding[0].of and j in rounding[1].of
    ]
    unit = float(torch.finfo(kind).eps)
    lost = any(_is_uneven(ours, theirs, unit / 8) for _, ours, theirs in gaps.values())
    uneven = (each for each in grown if _is_uneven(each.our_error, each.their_error, unit))
    most = [(side, *line) for side, errors in zip(("JAX", "PyTorch"), rounding, strict=True) for line in errors.most()]
    return Explanation(
        "lost digits" if lost else "rounding",
        gaps,
        found,
        next(uneven, None),
        _doubling(grown),
        tuple(sorted(most, key=lambda line: -line[2])[:_SHOWN]),
        tuple(site for errors in rounding for site in errors.coarse(unit)),
        name,
    )


class _Errors:
    """How far the values of a side are from its own float64, by their numbers there."""

    def __init__(self, wide: Values, narrow: Values) -> None:
        assert wide.sketches is not None
        assert narrow.sketches is not None
        self._wide, self.of = wide, dict[int, float]()
        ends = {wide.outputs[name]: narrow.outputs[name] for name in wide.outputs}
        # Casts are not in both, so that values are told by their lines, and by their turn there.
        counterparts = dict(zip(_turns(narrow), narrow.sketches, strict=True))
        for turn, number in zip(_turns(wide), wide.sketches, strict=True):
            other = ends.get(number, counterparts.get(turn))
            here, size = wide.sketches[number], float(np.linalg.norm(wide.sketches[number]))
            if other in narrow.sketches and size > 0 and not wide.rows[number].noise:
                self.of[number] = float(np.linalg.norm(narrow.sketches[other] - here)) / size
        self.of |= {number: 0.0 for number, row in enumerate(wide.rows) if row.kind in ("parameter", "input")}

    def added(self) -> Iterable[tuple[int, float, float]]:
        """(value, error, the largest error of those that it was made of)."""
        carried: list[float] = []
        for number, row in enumerate(self._wide.rows):
            before = max((carried[i] for i in row.inputs), default=0.0)
            carried.append(self.of.get(number, before))
            if self.of.get(number):
                yield number, carried[-1], before

    def most(self) -> list[tuple[Site, float]]:
        """The lines that add most, all their values together."""
        lines: dict[tuple[str, int], tuple[Site, float]] = {}
        for number, error, before in self.added():
            site = self._wide.site(number)
            if error > before and site.file:
                first, so_far = lines.get((site.file, site.line), (site, 0.0))
                lines[site.file, site.line] = first, so_far + error - before
        return sorted(lines.values(), key=lambda line: -line[1])[:3]

    def coarse(self, unit: float) -> Iterable[Site]:
        """Products of matrices that err by far more than their type and what they are made of explain."""
        for number, error, before in self.added():
            product = self._wide.rows[number].operation in _PRODUCTS
            if product and unit < 1e-5 and error > _COARSE * unit > 4 * before:
                yield self._wide.site(number)


def _turns(values: Values) -> list[tuple[Any, ...]]:
    """Of each value that has a sketch: what computes it, where, and the how manieth of these it is."""
    seen: Counter[tuple[Any, ...]] = Counter()
    found = []
    for number in values.sketches or ():
        row = values.rows[number]
        key = row.operation, row.place[:2], row.module, row.layer, row.shape
        found.append((*key, seen[key]))
        seen[key] += 1
    return found


def _is_uneven(error: float, other: float, unit: float) -> bool:
    return max(error, other) > max(_TIMES * min(error, other), 2 * unit)


def _doubling(grown: Iterable[Grown]) -> tuple[Grown, ...]:
    """The values at which the error is twice what it has been; the first ones, and the last."""
    found: list[Grown] = []
    for each in grown:
        if each.our_error > (2 * found[-1].our_error if found else 0.0):
            found.append(each)
    return tuple(found if len(found) <= _SHOWN else [*found[: _SHOWN - 1], found[-1]])


def _gaps(narrow: Sides, wide: Sequence[Mapping[str, np.ndarray]]) -> dict[str, tuple[float, float, float]]:
    """Of each output: how far the sides are apart as they are, and each from its own float64."""
    ours, theirs = narrow.returned()
    return {
        name: (_apart(ours[name], theirs[name]), _apart(ours[name], wide[0][name]), _apart(theirs[name], wide[1][name]))
        for name in ours
    }


def _apart(array: np.ndarray, other: np.ndarray) -> float:
    """In root mean square, relative to the other one."""
    here, there = finite(array), finite(other)
    size = float(np.linalg.norm(there))
    return float(np.linalg.norm(here - there)) / (size or 1.0)


def _said(error: float) -> str:
    return f"{error:.1e}" if error < 1e-3 else f"{100 * error:.2g}%"
