"""How two tensors are compared: normalised per tensor against a bar, never elementwise with a chosen tolerance."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from parity.gates.pytrees import Tensors

FLOAT64_BAR = 1e-12
"""Gates 1, 2, 5 and 7: the largest relative error of anything computed in float64."""


class ParityError(AssertionError):
    """Two implementations differ by more than a gate allows, or cannot be compared; the message shows both sides."""

    figures: "tuple[Measured, ...]" = ()
    """What had been measured, the red figure last; without it where there is none, since the two cannot be compared."""
    difference: Any = None
    """The `Difference` that was found, where one was looked for; a sentence where the search itself failed."""
    gate: str = ""
    """Which was red, or could not be measured."""


@dataclass(frozen=True)
class Measured:
    """The worst figure of one comparison, beside its bar."""

    gate: str
    worst: float
    bar: float
    name: str
    """Of the tensor with the worst figure."""
    beyond: tuple[tuple[str, Any], ...] = ()
    """The tensors above the bar with their figures, in the order in which they were given."""
    note: str = ""
    """What the figure does not say, and has to be known beside it."""

    @property
    def passed(self) -> bool:
        """Whether the gate is green; NaN is not."""
        return self.worst <= self.bar

    def without(self, left_out: Collection[str]) -> "Measured":
        """With a note that these were not compared, if there are any."""
        return replace(self, note=f"not compared: {', '.join(sorted(left_out))}") if left_out else self

    def require(self) -> "Measured":
        """Prints the figure next to its bar; raises ParityError, which says the same, where the gate is red."""
        if not self.passed:
            error = ParityError(str(self))
            error.figures = (self,)
            raise error
        print(self)
        return self

    def __str__(self) -> str:
        """One line; where several tensors are above the bar, the first of them, and a line for each."""
        verdict = "<=" if self.passed else "> "
        name, figure = (self.name, self.worst) if self.passed or not self.beyond else self.beyond[0]
        note = f"; {self.note}" if self.note else ""
        return f"gate {self.gate}: {figure:.2e} {verdict} {self.bar:.0e} ({name}){note}{_listed(self.beyond)}"


def require_comparable(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Raises ParityError where shapes, dtypes or the places of NaN and infinity differ; it shows both sides."""
    if said := incomparable(name, ours, theirs):
        raise ParityError(said)


def incomparable(name: str, ours: np.ndarray, theirs: np.ndarray) -> str:
    """Why two tensors cannot be compared: their shapes, dtypes or places of NaN and infinity; else ""."""
    if ours.shape != theirs.shape:
        return f"{name}: shapes differ: ours {list(ours.shape)}, theirs {list(theirs.shape)}"
    if ours.dtype != theirs.dtype:
        return (
            f"{name}: dtypes differ: ours {ours.dtype}, theirs {theirs.dtype}; "
            "one side was lowered on the way (JAX gives float32 unless jax_enable_x64 is on before tracing)"
        )
    for what, test in (("NaN", np.isnan), ("infinity", np.isinf)):
        here, there = test(ours), test(theirs)
        if (here != there).any():
            place = tuple(map(int, np.argwhere(here != there)[0]))
            return (
                f"{name}: {what} at {here.sum()} places in ours and {there.sum()} in theirs; "
                f"at {list(place)} ours is {float(ours[place]):.4g}, theirs {float(theirs[place]):.4g}"
            )
    return ""


def failure(side: str, error: Exception, given: str) -> ParityError:
    """To be raised where a side fails on what it was given: in one line."""
    return ParityError(f"{side} failed ({reason_of(error)}) on {given}")


