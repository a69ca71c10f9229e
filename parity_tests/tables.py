"""`python -m parity_tests.tables`: what `make parity` measured goes into the tables of README.md and docs/parity.md.

With --check it writes nothing. Either way it ends with status 1 if a figure is missing that a whole run would have.
"""

import json
import re
import sys
from pathlib import Path

from parity.report.figures import Cell, Figures, fault_rows, gates_markdown, markdown_table
from twin.cases import CONFIGS

ROOT = Path(__file__).parents[1]


def between(name):
    """Matches the part of a document that the table `name` replaces, lines of markers included."""
    return re.compile(rf"(<!-- {name}: begin -->\n).*?(^<!-- {name}: end -->)", re.DOTALL | re.MULTILINE)


def figures_of(report):
    """The figures of a report that have a row."""
    checks = [check for test in report["tests"] for check in test["checks"] if check["row"]]
    return Figures(
        Cell(check["row"], figure["gate"], float(figure["figure"]), float(figure["bar"]), figure["worst_tensor"])
        for check in sorted(checks, key=lambda check: "," in check["row"])
        for figure in check["figures"]
    )


def find_unmeasured(figures):
    """What a whole run should have measured and has not, a line each: a test that asks nothing is no green."""
    always = ["1 activations", "2 gradients", "3 float32 / allowed", "4 bfloat16 / allowed", "9 bytes lost", "10 draws"]
    missing = [] if "7 dropout" in figures.gates else ["no figure for gate 7 dropout"]
    for name, config in CONFIGS.items():
        gates = list(always)
        if config.predicts_tokens:
            gates += ["5 optimizer", "6 trajectory, float64", "6 trajectory / allowed"]
            gates += ["8 decoding", "8 decoding, float64"] if config.decoder is not None else []
        missing += [f"no figure for {name}, gate {gate}" for gate in gates if (name, gate) not in figures.cells]
    return missing


def with_table(text, name, table):
    """A document with this table in its place, if it has one for it."""
    if part := between(name).search(text):
        text = f"{text[: part.start()]}{part[1]}\n{table}\n\n{part[2]}{text[part.end() :]}"
    return text


def updated(text, report):
    """A document with the tables of a report in their places."""
    checks = [check for test in report["tests"] for check in test["checks"]]
    figures = figures_of(report)
    versions = ", ".join(f"{name} {report['versions'][name]}" for name in ("jax", "torch"))
    where = f"{report['measured_on']}, {report['date'][:10]}, {versions}"
    header, *faults = fault_rows([check["fault"] for check in checks if check["fault"]]) or [[]]
    tables = {
        "gates": gates_markdown(figures, where),
        "summary": gates_markdown(figures, where, summary=True),
        "faults": f"{markdown_table(header, faults)}\n\nMeasured on {where}.",
    }
    for name, table in tables.items():
        text = with_table(text, name, table)
    return text


if __name__ == "__main__":
    report = ROOT / "parity-report" / "parity.json"
    if not report.exists():
        sys.exit(f"there is no {report}; make parity writes it")
    measured = json.loads(report.read_text("utf-8"))
    if measured["verdict"] != "green":
        sys.exit(f"the tables are left as they were: {measured['told']}")
    if missing := find_unmeasured(figures_of(measured)):
        sys.exit("\n".join(missing))
    for path in () if "--check" in sys.argv else (ROOT / "README.md", ROOT / "docs" / "parity.md"):
        path.write_text(updated(path.read_text("utf-8"), measured), "utf-8")
