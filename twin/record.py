"""Records a comparison: the curves of every seed, the error of every parameter, and the verdicts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jax_tformer.config import TransformerConfig
from parity.gates.measure import (
    FLOAT64_BAR,
    Measured,
    relative_error,
    require_comparable,
    trajectory_bars,
    worst,
)
from twin.pair import known_zeros
from twin.sides import StepFigures, Tensors

PARTED = 1e-3
"""Gate 6 judges only steps at which PyTorch is nearer than this to the truth, in nats. Training amplifies every
difference, even rounding, until any two float32 trainings diverge; then distances only show rounding."""

AT_LEAST = 20
"""The fewest steps over which gate 6 takes PyTorch's largest distance, because a single loss may be right by luck."""


class ParameterError(NamedTuple):
    """Relative distances of one parameter after the last step; those from the truth are None without a truth."""

    difference: float
    """Between JAX and PyTorch."""
    jax: float | None
    """Between JAX and the truth."""
    torch: float | None
    """Between PyTorch and the truth."""


@dataclass
class SeedRecord:
    """The run of one seed."""

    seed: int
    figures: dict[str, list[StepFigures]] = field(default_factory=dict)
    """Side -> its steps, of all sides as many: "jax" and "torch"; "transformers", the same model there, and "truth",
    the float64 training, if they take part."""
    parameters: dict[str, ParameterError] = field(default_factory=dict)
    """Errors by parameter after `parameters_step`; empty before that."""
    parameters_step: int = 0
    """The step after which parameters were compared: the one at which float32 left the truth, or the last one."""
    other_work: float | None = None
    """Fraction of the CPUs' time that other processes took after the first step; None if unknown."""

    @property
    def steps(self) -> int:
        """How many steps all sides have taken."""
        return len(self.figures.get("torch", ()))

    def add(self, taken: Mapping[str, StepFigures]) -> None:
        """Adds a step of every side."""
        for side, figures in taken.items():
            self.figures.setdefault(side, []).append(figures)

    def losses(self, side: str) -> np.ndarray:
        """Returns the losses of a side, float64[steps]."""
        return np.array([figures.loss for figures in self.figures[side]], np.float64)

    def distance(self, one: str, other: str) -> np.ndarray:
        """Returns |loss - loss| of two sides in nats, float64[steps]."""
        return np.abs(self.losses(one) - self.losses(other))

    def relative_difference(self, side: str = "torch") -> np.ndarray:
        """Returns |JAX - PyTorch| / |PyTorch| of the losses, float64[steps]; `side` may be "transformers"."""
        ours, theirs = self.losses("jax"), self.losses(side)
        return np.abs(ours - theirs) / np.where(ours == theirs, 1.0, np.abs(theirs))

    def judged(self, side: str = "torch") -> int:
        """Counts the steps that gate 6 judges: until PyTorch's distance from the truth reaches PARTED, at least one."""
        return max(int((np.maximum.accumulate(self.distance(side, "truth")) < PARTED).sum()), 1)

    def allowed(self, side: str = "torch") -> np.ndarray:
        """Returns the bar of gate 6 at every step that it judges, float64[judged], in nats."""
        return trajectory_bars(self.distance(side, "truth")[: self.judged(side)], AT_LEAST)


@dataclass
class Record:
    """All seeds of a comparison."""

    dtype: str
    seeds: list[SeedRecord] = field(default_factory=list)

    @property
    def begun(self) -> list[SeedRecord]:
        """The seeds with at least one step."""
        return [seed for seed in self.seeds if seed.steps]

    @property
    def steps(self) -> int:
        """The total steps of all seeds."""
        return sum(seed.steps for seed in self.seeds)

    def has(self, side: str) -> bool:
        """Whether a side takes part, "truth" or "transformers"."""
        return any(side in seed.figures for seed in self.begun)

    @property
    def judged(self) -> bool:
        """Whether gate 6 judges the trajectories: those of float32, beside a truth."""
        return self.dtype == "float32" and self.has("truth")

    def largest(self, one: str, other: str) -> float:
        """Returns the largest distance between the losses of two sides in nats."""
        return max(float(seed.distance(one, other).max()) for seed in self.begun)

    def seconds(self, side: str) -> np.ndarray:
        """Returns the seconds of all steps of a side; the very first also compiles."""
        return np.array([figures.seconds for seed in self.begun for figures in seed.figures[side]])

    def other_work(self) -> float | None:
        """Returns the largest fraction of the CPUs' time that other processes took during a seed; None if unknown."""
        return _largest([seed.other_work for seed in self.seeds])

    def parameters(self) -> dict[str, ParameterError]:
        """Returns the largest error of all seeds, for each parameter."""
        compared = [seed.parameters for seed in self.seeds if seed.parameters]
        return {
            name: ParameterError(*(_largest([errors[name][i] for errors in compared]) for i in range(3)))  # type: ignore[arg-type]
            for name in (compared[0] if compared else {})
        }

    def verdicts(self, side: str = "torch") -> list[Measured]:
        """Judges the gates beside "torch" or "transformers"; none in bfloat16, or in float32 without a truth."""
        if self.judged:
            return [gate6(seed, side) for seed in self.begun]
        if self.dtype != "float64":
            return []
        differences = {}
        for seed in self.begun:
            apart = seed.relative_difference(side)
            differences[_place(seed, int(apart.argmax()), side)] = float(apart.max())
        found = [worst("5, loss", differences, FLOAT64_BAR)]
        errors = {name: error.difference for name, error in self.parameters().items()}
        return [*found, worst("5, parameters", errors, FLOAT64_BAR)] if errors and side == "torch" else found


def gate6(seed: SeedRecord, side: str = "torch") -> Measured:
    """Judges gate 6 for one seed: at every step, the largest |JAX - truth| so far against 3 times PyTorch's + 1e-6.

    Takes PyTorch's over at least the first 20 steps, since a single loss may be right by luck. Returns the step that is
    nearest to its bar or furthest beyond it, in nats. A single bar for all steps would allow JAX at the first step what
    PyTorch needs at the last. With `side` "transformers", its training is the one that JAX may not be worse than.
    """
    bars = seed.allowed(side)
    ours = np.maximum.accumulate(seed.distance("jax", "truth")[: len(bars)])
    step = int((ours / bars).argmax())
    return Measured("6", float(ours[step]), float(bars[step]), _place(seed, step, side))


def _place(seed: SeedRecord, step: int, side: str) -> str:
    return f"seed {seed.seed}, step {step + 1}" + ("" if side == "torch" else f", beside {side}")


def parameter_errors(
    config: TransformerConfig, ours: Tensors, theirs: Tensors, truth: Tensors | None
) -> dict[str, ParameterError]:
    """Measures how far apart the parameters of both sides are, relative to their size, and each from the truth.

    A key bias that changes nothing in exact arithmetic is measured relative to all parameters together, because its own
    size is rounding. Raises ParityError if shapes, types or the places of NaN differ.
    """
    scales = known_zeros(config, dict(theirs))
    errors = {}
    for name in theirs:
        require_comparable(name, ours[name], theirs[name])
        scale = scales.get(name)
        from_truth = [None if truth is None else relative_error(x[name], truth[name], scale) for x in (ours, theirs)]
        errors[name] = ParameterError(relative_error(ours[name], theirs[name], scale), *from_truth)
    return errors


def _largest(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.max(known)) if known else None
