"""What a run of pytest measured with the `parity` fixture: in a terminal, as a page, as JSON, as Markdown."""

import json
import os
import platform
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from parity.gates.ulps import Ulps
from parity.report.figures import Cell, Figures, cause, gates_markdown, plain, with_ulps

PACKAGES = ("jax", "jaxlib", "numpy", "torch", "flax", "equinox", "transformers", "pytest")


@dataclass
class Checks(Figures):
    """The checks of each test, judged together with how the test ended."""

    noted: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Test -> its checks, as the fixture notes them."""

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

    def settle(self) -> None:
        """Judges all figures, once it is known how the tests ended."""
        self.cells, self.ulps = {}, {}
        for test in self.tests:
            expected = self.outcomes.get(test) != "failed"
            for check in self.checks(test):
                for gate, figure, bar, name in check["figures"]:
                    self.put(Cell(self._row(test), gate, figure, bar, name, expected=expected))
                for gate, unit, tensors in check["ulps"]:
                    self.put_ulps(
                        self._row(test), gate, {name: Ulps.read(unit, counts) for name, counts in tensors.items()}
                    )

    @property
    def tests(self) -> list[str]:
        """Those that used the fixture."""
        return list(self.noted)

    def checks(self, test: str) -> list[dict[str, Any]]:
        """Those of one test; the first that the fixture notes is that it was asked for."""
        return [check for check in self.noted[test] if check]

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

    def answers(self, test: str, key: str = "answer") -> list[str]:
        """Where the two part, as far as it was looked for."""
        return [check[key] for check in self.checks(test) if check[key]]

    def verdict(self) -> str:
        """One line that starts with GREEN or RED."""
        if not self.tests:
            return "RED: no test used the parity fixture"
        ended = Counter(self.outcomes.get(test, "unfinished") for test in self.tests)
        tests = f"tests: {', '.join(f'{count} {outcome}' for outcome, count in sorted(ended.items()))}"
        red = sum(cell.state == "red" for cell in self.cells.values())
        counted = (
            (red, "figure above its bar", "figures above their bars"),
            (len(self.failed), "failed test", "failed tests"),
        )
        if self.failed or ended["unfinished"]:
            told = [f"{count} {one if count == 1 else many}" for count, one, many in counted if count]
            return f"RED: {', '.join(told) or 'tests that did not finish'} ({tests})"
        if not self.cells:
            return f"RED: no figure was measured ({tests})"
        count, asked = len(self.cells), sum(cell.state == "expected" for cell in self.cells.values())
        above = f"{asked} above their bars, as their tests ask" if asked else "none above its bar"
        return f"GREEN: {count} figure{'s' * (count != 1)}, {above} ({tests})"

    def lines(self, width: int, *, colour: bool) -> Iterator[tuple[str, bool]]:
        """The table in a terminal, then each test that failed with where the two part; and whether a line is red."""
        from parity.report.terminal_table import table_text

        if self.cells:
            yield table_text(self, width, colour=colour), False
            yield f"measured on {self._measured_on()}", False
        failed = self.failed
        for test in self.tests:
            if test in failed:
                yield f"\n{test}: {failed[test]}", True
            elif self.answers(test):
                yield f"\n{test}:", False
            yield from ((_hanging(line, width), False) for said in self.answers(test) for line in said.splitlines())
        if any(map(self.answers, self.tests)):
            yield "", False

    def write(self, folder: Path) -> None:
        """Writes parity.html and parity.json; raises OSError."""
        from parity.report.summary_page import failures, gates_table, meanings, report
        from parity.report.ulps_histograms import STYLE, histograms

        folder.mkdir(parents=True, exist_ok=True)
        facts, answers = self._facts(), {test: "".join(self._html(test)) for test in self.tests}
        others = [
            f"<p><code>{escape(test)}</code></p>{answers[test]}"
            for test in self.tests
            if test not in self.failed and answers[test]
        ]
        sections = [
            ("Failures", failures(self.failed, answers)),
            ("The worst figure of each test and gate", gates_table(self)),
            ("Where they part", "".join(others)),
            ("How far from the truth", histograms(self)),
            ("What each gate means", meanings(self)),
        ]
        page = report("Parity of JAX and PyTorch", self.verdict(), facts, sections, STYLE if self.ulps else "")
        _replace(folder / "parity.html", page)
        document = json.dumps(self._document(facts), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        _replace(folder / "parity.json", with_ulps(document, self))

    def append_markdown(self, path: Path) -> None:
        """Adds the table and what failed to the summary of a job; raises OSError."""
        verdict, _, rest = self.verdict().partition(":")
        parts = [f"## Parity: {verdict}", rest.strip()]
        if self.cells:
            parts.append(gates_markdown(self, self._measured_on()))
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

    def _html(self, test: str) -> Iterator[str]:
        for check in self.checks(test):
            if check["answer_html"]:
                yield check["answer_html"]
            elif check["answer"]:
                yield f'<div class="wide"><pre>{escape(check["answer"])}</pre></div>'

    def _measured_on(self) -> str:
        devices = {check["device"]: None for test in self.tests for check in self.checks(test)}
        beside = [device for device in devices if device != "cpu"]
        return ", beside ".join([*beside, _processor()])

    def _facts(self) -> dict[str, Any]:
        machine = {
            "processor": _processor(),
            "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        }
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "measured_on": self._measured_on(),
            "machine": machine,
            "versions": {"python": platform.python_version()} | _versions(),
        }

    def _document(self, facts: dict[str, Any]) -> dict[str, Any]:
        tests = []
        for test in self.tests:
            checks = [
                {
                    "name": check["name"],
                    "figures": [
                        {"gate": gate, "figure": plain(figure), "bar": plain(bar), "worst_tensor": name}
                        | {"passed": Cell("", gate, figure, bar, name).within}
                        for gate, figure, bar, name in check["figures"]
                    ],
                    "error": check["error"],
                    "difference": check["difference"],
                    "answer": check["answer"],
                }
                for check in self.checks(test)
            ]
            outcome = self.outcomes.get(test, "unfinished")
            tests.append({"test": test, "outcome": outcome, "message": self.failed.get(test), "checks": checks})
        verdict = self.verdict()
        return {"verdict": verdict.partition(":")[0].lower(), "told": verdict, **facts, "tests": tests}


def _hanging(line: str, width: int) -> str:
    """A line of an answer, folded behind its label ("  PyTorch  port.py:11  return ...")."""
    label = re.match(r"(\s+(?:[A-Za-z]+:?\s+)?)(?=\S)", line)
    room = " " * len(label[1]) if label else ""
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=room, break_long_words=False, break_on_hyphens=False))


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(named, "") or platform.processor() or platform.machine()
    return f"{cores} core{'s' if cores != 1 else ''} of {model}"
