"""The pytest plugin, in a project of its own that has one green test and one red."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PORT = """
import jax, numpy, pytest, torch
from parity import ParityError

WEIGHTS = {"up.kernel": ("up.weight", "o i -> i o"), "up.bias": "up.bias"}
X = numpy.random.default_rng(0).standard_normal((5, 4))


class Theirs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 6)

    def forward(self, x):
        return torch.nn.functional.gelu(self.up(x))


def ours(params, x, approximate=False):
    return jax.nn.gelu(x @ params["up"]["kernel"] + params["up"]["bias"], approximate=approximate)


def wrong(params, x):
    return ours(params, x, approximate=True)
"""
LIGHT = "import numpy\n\nX = numpy.zeros((5, 4))\n"
"""For tests that need neither framework."""
GREEN = """

def test_green(parity):
    theirs = Theirs()
    theirs.up.bias.requires_grad_(False)
    parity.check(ours, theirs, WEIGHTS, [X], gates=["9", "1", "2"])
"""
RED = """

def test_red(parity):
    parity.check(wrong, Theirs(), WEIGHTS, [X], gates=["9", "1", "2"])
"""


def run_pytest(folder, *arguments, **environment):
    """As a user of the plugin runs it, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:parity", "-p", "parity.plugin"]
    # This suite's XLA_FLAGS make short work of compilation; what is set for a job of ours is not this project's.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GITHUB_"))}
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"} | environment,
        capture_output=True,
        text=True,
    )


def run(folder, *arguments, tests, **environment):
    """Of these tests."""
    (folder / "test_port.py").write_text(tests)
    return run_pytest(folder, *arguments, **environment)


def reported(folder, tests):
    """(a run with a report, its parity.json)."""
    done = run(folder, "--parity-report", "report", tests=tests)
    return done, json.loads((folder / "report" / "parity.json").read_text())


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A run with a green test and a red one, with a report and the summary of a job, in a process of xdist's."""
    folder = tmp_path_factory.mktemp("port")
    (folder / "summary.md").write_text("before\n")
    tests = PORT + GREEN + RED
    done = run(folder, "--parity-report", "report", "-n", "1", tests=tests, GITHUB_STEP_SUMMARY="summary.md")
    return folder, done


def test_the_terminal_says_what_is_red_and_where(both):
    said = both[1].stdout
    assert both[1].returncode == pytest.ExitCode.TESTS_FAILED, said + both[1].stderr
    summary = said[said.index("= parity =") :]
    rows = {line.split()[0]: line.split()[1:] for line in summary.splitlines() if line.startswith("test_")}
    assert rows["test_red"][1] == "-", "gate 2 comes after the red one"
    assert rows["test_green"][2] == "0"
    assert all(float(figure) < 1e-12 for figure in rows["test_green"])
    assert "\ntest_port.py::test_green:\npair: gate 2 gradients: trained in ours alone: up.bias\n" in summary
    assert "RED" in summary
    assert "test_port.py::test_red: pair: gate 1 activations" in summary
    assert "RED: 1 figure above the bar, 1 failed test (tests: 1 failed, 1 passed)" in summary
    assert max(map(len, summary.splitlines()[1:-3])) <= 120
    assert re.search(r"JAX +test_port.py:\d+ +return jax.nn.gelu", summary)
    assert re.search(r"PyTorch +test_port.py:\d+ +return\s+torch.nn.functional.gelu", summary)
    # The traceback is the test's own line, and nothing of ours.
    assert re.search(r"^>\s+parity\.check\(wrong, Theirs\(\)", said, re.MULTILINE)
    assert "gates.py" not in said
    assert "plugin.py:" not in said


def test_json_has_every_figure_and_why(both):
    document = json.loads((both[0] / "report" / "parity.json").read_text())
    assert document["verdict"] == "red"
    rows = [(row["test"], row["outcome"]) for row in document["tests"]]
    assert rows == [("test_port.py::test_green", "passed"), ("test_port.py::test_red", "failed")]
    [green], [red] = (row["checks"] for row in document["tests"])
    assert [figure["passed"] for figure in green["figures"]] == [True, True, True]
    assert [figure["passed"] for figure in red["figures"]] == [True, False]
    assert red["error"].startswith("pair: gate 1 activations")
    assert red["difference"]["stage"] == "forward"
    assert red["difference"]["ours"]["source"].startswith("return jax.nn.gelu(")


