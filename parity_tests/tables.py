"""`python -m parity_tests.tables`: what `make parity` measured goes into the tables of README.md and docs/parity.md."""

import json
import re
import sys
from pathlib import Path

from parity.report.checks import fault_rows
from parity.report.figures import Cell, Figures, gates_markdown, markdown_table

ROOT = Path(__file__).parents[1]


def between(name):
    """Matches the part of a document that the table `name` replaces, lines of markers included."""
    return re.compile(rf"(<!-- {name}: begin -->\n).*?(^<!-- {name}: end -->)", re.DOTALL | re.MULTILINE)


def updated(text, report):
    """A document with the tables of a report in their places."""
    checks = [check for test in report["tests"] for check in test["checks"]]
    figures = Figures(
        Cell(check["row"], figure["gate"], float(figure["figure"]), float(figure["bar"]), figure["worst_tensor"])
        for check in sorted((check for check in checks if check["row"]), key=lambda check: "," in check["row"])
        for figure in check["figures"]
    )
    versions = ", ".join(f"{name} {report['versions'][name]}" for name in ("jax", "torch"))
    where = f"{report['measured_on']}, {report['date'][:10]}, {versions}"
    header, *faults = fault_rows([check["fault"] for check in checks if check["fault"]]) or [[]]
    tables = {
        "gates": gates_markdown(figures, where),
        "summary": gates_markdown(figures, where, summary=True),
        "faults": f"{markdown_table(header, faults)}\n\nMeasured on {where}.",
    }
    for name, table in tables.items():
        if part := between(name).search(text):
            text = f"{text[: part.start()]}{part[1]}\n{table}\n\n{part[2]}{text[part.end() :]}"
    return text


if __name__ == "__main__":
    measured = json.loads((ROOT / "parity-report" / "parity.json").read_text("utf-8"))
    if measured["verdict"] != "green":
        sys.exit(f"the tables are left as they were: {measured['told']}")
    for path in (ROOT / "README.md", ROOT / "docs" / "parity.md"):
        path.write_text(updated(path.read_text("utf-8"), measured), "utf-8")
