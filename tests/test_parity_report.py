"""The parity report: what is red never reads as green, NaN survives, page and documents say what was measured."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parity import Difference, Site
from parity.differ.answer import sendable
from parity.report.figures import Cell, cause, gates_markdown, shown, summary_markdown
from parity.report.terminal_table import table_text
from parity_tests.__main__ import between, facts, updated
from parity_tests.report import GATES, Fault, Results, faults_markdown
from parity_tests.report_page import html
from twin.machine import Machine, describe_machine

ROOT = Path(__file__).parents[1]
MACHINE = Machine("cpu", "Some Processor", "SomeVendor", 2, "Linux", {"jax": "1.2.3"})
FACTS: dict[str, Any] = {"date": "2026-01-02T03:04:05+00:00", **facts([], 1.0, MACHINE)}
WHERE = "2 cores of Some Processor (SomeVendor)"
FAULT: dict[str, Any] = {
    "fault": "GELU: tanh <-> erf | one side",
    "planted": "reference",
    "gate": "1 activations",
    "figure": 1e-4,
    "bar": 1e-12,
    "margin": 1e8,
    "softmax_1e-2": True,
    "logits_1e-4": False,
    "logits_1e-5": None,
}


def report(
    test: str, *properties: tuple[str, Any], outcome: str = "passed", when: str = "call", error: str = ""
) -> SimpleNamespace:
    """What pytest reports about one phase of one test."""
    return SimpleNamespace(
        nodeid=test,
        when=when,
        user_properties=list(properties),
        passed=outcome == "passed",
        failed=outcome == "failed",
        skipped=outcome == "skipped",
        longrepr=error,
    )


def figure(preset: str, gate: str, value: float, bar: float = 1e-12) -> tuple[str, tuple[object, ...]]:
    return "parity", (preset, gate, value, bar, "logits")


def gathered(*reports: SimpleNamespace) -> Results:
    results = Results()
    for one in reports:
        results.add(one)
    return results


def parsed(results: Results) -> dict[str, Any]:
    """The report as a program that accepts only the letter of JSON reads it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(results.as_json(FACTS), parse_constant=refuse)


GREEN = report("green", figure("gpt2", "1 activations", 5e-16), figure("gpt2", "9 bytes lost", 0, 0))


def test_all_green() -> None:
    results = gathered(GREEN, report("faulty", ("fault", FAULT)))
    assert results.complaints() == []
    assert (
        results.verdict()
        == "GREEN: 2 figures in 1 row, none above its bar; 1 planted fault, all seen (tests: 2 passed)"
    )
    assert parsed(results)["verdict"] == "green"
    assert [cell["state"] for cell in parsed(results)["cells"]] == ["green", "green"]


@pytest.mark.parametrize("value", [2e-12, math.nan, math.inf, -math.inf, -1.0])
def test_what_is_not_a_figure_below_its_bar_is_red_everywhere(value: float) -> None:
    results = gathered(GREEN, report("red", figure("gpt2", "2 gradients", value)))
    assert results.verdict().startswith("RED: 1 figure above its bar (")
    assert results.column("2 gradients") == ("1e-12", "red")
    assert results.column("1 activations") == ("1e-12", "green")
    [cell] = [cell for cell in parsed(results)["cells"] if cell["gate"] == "2 gradients"]
    assert cell["state"] == "red"
    assert cell["passed"] is False
    assert float(cell["figure"]) == value or math.isnan(value)
    assert isinstance(cell["figure"], float if math.isfinite(value) else str)
    assert "RED" in table_text(results, 80, colour=False)
    assert "RED" in html(results, FACTS)
    assert f"**{shown(value)} red**" in gates_markdown(results, WHERE)
    assert f"**{shown(value)} red**" in summary_markdown(results, WHERE)


