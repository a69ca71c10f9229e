"""Writes a run's results: metrics.jsonl and TensorBoard files, then loss.png, samples.txt, summary.json."""

import errno
import json
import math
import os
import platform
import re
import shutil
import struct
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from jax_tformer.data.batches import Pipeline
from jax_tformer.data.pipeline import build_pipeline
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import ExperimentConfig
from jax_tformer.files import named_errors, not_regular, parse_json, shortened, write_json, write_text
from jax_tformer.runs.evaluation import sample_text
from jax_tformer.runs.restoring import Trained, load_trained
from jax_tformer.runs.folder import RunFolder

Row = dict[str, Any]
"""A step, and figures by name; the name of a sentence in place of a figure begins with no_."""
_LOSSES = ("loss", "val_loss", "val_perplexity", "val_bits_per_byte", "exact_match", "bleu", "no_bleu")
_BEGUN = re.compile(r"events\.out\.tfevents\.(\d{19})\.")
"""The name of an event file of ours: when it was begun, in nanoseconds."""
_PACKAGES = ("jax-tformer", "jax", "flax", "optax", "orbax-checkpoint", "grain")


class MetricsLog:
    """Appends rows to metrics.jsonl and TensorBoard.

    A run that continues at `step` first drops the rows after it: a killed run may have logged steps after its last
    checkpoint, and will make them again. If lines are damaged, keeps a copy of the file. The constructor and the
    methods raise InputError if the disk is full.
    """

    def __init__(self, folder: RunFolder, step: int) -> None:
        self.notes: list[str] = []
        """What is wrong with an existing file."""
        self._path = folder.metrics
        rows = read_metrics(self._path, self.notes)
        try:
            if self.notes:
                kept = self._path.with_name(self._path.name + ".damaged")
                shutil.copyfile(self._path, kept)
                self.notes[-1] += f"; the original file is {kept.name}"
            write_text(self._path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
            # Unbuffered, so that a full disk fails here and not again at exit.
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
            self._board = _TensorBoard(folder.tensorboard, step + 1)
        except OSError as error:
            raise self._no_room(error) from error

    def write(self, row: Row) -> None:
        """Writes a row; sentences in place of figures go to metrics.jsonl only."""
        line = (json.dumps(row) + "\n").encode()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._board.write(row)
        except OSError as error:
            raise self._no_room(error) from error

    def sync(self) -> None:
        """Flushes all rows to the disk; call it before a checkpoint."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._no_room(error) from error

    def close(self) -> None:
        """Closes the file; nothing can be written afterwards."""
        self._file.close()
        self._board.close()

    def _no_room(self, error: OSError) -> InputError:
        return InputError(
            f"cannot write to {self._path}: {error.strerror or error}; make room, and the same command continues the "
            "run from its newest checkpoint"
        )


class _TensorBoard:
    """An event file of TensorBoard: protocol buffers, each between its length and a checksum.

    The packages that write such files import TensorFlow, or PyTorch if it is installed, which takes a second or more.
    A session log at the beginning hides the steps from `first` on that earlier sessions wrote. TensorBoard reads the
    files by name, and where one was begun with a clock that went back it would take the later steps for older ones.
    """

    def __init__(self, folder: Path, first: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        before = (_BEGUN.match(path.name) for path in folder.iterdir())
        begun = max([time.time_ns(), *(int(found[1]) + 1 for found in before if found)])
        self._time = begun / 1e9
        name = f"events.out.tfevents.{begun}.{os.getpid()}"
        self._file = open(folder / name, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self._event(_field(3, b"brain.Event:2"))
        self._event(_field(2, first) + _field(7, _field(1, 1)))  # a session log that says START

    def write(self, row: Row) -> None:
        """Writes the finite figures of `row`."""
        figures = {n: x for n, x in row.items() if n != "step" and not isinstance(x, str) and math.isfinite(x)}
        values = (_field(1, n.encode()) + b"\x15" + struct.pack("<f", x) for n, x in figures.items())
        self._event(_field(2, row["step"]) + _field(5, b"".join(_field(1, value) for value in values)))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _event(self, fields: bytes) -> None:
        self._time = max(self._time, time.time())
        event = b"\x09" + struct.pack("<d", self._time) + fields
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))


def _field(number: int, value: int | bytes) -> bytes:
    """Encodes a field of a protocol buffer: a whole number, or bytes (text or a message) after their length."""
    if isinstance(value, int):
        return bytes([number << 3]) + _varint(value)
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _checksum(data: bytes) -> bytes:
    """Computes CRC-32C, masked as in TensorBoard's files."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def described(figures: Row) -> str:
    """Formats figures with four decimals, or the sentences in their place, each with its name."""
    return "  ".join(f"{n} ({x})" if isinstance(x, str) else f"{n} {x:.4f}" for n, x in figures.items())


def read_metrics(path: Path, notes: list[str] | None = None) -> list[Row]:
    """Reads the rows of metrics.jsonl without damaged lines; returns [] if there is no file.

    Adds a line to `notes` that names the damaged ones, except for a last one that a kill left unfinished. Raises
    InputError if the path is not a regular file.
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
    """Parses a line of metrics.jsonl; returns None if it is damaged."""
    try:
        row = parse_json(line.decode("utf-8"))
    except ValueError:
        return None
    if not (isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0):
        return None
    sound = (type(x) in (int, float) or (isinstance(x, str) and name.startswith("no_")) for name, x in row.items())
    return row if all(sound) else None


def finish(run: RunFolder, steps: int, figures: dict[str, Any], samples: str) -> str:
    """Writes samples.txt, loss.png and summary.json; returns the text to print.

    `figures` are those of the last session. Losses come from metrics.jsonl, so that a run in several sessions ends with
    the same ones; those whose lines are lost are left out.
    """
    rows = read_metrics(run.metrics)
    losses = [row["loss"] for row in rows if "loss" in row]
    evaluated = [row for row in rows if "val_loss" in row]
    summary = {
        "steps": steps,
        "train_loss": losses[-1] if losses else None,
        **{name: value for row in evaluated if row["step"] == steps for name, value in row.items() if name != "step"},
        **figures,
        "devices": [str(device.device_kind) for device in jax.devices()],
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    }
    if evaluated:
        best = min(evaluated, key=lambda row: row["val_loss"])
        summary |= {"best_step": best["step"], "best_val_loss": best["val_loss"]}
    write_text(run.samples, samples)
    write_json(run.summary, summary)
    draw_losses(rows, run.picture, run.path.name)
    shown = {name: summary[name] for name in ("train_loss", *_LOSSES[1:]) if summary.get(name) is not None}
    speed = f"{summary['tokens_per_second']:,.0f} tokens/s  " if summary["tokens_per_second"] else ""
    told = [
        f"{steps} steps  {described(shown)}",
        *_best_of(evaluated, steps),
        f"{summary['parameters']:,} parameters  {speed}{summary['wall_seconds']:.0f} s in all",
        f"everything is in {run.path}/: {run.picture.name}, {run.samples.name}, {run.summary.name}, checkpoints ...",
    ]
    return "\n".join([samples, *told])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def report(run: RunFolder, experiment: ExperimentConfig) -> str:
    """Draws loss.png and writes samples.txt for a run in any state; returns the text to print.

    Samples come from the newest checkpoint, as `experiment.sample` describes. If there is no checkpoint or the data is
    gone, a line says why there are none. Raises InputError if the run has logged nothing yet.
    """
    notes = list[str]()
    rows = read_metrics(run.metrics, notes)
    if not rows:
        raise InputError(f"the run in {run.path} has logged nothing yet; expected lines in {run.metrics.name}")
    draw_losses(rows, run.picture, run.path.name)
    losses = {name: found[-1][name] for name in _LOSSES if (found := [row for row in rows if name in row])}
    evaluated = [row for row in rows if "val_loss" in row]
    told = [
        f"step {rows[-1]['step']} of {experiment.training.steps}  {described(losses)}",
        *_best_of(evaluated, evaluated[-1]["step"] if evaluated else 0),
        *notes,
        f"drawn: {run.picture}",
    ]
    try:
        trained = load_trained(run)
        held_out = partial(_same_data, experiment, trained)
        samples = sample_text(trained.net, trained.params, experiment, trained.tokenizer, held_out)
    except InputError as error:
        return "\n".join([*told, f"no samples: {error}"])
    write_text(run.samples, samples)
    return "\n".join([samples, *told, *trained.skipped, f"sampled at step {trained.step}: {run.samples}"])


def _same_data(experiment: ExperimentConfig, trained: Trained) -> Pipeline:
    """Makes the batches of a run's data; raises InputError if it is not what the run was trained on.

    The config of a stranger's run may name any file of the user's.
    """
    pipeline = build_pipeline(experiment.data, experiment.training, trained.tokenizer)
    if pipeline.fingerprint != trained.fingerprint:
        raise InputError("the data is not that of the run, so that nothing of it is shown; restore it, or its path")
    return pipeline


def _best_of(evaluated: list[Row], last: int) -> list[str]:
    """Returns a line about the evaluation with the best checkpoint, unless it is that of step `last`."""
    if not evaluated:
        return []
    best = min(evaluated, key=lambda row: row["val_loss"])
    told = f"best: val_loss {best['val_loss']:.4f} at step {best['step']} (generate.py --checkpoint best)"
    return [told] if best["step"] != last else []


def draw_losses(rows: list[Row], path: Path, title: str) -> None:
    """Draws the training and held-out losses over steps as a PNG."""
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
    axes.set(xlabel="step", ylabel="cross-entropy, nats per token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if trained or held_out:
        axes.legend(frameon=False)
    with named_errors(path):
        figure.savefig(path)