def reason_of(error: Exception) -> str:
    """What failed, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def relative_error(ours: np.ndarray, theirs: np.ndarray, scale: float | None = None) -> float:
    """The larger of ||a - b|| / ||b|| and max|a - b| / max|b|, in float64.

    `scale` replaces the norms of `theirs` where that is known to be zero (the gradient of a key bias): the error then
    counts against the scale of everything together.
    """
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if not a.size:
        return 0.0
    difference, norm = a - b, float(np.linalg.norm(b)) if scale is None else scale
    if norm == 0:
        return 0.0 if not difference.any() else float("inf")
    error = float(np.linalg.norm(difference)) / norm
    return error if scale is not None else max(error, float(np.abs(difference).max()) / float(np.abs(b).max()))


def compared(
    gate: str,
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    *,
    bar: float = FLOAT64_BAR,
    zero: Mapping[str, float] | None = None,
) -> Measured:
    """The largest relative error of all tensors, which are matched by name, beside the bar of `gate`.

    The order is that of `theirs`, since jax.jit sorts the names of what it returns. `zero` names tensors that are zero
    in exact arithmetic, with the scale to measure them against. Raises ParityError for names that stand on one side
    only, and for what `require_comparable` raises; the first tensor that differs begins the message, all are listed.
    """
    require_same_names(gate, ours, theirs)
    errors: dict[str, float | str] = {}
    for name in theirs:
        a, b = as_array(ours[name]), as_array(theirs[name])
        errors[name] = incomparable(name, a, b) or relative_error(a, b, (zero or {}).get(name))
    return worst(gate, errors, bar)


def assert_parity(
    gate: str,
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    *,
    bar: float = FLOAT64_BAR,
    zero: Mapping[str, float] | None = None,
) -> Measured:
    """`compared`, printed; raises ParityError above the bar."""
    return compared(gate, ours, theirs, bar=bar, zero=zero).require()


class Sample(NamedTuple):
    """The same tensors from one batch: ours and theirs in a narrow type, and the truth in float64."""

    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]
    truth: Mapping[str, Any]
    scales: Mapping[str, float]
    """What errors are relative to: the norm of the truth, or of everything where the truth is known to be zero."""

    def without(self, names: Collection[str]) -> "Sample":
        """The other tensors."""
        return Sample(*({name: x for name, x in side.items() if name not in names} for side in self))


@dataclass(frozen=True)
class Quality:
    """How far from the truth a narrow type may be: `factor` times as far as the reference in that type, + `floor`."""

    dtypes: tuple[str, ...]
    """That results may have; the same on both sides, tensor by tensor."""
    factor: float
    floor: float
    mean: Literal["median", "geometric"] = "median"
    """Of the errors of all samples."""


FLOAT32 = Quality(("float32",), 2.5, 2.0**-23)
"""Gate 3: the worst of all presets is at 0.93 of this over 31 draws, on an AMD EPYC (a query bias of six numbers).

Before attention weights had a derivative of their own (see model/masks.py) it was at 1.00, on an Intel Xeon at 1.32.
"""
BFLOAT16 = Quality(("bfloat16", "float32"), 1.8, 2.0**-23, "geometric")
"""Gate 4; norms, softmax, logits and loss are float32 there. At most 1.46 times PyTorch's error on an AMD EPYC.

About every second sample has a ReLU that rounding pushes over its kink, which makes its error several times as large: a
median then stands on either side of the gap, by luck (it gave 1.92).
"""
NARROW = {"3": ("float32", FLOAT32), "4": ("bfloat16", BFLOAT16)}
"""Gate -> the type in which both sides are run, and what is allowed."""
BFLOAT16_VALUES = Quality(BFLOAT16.dtypes, 1.5, 2.0**-23, "geometric")
"""Gate 4 of what is computed forward, where luck matters less: at most 1.08 times PyTorch's error there."""


SAMPLES = 9
"""Of weights near the given ones, over which gates 3 and 4 take the median or the mean."""


def quality(gate: str, samples: Sequence[Sample], allowed: Quality = FLOAT32) -> Measured:
    """err(ours) / (factor * err(theirs) + floor) of the worst tensor; green is at most 1.

    err is the Euclidean distance from the truth, relative to its scale: the median over the samples, or their geometric
    mean. Either side may be right by luck once where a tensor has six numbers, or wrong by luck where rounding pushes a
    ReLU over its kink. Scalars are left to gate 1; the loss is judged by the tensor of its terms. Raises ParityError
    for what `compared` raises, and for results of another type than `allowed.dtypes`.
    """
    errors: dict[str, list[tuple[float, float]]] = {}
    refused: dict[str, str] = {}
    for ours, theirs, truth, scales in samples:
        require_same_names(gate, ours, theirs)
        require_same_names(gate, ours, truth)
        for name in theirs:
            a, b = as_array(ours[name]), as_array(theirs[name])
            refused[name] = refused.get(name) or refusal(name, a, b, allowed)
            if a.shape and not refused[name]:
                both = relative_error(a, truth[name], scales[name]), relative_error(b, truth[name], scales[name])
                errors.setdefault(name, []).append(both)
    return quality_of_errors(gate, errors, allowed, refused)


