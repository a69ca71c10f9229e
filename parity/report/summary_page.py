"""The page of a run: its verdict, what failed, the table of figures, what the gates mean, and where it was measured."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from parity.report.figures import Cell, Figures, shown
from parity.report.page import page, table
from parity.report.terminal_table import NOTES

_STYLE = """
.badge { padding: .1rem .55rem; border-radius: .3rem; color: Canvas; margin-right: .4rem; }
.badge.green { background: var(--good); } .badge.red { background: var(--bad); }
.cut, .expected { color: light-dark(#8a5a00, #f2a24b); } .none { opacity: .5; } small { font-weight: 400; }
.label { display: none; }
.cards td:first-child, .cards th:first-child { position: sticky; left: 0; background: Canvas; }
.cards th:first-child { background: var(--soft); }
.cards .wide { max-width: max-content; }
.totals tr:nth-last-child(2) td { border-top: 2px solid var(--line); }
.totals th, .totals td { padding: .35rem .4rem; } .totals td:first-child { white-space: normal; min-width: 12rem; }
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
  .cards td, .cards td:first-child { display: block; position: static; border: 0; padding: .1rem 0;
                                     min-width: 0; white-space: normal; text-align: left; }
  .cards td:first-child { grid-column: 1 / -1; font-weight: 600; overflow-wrap: anywhere; }
  .totals tr:nth-last-child(2) td { border: 0; } .totals tr:nth-last-child(2) { border-top: 2px solid var(--line); }
  .totals td:has(.none) { display: none; } .cards small { display: block; line-height: 1; }
  .label { display: block; font-size: .7rem; line-height: 1.2; opacity: .75; }
}
"""


def report(
    title: str, verdict: str, facts: Mapping[str, Any], sections: Sequence[tuple[str, str]], style: str = ""
) -> str:
    """A document that loads nothing: `verdict` begins with GREEN or RED, and `sections` are (heading, HTML).

    `facts` say when (`date`, `seconds`, `commit`), of what (`selection`) and where (`measured_on`, `machine`,
    `versions`) the figures were measured. A section without HTML is left out.
    """
    word, _, rest = verdict.partition(":")
    partial = f"Only a selection ran: <code>{escape(facts['selection'])}</code>" if facts.get("selection") else ""
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict"><strong class="badge {word.lower()}">{word}</strong>{escape(rest)}</p>',
        f'<p class="note">{escape(_occasion(facts))} {partial}</p>',
        f"<p>Measured on {escape(facts['measured_on'])}.</p>",
        *(f"<h2>{escape(heading)}</h2>\n{body}" for heading, body in sections if body),
        "<h2>Machine and versions</h2>",
        _facts(facts),
        '<p class="note">The same data, for programs: <code>parity.json</code>, beside this page. '
        'JSON knows no NaN and no infinity: they are the strings "nan", "inf" and "-inf".</p>',
    ]
    return page(f"Parity: {word.lower()}", "\n".join(parts), _STYLE + style)


def labelled(label: str, value: str) -> str:
    """A cell with its label, which shows on a phone: there a row becomes a card, where no header stands above it."""
    return f'<span class="label">{escape(label)}</span>{value}'


def gates_table(figures: Figures) -> str:
    """Rows x gates, bars and verdicts."""
    if not figures.cells:
        return "<p>No figure was measured.</p>"
    titles = {gate: figures.short(gate).replace("\n", " ") for gate in figures.gates}

    def cell(found: Cell | None, gate: str) -> str:
        if found is None:
            return labelled(titles[gate], '<span class="none">&ndash;</span>')
        where = f"{shown(found.figure, 3)} of {found.bar:g}, in {found.name or 'a tensor without a name'}"
        return labelled(titles[gate], _coloured(found.state, shown(found.figure), where))

    columns = {gate: figures.column(gate) for gate in figures.gates}
    rows = [[escape(row), *(cell(figures.cells.get((row, gate)), gate) for gate in columns)] for row in figures.rows]
    rows.append(["bar", *(labelled(titles[gate], bar) for gate, (bar, _) in columns.items())])
    rows.append(["verdict", *(labelled(titles[g], f'<b class="{s}">{_word(s)}</b>') for g, (_, s) in columns.items())])
    states = {cell.state for cell in figures.cells.values()}
    notes = "".join(f'<p class="note">{note}</p>' for state, note in NOTES.items() if state in states)
    header = [figures.heading, *(escape(figures.short(gate)).replace("\n", "<br>") for gate in columns)]
    return f'<div class="cards totals">{table(header, rows)}</div>{notes}'


def meanings(figures: Figures) -> str:
    """What each gate that was measured means."""
    rows = []
    for gate in figures.gates:
        bar, state = figures.column(gate)
        meaning = figures.known[gate].meaning if gate in figures.known else ""
        rows.append(f'<dt><b class="{state}">{escape(gate)}</b>, at most {bar}</dt><dd>{escape(meaning)}</dd>')
    return f'<dl class="meanings">{"".join(rows)}</dl>' if rows else ""


def failures(found: Mapping[str, str], answers: Mapping[str, str] | None = None) -> str:
    """Tests that failed, each with its line; `answers` are HTML that follows it."""
    rows = "".join(
        f'<li><code>{escape(test)}</code><br><span class="red">{escape(message)}</span>'
        f"{(answers or {}).get(test, '')}</li>"
        for test, message in sorted(found.items())
    )
    return f'<ul class="failures">{rows}</ul>' if rows else ""


def _word(state: str) -> str:
    return "(red)" if state == "expected" else state


def _coloured(state: str, figure: str, title: str) -> str:
    word = f" <small>{_word(state)}</small>" if state != "green" else ""
    return f'<span class="{state}" title="{escape(title)}">{figure}{word}</span>'


def _occasion(facts: Mapping[str, Any]) -> str:
    date = str(facts.get("date", "")).replace("T", " ").replace("+00:00", " UTC")
    seconds = f", {facts['seconds']:.0f} s" if "seconds" in facts else ""
    return f"{date}{seconds}{', commit ' + facts['commit'] if facts.get('commit') else ''}."


def _facts(facts: Mapping[str, Any]) -> str:
    rows = {**facts.get("machine", {}), **facts.get("versions", {})}
    return (
        f'<dl class="facts">{"".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in rows.items())}</dl>'
    )
