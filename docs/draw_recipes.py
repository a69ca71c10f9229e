"""Draws what the recipes reached, as docs/recipes.md shows it, from the logs in docs/logs.

    python docs/draw_recipes.py [RUN ...]

Of each run folder named, which must be called RECIPE-SEED, it first keeps a log there: every evaluation, and the loss
of about fifty batches of training.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jax_tformer.runs.metrics import Row, read_metrics

DOCS = Path(__file__).parent
LOGS = DOCS / "logs"
_BLUE, _RED, _GREY = "#9db8d9", "#b3471d", "#777777"
_KEPT = 50
_FIGURES = ("loss", "val_loss", "exact_match", "train_accuracy", "val_accuracy")


def keep(run: Path) -> None:
    """Writes the log of a run to docs/logs."""
    rows = read_metrics(run / "metrics.jsonl")
    apart = max(1, rows[-1]["step"] // _KEPT)
    kept = [
        {"step": row["step"]} | {name: row[name] for name in _FIGURES if name in row}
        for row in rows
        if "val_loss" in row or row["step"] % apart == 0
    ]
    LOGS.mkdir(exist_ok=True)
    (LOGS / f"{run.name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def read_logs(recipe: str) -> list[list[Row]]:
    """Returns the rows of every run of a recipe."""
    return [read_metrics(log) for log in sorted(LOGS.glob(f"{recipe}-[0-9]*.jsonl"))]


def reached(recipe: str, figure: str) -> list[float]:
    """Returns the last value of a figure in every run of a recipe."""
    return [[row[figure] for row in rows if figure in row][-1] for rows in read_logs(recipe)]


def in_words(figures: list[float], digits: int = 3) -> str:
    """Writes the mean of several runs with the standard deviation of one: "0.998 ± 0.001 (3 runs)"."""
    mean = f"{statistics.mean(figures):.{digits}f}"
    if len(figures) == 1:
        return f"{mean} (1 run)"
    return f"{mean} ± {statistics.stdev(figures):.{digits}f} ({len(figures)} runs)"


@contextmanager
def _picture(name: str, **settings: Any) -> Iterator[Axes]:
    """Draws into axes, and writes them as docs/NAME.svg, always the same for the same logs."""
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        yield axes
        axes.set(**settings)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(DOCS / f"{name}.svg", metadata={"Date": None})


def _curve(axes: Axes, recipe: str, figure: str, label: str, **style: Any) -> None:
    """Draws a figure over steps, of all runs of a recipe."""
    for number, rows in enumerate(read_logs(recipe)):
        points = [(row["step"], row[figure]) for row in rows if figure in row]
        axes.plot(*zip(*points, strict=True), linewidth=1.4, label=None if number else label, **style)


def _level(axes: Axes, value: float, label: str) -> None:
    """Draws a published figure."""
    axes.axhline(value, color=_GREY, linewidth=1, linestyle="--", label=label)


def draw_grokking() -> None:
    """Draws the shares of right answers."""
    with _picture("grokking", xlabel="step", ylabel="share of right answers", xscale="log", ylim=(0, 1.03)) as axes:
        _curve(axes, "grokking", "train_accuracy", "training equations", color=_BLUE)
        _curve(axes, "grokking", "val_accuracy", "held out", color=_RED)


def draw_chain() -> None:
    """Draws the held-out loss of masked letters, and the least possible one."""
    with _picture("masked-chain", xlabel="step", ylabel="nats a letter", ylim=(0.3, 0.45)) as axes:
        _curve(axes, "masked-chain", "val_loss", "held out", color=_RED, marker="o", markersize=4)
        _level(axes, 0.3344, "least possible: 0.3344")


def draw_shakespeare() -> None:
    """Draws the losses at both learning rates."""
    with _picture("shakespeare-char", xlabel="step", ylabel="nats a character", ylim=(1.5, 3)) as axes:
        for recipe, rate, color in (("nanogpt-rate", "1e-3", _BLUE), ("shakespeare-char", "2e-3", _RED)):
            _curve(axes, recipe, "loss", f"training batch, learning rate {rate}", color=color, alpha=0.5)
            _curve(axes, recipe, "val_loss", f"held out, learning rate {rate}", color=color, marker="o", markersize=4)
        _level(axes, 1.88, "nanoGPT, learning rate 1e-3: 1.88")


def draw_scan() -> None:
    """Draws the share of right commands in every run, beside what others published."""
    splits = ("simple", "length", "jump")
    published = {
        "LSTM (Lake & Baroni, 2018)": ("x", {"simple": 0.998, "length": 0.138, "jump": 0.0008}),
        "transformer (Newman et al., 2020; Furrer et al., 2020)": ("+", {"length": 0.0, "jump": 0.01}),
        "transformer, relative positions (Csordás et al., 2021)": ("d", {"length": 0.2}),
    }
    with _picture("scan", xlabel="split", ylabel="share of right commands", ylim=(-0.03, 1.03)) as axes:
        for split in splits:
            shares = reached(f"scan-{split}", "exact_match")
            label = "ours, every run" if split == splits[0] else None
            axes.scatter([split] * len(shares), shares, color=_RED, alpha=0.7, clip_on=False, label=label)
        for label, (marker, by_split) in published.items():
            axes.scatter(
                list(by_split), list(by_split.values()), color=_GREY, marker=marker, clip_on=False, label=label
            )


if __name__ == "__main__":
    for run in sys.argv[1:]:
        keep(Path(run))
    for draw in (draw_grokking, draw_scan, draw_chain, draw_shakespeare):
        draw()
