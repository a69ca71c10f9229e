"""The page of a run: its verdict, what failed, the table of figures, what the gates mean, and where it was measured."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parity.report.figures import GATES, fault_rows, short, shown
from parity.report.page import render

if TYPE_CHECKING:
    from parity.report.checks import Checks

_TEMPLATE = """
{% extends "page.html" %}
{% from "table.html" import table %}
{% block style %}
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
.faults td:first-child { white-space: normal; min-width: 15rem; }
.faults td:nth-child(2), .faults td:nth-child(3), .faults th:nth-child(2), .faults th:nth-child(3) { text-align: left; }
{% endblock %}
{% macro labelled(label) %}<span class="label">{{ label }}</span>{{ caller() }}{% endmacro %}
{% macro mark(state) %}<b class="{{ state }}">{{ "(red)" if state == "expected" else state }}</b>{% endmacro %}
{% macro figure(found, gate) %}
{% call labelled(short(gate)) %}
{% if found %}
<span class="{{ found.state }}" title="{{ shown(found.figure, 3) }} of {{ found.bar }}, in {{ found.name }}">
{{- shown(found.figure) }}{% if not found.within %} <small>{{ mark(found.state) }}</small>{% endif %}</span>
{% else %}<span class="none">&ndash;</span>{% endif %}
{% endcall %}
{% endmacro %}
{% macro answers(test) %}
{% for check in checks.checks(test) if check.answer %}
{% if check.answer_html %}{{ check.answer_html | safe }}
{% else %}<div class="wide"><pre>{{ check.answer }}</pre></div>
{% endif %}
{% endfor %}
{% endmacro %}
{% block body %}
<h1>Parity of JAX and PyTorch</h1>
<p class="verdict"><strong class="badge {{ word | lower }}">{{ word }}</strong>{{ rest }}</p>
<p>Measured on {{ facts.measured_on }}, {{ facts.date.replace("T", " ").replace("+00:00", " UTC") }}.</p>
{% if failed %}
<h2>Failures</h2>
<ul class="failures">{% for test, message in failed.items() | sort %}
<li><code>{{ test }}</code><br><span class="red">{{ message }}</span>{{ answers(test) }}</li>
{% endfor %}</ul>
{% endif %}
<h2>The worst figure of each test and gate</h2>
{% if figures.cells %}
<div class="cards totals"><div class="wide"><table>
<thead><tr><th>test</th>{% for gate in figures.gates %}
<th>{% for line in short(gate).split("\n") %}{{ line }}{% if loop.first %}<br>{% endif %}{% endfor %}</th>
{% endfor %}</tr></thead>
<tbody>
{% for row in figures.rows %}
<tr><td>{{ row }}</td>{% for gate in figures.gates %}<td>{{ figure(figures.cells.get((row, gate)), gate) }}</td>
{% endfor %}</tr>
{% endfor %}
<tr><td>bar</td>{% for gate in figures.gates %}
<td>{% call labelled(short(gate)) %}{{ figures.bars(gate) }}{% endcall %}</td>{% endfor %}</tr>
<tr><td>verdict</td>{% for gate in figures.gates %}
<td>{% call labelled(short(gate)) %}{{ mark(figures.state(gate)) }}{% endcall %}</td>{% endfor %}</tr>
</tbody>
</table></div></div>
<p class="note">{{ figures.note }}</p>
{% else %}<p>No figure was measured.</p>{% endif %}
{% for test in checks.tests if checks.answers(test) and test not in failed %}
{% if loop.first %}<h2>Where they part</h2>{% endif %}
<p><code>{{ test }}</code></p>{{ answers(test) }}
{% endfor %}
<h2>What each gate means</h2>
<dl class="meanings">{% for gate in figures.gates %}
<dt><b class="{{ figures.state(gate) }}">{{ gate }}</b>, at most {{ figures.bars(gate) }}</dt>
<dd>{{ gates[gate].meaning if gate in gates }}</dd>
{% endfor %}</dl>
{% if faults %}
<h2>Planted faults</h2>
<p>A gate that cannot fail proves nothing. So one mistake at a time is planted in one of the two frameworks, and a gate
has to turn red.</p>
<div class="faults">{{ table(faults[0], faults[1:]) }}</div>
{% endif %}
<h2>Machine and versions</h2>
<dl class="facts">{% for name, value in (facts.machine.items() | list) + (facts.versions.items() | list) %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}</dl>
<p class="note">The same data, for programs: <code>parity.json</code>, beside this page. JSON knows no NaN and no
infinity: they are the strings "nan", "inf" and "-inf".</p>
{% endblock %}
"""


def summary_page(checks: "Checks", facts: Mapping[str, Any]) -> str:
    """A document that loads nothing."""
    word, _, rest = checks.verdict().partition(":")
    return render(
        _TEMPLATE,
        title=f"Parity: {word.lower()}",
        word=word,
        rest=rest,
        facts=facts,
        checks=checks,
        figures=checks.figures,
        failed=checks.failed,
        faults=fault_rows(checks.faults),
        gates=GATES,
        short=short,
        shown=shown,
    )
