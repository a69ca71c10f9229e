"""The findings of a comparison in words and numbers, and the folder that they are written to."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_tformer.config.errors import InputError
from jax_tformer.files import require_writable, to_dict, write_json
from parity.differ.answer import Difference
from parity.gates.measure import FLOAT64_BAR, TRAJECTORY_FACTOR, TRAJECTORY_FLOOR, Measured
from twin.machine import Machine, quiet
from twin.options import Plan
from twin.record import PARTED, Record, SeedRecord
from twin.report_plots import difference_figure, loss_figure, parameter_figure, save_png
from twin.side_by_side import Needs

FILES = ("report.html", "report.json", "curves.csv", "loss.png", "difference.png", "parameters.png")
SIDES = {"jax": "JAX", "torch": "PyTorch"}
THIRD = {"transformers": "transformers"}
"""The side that takes part if the model began as a checkpoint of Hugging Face."""


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
    alone: dict[str, Needs | str]
    """Side -> what it needs alone, or why that is unknown; empty if not measured."""
    stopped: str | None
    """Why the comparison ended early; None if it did not."""
    where: Difference | str | None = None
    """Where the two part, or why that was not found; None if they are within the bars."""

    @property
    def passed(self) -> bool | None:
        """Whether all bars were kept; None if there was no bar, or if the comparison ended early."""
        verdicts = self.record.verdicts()
        return all(verdict.passed for verdict in verdicts) if verdicts and not self.stopped else None

    def statements(self) -> list[Statement]:
        """Returns the findings in words, the most important first."""
        stopped = [Statement(f"Stopped: {self.stopped}. The findings so far follow.")]
        if not self.record.begun:
            return stopped
        return (stopped if self.stopped else []) + [*self._exactness(), *self._transformers(), self._speed()]

    def _exactness(self) -> list[Statement]:
        if self.record.dtype == "float64":
            return self._identity()
        if not self.record.has_truth:
            return [self._difference()]
        return self._gate6() if self.record.dtype == "float32" else [self._distances()]

    def _transformers(self) -> list[Statement]:
        """The same training in `transformers`, if it took part."""
        record = self.record
        if not record.has_transformers:
            return []
        apart = max(float(seed.distance("jax", "transformers").max()) for seed in record.begun)
        verdicts = [verdict for verdict in record.verdicts() if verdict.name.endswith("transformers")]
        passed = all(verdict.passed for verdict in verdicts) if verdicts else None
        text = f"The loss of transformers itself is at most {apart:.1e} nats from that of JAX over {self._steps()}."
        if verdicts:
            tightest = max(verdicts, key=lambda verdict: verdict.worst / verdict.bar)
            against = "relative to it" if record.dtype == "float64" else "from the float64 training"
            text += (
                f" JAX is nearest to its bar at {tightest.name}, {tightest.worst:.1e} {against}, where "
                f"{tightest.bar:.1e} is allowed."
            )
        return [Statement(text, passed)]

    def _steps(self) -> str:
        return f"{self.record.steps} step{'s' if self.record.steps > 1 else ''}"

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
            for verdict, subject, place in zip(_of_torch(self.record.verdicts()), subjects, places, strict=False)
        ]

    def _first_beyond(self) -> str:
        """Returns a sentence for float64 curves that were equal at first and then diverged."""
        steps = [
            int(part.argmax()) + 1
            for seed in self.record.begun
            if (part := seed.relative_difference() > FLOAT64_BAR).any()
        ]
        if not steps or min(steps) == 1:
            return ""
        return (
            f" The first step beyond is {min(steps)}: training amplifies every difference, even rounding, so fewer "
            "--steps can tell more."
        )

    def _difference(self) -> Statement:
        apart = max(float(seed.distance("jax", "torch").max()) for seed in self.record.begun)
        return Statement(
            f"The losses are at most {apart:.1e} nats apart over {self._steps()}. This has no bar, because it is not "
            "known which side is nearer to the truth: --truth yes shows that, and --dtype float64 shows whether both "
            "are the same function."
        )

    def _distances(self) -> Statement:
        ours, theirs = (max(float(s.distance(side, "truth").max()) for s in self.record.begun) for side in SIDES)
        return Statement(
            f"In {self.record.dtype} and over {self._steps()}, the loss of JAX strays by at most {ours:.1e} nats from "
            f"that of a float64 training, and the loss of PyTorch by {theirs:.1e}. No gate judges trajectories in "
            "this type."
        )

    def _gate6(self) -> list[Statement]:
        record = self.record
        judged = sum(seed.judged() for seed in record.begun)
        tightest = max(_of_torch(record.verdicts()), key=lambda verdict: verdict.worst / verdict.bar)
        among = "" if judged == record.steps else f" of the {judged} steps that gate 6 judges"
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
        if judged < record.steps:
            found.append(
                Statement(
                    f"In the other {record.steps - judged} steps even PyTorch in float32 is more than {PARTED:g} nats "
                    "from PyTorch in float64: training has amplified rounding so far that distances say nothing."
                )
            )
        return found

    def _largest(self, side: str) -> str:
        """Returns the largest distance of a side from the truth in the whole run, and its step."""
        curves = [(seed.seed, seed.distance(side, "truth")) for seed in self.record.begun]
        distance, seed, step = max((float(curve.max()), seed, int(curve.argmax()) + 1) for seed, curve in curves)
        return f"{distance:.1e} nats (seed {seed}, step {step})"

    def _speed(self) -> Statement:
        ours, theirs = (1000 * _median(self.record.seconds(side)) for side in SIDES)
        if not np.isfinite(ours):
            return Statement("One step is too few to measure speed, because it also compiles.")
        compiled = ", compiled" if self.plan.torch_compile else ""
        text = f"A step takes {ours:.1f} ms in JAX and {theirs:.1f} ms in PyTorch{compiled}"
        if self.record.has_transformers:
            text += f" (transformers: {1000 * _median(self.record.seconds('transformers')):.1f} ms)"
        others = self.record.other_work()
        if quiet(others):
            text += f": JAX needs {ours / theirs:.2f} times PyTorch's time"
        elif others is None:
            text += "; no ratio, since it is not known how much other work ran (a short run, or not on Linux)"
        else:
            text += f"; no ratio, since other work took {others:.0%} of the processors' time: measure again when idle"
        return Statement(f"{text}. Measured on {self.machine}.")

    def as_dict(self) -> dict[str, Any]:
        """Returns the contents of report.json."""
        verdicts = [
            {name: value for name, value in asdict(verdict).items() if name != "ulps"} | {"passed": verdict.passed}
            for verdict in self.record.verdicts()
        ]
        plan = {name: value for name, value in vars(self.plan).items() if name not in ("experiment", "out")}
        return {
            "statements": [statement.text for statement in self.statements()],
            "passed": self.passed,
            "verdicts": verdicts,
            "stopped": self.stopped,
            "where": self.where.as_json() if isinstance(self.where, Difference) else self.where,
            "plan": plan,
            "experiment": to_dict(self.plan.experiment),
            "parameters": self.parameters,
            "seeds": [seed_figures(seed) for seed in self.record.begun],
            "spread": spread(self.record),
            "parameter_errors": {name: error._asdict() for name, error in self.record.parameters().items()},
            "speed": {side: speed_figures(self.record, side) for side in shown_sides(self.record)},
            "alone": {side: asdict(x) if isinstance(x, Needs) else {"error": x} for side, x in self.alone.items()},
            "other_work": self.record.other_work(),
            "machine": self.machine.as_dict() | {"torch_threads": self.torch_threads},
        }


def shown_sides(record: Record) -> dict[str, str]:
    """Returns the sides whose losses and times are shown, with their names."""
    return SIDES | THIRD if record.has_transformers else SIDES


def _of_torch(verdicts: Sequence[Measured]) -> list[Measured]:
    """Leaves out the verdicts beside `transformers`."""
    return [verdict for verdict in verdicts if not verdict.name.endswith("transformers")]


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if values.size else float("nan")


def seed_figures(seed: SeedRecord) -> dict[str, Any]:
    """Returns one seed in numbers: losses after the last step and the largest distances, in nats per token."""
    figures: dict[str, Any] = {
        "seed": seed.seed,
        "steps": seed.steps,
        "loss_jax": seed.jax[-1].loss,
        "loss_torch": seed.torch[-1].loss,
        "largest_difference": float(seed.distance("jax", "torch").max()),
        "parameters_step": seed.parameters_step,
        "largest_relative_difference": float(seed.relative_difference().max()),
    }
    if len(seed.transformers) >= seed.steps:
        figures["loss_transformers"] = seed.transformers[-1].loss
        figures["largest_difference_transformers"] = float(seed.distance("jax", "transformers").max())
    if len(seed.truth) >= seed.steps:
        figures["loss_truth"] = seed.truth[-1].loss
        for side in SIDES:
            figures[f"largest_distance_{side}"] = float(seed.distance(side, "truth").max())
        figures["judged_steps"] = seed.judged()
    return figures


def spread(record: Record) -> dict[str, dict[str, float]]:
    """Returns the mean and standard deviation of each side's last loss over the seeds with all steps."""
    longest = max((seed.steps for seed in record.begun), default=0)
    whole = [seed for seed in record.begun if seed.steps == longest]
    found = {}
    for side in SIDES if whole else ():
        last = np.array([seed.losses(side)[-1] for seed in whole])
        deviation = float(last.std(ddof=1)) if len(last) > 1 else 0.0
        found[side] = {"mean": float(last.mean()), "standard_deviation": deviation, "seeds": float(len(last))}
    return found


