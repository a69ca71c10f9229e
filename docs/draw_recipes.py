"""Draws how runs grok, as docs/recipes.md shows it: `python docs/draw_recipes.py FOLDER OUT.svg`.

FOLDER holds runs of `grokking`, one for each seed.
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from jax_tformer.runs.metrics import read_metrics

_CURVES = {"train_accuracy": "#9db8d9", "val_accuracy": "#b3471d"}


def main(folder: Path, picture: Path) -> None:
    """Draws the shares of right answers of all runs in `folder`."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(sorted(folder.iterdir())):
        rows = [row for row in read_metrics(run / "metrics.jsonl") if "val_accuracy" in row]
        for name, color in _CURVES.items():
            steps, shares = zip(*((row["step"], row[name]) for row in rows), strict=True)
            label = None if number else {"train_accuracy": "training equations", "val_accuracy": "held out"}[name]
            axes.plot(steps, shares, color=color, linewidth=1.4, alpha=0.9, label=label)
    axes.set(xlabel="step", ylabel="share of right answers", xscale="log", ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
