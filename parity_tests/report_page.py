"""The results as people see them: a table that fits the terminal, and a page."""

import textwrap
from collections.abc import Mapping
from html import escape
from io import StringIO
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.page import page, table
from parity_tests.report import TOLERANCES, Cell, Results, number, shown


class Gate(NamedTuple):
    """How a gate is shown."""

    short: str
    """At most five letters, as wide as a figure: all columns have to fit into a terminal."""
    meaning: str


GATES = {
    "1 activations": Gate(
        "value",
        "float64, forward: logits, loss, hidden states and attention weights of every layer. The figure is the largest "
        "relative error of any of these tensors, in its norm or in its worst element.",
    ),
    "2 gradients": Gate(
        "grads",
        "float64, backward: the gradient of every parameter, each measured by itself; those that are zero in exact "
        "arithmetic count against the norm of all together.",
    ),
    "3 float32 / allowed": Gate(
        "fp32",
        "float32: our distance from the float64 truth over the distance that is allowed, which is two and a "
        "half times PyTorch's own plus 2^-23.",
    ),
    "4 bfloat16 / allowed": Gate(
        "bf16",
        "bfloat16: the same ratio, with 1.8 times PyTorch's distance allowed, and 1.5 times before the backward pass.",
    ),
    "4 parts, bfloat16 / allowed": Gate(
        "parts",
        "bfloat16, each part by itself from the same inputs, compiled so that every rounding is made: the same ratio, "
        "with 1.1 times PyTorch's distance allowed for what it computes, and 1.5 times for gradients.",
    ),
    "5 optimizer": Gate(
        "optim",
        "Fifty AdamW steps in float64 with clipping that takes effect, decay on some parameters only and a learning "
        "rate that warms up: losses and parameters.",
    ),
    "6 trajectory / allowed": Gate(
        "path",
        "Three hundred steps of training in float32: how far our losses stray from the float64 path over what is "
        "allowed, three times as far as PyTorch's stray plus 1e-6.",
    ),
    "6 trajectory, float64": Gate(
        "f64",
        "The same three hundred steps in float64, on both sides: the largest relative difference of a loss or of a "
        "parameter at the end.",
    ),
    "7 dropout": Gate(
        "drop", "Dropout on: PyTorch drops exactly what JAX drew, and gates 1, 2 and 5 hold as they are."
    ),
    "8 decoding": Gate(
        "token",
        "Greedy and beam search: how many tokens differ from those that Hugging Face's generate chooses with the "
        "reference.",
    ),
    "8 decoding, float64": Gate(
        "cache",
        "float64: logits token by token from the cache against the whole forward pass, and the scores of beams.",
    ),
    "9 bytes lost": Gate("bytes", "Weights converted there and back: how many bytes differ."),
    "10 draws": Gate(
        "draws",
        "Dropout masks and fresh parameters as draws: the worst statistic (rates, means, deviations, "
        "pairs that should be independent), in standard deviations from what chance gives.",
    ),
    "10 first loss": Gate(
        "loss",
        "The loss of a fresh model: how far it is from ln V, that of a guess, and what the spread of its logits adds; "
        "in parts of that addition.",
    ),
}

_STYLES = {"green": "green", "red": "bold red", "cut": "yellow"}
_WORDS = {"green": "green", "red": "RED", "cut": "cut"}
_STYLE = """
.badge { padding: .1rem .55rem; border-radius: .3rem; color: Canvas; margin-right: .4rem; }
.badge.green { background: var(--good); } .badge.red { background: var(--bad); }
.cut { color: light-dark(#8a5a00, #f2a24b); } .none { opacity: .5; } small { font-weight: 400; }
.label { display: none; }
.cards td:first-child, .cards th:first-child { position: sticky; left: 0; background: Canvas; }
.cards th:first-child { background: var(--soft); }
.cards .wide { max-width: max-content; }
.totals tr:nth-last-child(2) td { border-top: 2px solid var(--line); }
.totals th, .totals td { padding: .35rem .4rem; } .totals td:first-child { white-space: normal; min-width: 12rem; }
.faults td:first-child { white-space: normal; min-width: 15rem; }
.faults td:nth-child(2), .faults td:nth-child(3), .faults th:nth-child(2), .faults th:nth-child(3) { text-align: left; }
dl.meanings { max-width: 44rem; } .meanings dd { margin: 0 0 .6rem; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.failures { padding-left: 1.1rem; } .failures li { margin-bottom: .5rem; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  .cards table, .cards tbody { display: block; width: 100%; }
  .cards .wide { max-width: none; }
  .cards thead { display: none; }
  .cards tr { display: grid; grid-template-columns: repeat(5, 1fr); padding: .45rem 0;
              border-bottom: 1px solid var(--line); }
  .cards.faults tr { grid-template-columns: 1fr 1.3fr 1fr 1fr; column-gap: .4rem; }
  .cards td, .cards td:first-child { display: block; position: static; border: 0; padding: .1rem 0;
                                     min-width: 0; white-space: normal; text-align: left; }
  .cards td:first-child { grid-column: 1 / -1; font-weight: 600; }
  .totals tr:nth-last-child(2) td { border: 0; } .totals tr:nth-last-child(2) { border-top: 2px solid var(--line); }
  .totals td:has(.none) { display: none; } .cards small { display: block; line-height: 1; }
  .label { display: block; font-size: .7rem; line-height: 1.2; opacity: .75; }
}
"""
_NAMES = 24
"""Columns of a narrow terminal that are left for the presets' names."""
_CUT = "cut: within its bar, but a test that measured it failed before its end."


