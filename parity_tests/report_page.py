"""The results as a page."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from parity.report.figures import shown
from parity.report.page import table
from parity.report.summary_page import failures, gates_table, labelled, meanings, report
from parity.report.ulps_histograms import STYLE as ULPS_STYLE
from parity.report.ulps_histograms import histograms
from parity_tests.report import TOLERANCES, Results

_STYLE = """
.faults td:first-child { white-space: normal; min-width: 15rem; }
.faults td:nth-child(2), .faults td:nth-child(3), .faults th:nth-child(2), .faults th:nth-child(3) { text-align: left; }
@media (max-width: 40rem) { .cards.faults tr { grid-template-columns: 1fr 1.3fr 1fr 1fr; column-gap: .4rem; }
                            .faults td:first-child { min-width: 0; } }
"""


def html(results: Results, facts: Mapping[str, Any]) -> str:
    """The whole report as one document that loads nothing."""
    sections = [
        ("Failures", failures(results.failures, {test: _where(found) for test, found in results.answers.items()})),
        ("The worst figure of each preset and gate", gates_table(results)),
        ("How far from the truth", histograms(results)),
        ("What each gate means", meanings(results) or "<p>No figure was measured.</p>"),
        ("Planted faults", _faults(results)),
    ]
    return report("Parity of JAX and PyTorch", results.verdict(), facts, sections, _STYLE + ULPS_STYLE)


def _where(answers: Sequence[Mapping[str, Any]]) -> str:
    return "".join(answer["answer_html"] or f"<p>{escape(answer['answer'])}</p>" for answer in answers)


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
        rows.append([escape(fault.fault), *map(labelled, labels, (*cells, *missed))])
    header = ["fault", "planted in", "seen by gate", "figure", "bar", "figure / bar"]
    header += [title.replace(", ", ",<br>") for title in TOLERANCES.values()]
    line = escape(results.faults_line())
    return f'<p>{introduction}</p><p>{line}.</p><div class="cards faults">{table(header, rows)}</div>'
