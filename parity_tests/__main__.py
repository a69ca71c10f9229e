"""`python -m parity_tests`: the gates as a report; a live line, a table, parity.json, parity.html and one verdict."""

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from jax_tformer.config.errors import InputError
from jax_tformer.files import write_text
from parity.report.figures import cause, gates_markdown, shown, summary_markdown
from parity.report.terminal_table import table_text
from parity_tests.report import Results, faults_markdown
from parity_tests.report_page import html
from twin.machine import Machine, describe_machine, jax_device

ROOT = Path(__file__).parents[1]
TABLES = ("gates", "summary", "faults")
SECONDS_BETWEEN_LINES = 15


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def called() -> str:
    """Returns what the user typed for this program."""
    return sys.argv[0] if sys.argv[0].startswith("jax-tformer ") else "python -m parity_tests"


def arguments(given: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our options, what is passed on to pytest)."""
    parser = Parser(
        prog=called(),
        description="Runs the parity gates and reports them: 0 all green, 1 something red, 2 bad usage.",
        epilog="Everything else goes to pytest: -k gpt2, --deep SEED, parity_tests/test_weights.py, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--jobs", "-n", type=int, default=2, metavar="N", help="processes that test (default 2)")
    parser.add_argument("--out", type=Path, default=Path("parity-report"), metavar="FOLDER", help="for the report")
    parser.add_argument(
        "--docs",
        nargs="*",
        type=Path,
        default=None,
        metavar="FILE",
        help="write the tables into these Markdown files: of all gates between <!-- gates: begin --> and "
        "<!-- gates: end -->, and likewise summary (the worst of each gate) and faults; without a file into README.md "
        "and docs/parity.md",
    )
    options, selection = parser.parse_known_args(given)
    options.docs = [] if options.docs is None else options.docs or [ROOT / "README.md", ROOT / "docs" / "parity.md"]
    if options.jobs < 1:
        raise InputError(f"--jobs {options.jobs}: at least 1 process has to test")
    for path in options.docs:
        with _as_asked(path):
            if not any(between(name).search(path.read_text("utf-8")) for name in TABLES):
                raise InputError(f"{path}: has no <!-- gates: begin --> ... <!-- gates: end -->, nor summary or faults")
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out}: is a file; expected a folder")
    with _as_asked(options.out):
        options.out.mkdir(parents=True, exist_ok=True)
    return options, selection


def between(name: str) -> re.Pattern[str]:
    """Matches the part of a document that the table `name` replaces, lines of markers included."""
    return re.compile(rf"(<!-- {name}: begin -->\n).*?(^<!-- {name}: end -->)", re.DOTALL | re.MULTILINE)


def updated(text: str, results: Results, measured_on: str) -> str:
    """A document with the tables that were measured in their places; a table without rows replaces nothing."""
    tables = {"gates": gates_markdown(results, measured_on), "summary": summary_markdown(results, measured_on)}
    tables = tables if results.cells else {}
    tables["faults"] = faults_markdown(results.ordered_faults, measured_on) if results.faults else ""
    for name, table in tables.items():
        part = between(name).search(text) if table else None
        if part:
            text = f"{text[: part.start()]}{part[1]}\n{table}\n\n{part[2]}{text[part.end() :]}"
    return text


class Progress:
    """A plugin of pytest: gathers reports, and tells how far the run is."""

    def __init__(self, console: Console, results: Results) -> None:
        self._console, self._results = console, results
        self.started = self._told = time.monotonic()

    def __rich__(self) -> Text:
        """How many tests of how many, the worst figure so far, and the time."""
        results, worst = self._results, self._results.worst()
        line = f"{len(results.outcomes)} of {len(results.collected) or '?'} tests"
        if worst:
            line += f"  worst: {worst.row}, gate {worst.gate}: {shown(worst.figure)} of {worst.bar:g}"
        if results.failures:
            line += f"  {len(results.failures)} failed"
        red = bool(results.failures) or (worst is not None and worst.state == "red")
        return Text(f"{line}  {time.monotonic() - self.started:.0f} s", style="red" if red else "")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """The processes that test have agreed on what there is."""
        self._results.collected = list(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failure."""
        if report.failed:
            self._results.failures[report.nodeid] = cause(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of one phase of one test."""
        self._results.add(report)
        if not self._console.is_terminal and time.monotonic() - self._told > SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            self._console.print(self, soft_wrap=True)


def run(selection: list[str], jobs: int, results: Results, log: IO[bytes]) -> None:
    """Runs the tests in `jobs` processes; what pytest and the tests print goes to `log`."""
    os.chdir(ROOT)
    with _output_to(log) as screen:
        console = Console(file=screen)
        progress = Progress(console, results)
        # Live would bring what pytest prints back onto the screen, and it belongs into the log.
        live = Live(progress, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
        with live if console.is_terminal else contextlib.nullcontext():
            # Named as testpaths, the folder gives way to files that the selection names.
            status = pytest.main(
                ["-n", str(jobs), "--dist", "worksteal", "-o", "testpaths=parity_tests", *selection], plugins=[progress]
            )
    log.seek(0)
    said = log.read().decode(errors="replace")
    ran = results.outcomes or results.failures or status == pytest.ExitCode.INTERRUPTED
    if status == pytest.ExitCode.USAGE_ERROR or not ran:
        errors = [line for line in said.splitlines() if re.search(r"\berror:", line, re.IGNORECASE)]
        # Of what the testing processes find wrong, a mistake in -k for example, pytest passes no message on.
        reason = f"pytest ran no test for: {shlex.join(selection) or 'parity_tests'} (its words: pytest.log, in --out)"
        raise InputError(errors[-1].split("rror:", 1)[1].strip() if errors else reason)
    if status == pytest.ExitCode.INTERRUPTED and not results.failures:
        results.remarks.append("the run was interrupted")
    elif status == pytest.ExitCode.INTERNAL_ERROR:
        results.remarks.append("pytest ended with an internal error (see pytest.log)")
    if not (results.cells or results.faults or results.failures or results.remarks):
        results.remarks.append("the selected tests measured nothing")


def facts(selection: list[str], seconds: float, machine: Machine) -> dict[str, Any]:
    """When, where and with what the figures were measured."""
    about = machine.as_dict()
    versions = about.pop("versions")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "commit": _commit(),
        "selection": shlex.join(selection),
        "measured_on": str(machine),
        "machine": about,
        "versions": versions,
    }


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or None
    return None


@contextlib.contextmanager
def _as_asked(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def _output_to(log: IO[bytes]) -> Iterator[IO[str]]:
    # The descriptors, not sys.stdout: compiled code and the processes that test write there too.
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        with os.fdopen(kept[0], "w", encoding="utf-8", closefd=False) as screen:
            yield screen
    finally:
        sys.stdout.flush()
        for place, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, place)
            os.close(descriptor)


def unmeasured(results: Results) -> list[str]:
    """The gates that a whole run should have measured and has not: an emptied parametrisation is no green."""
    from twin.cases import CONFIGS

    always = ["1 activations", "2 gradients", "3 float32 / allowed", "4 bfloat16 / allowed", "9 bytes lost", "10 draws"]
    trained = ["5 optimizer", "6 trajectory, float64", "6 trajectory / allowed"]
    missing = []
    for name, config in CONFIGS.items():
        gates = always + (trained if config.predicts_tokens else [])
        if config.decoder is not None and config.predicts_tokens:
            gates += ["8 decoding", "8 decoding, float64"]
        missing += [f"no figure for {name}, gate {gate}" for gate in gates if (name, gate) not in results.cells]
    if not any(gate == "7 dropout" for _, gate in results.cells):
        missing.append("no figure for gate 7 dropout")
    return missing


def main(given: list[str]) -> int:
    """Returns the exit status: 0 all green, 1 something red, 2 bad usage."""
    started, results = time.monotonic(), Results()
    try:
        options, selection = arguments(given)
        out, documents = options.out.resolve(), [path.resolve() for path in options.docs]
        with tempfile.TemporaryFile() as log:
            try:
                run(selection, options.jobs, results, log)
            finally:
                log.seek(0)
                (out / "pytest.log").write_bytes(log.read())
    except InputError as error:
        print(f"{called()}: error: {error}", file=sys.stderr)
        return 2
    if not selection:
        results.remarks += unmeasured(results)
    # Only now: the processes that tested have ended and left the device free.
    about = facts(selection, time.monotonic() - started, describe_machine(jax_device()))
    write_text(out / "parity.json", results.as_json(about))
    write_text(out / "parity.html", html(results, about))

    console = Console()
    if results.cells:
        print(table_text(results, console.width, colour=console.is_terminal and not console.no_color))
        console.print(Text(f"measured on {about['measured_on']}"), soft_wrap=True)
    for test, message in sorted(results.failures.items()):
        console.print(Text(f"FAILED {test}: {message}", style="red"), soft_wrap=True)
        for answer in results.answers.get(test, ()):
            console.print(Text(answer["answer"]), soft_wrap=True)
    complaints = results.complaints()
    console.print(Text(results.faults_line()), soft_wrap=True)
    for path in documents:
        if complaints:
            console.print(Text(f"{path.name} is left as it was, since something is red"))
        else:
            versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("jax", "torch"))
            where = f"{about['measured_on']}, {about['date'][:10]}, {versions}"
            write_text(path, updated(path.read_text("utf-8"), results, where))
            console.print(Text(f"{path.name} has the new tables" + (" (of a selection)" if selection else "")))
    console.print(Text(f"{options.out}/parity.html, parity.json, pytest.log; {about['seconds']:.0f} s"), soft_wrap=True)
    console.print(Text(results.verdict(), style="bold red" if complaints else "bold green"), soft_wrap=True)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
