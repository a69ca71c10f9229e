"""`make parity` as a program: what it passes on, its exit statuses, and a run from end to end."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_tformer.config.errors import InputError
from parity_tests.__main__ import arguments, main

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--jobs", "0"], "--jobs 0"),
        (["--jobs", "two"], "invalid int value: 'two'"),
        (["--out"], "expected one argument"),
        (["--docs", "missing.md"], "missing.md: No such file"),
        (["--docs", "plain.md"], "plain.md: has no <!-- gates: begin -->"),
        (["--docs", "half.md"], "half.md: has no <!-- gates: begin -->"),
        (["--out", "plain.md"], "plain.md: "),
    ],
)
def test_bad_usage_is_one_line(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.md").write_text("# Nothing\n")
    Path("half.md").write_text("<!-- gates: begin -->\n")
    assert main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m parity_tests: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(os.listdir()) == ["half.md", "plain.md"]


def test_what_is_not_ours_goes_to_pytest(tmp_path: Path) -> None:
    options, selection = arguments(["-k", "gpt2 and gates", "--out", str(tmp_path), "--deep", "7", "-n", "3", "a.py"])
    assert (options.jobs, selection) == (3, ["-k", "gpt2 and gates", "--deep", "7", "a.py"])
    with pytest.raises(InputError):
        arguments(["--out"])


def test_the_tables_of_this_project_are_written_by_default(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    assert [path.name for path in arguments(["--docs", *out])[0].docs] == ["README.md", "parity.md"]
    assert arguments([*out])[0].docs == []


TINY = """
import pytest

class ParityError(AssertionError):
    pass

def test_green(record_property):
    record_property("parity", ("gpt2", "1 activations", 5e-16, 1e-12, "logits"))

def test_red(record_property):
    record_property("parity", ("gpt2", "2 gradients", float("nan"), 1e-12, "head.bias"))
    raise ParityError("gate 2 gradients: nan >  1e-12 (head.bias)")

def test_crash(record_property):
    print("loud")
    raise MemoryError
"""


def command(folder: Path, *given: str) -> list[str]:
    tests = str(folder / "test_tiny.py")
    documents = ("--out", str(folder / "out"), "--docs", str(folder / "page.md"))
    return [sys.executable, "-m", "parity_tests", tests, "--jobs", "1", *given, *documents]


def environment() -> dict[str, str]:
    # Without the variables by which the processes of an outer run know each other.
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def on_a_terminal(*arguments: str) -> tuple[int, str]:
    """(exit status, everything that a terminal was sent)."""
    ours, theirs = os.openpty()
    with subprocess.Popen(arguments, cwd=ROOT, env=environment() | {"TERM": "xterm"}, stdout=theirs) as process:
        os.close(theirs)
        sent = b""
        # Linux ends the reading with an error, others with nothing.
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 4096):
                sent += piece
    os.close(ours)
    return process.returncode, sent.decode()


@pytest.mark.deep
def test_from_end_to_end(tmp_path: Path) -> None:
    """Through processes of their own, as `make parity` runs them, but tests without a framework."""
    (tmp_path / "test_tiny.py").write_text(TINY)
    markers = (f"<!-- {name}: {place} -->\n" for name in ("gates", "summary") for place in ("begin", "end"))
    (tmp_path / "page.md").write_text("".join(markers))

    def run(*given: str) -> subprocess.CompletedProcess[str]:
        arguments = command(tmp_path, *given)
        return subprocess.run(arguments, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)

    red = run()
    assert red.returncode == 1, red.stderr
    assert "loud" not in red.stdout + red.stderr
    # How a test outside of the project is called depends on where the project lies.
    assert re.search(r"FAILED \S*::test_red: ParityError: gate 2 gradients: nan >  1e-12 \(head.bias\)", red.stdout)
    assert re.search(r"FAILED \S*::test_crash: MemoryError", red.stdout)
    assert red.stdout.splitlines()[-1].startswith(
        "RED: 1 figure above its bar, 2 failed tests (tests: 1 passed, 2 fail"
    )
    document = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert [(cell["figure"], cell["state"]) for cell in document["cells"]] == [(5e-16, "green"), ("nan", "red")]
    assert document["tests"] == {"passed": 1, "failed": 2, "collected": 3}
    assert {"python", "jax", "numpy"} <= document["versions"].keys()
    assert "RED" in (tmp_path / "out" / "parity.html").read_text()
    assert "loud" in (tmp_path / "out" / "pytest.log").read_text()
    assert (tmp_path / "page.md").read_text().count("\n") == 4

    status, screen = on_a_terminal(*command(tmp_path, "-k", "green"))
    assert status == 0, screen
    assert "tests" in screen
    assert "session" not in screen, "pytest's own output is for the log"
    assert "GREEN: 1 figure in 1 row, none above its bar (tests: 1 passed)" in screen
    assert re.search(r"measured on \d+ cores? of ", screen)
    document = json.loads((tmp_path / "out" / "parity.json").read_text())
    page = (tmp_path / "page.md").read_text()
    assert "| worst of 1 row | 5.0e-16 |" in page
    assert f"| `gpt2` | 5.0e-16 |\n| bar | 1e-12 |\n\nMeasured on {document['measured_on']}, 20" in page

    unknown = run("--no-such-option")
    assert unknown.returncode == 2
    assert unknown.stderr == "python -m parity_tests: error: unrecognized arguments: --no-such-option\n"
    assert unknown.stdout == ""
