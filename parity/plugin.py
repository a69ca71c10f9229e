"""The pytest plugin: a `parity` fixture whose figures end the run as a table, a page, JSON and a job's summary.

    def test_mlp(parity):
        parity.check(ours, theirs, {"up.kernel": ("up.weight", "o i -> i o"), "up.bias": "up.bias"}, [x])

Every project that has pytest and this package loads it: it imports neither framework, nor anything else that is slow,
before a test asks for the fixture.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from parity.machine import jax_device

if TYPE_CHECKING:
    from parity import Difference, Measured
    from parity.report.checks import Checks

__tracebackhide__ = True  # a failure is shown where the test calls
PROPERTY = "parity check"
"""Under this name a check travels with the report of its test, also from a process that xdist has started."""


class Parity:
    """The fixture: each call is noted under its test, green or red."""

    def __init__(self, note: Callable[[dict[str, Any]], None]) -> None:
        self._note = note

    def check(self, *arguments: Any, name: str = "pair", **options: Any) -> "list[Measured]":
        """`parity.check_parity`, with the same arguments; raises ParityError where it does.

        Where two sides part, the end of the run shows the first place.
        """
        from parity import check_parity

        return self._require(lambda: check_parity(*arguments, name=name, **options), name)

    def tensors(
        self, gate: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], *, name: str = "tensors", **options: Any
    ) -> "Measured":
        """`parity.assert_parity`: tensors that the test has already, by name, against the bar of `gate`."""
        from parity import assert_parity

        return self._require(lambda: [assert_parity(gate, ours, theirs, **options)], name)[0]

    def figure(self, measured: "Measured", *, row: str, search: Callable[[], Any] | None = None) -> None:
        """What the test measured by itself, for the row of this name; raises ParityError where it is red.

        `search` is then asked where the two part, and the end of the run shows the answer.
        """
        self._require(lambda: [measured.require()], row, row=row, search=search)

    def fault(self, name: str, figures: "Sequence[Measured]", planted: str, **more: str) -> None:
        """A fault that the test has `planted` somewhere: fails unless one of the figures is red, and notes the first.

        `more` are further columns of the table of faults.
        """
        red = [figure for figure in figures if not figure.passed]
        assert red, f"no gate sees {name!r}: {'; '.join(map(str, figures))}"
        figure, bar = float(red[0].worst), float(red[0].bar)
        said = {"fault": name, "planted in": planted, "seen by gate": red[0].gate, "figure": figure, "bar": f"{bar:g}"}
        self._record(name, fault=said | {"figure / bar": figure / bar if bar else float("inf")} | more)

    def first_difference(self, *arguments: Any, name: str = "pair", **options: Any) -> "Difference":
        """`parity.first_difference`, whose answer is noted; it fails nothing by itself."""
        from parity import first_difference

        found = first_difference(*arguments, name=name, **options)
        self._record(name, found=found)
        return found

    def _require(
        self,
        run: "Callable[[], list[Measured]]",
        name: str,
        *,
        row: str | None = None,
        search: Callable[[], Any] | None = None,
    ) -> "list[Measured]":
        """The figures that `run` measures, noted, also where it raises."""
        from parity import ParityError

        try:
            figures = run()
        except ParityError as error:
            found = search() if search else error.difference
            self._record(name, error.figures, row=row, error=str(error), found="" if found is None else found)
            error.__notes__ = []  # the end of the run has the answer
            raise error.with_traceback(None) from None
        notes = "\n".join(f"{name}: gate {figure.gate}: {figure.note}" for figure in figures if figure.note)
        self._record(name, figures, row=row, found=notes)
        return figures

    def _record(
        self,
        name: str,
        figures: "Sequence[Measured]" = (),
        *,
        row: str | None = None,
        error: str | None = None,
        found: "Difference | str" = "",
        fault: Mapping[str, Any] | None = None,
    ) -> None:
        from parity.differ.answer import sendable

        rows = [[f.gate, float(f.worst), float(f.bar), f.name] for f in figures]
        device = jax_device() if "jax" in sys.modules else "cpu"
        about = {"name": name, "row": row, "figures": rows, "fault": fault or {}, "error": error, "device": device}
        self._note(about | sendable(found))


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Parity:
    """Compares a JAX function with a PyTorch module: `parity.check(ours, theirs, weights, inputs)`."""

    def note(check: dict[str, Any]) -> None:
        request.node.user_properties.append((PROPERTY, check))

    note({})  # The test stands in the report even if it fails before it has compared anything.
    return Parity(note)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--parity-report FOLDER`."""
    group = parser.getgroup("parity", "parity of JAX and PyTorch")
    message = "write what the parity fixture measured to FOLDER/parity.html and FOLDER/parity.json"
    group.addoption("--parity-report", type=Path, metavar="FOLDER", help=message)


def pytest_configure(config: pytest.Config) -> None:
    """Refuses a folder that cannot be one, before any test runs; processes of xdist report to the one that started."""
    if hasattr(config, "workerinput"):
        return
    folder: Path | None = config.getoption("--parity-report")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise pytest.UsageError(f"--parity-report {folder}: is a file; expected a folder")
    config.pluginmanager.register(Reporter(folder), "parity reporter")


class Reporter:
    """Gathers what the tests measured, and says it at the end."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._noted = folder, False
        self._said: list[str] = []
        """Lines below the table: what was written."""

    @cached_property
    def _checks(self) -> "Checks":
        from parity.report.checks import Checks

        return Checks()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes in one phase of one test."""
        self._noted = self._noted or any(kind == PROPERTY for kind, _ in report.user_properties)
        if self._noted:
            self._checks.add(report, PROPERTY)

    # First: the terminal's summary, which shows what happens here, is part of the same hook.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Writes the report and the summary of the job; a run for which one was not written has not passed."""
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if not self._noted and self._folder is None:
            return
        checks = self._checks
        checks.others = session.testsfailed - len(checks.failed)
        checks.interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        for path, write, said in (
            (self._folder, checks.write, "parity.html, parity.json"),
            (summary and checks.tests and Path(summary), checks.append_markdown, "the summary of the job"),
        ):
            if path:
                try:
                    write(path)
                except OSError as error:
                    said = f"cannot be written ({error.strerror or error})"
                    session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
                self._said.append(f"{path}: {said}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The table, what failed and where the two part."""
        if not self._noted and self._folder is None:
            return
        screen = terminalreporter._tw
        terminalreporter.section("parity")
        for line, red in self._checks.lines(screen.fullwidth, colour=screen.hasmarkup):
            terminalreporter.write_line(line, red=red)
        verdict = self._checks.verdict()
        good = verdict.startswith("GREEN")
        terminalreporter.write_line(verdict, green=good, red=not good, bold=True)
        for line in self._said:
            terminalreporter.write_line(line)


__all__ = ["Parity", "parity"]
