"""What a run measures, on disk: metrics.jsonl, TensorBoard, loss.png."""

import errno
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from jax_tformer.config_file import not_regular, parse_json, shortened, write_text
from jax_tformer.errors import InputError
from jax_tformer.run.run_folder import RunFolder

Row = dict[str, Any]


class MetricsLog:
    """Appends rows to metrics.jsonl and TensorBoard.

    A run that continues at `step` first drops the rows after it: a killed run may have logged steps that its last
    checkpoint does not hold, and they will be made again. Where lines are damaged, the file as it was is kept too.
    """

    def __init__(self, folder: RunFolder, step: int) -> None:
        """Raises InputError, as do the methods, where there is no room."""
        self.notes: list[str] = []
        """What is wrong with the file that was there."""
        self._path = folder.metrics
        rows = read_metrics(self._path, self.notes)
        try:
            if self.notes:
                kept = self._path.with_name(self._path.name + ".damaged")
                shutil.copyfile(self._path, kept)
                self.notes[-1] += f"; the file as it was is {kept.name}"
            write_text(self._path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
            # Without a buffer: what does not fit on the disk fails here and now, and not again when the program ends.
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
            self._board = _TensorBoard(folder.tensorboard, step + 1)
        except OSError as error:
            raise self._no_room(error) from error

    def write(self, row: Row) -> None:
        """One row: its step, and figures by name; sentences in place of figures are for the file alone."""
        line = (json.dumps(row) + "\n").encode()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._board.write(row)
        except OSError as error:
            raise self._no_room(error) from error

    def sync(self) -> None:
        """Returns when all rows are on the disk: before a checkpoint that comes after them."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._no_room(error) from error

    def close(self) -> None:
        """Nothing can be written any more."""
        self._file.close()
        self._board.close()

    def _no_room(self, error: OSError) -> InputError:
        return InputError(
            f"cannot write to {self._path}: {error.strerror or error}; make room, and the same command continues the "
            "run from its newest checkpoint"
        )


class _TensorBoard:
    """Event files for TensorBoard, written at once: tensorboardX's own thread would wait for ever on a full disk."""

    def __init__(self, folder: Path, first: int) -> None:
        """Hides what earlier sessions wrote of step `first` and those after it."""
        # Imported at first use, and without torch, which tensorboardX brings where it finds it: 1.5 s and 300 MB.
        absent: Any = None
        hidden = "torch" not in sys.modules
        if hidden:
            sys.modules["torch"] = absent
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.proto.summary_pb2 import Summary
        finally:
            if hidden:
                del sys.modules["torch"]
        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(step=first, wall_time=time.time(), session_log=start))
        self._writer.flush()

    def write(self, row: Row) -> None:
        """The figures of `row` that can be drawn."""
        figures = {n: x for n, x in row.items() if n != "step" and not isinstance(x, str) and math.isfinite(x)}
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        summary = self._summary(value=values)
        self._writer.write_event(self._event(step=row["step"], wall_time=time.time(), summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def described(figures: Row) -> str:
    """Figures with four decimals, and sentences that stand in place of one, each with its name."""
    parts = (f"{n} ({x})" if isinstance(x, str) else f"{n} {x:.4f}" for n, x in figures.items())
    return "  ".join(parts)


def read_metrics(path: Path, notes: list[str] | None = None) -> list[Row]:
    """The rows of metrics.jsonl, without damaged lines; [] where there is no file.

    `notes` is given a line that names those, except for a last one that a kill left unfinished. Raises InputError for
    what is no file.
    """
    if not path.exists():
        return []
    problem = not_regular(path)
    if problem:
        raise InputError(f"{path} {problem}; expected the log of a run: move it away")
    *lines, unfinished = path.read_bytes().split(b"\n")
    rows = [_row(line) for line in lines]
    damaged = [str(number) for number, row in enumerate(rows, 1) if row is None]
    if damaged and notes is not None:
        which = f"line{'s' if len(damaged) > 1 else ''} {shortened(damaged)}"
        notes.append(f"{path.name} is damaged in {which}: the other {len(rows) - len(damaged):,} are used")
    return [row for row in (*rows, _row(unfinished)) if row is not None]


def _row(line: bytes) -> Row | None:
    """What a line of metrics.jsonl says; None if it is none."""
    try:
        row = parse_json(line.decode("utf-8"))
    except ValueError:
        return None
    if not (isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0):
        return None
    # A sentence may stand in place of a figure, and says in its name that there is none.
    sound = (type(x) in (int, float) or (isinstance(x, str) and name.startswith("no_")) for name, x in row.items())
    return row if all(sound) else None


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
    if trained or held_out:
        axes.legend(frameon=False)
    figure.savefig(path)
