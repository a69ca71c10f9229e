"""The table of figures in a terminal, as wide as that is."""

import textwrap
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.report.figures import Cell, Figures, shown

_STYLES = {"green": "green", "red": "bold red", "cut": "yellow", "expected": "yellow"}
_WORDS = {"green": "green", "red": "RED", "cut": "cut", "expected": "(red)"}
_NAMES = 24
"""Columns of a narrow terminal that are left for the rows' names."""
NOTES = {
    "cut": "cut: within its bar, but a test that measured it failed before its end.",
    "expected": "(red): above its bar, and its test passed: it asks for that.",
}
"""What states mean that need explaining."""


def terminal_tables(figures: Figures, width: int) -> list[Table]:
    """Rows x gates in at most `width` columns: in one table, or in several below one another, of some gates each."""
    gates = figures.gates
    longest = max(map(len, figures.rows), default=0)
    if longest + 9 * len(gates) <= width:
        return [_terminal_table(figures, gates, 1, longest)]
    count = -(-len(gates) // max((width - _NAMES) // 6, 1))
    parts = [gates[len(gates) * i // count : len(gates) * (i + 1) // count] for i in range(count)]
    return [_terminal_table(figures, part, 0, max(width - 6 * len(part), 8)) for part in parts]


def _terminal_table(figures: Figures, gates: list[str], digits: int, room: int) -> Table:
    """The rows that have a figure of these gates, their names in `room` columns; words repeat what colours say."""

    def cell(found: Cell | None) -> Text:
        if found is None:
            return Text("-", style="dim")
        word = "" if found.state == "green" else f"\n{_WORDS[found.state]}"
        return Text(shown(found.figure, digits) + word, style=_STYLES[found.state])

    # No rules and no outer edge: at 80 columns there is not one to spare.
    grid = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2 if digits else 1), header_style="bold")
    grid.add_column(Text(figures.heading), vertical="top", overflow="fold")
    for gate in gates:
        grid.add_column(Text(figures.short(gate)), justify="right", no_wrap=True)
    for row in figures.rows:
        cells = [figures.cells.get((row, gate)) for gate in gates]
        if any(cells):
            name = textwrap.wrap(row, room, subsequent_indent="  ")
            grid.add_row(Text("\n".join(name)), *map(cell, cells))
    bars, states = zip(*(figures.column(gate) for gate in gates), strict=True) if gates else ((), ())
    grid.add_row(Text("bar", style="bold"), *map(Text, bars))
    grid.add_row(Text("verdict", style="bold"), *(Text(_WORDS[state], style=_STYLES[state]) for state in states))
    return grid


def table_text(figures: Figures, width: int, *, colour: bool) -> str:
    """The table as lines, and what its words mean where one needs explaining."""
    screen = StringIO()
    console = Console(file=screen, width=width, force_terminal=colour, no_color=not colour)
    for place, part in enumerate(terminal_tables(figures, width)):
        console.print("\n" * (place > 0), part, sep="", end="")
    for state, note in NOTES.items():
        if any(cell.state == state for cell in figures.cells.values()):
            console.print(Text(note, style=_STYLES[state]), soft_wrap=True)
    return "\n".join(line.rstrip() for line in screen.getvalue().splitlines())
