"""What a run measures, on disk: metrics.jsonl, TensorBoard, loss.png."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_tformer.training.run_folder import RunFolder

Row = dict[str, Any]


class MetricsLog:
    """Appends rows to metrics.jsonl and TensorBoard.

    A run that continues at `step` first drops the rows after it: a killed run may have logged steps that its last
    checkpoint does not hold, and they will be made again.
    """

    def __init__(self, folder: RunFolder, step: int) -> None:
        kept = [row for row in read_metrics(folder.metrics) if row["step"] <= step]
        partial = folder.metrics.with_name(folder.metrics.name + ".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        partial.replace(folder.metrics)
        self._file = open(folder.metrics, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed by close)
        self._writer = _tensorboard()(str(folder.tensorboard), purge_step=step + 1)

    def write(self, row: Row) -> None:
        """One row: its step, and figures by name; sentences in place of figures are for the file alone."""
        self._file.write(json.dumps(row) + "\n")
        for name, value in row.items():
            if name != "step" and not isinstance(value, str) and math.isfinite(value):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flushes both."""
        self._file.close()
        self._writer.close()


def _tensorboard() -> Callable[..., Any]:
    """tensorboardX's SummaryWriter, which imports torch where it finds it: 1.5 seconds and 300 MB, for nothing here."""
    absent: Any = None
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = absent
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hidden:
            del sys.modules["torch"]
    return SummaryWriter


def described(figures: Row) -> str:
    """Figures with four decimals, and sentences that stand in place of one, each with its name."""
    parts = (f"{n} ({x})" if isinstance(x, str) else f"{n} {x:.4f}" for n, x in figures.items())
    return "  ".join(parts)


def read_metrics(path: Path) -> list[Row]:
    """The rows of metrics.jsonl, without a last line that a kill left unfinished; [] where there is no file."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
            break
        rows.append(row)
    return rows


def draw_losses(rows: list[Row], path: Path, title: str) -> None:
    """The training and held-out losses over steps, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    trained = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    held_out = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    if trained:
        axes.plot(*zip(*trained, strict=True), color="#9db8d9", linewidth=1.2, label="training batch")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#b3471d", markersize=4, label="held out")
        step, loss = held_out[-1]
        axes.annotate(f"{loss:.3f}", (step, loss), xytext=(0, 8), textcoords="offset points", ha="right")
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="step", ylabel="cross-entropy, nats a token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
