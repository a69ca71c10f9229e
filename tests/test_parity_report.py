"""The parity report: what is red never reads as green, NaN survives, page and documents say what was measured."""

import json
import math
import re
from html import unescape
from itertools import permutations
from types import SimpleNamespace

import pytest

from parity import Difference, Measured, ParityError, Site
from parity.plugin import PROPERTY, Parity
from parity.report.checks import Checks, cause
from parity.report.figures import GATES, Cell, Figures, gates_markdown, short, shown
from parity.report.terminal_table import table_text
from parity_tests.tables import between, find_unmeasured, updated
from tests.several_processes import ROOT
from twin.cases import CONFIGS

ALL = {(row, gate): 5.44e-16 for row in ("gpt2", "switches-encoder-decoder, 520 positions") for gate in GATES}
"""Two rows, one with a long name, by all gates."""


def run(*tests, **more):
    """What the plugin gathers from tests: (name, outcome, a function that calls the fixture)."""
    checks = Checks(**more)
    for name, outcome, measure in tests:
        notes = [{}]
        said = ""
        try:
            measure(Parity(notes.append))
        except ParityError as error:
            said = f"E   parity.gates.measure.ParityError: {error}"
        # As a process of xdist sends them.
        properties = json.loads(json.dumps([[PROPERTY, note] for note in notes]))
        report = {"when": "call", "failed": outcome == "failed", "skipped": outcome == "skipped", "longrepr": said}
        checks.add(SimpleNamespace(nodeid=name, user_properties=properties, **report), PROPERTY)
    return checks


def of(value, bar=1e-12, row="gpt2", gate="1 activations", **options):
    return lambda parity: parity.figure(Measured(gate, value, bar, "logits"), row=row, **options)


def red(parity):
    """A figure above its bar, and where the two part."""
    site = Site("mul", file="model.py", line=7, source="x * (1 < 2)")
    of(1e-4, gate="2 gradients", search=lambda: Difference("forward", site, site))(parity)


def fault(parity, figure=1e-4, bar=1e-12):
    parity.fault(
        "GELU: tanh <-> erf | one side", [Measured("1 activations", figure, bar, "x")], "reference", more="seen"
    )