@pytest.mark.parametrize("order", [(1e-15, math.nan, 1e-11), (1e-11, 1e-15, math.nan), (math.nan, 1e-11, 1e-15)])
def test_the_worst_figure_counts_and_none_is_worse_than_nan(order: tuple[float, ...]) -> None:
    results = gathered(*(report(str(value), figure("gpt2", "1 activations", value)) for value in order))
    assert math.isnan(results.cells["gpt2", "1 activations"].figure)


def test_a_larger_figure_below_a_larger_bar_does_not_hide_a_red_one() -> None:
    cells = [Cell("gpt2", "1 activations", 2e-12, 1e-12, "a"), Cell("gpt2", "1 activations", 1e-10, 1e-9, "b")]
    assert cells[0].merged(cells[1]).name == cells[1].merged(cells[0]).name == "a"


def test_figures_of_a_test_that_failed_are_not_green() -> None:
    """It may have been about to measure something worse."""
    crashed = report("crashed", figure("bert-base", "1 activations", 5e-16), outcome="failed", error="E  ValueError: x")
    results = gathered(crashed, report("whole", figure("bert-base", "1 activations", 6e-16)))
    [cell] = parsed(results)["cells"]
    assert (cell["state"], cell["passed"], cell["figure"]) == ("cut", False, 6e-16)
    assert parsed(results)["failures"] == [{"test": "crashed", "message": "ValueError: x"}]
    assert results.verdict().startswith("RED: 1 figure of a test that did not finish, 1 failed test (")
    assert "green" not in table_text(results, 80, colour=False)


def test_a_failure_without_a_figure_is_red_and_a_gap_is_no_colour() -> None:
    results = gathered(GREEN, report("setup", outcome="failed", when="setup", error="ValueError: x"))
    assert results.complaints() == ["1 failed test"]
    assert results.failures == {"setup": "ValueError: x (in setup)"}
    results = gathered(GREEN, report("other", figure("bert-base", "1 activations", 0.0)))
    assert table_text(results, 80, colour=False).splitlines()[3].split() == ["bert-base", "0", "-"]


def test_a_teardown_that_fails_repeats_nothing() -> None:
    teardown = report("test", ("fault", FAULT), outcome="failed", when="teardown", error="OSError: full")
    results = gathered(report("test", ("fault", FAULT)), teardown)
    assert len(results.faults) == 1
    assert results.outcomes == {"test": "failed"}


def test_tests_that_never_ran_are_red() -> None:
    results = gathered(GREEN)
    results.collected = ["green", "never"]
    assert results.complaints() == ["1 test that did not run"]


def test_a_fault_that_no_gate_saw_is_red() -> None:
    results = gathered(GREEN, report("faulty", ("fault", FAULT | {"figure": 1e-13, "margin": 0.1})))
    assert results.complaints() == ["1 planted fault that its gate let pass"]
    assert parsed(results)["faults"][0]["caught"] is False
    assert "**none** (1 activations)" in faults_markdown(results.faults, WHERE)
    incomplete = gathered(GREEN, report("faulty", ("fault", {"fault": "x"})))
    assert incomplete.complaints() == ["1 failed test"]


def test_faults_stand_in_the_order_of_the_tests() -> None:
    results = gathered(*(report(test, ("fault", FAULT | {"fault": test})) for test in "cab"))
    results.collected = ["b", "c", "a"]
    assert [fault["fault"] for fault in parsed(results)["faults"]] == ["b", "c", "a"]


def test_rows_and_columns_stand_in_one_order_whatever_ran_first() -> None:
    names = ["gpt2, full size", "switches-b", "gpt2", "vaswani-base", "switches-a"]
    results = gathered(
        *(report(n, figure(n, g, 0.0)) for n in names for g in ("9 bytes lost", "10 more", "1 activations"))
    )
    assert results.rows == ["vaswani-base", "gpt2", "switches-a", "switches-b", "gpt2, full size"]
    assert results.gates == ["1 activations", "9 bytes lost", "10 more"]


