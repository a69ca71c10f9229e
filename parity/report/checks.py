"""What a run of pytest measured with the `parity` fixture: in a terminal, as a page, as JSON, as Markdown."""

import json
import math
import platform
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from parity.differ.answer import folded
from parity.machine import count_cores, describe_processor, versions_of
from parity.report.figures import Cell, Figures, gates_markdown
from parity.report.summary_page import summary_page

PACKAGES = ("jax", "jaxlib", "numpy", "torch", "flax", "equinox", "transformers", "pytest")


@dataclass
class Checks:
    """The checks of each test, judged together with how the test ended."""

    noted: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Test -> its checks, as the fixture notes them."""
    outcomes: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Test -> the line that says why."""
    others: int = 0
    """How many more failed, of those that compare nothing."""
    interrupted: bool = False

    def add(self, report: Any, kind: str) -> None:
        """Takes in one phase of one test, whose checks are the properties of this `kind`."""
        test = report.nodeid
        if report.when == "setup":  # also of a test that runs again
            for seen in (self.noted, self.failures, self.outcomes):
                seen.pop(test, None)
        if found := [check for name, check in report.user_properties if name == kind]:
            self.noted[test] = found
        if report.failed:
            self.outcomes[test] = "failed"
            self.failures.setdefault(test, cause(report) + ("" if report.when == "call" else f" (in {report.when})"))
        elif report.when == "call" or report.skipped:
            self.outcomes.setdefault(test, "skipped" if report.skipped else "passed")

    @cached_property
    def figures(self) -> Figures:
        """All figures, once it is known how the tests ended."""
        return Figures(
            Cell(check["row"] or self._row(test), gate, figure, bar, name, self.outcomes.get(test) != "failed")
            for test in self.tests
            for check in self.checks(test)
            for gate, figure, bar, name in check["figures"]
        )

    @property
    def tests(self) -> list[str]:
        """Those that used the fixture."""
        return list(self.noted)

    def checks(self, test: str) -> list[dict[str, Any]]:
        """Those of one test; the first that the fixture notes is that it was asked for."""
        return [check for check in self.noted[test] if check]

    @property
    def faults(self) -> list[dict[str, Any]]:
        """Those that were planted, and seen, in the order of the names of their tests."""
        checks = (check for test in sorted(self.tests) for check in self.checks(test))
        return [check["fault"] for check in checks if check["fault"]]

    @property
    def failed(self) -> dict[str, str]:
        """Test -> why it failed, in the words of the check that is red where there is one."""
        said = {}
        for test in self.tests:
            if self.outcomes.get(test) == "failed":
                line = self.failures[test]
                errors = (check["error"] for check in self.checks(test) if check["error"])
                said[test] = next((error for error in errors if error.splitlines()[0] in line), line)
        return said

    def answers(self, test: str) -> list[str]:
        """Where the two part, as far as it was looked for."""
        return [check["answer"] for check in self.checks(test) if check["answer"]]

    def verdict(self) -> str:
        """One line that starts with GREEN or RED."""
        if not self.tests:
            return "RED: no test used the parity fixture"
        ended = Counter(self.outcomes.get(test, "unfinished") for test in self.tests)
        tests = f"tests: {', '.join(f'{count} {outcome}' for outcome, count in sorted(ended.items()))}"
        states = Counter(cell.state for cell in self.figures.cells.values())
        told = (
            (ended["failed"], "failed test"),
            (ended["unfinished"], "unfinished test"),
            (self.others, "other failed test"),
        )
        said = [_counted(count, what) for count, what in told if count] + ["the run was interrupted"] * self.interrupted
        if said:
            above = [f"{_counted(states['red'], 'figure')} above the bar"] if states["red"] else []
            return f"RED: {', '.join(above + said)} ({tests})"
        if not states and not self.faults:
            return f"RED: no figure was measured ({tests})"
        asked = (
            f"{states['expected']} above their bars, as their tests ask" if states["expected"] else "none above its bar"
        )
        seen = f"; {_counted(len(self.faults), 'planted fault')}, each seen" if self.faults else ""
        return f"GREEN: {_counted(states.total(), 'figure')}, {asked}{seen} ({tests})"

    def lines(self, width: int, *, colour: bool) -> Iterator[tuple[str, bool]]:
        """The table in a terminal, then each test that failed with where the two part; and whether a line is red."""
        from parity.report.terminal_table import table_text

        if self.figures.cells:
            yield table_text(self.figures, width, colour=colour), False
            yield f"measured on {self._measured_on()}", False
        failed = self.failed
        for test in self.tests:
            if test in failed:
                yield f"\n{test}: {failed[test]}", True
            elif self.answers(test):
                yield f"\n{test}:", False
            yield from ((folded(line, width), False) for said in self.answers(test) for line in said.splitlines())
        if any(map(self.answers, self.tests)):
            yield "", False

    def write(self, folder: Path) -> None:
        """Writes parity.html and parity.json; raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        facts = self._facts()
        document = json.dumps(self._document(facts), indent=2, allow_nan=False, ensure_ascii=False)
        for name, text in (("parity.html", summary_page(self, facts)), ("parity.json", f"{document}\n")):
            partial = folder / f"{name}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(folder / name)

    def append_markdown(self, path: Path) -> None:
        """Adds the table and what failed to the summary of a job; raises OSError."""
        verdict, _, rest = self.verdict().partition(":")
        parts = [f"## Parity: {verdict}", rest.strip()]
        if self.figures.cells:
            parts.append(gates_markdown(self.figures, self._measured_on()))
        for test, message in self.failed.items():
            told = "\n".join([message, *self.answers(test)])
            fence = "```"
            while fence in told:
                fence += "`"
            parts += [f"**`{test}`**", f"{fence}text\n{told}\n{fence}"]
        with path.open("a", encoding="utf-8") as file:
            file.write("\n\n".join(parts) + "\n\n")

    def _row(self, test: str) -> str:
        """A test without its file where all are in one: names have to fit into a narrow table."""
        files = {name.partition("::")[0] for name in self.tests}
        return test.partition("::")[2] or test if len(files) == 1 else test

    def _measured_on(self) -> str:
        devices = {check["device"]: None for test in self.tests for check in self.checks(test)}
        beside = [device for device in devices if device != "cpu"]
        return ", beside ".join([*beside, _processor()])

    def _facts(self) -> dict[str, Any]:
        system = f"{platform.system()} {platform.release()}, {platform.machine()}"
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "measured_on": self._measured_on(),
            "machine": {"processor": _processor(), "system": system},
            "versions": versions_of(PACKAGES),
        }

    def _document(self, facts: dict[str, Any]) -> Any:
        def said(check: dict[str, Any]) -> dict[str, Any]:
            figures = [
                {"gate": gate, "figure": figure, "bar": bar, "worst_tensor": name}
                | {"passed": Cell("", gate, figure, bar, name).within}
                for gate, figure, bar, name in check["figures"]
            ]
            return {key: value for key, value in check.items() if key != "answer_html"} | {"figures": figures}

        verdict, failed = self.verdict(), self.failed
        tests = [
            {"test": test, "outcome": self.outcomes.get(test, "unfinished"), "message": failed.get(test)}
            | {"checks": list(map(said, self.checks(test)))}
            for test in self.tests
        ]
        return _plain({"verdict": verdict.partition(":")[0].lower(), "told": verdict, **facts, "tests": tests})


def cause(report: Any) -> str:
    """The error of a failed report of pytest in one line, without the module path of its class."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines() or ["no message"]
    line = lines[0] if crash else lines[-1]
    return re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", line.removeprefix("E").strip())


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _plain(value: Any) -> Any:
    """For JSON, which has no NaN: "nan" and "inf" stand in."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(_plain, value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _processor() -> str:
    return f"{_counted(count_cores(), 'core')} of {describe_processor()['model name']}"