def speed_figures(record: Record, side: str) -> dict[str, float | None]:
    """Returns the times of one side's steps; the very first, which also compiles, is listed separately."""
    milliseconds = 1000 * record.seconds(side)
    first = record.first_seconds(side)
    if not milliseconds.size:
        return {"first_step_seconds": first}
    low, middle, high = np.percentile(milliseconds, [10, 50, 90])
    return {
        "median_milliseconds": float(middle),
        "percentile_10_milliseconds": float(low),
        "percentile_90_milliseconds": float(high),
        "tokens_per_second": float(1000 * record.tokens() / middle),
        "first_step_seconds": first,
    }


@dataclass(frozen=True)
class ReportFolder:
    """The folder of a report, which replaces an older one there."""

    path: Path

    def check(self) -> None:
        """Raises InputError if the folder is a file, holds anything but a report, or is not writable."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; expected a folder: choose another --out")
        require_writable(self.path)
        others = (
            sorted(path.name for path in self.path.iterdir() if path.name not in FILES) if self.path.is_dir() else []
        )
        if others:
            raise InputError(
                f"{self.path} holds {others[0]}, which is no part of a report; choose an empty or new --out"
            )

    def write(self, record: Record, report: dict[str, Any], page: str) -> None:
        """Writes all files; raises InputError if that fails."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # This report may lack a file of an older one: an interrupted run has no parameters.png.
            for name in FILES:
                (self.path / name).unlink(missing_ok=True)
            write_curves(record, self.path / "curves.csv")
            save_png(loss_figure(record), self.path / "loss.png")
            save_png(difference_figure(record), self.path / "difference.png")
            if errors := record.parameters():
                save_png(parameter_figure(errors), self.path / "parameters.png")
            (self.path / "report.html").write_text(page, encoding="utf-8")
            write_json(self.path / "report.json", report)
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}; choose another --out") from error


def write_curves(record: Record, path: Path) -> None:
    """Writes one line for each seed and step, with all digits."""
    columns = ["seed", "step", "tokens", "loss_jax", "loss_torch", "loss_truth"]
    columns += ["gradient_norm_jax", "gradient_norm_torch", "seconds_jax", "seconds_torch"]
    columns += ["loss_transformers", "seconds_transformers"] if record.has_transformers else []
    with open(path, "w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(columns)
        for seed in record.begun:
            truth = seed.losses("truth").tolist() or [""] * seed.steps
            for step, (jax, torch, exact) in enumerate(zip(seed.jax, seed.torch, truth, strict=False), 1):
                losses = [jax.loss, torch.loss, exact]
                norms = [jax.gradient_norm, torch.gradient_norm]
                other = seed.transformers[step - 1 : step] if record.has_transformers else []
                third = [figure for figures in other for figure in (figures.loss, figures.seconds)]
                rows.writerow([seed.seed, step, jax.tokens, *losses, *norms, jax.seconds, torch.seconds, *third])