def short(gate: str) -> str:
    """What heads a narrow column: the gate's number over one word."""
    known = GATES.get(gate, Gate(gate.split()[-1][:5], ""))
    return f"{number(gate)}\n{known.short}"


def terminal_tables(results: Results, width: int) -> list[Table]:
    """Presets x gates in at most `width` columns: in one table, or in several below one another, of some gates each."""
    gates = results.gates
    longest = max(map(len, results.presets), default=0)
    if longest + 9 * len(gates) <= width:
        return [_terminal_table(results, gates, 1, longest)]
    count = -(-len(gates) // max((width - _NAMES) // 6, 1))
    parts = [gates[len(gates) * i // count : len(gates) * (i + 1) // count] for i in range(count)]
    return [_terminal_table(results, part, 0, max(width - 6 * len(part), 8)) for part in parts]


def _terminal_table(results: Results, gates: list[str], digits: int, room: int) -> Table:
    """The presets that have a figure of these gates, their names in `room` columns; words repeat what colours say."""

    def cell(found: Cell | None) -> Text:
        if found is None:
            return Text("-", style="dim")
        word = "" if found.state == "green" else f"\n{_WORDS[found.state]}"
        return Text(shown(found.figure, digits) + word, style=_STYLES[found.state])

    # No rules and no outer edge: at 80 columns there is not one to spare.
    grid = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2 if digits else 1), header_style="bold")
    grid.add_column(Text("preset"), vertical="top", overflow="fold")
    for gate in gates:
        grid.add_column(Text(short(gate)), justify="right", no_wrap=True)
    for preset in results.presets:
        cells = [results.cells.get((preset, gate)) for gate in gates]
        if any(cells):
            name = textwrap.wrap(preset, room, subsequent_indent="  ")
            grid.add_row(Text("\n".join(name)), *map(cell, cells))
    bars, states = zip(*(results.column(gate) for gate in gates), strict=True) if gates else ((), ())
    grid.add_row(Text("bar", style="bold"), *map(Text, bars))
    grid.add_row(Text("verdict", style="bold"), *(Text(_WORDS[state], style=_STYLES[state]) for state in states))
    return grid


def table_text(results: Results, width: int, *, colour: bool) -> str:
    """The table as lines, and what its words mean where one needs explaining."""
    screen = StringIO()
    console = Console(file=screen, width=width, force_terminal=colour, no_color=not colour)
    for place, part in enumerate(terminal_tables(results, width)):
        console.print("\n" * (place > 0), part, sep="", end="")
    if any(cell.state == "cut" for cell in results.cells.values()):
        console.print(Text(_CUT, style=_STYLES["cut"]), soft_wrap=True)
    return "\n".join(line.rstrip() for line in screen.getvalue().splitlines())


def html(results: Results, facts: Mapping[str, Any]) -> str:
    """The whole report as one document that loads nothing."""
    complaints = results.complaints()
    state = "red" if complaints else "green"
    verdict = results.verdict()
    word, _, rest = verdict.partition(":")
    partial = f"Only a selection ran: <code>{escape(facts['selection'])}</code>" if facts.get("selection") else ""
    parts = [
        "<h1>Parity of JAX and PyTorch</h1>",
        f'<p class="verdict"><strong class="badge {state}">{word}</strong>{escape(rest)}</p>',
        f'<p class="note">{escape(_occasion(facts))} {partial}</p>',
        f"<p>Measured on {escape(facts['measured_on'])}.</p>",
        _failures(results),
        "<h2>The worst figure of each preset and gate</h2>",
        _gates(results),
        "<h2>What each gate means</h2>",
        _meanings(results),
        "<h2>Planted faults</h2>",
        _faults(results),
        "<h2>Machine and versions</h2>",
        _facts(facts),
        '<p class="note">The same data, for programs: <code>parity.json</code>, beside this page. '
        'JSON knows no NaN and no infinity: they are the strings "nan", "inf" and "-inf".</p>',
    ]
    return page(f"Parity: {word.lower()}", "\n".join(parts), _STYLE)


def _labelled(label: str, value: str) -> str:
    # On a phone a row becomes a card, where no header stands above the cell.
    return f'<span class="label">{escape(label)}</span>{value}'


def _coloured(state: str, figure: str, title: str = "") -> str:
    word = f" <small>{state}</small>" if state != "green" else ""
    return f'<span class="{state}" title="{escape(title)}">{figure}{word}</span>'


def _gates(results: Results) -> str:
    if not results.cells:
        return "<p>No figure was measured.</p>"
    titles = {gate: short(gate).replace("\n", " ") for gate in results.gates}

    def cell(found: Cell | None, gate: str) -> str:
        if found is None:
            return _labelled(titles[gate], '<span class="none">&ndash;</span>')
        where = f"{shown(found.figure, 3)} of {found.bar:g}, in {found.name or 'a tensor without a name'}"
        return _labelled(titles[gate], _coloured(found.state, shown(found.figure), where))

    columns = {gate: results.column(gate) for gate in results.gates}
    rows = [
        [escape(preset), *(cell(results.cells.get((preset, gate)), gate) for gate in columns)]
        for preset in results.presets
    ]
    rows.append(["bar", *(_labelled(titles[gate], bar) for gate, (bar, _) in columns.items())])
    rows.append(["verdict", *(_labelled(titles[g], f'<b class="{s}">{s}</b>') for g, (_, s) in columns.items())])
    note = f'<p class="note">{_CUT}</p>' if any(cell.state == "cut" for cell in results.cells.values()) else ""
    header = ["preset", *(escape(short(gate)).replace("\n", "<br>") for gate in columns)]
    return f'<div class="cards totals">{table(header, rows)}</div>{note}'


def _meanings(results: Results) -> str:
    rows = []
    for gate in results.gates:
        bar, state = results.column(gate)
        meaning = GATES[gate].meaning if gate in GATES else ""
        rows.append(f'<dt><b class="{state}">{escape(gate)}</b>, at most {bar}</dt><dd>{escape(meaning)}</dd>')
    return f'<dl class="meanings">{"".join(rows)}</dl>'


def _faults(results: Results) -> str:
    introduction = (
        "A gate that cannot fail proves nothing. So one mistake at a time is planted in one of the two frameworks, and "
        "a gate has to turn red. The last columns say whether a comparison by a tolerance picked by hand, of the "
        "softmax or of the logits, would have seen the mistake."
    )
    if not results.faults:
        return f"<p>{introduction}</p><p>No faults were planted in this run.</p>"
    words = {True: '<span class="red">missed</span>', False: "seen", None: '<span class="none">&ndash;</span>'}
    labels = ("planted in", "gate", "figure", "bar", "figure / bar", *TOLERANCES.values())
    rows = []
    for fault in results.ordered_faults:
        gate = escape(fault.gate) if fault.caught else f'<span class="red">none ({escape(fault.gate)})</span>'
        cells = (escape(fault.planted), gate, shown(fault.figure), f"{fault.bar:g}", shown(fault.margin))
        missed = (words[missed] for missed in fault.missed)
        rows.append([escape(fault.fault), *map(_labelled, labels, (*cells, *missed))])
    header = ["fault", "planted in", "seen by gate", "figure", "bar", "figure / bar"]
    header += [title.replace(", ", ",<br>") for title in TOLERANCES.values()]
    line = escape(results.faults_line())
    return f'<p>{introduction}</p><p>{line}.</p><div class="cards faults">{table(header, rows)}</div>'


def _failures(results: Results) -> str:
    if not results.failures:
        return ""
    rows = "".join(
        f'<li><code>{escape(test)}</code><br><span class="red">{escape(message)}</span></li>'
        for test, message in sorted(results.failures.items())
    )
    return f'<h2>Failures</h2><ul class="failures">{rows}</ul>'


def _occasion(facts: Mapping[str, Any]) -> str:
    date = str(facts.get("date", "")).replace("T", " ").replace("+00:00", " UTC")
    seconds = f", {facts['seconds']:.0f} s" if "seconds" in facts else ""
    return f"{date}{seconds}{', commit ' + facts['commit'] if facts.get('commit') else ''}."


def _facts(facts: Mapping[str, Any]) -> str:
    rows = {**facts.get("machine", {}), **facts.get("versions", {})}
    return (
        f'<dl class="facts">{"".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in rows.items())}</dl>'
    )
