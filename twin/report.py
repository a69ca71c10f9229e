"""The findings of a comparison in words and numbers."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from parity.differ.answer import Difference
from parity.gates.measure import FLOAT64_BAR, TRAJECTORY_FACTOR, TRAJECTORY_FLOOR, Measured
from twin.machine import Machine, quiet
from twin.options import Plan
from twin.record import PARTED, Record, SeedRecord
from twin.side_by_side import Needs

SIDES = {"jax": "JAX", "torch": "PyTorch"}


@dataclass(frozen=True)
class Statement:
    """One sentence of the findings."""

    text: str
    passed: bool | None = None
    """Whether a bar was kept; None if the sentence is about no bar."""

    @property
    def mark(self) -> str:
        """The verdict that precedes the sentence."""
        return {True: "Within the bar. ", False: "Beyond the bar. ", None: ""}[self.passed]

    def __str__(self) -> str:
        return self.mark + self.text


@dataclass(frozen=True)
class Findings:
    """Everything that a report shows."""

    plan: Plan
    record: Record
    parameters: int
    machine: Machine
    torch_threads: int
    alone: dict[str, Needs]
    """Side -> what it needs alone; empty if not measured."""
    stopped: str | None
    """Why the comparison ended early; None if it did not."""
    where: Difference | str | None = None
    """Where the two part, or why that was not found; None if they are within the bars."""

    @property
    def sides(self) -> dict[str, str]:
        """The sides whose losses and times are shown, with their names."""
        return SIDES | ({"transformers": "transformers"} if self.record.has("transformers") else {})

    @property
    def verdicts(self) -> list[Measured]:
        """Those beside PyTorch, then those beside `transformers`, if it took part."""
        return [verdict for side in self.sides if side != "jax" for verdict in self.record.verdicts(side)]

    @property
    def passed(self) -> bool | None:
        """Whether all bars were kept; None if there was no bar, or if the comparison ended early."""
        return all(verdict.passed for verdict in self.verdicts) if self.verdicts and not self.stopped else None

    def statements(self) -> list[Statement]:
        """Returns the findings in words, the most important first."""
        stopped = [Statement(f"Stopped: {self.stopped}. The findings so far follow.")] if self.stopped else []
        if self.record.dtype == "float64":
            found = self._identity()
        elif self.record.judged:
            found = self._gate6()
        else:
            found = [self._distances() if self.record.has("truth") else self._difference()]
        return [*stopped, *found, *self._transformers(), self._speed()]

    def _identity(self) -> list[Statement]:
        since = self._first_beyond()
        subjects = ("The loss curves", "The parameters")
        places = (f"over {self._steps()}", "of any of them after the last step")
        return [
            Statement(
                f"{subject} {'coincide' if verdict.passed else 'differ'}: the largest relative difference {place} is "
                f"{verdict.worst:.1e} ({verdict.name}); the bar is {verdict.bar:.0e}.{since}",
                verdict.passed,
            )
            for verdict, subject, place in zip(self.record.verdicts(), subjects, places, strict=False)
        ]

    def _first_beyond(self) -> str:
        """Returns a sentence for float64 curves that were equal at first and then diverged."""
        beyond = [seed.relative_difference() > FLOAT64_BAR for seed in self.record.begun]
        first = min((int(part.argmax()) + 1 for part in beyond if part.any()), default=1)
        if first == 1:
            return ""
        return (
            f" The first step beyond is {first}: training amplifies every difference, even rounding, so fewer "
            "--steps can tell more."
        )

    def _gate6(self) -> list[Statement]:
        judged, steps = sum(seed.judged() for seed in self.record.begun), self.record.steps
        tightest = _tightest(self.record.verdicts())
        among = "" if judged == steps else f" of the {judged} steps that gate 6 judges"
        found = [
            Statement(
                f"{'JAX is as exact as PyTorch' if tightest.passed else 'JAX is less exact than it may be'}: over "
                f"{self._steps()} its loss strays from that of a float64 training by at most {self._largest('jax')}, "
                f"PyTorch's by {self._largest('torch')}. JAX is nearest to its bar at {tightest.name}{among}, "
                f"{tightest.worst:.1e} nats by then, where {tightest.bar:.1e} is allowed: {TRAJECTORY_FACTOR:g} times "
                f"PyTorch's distance by then, + {TRAJECTORY_FLOOR:.0e}.",
                tightest.passed,
            )
        ]
        if judged < steps:
            found.append(
                Statement(
                    f"In the other {steps - judged} steps even PyTorch in float32 is more than {PARTED:g} nats "
                    "from PyTorch in float64: training has amplified rounding so far that distances say nothing."
                )
            )
        return found

    def _largest(self, side: str) -> str:
        """Returns the largest distance of a side from the truth in the whole run, and its step."""
        curves = [(seed.seed, seed.distance(side, "truth")) for seed in self.record.begun]
        distance, seed, step = max((float(curve.max()), seed, int(curve.argmax()) + 1) for seed, curve in curves)
        return f"{distance:.1e} nats (seed {seed}, step {step})"

    def _distances(self) -> Statement:
        ours, theirs = (self.record.largest(side, "truth") for side in SIDES)
        return Statement(
            f"In {self.record.dtype} and over {self._steps()}, the loss of JAX strays by at most {ours:.1e} nats from "
            f"that of a float64 training, and the loss of PyTorch by {theirs:.1e}. No gate judges trajectories in "
            "this type."
        )

    def _difference(self) -> Statement:
        return Statement(
            f"The losses are at most {self.record.largest('jax', 'torch'):.1e} nats apart over {self._steps()}. This "
            "has no bar, because it is not known which side is nearer to the truth: --truth yes shows that, and "
            "--dtype float64 shows whether both are the same function."
        )

    def _transformers(self) -> list[Statement]:
        """The same training in `transformers`, if it took part."""
        if "transformers" not in self.sides:
            return []
        apart = self.record.largest("jax", "transformers")
        text = f"The loss of transformers itself is at most {apart:.1e} nats from that of JAX over {self._steps()}."
        verdicts = self.record.verdicts("transformers")
        if not verdicts:
            return [Statement(text)]
        tightest = _tightest(verdicts)
        against = "relative to it" if self.record.dtype == "float64" else "from the float64 training"
        text += (
            f" JAX is nearest to its bar at {tightest.name}, {tightest.worst:.1e} {against}, where "
            f"{tightest.bar:.1e} is allowed."
        )
        return [Statement(text, tightest.passed)]

    def _steps(self) -> str:
        return f"{self.record.steps} step{'s' if self.record.steps > 1 else ''}"

    def _speed(self) -> Statement:
        if self.record.steps == 1:
            return Statement("One step is too few to measure speed, because it also compiles.")
        times = {side: 1000 * float(np.median(self.record.seconds(side)[1:])) for side in self.sides}
        compiled = ", compiled" if self.plan.torch_compile else ""
        text = f"A step takes {times['jax']:.1f} ms in JAX and {times['torch']:.1f} ms in PyTorch{compiled}"
        if "transformers" in times:
            text += f" (transformers: {times['transformers']:.1f} ms)"
        others = self.record.other_work()
        if quiet(others):
            text += f": JAX needs {times['jax'] / times['torch']:.2f} times PyTorch's time"
        elif others is None:
            text += "; no ratio, since it is not known how much other work ran (a short run, or not on Linux)"
        else:
            text += f"; no ratio, since other work took {others:.0%} of the processors' time: measure again when idle"
        return Statement(f"{text}. Measured on {self.machine}.")

    def as_dict(self) -> dict[str, Any]:
        """Returns the contents of report.json, which the page shows."""
        plan = {name: value for name, value in vars(self.plan).items() if name not in ("experiment", "out")}
        return {
            "statements": [statement.text for statement in self.statements()],
            "passed": self.passed,
            "verdicts": [asdict(verdict) | {"passed": verdict.passed} for verdict in self.verdicts],
            "stopped": self.stopped,
            "where": self.where.as_json() if isinstance(self.where, Difference) else self.where,
            "plan": plan,
            "experiment": asdict(self.plan.experiment),
            "parameters": self.parameters,
            "seeds": [seed_figures(seed) for seed in self.record.begun],
            "spread": spread(self.record),
            "parameter_errors": {name: error._asdict() for name, error in self.record.parameters().items()},
            "speed": {side: speed_figures(self.record, side) for side in self.sides},
            "alone": self.alone,
            "other_work": self.record.other_work(),
            "machine": asdict(self.machine) | {"torch_threads": self.torch_threads},
        }


def _tightest(verdicts: list[Measured]) -> Measured:
    """Returns the verdict that is nearest to its bar, or furthest beyond it."""
    return max(verdicts, key=lambda verdict: verdict.worst / verdict.bar)


def seed_figures(seed: SeedRecord) -> dict[str, Any]:
    """Returns one seed in numbers: losses after the last step and the largest distances, in nats per token."""
    figures: dict[str, Any] = {
        "seed": seed.seed,
        "steps": seed.steps,
        **{f"loss_{side}": steps[-1].loss for side, steps in seed.figures.items()},
        "largest_difference": float(seed.distance("jax", "torch").max()),
        "parameters_step": seed.parameters_step,
    }
    if "transformers" in seed.figures:
        figures["largest_difference_transformers"] = float(seed.distance("jax", "transformers").max())
    if "truth" in seed.figures:
        figures |= {f"largest_distance_{side}": float(seed.distance(side, "truth").max()) for side in SIDES}
        figures["judged_steps"] = seed.judged()
    return figures


def spread(record: Record) -> dict[str, dict[str, float]]:
    """Returns the mean and standard deviation of each side's last loss over the seeds with all steps."""
    longest = max(seed.steps for seed in record.begun)
    found = {}
    for side in SIDES:
        last = np.array([seed.losses(side)[-1] for seed in record.begun if seed.steps == longest])
        deviation = float(last.std(ddof=1)) if len(last) > 1 else 0.0
        found[side] = {"mean": float(last.mean()), "standard_deviation": deviation}
    return found


def speed_figures(record: Record, side: str) -> dict[str, float]:
    """Returns the times of one side's steps; the very first, which also compiles, is listed separately."""
    first, *seconds = record.seconds(side).tolist()
    if not seconds:
        return {"first_step_seconds": first}
    low, middle, high = (1000 * float(share) for share in np.percentile(seconds, [10, 50, 90]))
    tokens = np.mean([figures.tokens for seed in record.begun for figures in seed.figures[side]])
    return {
        "median_milliseconds": middle,
        "percentile_10_milliseconds": low,
        "percentile_90_milliseconds": high,
        "tokens_per_second": float(1000 * tokens / middle),
        "first_step_seconds": first,
    }