def written(checks, folder):
    """(the page, the document as a program that accepts only the letter of JSON reads it)."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    checks.write(folder)
    page = (folder / "parity.html").read_text()
    return page, json.loads((folder / "parity.json").read_text(), parse_constant=refuse)


@pytest.mark.parametrize(
    "tests, more, said",
    [
        ([("a", "passed", of(5e-16))], {}, "GREEN: 1 figure, none above its bar (tests: 1 passed)"),
        (
            [("a", "passed", of(5e-16)), ("b", "passed", fault)],
            {},
            "GREEN: 1 figure, none above its bar; 1 planted fault, each seen (tests: 2 passed)",
        ),
        ([("a", "passed", of(1e-16))], {"interrupted": True}, "RED: the run was interrupted (tests: 1 passed)"),
        ([("a", "", lambda parity: None)], {}, "RED: no figure was measured (tests: 1 passed)"),
    ],
)
def test_the_verdict(tests, more, said):
    assert run(*tests, **more).verdict() == said


@pytest.mark.parametrize("value", [2e-12, math.nan, math.inf, -math.inf, -1.0])
def test_what_is_not_a_figure_below_its_bar_is_red_everywhere(value, tmp_path):
    cells = [Cell("gpt2", gate, x, 1e-12, "x") for gate, x in (("2 gradients", value), ("1 activations", 0.0))]
    figures = Figures(cells)
    assert [figures.state(cell.gate) for cell in cells] == ["red", "green"]
    assert "RED" in table_text(figures, 80, colour=False)
    for summary in (False, True):
        assert f"**{shown(value)} red**" in gates_markdown(figures, "here", summary=summary)
    page, document = written(run(("a", "failed", of(value, gate="2 gradients"))), tmp_path)
    assert '<b class="red">red</b>' in page
    [figure] = document["tests"][0]["checks"][0]["figures"]
    assert figure["passed"] is False
    assert isinstance(figure["figure"], float if math.isfinite(value) else str)


@pytest.mark.parametrize(
    "cells, worst",
    [
        ([(1e-15, 1e-12, False), (math.nan, 1e-12, False), (1e-11, 1e-12, False)], math.nan),
        # Neither a larger bar nor a test that asks for it hides a red figure.
        ([(2e-12, 1e-12, False), (1e-10, 1e-9, False), (1.0, 1e-12, True)], 2e-12),
    ],
)
def test_the_worst_figure_counts_and_none_is_worse_than_nan(cells, worst):
    for order in permutations(Cell("gpt2", "1 activations", x, bar, "x", expected=red) for x, bar, red in cells):
        assert str(Figures(order).worst("1 activations").figure) == str(worst)


def test_a_fault_that_no_gate_sees_fails_its_test():
    with pytest.raises(AssertionError, match="no gate sees 'GELU"):
        run(("a", "failed", lambda parity: fault(parity, 1e-13)))


def test_every_gate_has_a_column_and_a_text_of_its_own():
    """Gate 6 is two gates, and so is gate 8: each with a bar and a meaning, under a heading that tells them apart."""
    assert len({gate.meaning for gate in GATES.values()}) == len(set(map(short, GATES))) == len(GATES)
    [part] = between("gates").finditer((ROOT / "docs" / "parity.md").read_text("utf-8"))
    header = part[0].split("|  |", 1)[1].splitlines()[0]
    assert {name.strip() for name in header.split("|") if name.strip()} <= GATES.keys()


def test_page_and_json_say_everything(tmp_path):
    green = [(f"t{place}", "passed", of(x, row=row, gate=gate)) for place, ((row, gate), x) in enumerate(ALL.items())]
    checks = run(*green, ("a_test[<b>]", "failed", red), ("b", "passed", lambda parity: fault(parity, math.nan, 0.0)))
    page, document = written(checks, tmp_path)
    assert "<b>]" not in page
    red_one, planted = (test["checks"][0] for test in document["tests"][-2:])
    assert (red_one["row"], red_one["difference"]["ours"]["line"], planted["fault"]["figure"]) == ("gpt2", 7, "nan")
    told = ["a_test[<b>]", "1.00e-04 >  1e-12 (logits)", "x * (1 < 2)", "GELU: tanh <-> erf", document["measured_on"]]
    told += [*document["versions"].values(), *(gate.meaning for gate in GATES.values())]
    assert [said for said in told if said not in unescape(page)] == []


def test_what_a_whole_run_has_not_measured_is_named():
    cells = [Cell(row, gate, 0.0, 1.0, "x") for row in CONFIGS for gate in GATES]
    assert find_unmeasured(Figures(cells)) == []
    others = [cell for cell in cells if cell.gate != "7 dropout"]
    lost = Figures(cell for cell in others if (cell.row, cell.gate) != ("gpt2", "2 gradients"))
    assert find_unmeasured(lost) == ["no figure for gate 7 dropout", "no figure for gpt2, gate 2 gradients"]


def test_documents_get_the_tables_between_their_markers(tmp_path):
    names = ("gates", "summary", "faults")
    before = "\nbetween\n".join(f"<!-- {name}: begin -->\nold\n<!-- {name}: end -->\n" for name in names)
    checks = run(("a", "passed", of(5e-16)), ("b", "passed", of(0.0, 0.0, gate="9 bytes lost")), ("c", "passed", fault))
    document = written(checks, tmp_path)[1]
    once = updated(before, document)
    assert updated(once, document) == once
    assert ("old" in once, once.count("\nbetween\n")) == (False, 2)
    assert once.count(f"Measured on {document['measured_on']}, {document['date'][:10]}, jax ") == 3
    for row in (
        "|  | 1 activations | 9 bytes lost |\n| --- | --- | --- |\n| `gpt2` | 5.0e-16 | 0 |\n| bar | 1e-12 | 0 |",
        "| worst of 1 row | 5.0e-16 | 0 |",
        "| GELU: tanh <-> erf \\| one side | reference | 1 activations | 1.0e-04 | 1e-12 | 1.0e+08 | seen |",
    ):
        assert f"{row}\n" in once
    for name, table in (("README.md", "summary"), ("docs/parity.md", "gates"), ("docs/parity.md", "faults")):
        [part] = between(table).finditer((ROOT / name).read_text("utf-8"))
        assert re.search(r"\n\nMeasured on .*\d+ cores? of .*, jax \S+, torch \S+\.\n\n<!--", part[0]), name


@pytest.mark.parametrize(
    "error, line",
    [
        ("E   parity.gates.measure.ParityError: gate 1: NaN", "ParityError: gate 1: NaN"),
        ("worker 'gw0' crashed while running 'a.py::test'", "worker 'gw0' crashed while running 'a.py::test'"),
        ("", "no message"),
    ],
)
def test_the_cause_is_one_line(error, line):
    assert cause(SimpleNamespace(longrepr=error)) == line