def test_the_page_loads_nothing_and_says_the_same(both):
    page = (both[0] / "report" / "parity.html").read_text()
    assert re.search(r'<dt>JAX</dt>.*<code class="source">return jax.nn.gelu', page)
    assert not re.search(r"https?://|url\(|@import|<script", page)


def test_the_summary_of_a_job_is_added_to(both):
    text = (both[0] / "summary.md").read_text()
    assert text.startswith("before\n## Parity: RED\n")
    assert re.search(r"^\| `test_red` \| \*\*\S+ red\*\* \|  \| 0 \|$", text, re.MULTILINE), text
    assert re.search(
        r"^```text\npair: gate 1 activations.*\n(.*\n)*  JAX +test_port.py.*\n(.*\n)*```$", text, re.MULTILINE
    )


def test_a_test_that_asks_for_a_red_gate_is_no_failure(tmp_path):
    tests = PORT + RED.replace("    parity.check", "    with pytest.raises(ParityError):\n        parity.check")
    tests += """

def test_tensors(parity):
    parity.tensors("1 activations", {"y": X}, {"y": X + 1e-15})


def test_without_a_check(parity):
    pass


def test_without_the_fixture():
    pass
"""
    done, document = reported(tmp_path, tests)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "(red): above its bar, and its test passed: it asks for that." in done.stdout
    assert "GREEN: 3 figures, 1 above their bars, as their tests ask (tests: 3 passed)" in done.stdout
    assert document["verdict"] == "green"
    assert [row["test"].partition("::")[2] for row in document["tests"]] == [
        "test_red",
        "test_tensors",
        "test_without_a_check",
    ]


def test_an_answer_is_noted_on_its_own(tmp_path):
    """first_difference fails nothing by itself; where a test asks for it, the end of the run shows it."""
    tests = """

class Found:
    def __bool__(self):
        return True

    def __str__(self):
        return "pair: they part\\n  JAX      port.py:3  x * 2"

    def as_json(self):
        return {"stage": "forward"}

    def as_html(self):
        return "<p>they part</p>"


def test_asks(parity, monkeypatch):
    monkeypatch.setattr("parity.first_difference", lambda *_, **__: Found(), raising=False)
    assert parity.first_difference(None, None)
    parity.tensors("1 activations", {"y": X + 1}, {"y": X + 1})
"""
    done, document = reported(tmp_path, LIGHT + tests)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "\ntest_port.py::test_asks:\npair: they part\n  JAX      port.py:3  x * 2\n" in done.stdout
    assert "<p>they part</p>" in (tmp_path / "report" / "parity.html").read_text()
    [test] = document["tests"]
    assert [check["difference"] for check in test["checks"]] == [{"stage": "forward"}, None]


def test_what_breaks_before_a_figure_is_red(tmp_path):
    """Shapes that differ have no figure, a test may fail before it compares or beside those that do: none is green."""
    tests = """

def test_shapes(parity):
    parity.tensors("1 activations", {"y": X}, {"y": X[1:]})


def test_broken(parity):
    raise ValueError("no checkpoint")


def test_beside():
    raise ValueError("no data")
"""
    done, document = reported(tmp_path, LIGHT + tests)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "test_port.py::test_shapes: y: shapes differ: ours [5, 4], theirs [4, 4]" in done.stdout
    assert "test_port.py::test_broken: ValueError: no checkpoint" in done.stdout
    assert "RED: 2 failed tests, 1 other failed test (tests: 2 failed)" in done.stdout
    assert document["verdict"] == "red"


def test_a_folder_that_is_a_file_is_refused_before_any_test(tmp_path):
    (tmp_path / "report").write_text("mine")
    done = run(tmp_path, "--parity-report", "report", tests=LIGHT)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.strip() == "ERROR: --parity-report report: is a file; expected a folder"
    assert (tmp_path / "report").read_text() == "mine"


def test_a_report_that_cannot_be_written_fails_the_run(tmp_path):
    (tmp_path / "report" / "parity.html.partial").mkdir(parents=True)
    done = run(tmp_path, "--parity-report", "report", tests="def test_nothing(parity):\n    pass\n")
    assert "report: cannot be written (Is a directory)" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


def test_projects_that_do_not_use_it_pay_nothing(tmp_path):
    """Neither framework is imported, nor anything of rich, by a run whose tests do not ask for the fixture."""
    tests = """
import sys


def test_nothing_is_loaded():
    heavy = {'jax', 'torch', 'numpy', 'rich', 'einops', 'jinja2'} & sys.modules.keys()
    assert not heavy, heavy
"""
    done = run(tmp_path, tests=tests, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "= parity =" not in done.stdout