def everything() -> Results:
    """Two long names by all gates, all of it at its widest, and one of each colour."""
    gates = list(GATES)
    results = Results(faults=[Fault.read(FAULT)])
    for preset in ("switches-encoder-decoder", "switches-encoder-decoder, 520 positions"):
        for gate in gates:
            results.cells[preset, gate] = Cell(preset, gate, 5.44e-16, 1e-12, "<logits>")
    key = "switches-encoder-decoder", gates[3]
    results.cells[key] = replace(results.cells[key], figure=math.nan)
    return results


def test_the_table_fits_the_terminal() -> None:
    """A narrow one gets two tables, of some gates each."""
    # Headings, presets (one with a word below a figure, or folded), bars and verdicts; an empty line between tables.
    for width, lines in ((160, 2 + 2 + 1 + 2), (80, (2 + 2 + 2 + 2) + 1 + (2 + 1 + 2 + 2))):
        text = table_text(everything(), width, colour=False)
        assert max(map(len, text.splitlines())) <= width
        assert "..." not in text
        assert "…" not in text
        assert len(text.splitlines()) == lines
        assert text.count("switches-encoder-decoder") == (2 if width == 160 else 4)
        for gate in GATES:
            assert gate.split()[0] in text
            assert GATES[gate].short in text
    assert "\x1b[" in table_text(everything(), 80, colour=True)
    few = gathered(GREEN)
    few.cells["bert-base", "6 trajectory / allowed"] = Cell("bert-base", "6 trajectory / allowed", 0.5, 1, "")
    assert len(table_text(few, 80, colour=False).splitlines()) == 2 + 2 + 2, "few gates stand in one table"


