"""Draws the pictures of a report, as PNG files and as SVG in the colours of the page around it."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from parity.gates.measure import FLOAT64_BAR
from twin.record import ParameterError, Record, SeedRecord

INK, LINE, JAX, TORCH, BAND = "#1d1d22", "#d8d8dd", "#0a5fa5", "#e08214", "#dfe9f2"
"""Blue and orange can be told apart with every kind of colour blindness, and in grey."""
VARIABLES = {INK: "--text", LINE: "--line", JAX: "--jax", TORCH: "--torch", BAND: "--band"}
"""Colour -> the page's variable for it, so that its dark scheme also applies to the pictures."""
_SMALLEST = 1e-18
_STYLE: Any = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "comparison",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "mathtext.default": "regular",
}


@matplotlib.rc_context(_STYLE)
def draw(record: Record, folder: Path) -> dict[str, str]:
    """Writes all pictures to a folder as PNG files, and returns them as SVG elements, by name."""
    drawn = {
        "loss": (loss_figure(record), "Loss of JAX and PyTorch over steps"),
        "difference": (difference_figure(record), "Difference of the losses over steps"),
    }
    if errors := record.parameters():
        drawn["parameters"] = (parameter_figure(errors), "Relative difference of every parameter by layer")
    for name, (figure, _) in drawn.items():
        figure.savefig(folder / f"{name}.png", dpi=160, facecolor="white")
    return {name: to_svg(figure, name, description) for name, (figure, description) in drawn.items()}


def loss_figure(record: Record) -> Figure:
    """Draws both loss curves of every seed."""
    figure, axes = _axes("loss, nats a token")
    for side, name, colour, width in (("torch", "PyTorch", TORCH, 5.0), ("jax", "JAX", JAX, 1.4)):
        for number, seed in enumerate(record.begun):
            steps, label = np.arange(1, seed.steps + 1), "_" if number else name
            axes.plot(steps, seed.losses(side), color=colour, linewidth=width, label=label)
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def difference_figure(record: Record) -> Figure:
    """Draws the distance of the losses on a logarithmic scale: points for steps, a line for the largest so far.

    In float32 with a truth, draws each side's distance from it, and the band that gate 6 allows. In float64, draws the
    bar.
    """
    sides: dict[str, tuple[str, Callable[[SeedRecord], np.ndarray]]]
    """Label -> colour and distances."""
    if record.dtype == "float64":
        up, sides = "|JAX - PyTorch| / PyTorch, loss", {"JAX from PyTorch": (JAX, SeedRecord.relative_difference)}
    elif record.has("truth"):
        up = "distance from float64 loss, nats a token"
        sides = {
            f"PyTorch, {record.dtype}": (TORCH, lambda seed: seed.distance("torch", "truth")),
            f"JAX, {record.dtype}": (JAX, lambda seed: seed.distance("jax", "truth")),
        }
    else:
        up = "|JAX - PyTorch|, nats a token"
        sides = {"JAX from PyTorch": (JAX, lambda seed: seed.distance("jax", "torch"))}
    figure, axes = _axes(up)
    for number, seed in enumerate(record.begun):
        if record.judged:
            allowed, label = seed.allowed(), "" if number else "gate 6 allows"
            axes.fill_between(np.arange(1, len(allowed) + 1), _SMALLEST, allowed, color=BAND, linewidth=0, label=label)
        for label, (colour, distances) in sides.items():
            _distances(axes, distances(seed), colour, "" if number else label)
    if record.dtype == "float64":
        axes.axhline(FLOAT64_BAR, color=TORCH, linewidth=1.2, linestyle="dashed", label=f"bar, {FLOAT64_BAR:.0e}")
    axes.set_yscale("log")
    drawn = [float(y) for line in axes.lines for y in np.asarray(line.get_ydata()) if y > 0] or [1.0]
    axes.set_ylim(min(drawn) / 3, max(drawn) * 12)
    _legend(axes)
    return figure


def parameter_figure(errors: dict[str, ParameterError]) -> Figure:
    """A heat map of the relative difference of every parameter, by kind and layer."""
    layers, kinds, table = parameter_table(errors)
    figure = Figure(figsize=(2.9 + 0.62 * len(layers), 0.9 + 0.23 * len(kinds)), layout="constrained")
    axes = figure.subplots()
    # What is missing becomes NaN, which is not drawn.
    found = np.array(table, float)
    logarithms = np.log10(np.maximum(found, _SMALLEST))
    mesh = axes.pcolormesh(logarithms, cmap="cividis")
    middle = np.mean(mesh.get_clim())
    for (row, column), value in np.ndenumerate(found):
        if not np.isnan(value):
            colour = "#ffffff" if logarithms[row, column] < middle else "#000000"
            text = f"{value:.0e}" if value else "0"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(np.arange(len(layers)) + 0.5, layers)
    axes.set_yticks(np.arange(len(kinds)) + 0.5, kinds)
    axes.invert_yaxis()
    axes.tick_params(length=0, labelsize=8)
    axes.xaxis.tick_top()
    axes.spines[:].set_visible(False)
    axes.grid(False)
    bar = figure.colorbar(mesh, ax=axes, fraction=0.035, pad=0.02, aspect=30)
    bar.set_label("relative difference, power of ten")
    bar.outline.set_visible(False)
    return figure


def parameter_table(errors: dict[str, ParameterError]) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Returns (columns, rows, differences), with a column for each layer and one for the rest, a row for each kind."""
    places: dict[tuple[str, str], str] = {}
    """(layer, kind) -> name, in the order of the model, but what is in no layer first."""
    for name in sorted(errors, key=lambda name: ".blocks." in name):
        found = re.fullmatch(r"(encoder|decoder)\.blocks\.(\d+)\.(.*)", name)
        places[(f"{found[1]}\n{found[2]}", found[3]) if found else ("no layer", name)] = name
    layers = list(dict.fromkeys(layer for layer, _ in places))
    # A decoder may have kinds between those of an encoder.
    kinds = list(dict.fromkeys(kind for _, kind in sorted(places, key=lambda place: place[0].startswith("encoder"))))
    table = [
        [errors[places[layer, kind]].difference if (layer, kind) in places else None for layer in layers]
        for kind in kinds
    ]
    return layers, kinds, table


def to_svg(figure: Figure, name: str, description: str) -> str:
    """Returns an inline SVG element: without background, with the page's colours and fonts, and unique ids."""
    stream = io.StringIO()
    nothing = {"Creator": None, "Date": None, "Format": None, "Type": None}
    figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    svg = stream.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r'\b(id="|xlink:href="#|href="#|url\(#)', lambda found: f"{found[0]}{name}-", svg)
    svg = re.sub(r"'?DejaVu Sans'?[^;\"]*", "system-ui, sans-serif", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{description}"', 1).strip()


def _axes(up: str) -> tuple[Figure, matplotlib.axes.Axes]:
    # As wide as a phone, so that text is readable there; a wide screen shows two next to each other.
    figure = Figure(figsize=(4.3, 3.3), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel=up)
    return figure, axes


def _distances(axes: matplotlib.axes.Axes, values: np.ndarray, colour: str, label: str) -> None:
    steps, seen = np.arange(1, len(values) + 1), values > 0
    axes.plot(steps[seen], values[seen], ".", color=colour, markersize=2.5, alpha=0.45)
    largest = np.maximum.accumulate(values)
    axes.plot(steps[largest > 0], largest[largest > 0], color=colour, linewidth=1.6, label=label or "_")


def _legend(axes: matplotlib.axes.Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, columnspacing=1.2)
