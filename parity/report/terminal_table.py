"""The table of figures in a terminal, as wide as that is."""

import textwrap
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.report.figures import Cell, Figures, short, shown

_STYLES = {"green": "green", "red": "bold red", "expected": "yellow"}
_WORDS = {"green": "green", "red": "RED", "expected": "(red)"}
_NAMES = 24
"""Columns of a narrow terminal that are left for the rows' names."""


def table_text(figures: Figures, width: int, *, colour: bool) -> str:
    """Rows x gates as lines of at most `width` columns: in one table, or in several below one another, of some gates
    each."""
    gates, longest = figures.gates, max(map(len, figures.rows), default=0)
    if longest + 9 * len(gates) <= width:
        parts, room, digits = [gates], longest, 1
    else:
        count = -(-len(gates) // max((width - _NAMES) // 6, 1))
        parts = [gates[len(gates) * i // count : len(gates) * (i + 1) // count] for i in range(count)]
        room, digits = max(width - 6 * max(map(len, parts)), 8), 0
    screen = StringIO()
    console = Console(file=screen, width=width, force_terminal=colour, no_color=not colour)
    for place, part in enumerate(parts):
        console.print("\n" * (place > 0), _part(figures, part, digits, room), sep="", end="")
    if figures.note:
        console.print(Text(figures.note, style=_STYLES["expected"]), soft_wrap=True)
    return "\n".join(line.rstrip() for line in screen.getvalue().splitlines())


def _part(figures: Figures, gates: list[str], digits: int, room: int) -> Table:
    """The rows that have a figure of these gates, their names in `room` columns; words repeat what colours say."""

    def cell(found: Cell | None) -> Text:
        if found is None:
            return Text("-", style="dim")
        word = "" if found.state == "green" else f"\n{_WORDS[found.state]}"
        return Text(shown(found.figure, digits) + word, style=_STYLES[found.state])

    # No rules and no outer edge: at 80 columns there is not one to spare.
    grid = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2 if digits else 1), header_style="bold")
    grid.add_column(Text("test"), vertical="top", overflow="fold")
    for gate in gates:
        grid.add_column(Text(short(gate)), justify="right", no_wrap=True)
    for row in figures.rows:
        cells = [figures.cells.get((row, gate)) for gate in gates]
        if any(cells):
            name = textwrap.wrap(row, room, subsequent_indent="  ")
            grid.add_row(Text("\n".join(name)), *map(cell, cells))
    states = map(figures.state, gates)
    grid.add_row(Text("bar", style="bold"), *(Text(figures.bars(gate)) for gate in gates))
    grid.add_row(Text("verdict", style="bold"), *(Text(_WORDS[state], style=_STYLES[state]) for state in states))
    return grid