def refusal(name: str, ours: np.ndarray, theirs: np.ndarray, allowed: Quality) -> str:
    """Why the quality of two tensors cannot be judged: that they are `incomparable`, or their type; else ""."""
    other = f"{name}: {ours.dtype} on both sides; expected {' or '.join(allowed.dtypes)}"
    return incomparable(name, ours, theirs) or ("" if str(ours.dtype) in allowed.dtypes else other)


def quality_of_errors(
    gate: str,
    errors: Mapping[str, Sequence[tuple[float, float]]],
    allowed: Quality,
    refused: Mapping[str, str],
) -> Measured:
    """What `quality` says of distances from the truth that have been measured: for each tensor, of every sample, those
    of (ours, theirs). `refused` has the `refusal` of every tensor, and gives the order."""
    ratios: dict[str, float | str] = {}
    for name, reason in refused.items():
        if reason:
            ratios[name] = reason
        elif name in errors:
            here, there = np.median(errors[name], axis=0)
            if allowed.mean == "geometric":
                here, there = np.exp(np.log(np.maximum(errors[name], allowed.floor)).mean(axis=0))
            ratios[name] = float(here / (allowed.factor * there + allowed.floor))
    return worst(gate, ratios, 1.0)


def require_gates(gates: Sequence[str], known: Sequence[str]) -> None:
    """Raises ValueError unless these are some of the gates that are known."""
    if isinstance(gates, str) or not gates or not set(gates) <= set(known):
        raise ValueError(f"there are no gates {gates!r} here; expected a list of some of {list(known)}")


def run_gates(
    name: str, gates: Sequence[str], measure: Callable[[str], Measured], parted: Callable[[ParityError], Any]
) -> list[Measured]:
    """The figures of `gates`, each printed; the ParityError of a red one begins with the pair's name, has the figures
    before it, says which `gate` it is, and where the two have `parted`, unless that is None."""
    figures: list[Measured] = []
    for gate in gates:
        try:
            figures.append(measure(gate).require())
        except ParityError as error:
            said = ParityError(f"{name}: {error}")
            said.figures, said.gate = (*figures, *error.figures), gate
            said.difference = parted(said)
            if said.difference is not None:
                said.add_note(str(said.difference))
            raise said from None
    return figures


def searched(search: Callable[[], Any]) -> Any:
    """What `search` finds, or why it finds nothing: one that breaks must not hide the gate that is red."""
    try:
        return search()
    except Exception as error:
        return f"where they part was not found ({type(error).__name__}: {' '.join(str(error).split())})"


def numbers_lost(before: Tensors, after: Tensors) -> Measured:
    """Gate 9: how many numbers are others after weights were converted there and back; NaN stays what it is."""
    lost = {}
    for name, array in before.items():
        back = after[name]
        lost[name] = float(np.sum((array != back) & ((array == array) | (back == back))))
    return worst("9 numbers lost", lost, 0.0)


def global_norm(gradients: Tensors) -> float:
    """Of all together, in float64."""
    return float(np.sqrt(sum(np.square(gradient.astype(np.float64)).sum() for gradient in gradients.values())))


def zero_scales(exact: Tensors, names: Collection[str], where: Tensors | None = None) -> dict[str, float]:
    """The norm of all gradients of `exact`, the reference's in float64, for each of those that are said to be zero.

    `where` says in which of its places, as truth values; everywhere unless it is told of. Raises ParityError where one
    is not zero, or does not exist.
    """
    scale = global_norm(exact)
    for name in names:
        if name not in exact:
            raise ParityError(f"zero_gradients names {name!r}, which the module lacks: {sorted(exact)}")
        if (norm := float(np.linalg.norm(exact[name][(where or {}).get(name, ...)]))) > FLOAT64_BAR * scale:
            raise ParityError(f"the gradient of {name} is said to be zero, and is {norm:.1e} of {scale:.1e} in theirs")
    return dict.fromkeys(names, scale)


