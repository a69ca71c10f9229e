"""What the parity tests measured: gathered from pytest's reports, judged, written as JSON and Markdown."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_tformer.config.presets import ARCHITECTURES
from parity.gates.ulps import Ulps
from parity.report.figures import GATES as PAIR_GATES
from parity.report.figures import Cell, Figures, Gate, cause, markdown_table, plain, shown, with_ulps

TOLERANCES = {"softmax_1e-2": "softmax, 1e-2", "logits_1e-4": "logits, 1e-4", "logits_1e-5": "logits, 1e-5"}
"""Comparisons by a tolerance picked by hand: the property's key -> the column's title."""
GATES = {
    "1 activations": Gate(
        "value",
        "float64, forward: logits, loss, hidden states and attention weights of every layer. The figure is the largest "
        "relative error of any of these tensors, in its norm or in its worst element.",
    ),
    "2 gradients": Gate(
        "grads",
        "float64, backward: the gradient of every parameter, each measured by itself; those that are zero in exact "
        "arithmetic count against the norm of all together.",
    ),
    "3 float32 / allowed": PAIR_GATES["3 float32 / allowed"],
    "4 bfloat16 / allowed": Gate(
        "bf16",
        "bfloat16: the same ratio, with 1.8 times PyTorch's distance allowed, and 1.5 times before the backward pass.",
    ),
    "4 parts, bfloat16 / allowed": Gate(
        "parts",
        "bfloat16, each part by itself from the same inputs, compiled so that every rounding is made: the same ratio, "
        "with 1.1 times PyTorch's distance allowed for what it computes, and 1.5 times for gradients.",
    ),
    "5 optimizer": Gate(
        "optim",
        "Fifty AdamW steps in float64 with clipping that takes effect, decay on some parameters only and a learning "
        "rate that warms up: losses and parameters.",
    ),
    "6 trajectory / allowed": Gate(
        "path",
        "Three hundred steps of training in float32: how far our losses stray from the float64 path over what is "
        "allowed, three times as far as PyTorch's stray plus 1e-6.",
    ),
    "6 trajectory, float64": Gate(
        "f64",
        "The same three hundred steps in float64, on both sides: the largest relative difference of a loss or of a "
        "parameter at the end.",
    ),
    "7 dropout": Gate(
        "drop", "Dropout on: PyTorch drops exactly what JAX drew, and gates 1, 2 and 5 hold as they are."
    ),
    "8 decoding": Gate(
        "token",
        "Greedy and beam search: how many tokens differ from those that Hugging Face's generate chooses with the "
        "reference.",
    ),
    "8 decoding, float64": Gate(
        "cache",
        "float64: logits token by token from the cache against the whole forward pass, and the scores of beams.",
    ),
    "9 bytes lost": Gate("bytes", "Weights converted there and back: how many bytes differ."),
    "10 draws": Gate(
        "draws",
        "Dropout masks, fresh parameters and successive tokens as draws: the worst statistic (rates, means, "
        "deviations, pairs that should be independent), in standard deviations from what chance gives.",
    ),
    "10 first loss": Gate(
        "loss",
        "The loss of a fresh model: how far it is from ln V, that of a guess, and what the spread of its logits adds; "
        "in parts of that addition.",
    ),
}


@dataclass(frozen=True)
class Fault:
    """A fault that a test planted in one framework, and the gate that saw it."""

    fault: str
    planted: str
    """In the reference, or in the library."""
    gate: str
    figure: float
    bar: float
    margin: float
    missed: tuple[bool | None, ...]
    """By TOLERANCES: would that comparison have let the fault pass; None where it does not apply."""
    test: str = ""

    @classmethod
    def read(cls, value: Mapping[str, Any], test: str = "") -> "Fault":
        """From a recorded property; raises KeyError for a missing key."""
        figure, bar, margin = (float(value[key]) for key in ("figure", "bar", "margin"))
        missed = tuple(value[key] if value[key] is None else bool(value[key]) for key in TOLERANCES)
        return cls(str(value["fault"]), str(value["planted"]), str(value["gate"]), figure, bar, margin, missed, test)

    @property
    def caught(self) -> bool:
        """Whether the gate was red."""
        return not Cell("", self.gate, self.figure, self.bar, "").within


@dataclass
class Results(Figures):
    """What the tests' reports add up to."""

    known = GATES
    heading = "preset"

    faults: list[Fault] = field(default_factory=list)
    collected: list[str] = field(default_factory=list)
    """Known once the tests have been collected; empty where nobody told."""
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Test that is red -> where the two part, as `parity.differ.answer.sendable` says it."""
    remarks: list[str] = field(default_factory=list)
    """Why the run as a whole is red, beyond figures and tests."""

    def add(self, report: Any) -> None:
        """Takes in pytest's report on one phase of a test."""
        test = report.nodeid
        if report.failed:
            phase = "" if report.when == "call" else f" (in {report.when})" if report.when != "???" else ""
            self.failures.setdefault(test, cause(report) + phase)
            self.outcomes[test] = "failed"
        elif report.when == "call" or report.skipped:
            self.outcomes.setdefault(test, "skipped" if report.skipped else "passed")
        # A failing teardown repeats what its test recorded: cells merge, faults would double.
        for kind, value in getattr(report, "user_properties", ()):
            if kind == "parity":
                preset, gate, figure, bar, name = value
                self.put(Cell(preset, gate, float(figure), float(bar), name, report.passed))
            elif kind == "ulps" and report.when == "call":
                preset, gate, unit, tensors = value
                self.put_ulps(preset, gate, {name: Ulps.read(unit, counts) for name, counts in tensors.items()})
            elif kind == "difference" and report.when == "call":
                self.answers.setdefault(test, []).append(value)
            elif kind == "fault" and report.when == "call":
                try:
                    self.faults.append(Fault.read(value, test))
                except KeyError as missing:
                    self.failures.setdefault(test, f"it recorded a fault without {missing}")

    @property
    def rows(self) -> list[str]:
        """In the order of the presets; then other configs; then variants, which have a comma."""
        known = list(ARCHITECTURES)

        def place(preset: str) -> tuple[bool, int, str]:
            base, comma, _ = preset.partition(",")
            return bool(comma), known.index(base) if base in known else len(known), preset

        return sorted({preset for preset, _ in self.cells}, key=place)

    @property
    def ordered_faults(self) -> list[Fault]:
        """As the tests are written, whichever process ran them first."""
        places = {test: place for place, test in enumerate(self.collected)}
        return sorted(self.faults, key=lambda fault: (places.get(fault.test, len(places)), fault.test))

    def faults_line(self) -> str:
        """How many planted faults were seen, and which of them came nearest to passing."""
        if not self.faults:
            return "no faults were planted in this run"
        least = min(self.faults, key=lambda fault: -math.inf if math.isnan(fault.margin) else fault.margin)
        seen = sum(fault.caught for fault in self.faults)
        return (
            f"{seen} of {len(self.faults)} planted faults turned a gate red; "
            f"nearest to passing, at {shown(least.margin)} times the bar: {least.fault}"
        )

    def complaints(self) -> list[str]:
        """Everything that makes the verdict red; empty where it is green."""
        states = Counter(cell.state for cell in self.cells.values())
        missed = sum(not fault.caught for fault in self.faults)
        unrun = len(set(self.collected) - self.outcomes.keys())
        counted = (
            (states["red"], "figure above its bar", "figures above their bars"),
            (states["cut"], "figure of a test that did not finish", "figures of tests that did not finish"),
            (missed, "planted fault that its gate let pass", "planted faults that their gates let pass"),
            (len(self.failures), "failed test", "failed tests"),
            (unrun, "test that did not run", "tests that did not run"),
        )
        return [f"{count} {one if count == 1 else many}" for count, one, many in counted if count] + self.remarks

    def verdict(self) -> str:
        """One line that starts with GREEN or RED."""
        ended = Counter(self.outcomes.values())
        tests = ", ".join(f"{ended[state]} {state}" for state in ("passed", "failed", "skipped") if ended[state])
        if complaints := self.complaints():
            return f"RED: {', '.join(complaints)} (tests: {tests or 'none'})"
        counts = {"figure": len(self.cells), "row": len(self.rows), "planted fault": len(self.faults)}
        figures, rows, faults = (f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items())
        seen = f"; {faults}, all seen" if self.faults else ""
        return f"GREEN: {figures} in {rows}, none above its bar{seen} (tests: {tests})"

    def _where(self, test: str) -> dict[str, Any]:
        found = [answer["difference"] or answer["answer"] for answer in self.answers.get(test, ())]
        return {"where": found} if found else {}

    def as_json(self, facts: Mapping[str, Any]) -> str:
        """`facts` (machine, versions, date ...) and everything measured; JSON has no NaN, so "nan", "inf" stand in."""
        document = {
            "verdict": "red" if self.complaints() else "green",
            "complaints": self.complaints(),
            **facts,
            "tests": dict(Counter(self.outcomes.values())) | {"collected": len(self.collected or self.outcomes)},
            "cells": [
                {"preset": c.row, "gate": c.gate, "figure": plain(c.figure), "bar": plain(c.bar)}
                | {"passed": c.state == "green", "state": c.state, "worst_tensor": c.name}
                for c in self.ordered()
            ],
            "faults": [
                {"fault": f.fault, "planted": f.planted, "gate": f.gate, "figure": plain(f.figure)}
                | {"bar": plain(f.bar), "margin": plain(f.margin), "caught": f.caught}
                | dict(zip(TOLERANCES, f.missed, strict=True))
                for f in self.ordered_faults
            ],
            "failures": [
                {"test": test, "message": message} | self._where(test)
                for test, message in sorted(self.failures.items())
            ],
        }
        return with_ulps(json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n", self)


def faults_markdown(faults: Sequence[Fault], measured_on: str) -> str:
    """The table of planted faults: which gate saw each, and whether a hand-picked tolerance would have missed it."""
    words = {True: "missed", False: "seen", None: ""}
    rows = []
    for f in faults:
        gate = f.gate if f.caught else f"**none** ({f.gate})"
        figures = (shown(f.figure), f"{f.bar:g}", shown(f.margin))
        rows.append([f.fault, f.planted, gate, *figures, *(words[missed] for missed in f.missed)])
    header = ["fault", "planted in", "seen by gate", "figure", "bar", "figure / bar", *TOLERANCES.values()]
    return f"{markdown_table(header, rows)}\n\nMeasured on {measured_on}."
