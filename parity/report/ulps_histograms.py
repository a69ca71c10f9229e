"""The histograms of distances from the truth, for the page: small pictures, ours beside theirs, tensor by tensor."""

from collections.abc import Sequence
from html import escape

from parity.gates.ulps import EDGES, Ulps, median, together
from parity.report.figures import Figures

STYLE = """
.ulps summary { cursor: pointer; padding: .35rem 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
.ulps summary small { opacity: .75; font-variant-numeric: tabular-nums; }
.ulps path { fill: none; stroke-width: 3; } .ulps .o { stroke: var(--jax); } .ulps .t { stroke: var(--torch); }
.ulps text { font-size: 3.6px; fill: currentColor; text-anchor: middle; }
.ulps line { stroke: var(--line); stroke-width: .3; }
.ulps .rows { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 0 1.5rem; }
.ulps .rows div { display: grid; grid-template-columns: 1fr 120px; gap: .1rem .6rem; align-items: end; font-size: .8rem;
                  padding: .15rem 0; overflow-wrap: anywhere; line-height: 1.25; }
.ulps .rows small { opacity: .75; display: block; } .ulps .rows svg { width: 120px; height: 32px; }
.ulps h3 { font-size: 1rem; margin: .9rem 0 .3rem; } .ulps .whole svg { width: 100%; max-width: 24rem; }
.key { display: inline-block; width: .8em; height: .8em; vertical-align: -.05em; margin-right: .3em; }
.key.o { background: var(--jax); } .key.t { background: var(--torch); }
"""
_STEP, _HIGH = 8, 32
"""Width of a bin and height of the tallest bar, in units of the picture."""
_INTRODUCTION = (
    "Gates 3 and 4, number by number, in units in the last place (ulps): the distance between neighbours of the narrow "
    "type at the size of the truth, which float64 tells. At 0 stand the numbers that are nearest to the truth, the "
    "best that a type can do; then 1, 2, 3 to 4, 5 to 8, and so on up to {last}; the last bar is all beyond. Heights "
    "are shares of the tensor's numbers. Where large terms cancel, what is left is many ulps away, on both sides. The "
    "words say within how many ulps half of the numbers are, and how many are the nearest: JAX / PyTorch."
)


def histograms(figures: Figures) -> str:
    """A part to open for each row, with a picture of each tensor and gate; "" where there are no histograms."""
    rows = {row: [gate for other, gate in figures.ulps if other == row] for row, _ in figures.ulps}
    if not rows:
        return ""
    keys = '<span class="key o"></span>JAX, <span class="key t"></span>PyTorch'
    parts = [_row(figures, row, sorted(rows[row])) for row in dict.fromkeys((*figures.rows, *rows)) if row in rows]
    introduction = _INTRODUCTION.format(last=f"{EDGES[-1]:,}")
    return f'<p>{introduction} {keys}.</p><div class="ulps">{"".join(parts)}</div>'


def _row(figures: Figures, row: str, gates: Sequence[str]) -> str:
    found = {gate: figures.ulps[row, gate] for gate in gates if figures.ulps[row, gate]}
    totals = {gate: together(ulps.values()) for gate, ulps in found.items()}
    said = "; ".join(f"{total.unit}: {_within(total)}" for total in totals.values())
    body = "".join(
        f"<h3>{escape(gate)}, {totals[gate].unit}: all tensors</h3>"
        f'<div class="whole">{_labelled_picture(totals[gate])}</div>'
        f'<div class="rows">{"".join(_tensor(name, each) for name, each in ulps.items())}</div>'
        for gate, ulps in found.items()
    )
    return f"<details><summary><b>{escape(row)}</b> <small>{escape(said)}</small></summary>{body}</details>"


def _tensor(name: str, ulps: Ulps) -> str:
    breakable = escape(name).replace(".", ".<wbr>")
    return f"<div><span>{breakable}<small>{_within(ulps)}</small></span>{_picture(ulps)}</div>"


def _within(ulps: Ulps) -> str:
    """How far half of the numbers are within, and how many are the nearest to the truth: ours / theirs."""
    halves = (median(side) for side in (ulps.ours, ulps.theirs))
    here, there = (f"> {EDGES[-1]}" if half is None else str(half) for half in halves)
    exact, other = (100 * side[0] / max(1, sum(side)) for side in (ulps.ours, ulps.theirs))
    return f"half within {here} / {there}, nearest {exact:.0f}% / {other:.0f}%"


def _picture(ulps: Ulps, below: str = "", room: int = 0) -> str:
    bins = len(EDGES) + 1
    tallest = max(_share(side, place) for side in (ulps.ours, ulps.theirs) for place in range(bins)) or 1.0
    paths = ""
    for kind, side, left in (("o", ulps.ours, 2), ("t", ulps.theirs, 5)):
        # What is there at all shows, however rare it is.
        shares = (_share(side, place) for place in range(bins))
        heights = [max(round(_HIGH * share / tallest), 1) if share else 0 for share in shares]
        bars = "".join(f"M{left + _STEP * place} {_HIGH}V{_HIGH - high}" for place, high in enumerate(heights) if high)
        paths += f'<path class="{kind}" d="{bars}"/>' if bars else ""
    return f'<svg viewBox="0 0 {_STEP * bins} {_HIGH + room}">{paths}{below}</svg>'


def _labelled_picture(ulps: Ulps) -> str:
    names = [str(edge) if edge < 1000 else f"{edge // 1024}k" for edge in EDGES] + ["+"]
    wide = _STEP * len(names)
    labels = "".join(
        f'<text x="{_STEP * place + _STEP / 2:g}" y="{_HIGH + 5}">{name}</text>' for place, name in enumerate(names)
    )
    return _picture(ulps, f'<line x2="{wide}" y1="{_HIGH}" y2="{_HIGH}"/>{labels}', 7)


def _share(side: Sequence[int], place: int) -> float:
    return side[place] / max(1, sum(side))