class Links(HTMLParser):
    """What a page would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset")]
        self.found += [tag] * (tag in ("script", "link", "iframe", "img"))


def test_where_the_two_part_stands_with_the_test_that_is_red() -> None:
    site = Site("mul", file="model.py", line=7, source="x * (1 < 2)")
    answers = [sendable(Difference("forward", site, site)), sendable("where they part was not found (KeyError: 'x')")]
    red = report(
        "a", *(("difference", answer) for answer in answers), outcome="failed", error="E   ParityError: gate 1"
    )
    results = gathered(red, report("b", outcome="failed", error="E   ValueError: x"))
    first, second = parsed(results)["failures"]
    assert [first["where"][0]["ours"]["line"], first["where"][1]] == [7, answers[1]["answer"]]
    assert second == {"test": "b", "message": "ValueError: x"}
    page = html(results, FACTS)
    assert "x * (1 &lt; 2)" in page
    assert "where they part was not found (KeyError: &#x27;x&#x27;)" in page


def test_the_page_loads_nothing_and_says_everything() -> None:
    results = everything()
    results.failures["a_test[<b>]"] = "ParityError: 1 < 2 & 3"
    results.cells["gpt2", "10 draws"] = Cell("gpt2", "10 draws", 4.83, 7.44, "two rows")
    text = html(results, FACTS | {"selection": "-k '<i>'", "versions": {"jax": "0.10.2"}})
    assert Links(text).found == []
    assert not re.search(r"https?://|url\(|@import", text)
    for said in (
        "ParityError: 1 &lt; 2 &amp; 3",
        "a_test[&lt;b&gt;]",
        "&lt;i&gt;",
        "0.10.2",
        "GELU: tanh &lt;-&gt; erf",
    ):
        assert said in text
    assert "<b>]" not in text
    for gate in GATES.values():
        assert gate.short in text
    assert text.count(f"Measured on {WHERE}.") == 1
    assert html(Results(), FACTS).count("<h2>") == 4


def test_every_gate_has_a_column_and_a_text_of_its_own() -> None:
    """Gate 6 is two gates, and so is gate 8: each with a bar and a meaning, under a heading that tells them apart."""
    document = (ROOT / "docs" / "parity.md").read_text("utf-8")
    [part] = between("gates").finditer(document)
    header = part[0].split("|  |", 1)[1].splitlines()[0]
    assert {name.strip() for name in header.split("|") if name.strip()} <= GATES.keys()
    assert len({Results.short(gate) for gate in GATES}) == len({gate.meaning for gate in GATES.values()}) == len(GATES)
    assert "float32" in GATES["6 trajectory / allowed"].meaning
    assert "float32" not in GATES["6 trajectory, float64"].meaning
    text = html(everything(), FACTS)
    assert text.index("6<br>path") < text.index("6<br>f64") < text.index("8<br>token") < text.index("8<br>cache")


def test_the_verdict_counts_the_rows_that_stand_below_it() -> None:
    names = ("gpt2", "gpt2, 3 blocks", "gpt2, full size", "bert-base")
    results = gathered(*(report(name, figure(name, "1 activations", 0.0)) for name in names))
    assert results.verdict().startswith("GREEN: 4 figures in 4 rows, none above its bar")
    assert html(results, FACTS).count("<tr><td>") == len(names) + 2


def test_figures_say_where_they_were_measured() -> None:
    """Processor, vendor and cores: in JSON, on the page and below the tables of documents."""
    machine = parsed(gathered(GREEN))["machine"]
    assert (machine["processor"], machine["vendor"], machine["cores"]) == ("Some Processor", "SomeVendor", 2)
    assert parsed(gathered(GREEN))["measured_on"] == WHERE
    for table in (gates_markdown, summary_markdown):
        assert table(gathered(GREEN), WHERE).endswith(f"|\n\nMeasured on {WHERE}.")
    assert (
        str(replace(MACHINE, device="gpu: H100", cores=1)) == "gpu: H100, beside 1 core of Some Processor (SomeVendor)"
    )
    here = describe_machine("cpu")
    assert here.processor
    assert here.cores >= 1
    assert {"python", "jax", "torch"} <= here.versions.keys()
    for name, table in (("README.md", "summary"), ("docs/parity.md", "gates"), ("docs/parity.md", "faults")):
        [part] = between(table).finditer((ROOT / name).read_text("utf-8"))
        assert re.search(r"\n\nMeasured on .*\d+ cores? of .*, jax \S+, torch \S+\.\n\n<!--", part[0]), name


def test_documents_get_the_tables_between_their_markers() -> None:
    before = "# Title\n\n<!-- gates: begin -->\nold\n<!-- gates: end -->\n\nbetween\n\n"
    before += "<!-- summary: begin -->\nold\n<!-- summary: end -->\n"
    before += "<!-- faults: begin -->\n<!-- faults: end -->\nlast\n"
    results = gathered(GREEN, report("faulty", ("fault", FAULT)))
    once = updated(before, results, WHERE)
    assert updated(once, results, WHERE) == once
    assert once.startswith(
        "# Title\n\n<!-- gates: begin -->\n\n|  | 1 activations | 9 bytes lost |\n| --- | --- | --- |\n"
    )
    rows = "| `gpt2` | 5.0e-16 | 0 |\n| bar | 1e-12 | 0 |"
    assert f"{rows}\n\nMeasured on {WHERE}.\n\n<!-- gates: end -->\n\nbetween\n" in once
    summary = "| worst of 1 row | 5.0e-16 | 0 |\n| bar | 1e-12 | 0 |"
    assert f"{summary}\n\nMeasured on {WHERE}.\n\n<!-- summary: end -->\n" in once
    row = (
        "| GELU: tanh <-> erf \\| one side | reference | 1 activations | 1.0e-04 | 1e-12 | 1.0e+08 | missed | seen |  |"
    )
    assert f"{row}\n\nMeasured on {WHERE}.\n\n<!-- faults: end -->\nlast\n" in once
    # Without faults, the table of an earlier run stays.
    assert updated(once, gathered(GREEN), WHERE) == once


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("E   parity.gates.measure.ParityError: gate 1: NaN", "ParityError: gate 1: NaN"),
        ("worker 'gw0' crashed while running 'a.py::test'", "worker 'gw0' crashed while running 'a.py::test'"),
        ("", "no message"),
    ],
)
def test_the_cause_is_one_line(error: str, line: str) -> None:
    assert cause(report("test", outcome="failed", error=error)) == line