def worst(gate: str, figures: Mapping[str, float | str], bar: float) -> Measured:
    """The largest of the figures; NaN is larger than any number.

    Where some tensors have no figure but a sentence that says why, ParityError lists all that differ.
    """
    beyond = tuple((name, figure) for name, figure in figures.items() if isinstance(figure, str) or not figure <= bar)
    numbers = {name: figure for name, figure in figures.items() if not isinstance(figure, str)}
    if len(numbers) < len(figures):
        name, first = beyond[0]
        said = first if isinstance(first, str) else f"gate {gate}: {first:.2e} >  {bar:.0e} ({name})"
        raise ParityError(said + _listed(beyond))
    name = max(numbers, key=lambda name: float("inf") if np.isnan(numbers[name]) else numbers[name])
    return Measured(gate, numbers[name], bar, name, beyond)


def _listed(differing: Sequence[tuple[str, float | str]]) -> str:
    """A line for each of several tensors that differ; nothing for one."""
    if len(differing) < 2:
        return ""
    lines = (figure if isinstance(figure, str) else f"{name}: {figure:.2e}" for name, figure in differing)
    heading = f"; {differing[0][0]} is the first of {len(differing)} that differ:"
    return "\n".join([heading, *(f"  {line}" for line in lines)])


def as_array(tensor: Any) -> np.ndarray:
    """An array of NumPy from one of JAX or PyTorch, on any device; raises ParityError for complex numbers."""
    if hasattr(tensor, "detach"):
        from parity.gates.torch_side import from_torch

        tensor = from_torch(tensor)
    array = np.asarray(tensor)
    if np.iscomplexobj(array):
        raise ParityError(f"an array of {array.dtype} cannot be compared; give its real and its imaginary part")
    return array


def require_same_names(gate: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raises ParityError where a tensor has a name on one side only, and where there is none."""
    if ours.keys() != theirs.keys():
        only_ours, only_theirs = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
        raise ParityError(f"gate {gate}: only ours has {only_ours}, only theirs has {only_theirs}")
    if not ours:
        raise ParityError(f"gate {gate}: there is nothing to compare")


TRAJECTORY_FACTOR, TRAJECTORY_FLOOR = 3.0, 1e-6
"""Gate 6: our distance from the float64 truth is at most the reference's times the factor, plus the floor, in nats."""


def trajectory_bars(theirs: np.ndarray, at_least: int | None = None) -> np.ndarray:
    """Gate 6: what is allowed up to each step, float64[steps], given the reference's distance from the truth at each.

    It is 3 times its largest distance so far + 1e-6, taken over `at_least` so many steps: all, if not told otherwise.
    """
    largest = np.maximum.accumulate(theirs)
    bars: np.ndarray = TRAJECTORY_FACTOR * np.maximum(largest, largest[:at_least][-1]) + TRAJECTORY_FLOOR
    return bars


def trajectory(gate: str, ours: np.ndarray, theirs: np.ndarray, truth: np.ndarray) -> Measured:
    """Gate 6: max|ours - truth| / (3 max|theirs - truth| + 1e-6) over all losses of all runs; green is at most 1.

    `ours` and `theirs` are float32, `truth` is float64, each `[runs, steps]`. Raises ParityError for what
    `require_comparable` raises, and for other types.
    """
    ours, theirs, truth = np.asarray(ours), np.asarray(theirs), np.asarray(truth)
    require_comparable("the losses", ours, theirs)
    if ours.dtype != np.float32 or truth.dtype != np.float64:
        raise ParityError(f"the losses: {ours.dtype} against {truth.dtype}; expected float32 against float64")
    here, there = (np.abs(side - truth).reshape(-1, truth.shape[-1]).max(axis=0) for side in (ours, theirs))
    return Measured(gate, float((here / trajectory_bars(there)).max()), 1.0, "loss of each step")
