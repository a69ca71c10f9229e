"""From the command to the first training step: `python -m benchmarks.startup [--all] [--text FILE] [--quick]`."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.session import Options, Report, Session, by_turns, make_table, other_work, run_benchmark, show, spread
from twin.machine import Neighbours
from twin.sides import SideFailed

_ROOT = Path(__file__).resolve().parents[1]
_SHORT = "--training.steps 3 --training.log-every 1 --training.evaluate-batches 1 --sample.count 1"
TINY = (
    "--data.tokenizer.kind bytes --data.tokenizer.vocab-size None --data.context-length 16 --training.batch-size 2 "
    "--model.d-model 16 --model.decoder.num-layers 1 --model.decoder.num-heads 2 --model.decoder.feedforward-width 32"
)
"""A python-docs of no size."""
COLD, WARM, TORCH = "cold", "warm", "torch"
"""An empty cache of compiled programs; that of the run before; PyTorch instead."""
_SMALL = {"nothing": ["-c", "pass"], "help": ["train.py", "--help"]}
_NOTES = (
    "Seconds, median of the turns (cold, warm, torch, ...), in brackets min..max. cold: a fresh "
    "folder for what JAX compiles; warm: the same command again. first step: from the command until metrics.jsonl has "
    "its line.",
    "torch: a fresh process that imports torch, builds torch_ref's Trainer of the same model and makes one eager step "
    "on random ids; it reads no text, builds no tokenizer and writes no run folder.",
    "whole command: three steps, one evaluation batch, a checkpoint, a sample, a picture.",
)


@dataclass(frozen=True)
class StartupOptions(Options):
    """The options of this benchmark."""

    all: bool = False
    """Measure dates too."""
    text: Path | None = None
    """Measure shakespeare-char too, on this text."""


def main(arguments: Sequence[str]) -> int:
    """Status 1 where a program fails."""
    return run_benchmark("startup", __doc__, arguments, _measure, StartupOptions)


def _measure(session: Session) -> Report:
    experiments = {"python-docs": TINY.split() if session.quick else []}
    if session.options.all:
        experiments["dates"] = []
    if session.options.text is not None:
        experiments["shakespeare-char"] = ["--data.path", str(session.options.text)]
    rounds, others = session.rounds(1 if session.quick else 2), Neighbours()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        programs = Programs(Path(temporary), session.device)
        session.say("an interpreter that does nothing; train.py --help ...")
        alone = by_turns([*_SMALL], max(rounds, 3), programs.small)
        for name, flags in experiments.items():
            session.say(f"{name}: cold, warm, torch, by turns ...")
            turns = by_turns([COLD, WARM, TORCH], rounds, partial(programs.first_step, name, flags))
            found[name] = {
                kind: {figure: spread([turn[figure] for turn in taken]) for figure in taken[0]}
                for kind, taken in turns.items()
            }
            for kind in (COLD, WARM):
                ratio = found[name][kind]["first_step"]["median"] / found[name][TORCH]["first_step"]["median"]
                found[name][f"{kind}_over_torch"] = ratio
    nothing, help_page = (spread(seconds) for seconds in alone.values())
    figures: dict[str, Any] = {
        "nothing_seconds": nothing,
        "help_seconds": help_page,
        "experiments": found,
        "other_work": others.share(),
    }
    tiny = ", tiny" if session.quick else ""
    ours = {f"{name}{tiny}, {kind}": found[name][kind]["first_step"] for name in found for kind in (COLD, WARM)}
    rows = []
    for name, kinds in found.items():
        for kind in (COLD, WARM):
            cells = show(kinds[kind]["first_step"]), show(kinds[kind]["whole"]), f"{kinds[f'{kind}_over_torch']:.2f}"
            rows.append([f"{name}, {kind}", *cells])
        rows.append([f"{name}, torch", show(kinds[TORCH]["first_step"]), "", "1.00"])
    shown = [
        f"\npython train.py --help: {show(help_page)} s; an interpreter that does nothing: {show(nothing)} s",
        make_table("from the command to the first step", ["", "first step s", "whole command s", "times torch"], rows),
        *other_work("all of it", figures["other_work"]),
    ]
    return Report(figures, ours, shown, _NOTES)


def wait_for_end(run: Path, processes: Sequence[subprocess.Popen[str]], began: float) -> float | None:
    """Waits until all have ended; returns the seconds from `began` until the metrics.jsonl of `run` had a line."""
    metrics, first = run / "metrics.jsonl", None
    while any(process.poll() is None for process in processes):
        if first is None and metrics.exists() and metrics.stat().st_size:
            first = time.perf_counter() - began
        time.sleep(0.005)
    return first


class Programs:
    """Fresh processes, each timed from the command on."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._runs, self._caches = folder, 0, 0
        kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        kept |= {"JAX_PLATFORMS": "cpu" if device == "cpu" else "cuda,cpu", "PYTHONPATH": str(_ROOT)}
        self._environment, self._device = kept, "cuda" if device == "gpu" else device

    def small(self, which: str) -> float:
        """Seconds of an interpreter that does "nothing", or of train.py's "help"."""
        began = time.perf_counter()
        self._run(_SMALL[which])
        return time.perf_counter() - began

    def first_step(self, experiment: str, flags: Sequence[str], kind: str) -> dict[str, float]:
        """A short run of train.py, "cold" or "warm"; or in "torch", one step of the model of the run before."""
        return self._torch() if kind == TORCH else self._train(experiment, flags, kind)

    def _train(self, experiment: str, flags: Sequence[str], kind: str) -> dict[str, float]:
        """Its first step is over when metrics.jsonl has a line."""
        began = time.perf_counter()
        self._runs += 1
        self._caches += kind == COLD
        run, cache = self._folder / f"run{self._runs}", self._folder / f"cache{self._caches}"
        arguments = ["train.py", experiment, *_SHORT.split(), *flags, "--run", str(run)]
        with self.start(arguments, {"XDG_CACHE_HOME": str(cache)}) as process:
            first = wait_for_end(run, [process], began)
            whole = time.perf_counter() - began
            self.require_success(process, arguments)
        summary = json.loads((run / "summary.json").read_text())
        assert first is not None
        return {"first_step": first, "own_first_step": summary["seconds_to_first_step"], "whole": whole}

    def _torch(self) -> dict[str, float]:
        """The first step of torch_ref's Trainer with the model of the run before, on random ids."""
        began, config = time.perf_counter(), self._folder / f"run{self._runs}" / "config.json"
        found = json.loads(self._run(["-m", "benchmarks.first_torch_step", str(config), self._device]))
        # Less what the process took to end.
        return {"first_step": time.perf_counter() - began - (time.time() - found.pop("at")), **found}

    def start(self, arguments: Sequence[str], extra: dict[str, str]) -> subprocess.Popen[str]:
        """Starts a program of Python; what it says is kept for `require_success`."""
        with (self._folder / "output").open("w") as output:
            command, environment = [sys.executable, *arguments], self._environment | extra
            return subprocess.Popen(
                command, cwd=_ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
            )

    def _run(self, arguments: Sequence[str]) -> str:
        with self.start(arguments, {}) as process:
            process.wait()
            return self.require_success(process, arguments)

    def require_success(self, process: subprocess.Popen[str], arguments: Sequence[str]) -> str:
        """Returns what a program that has ended said; raises SideFailed, with the last line, if it failed."""
        told = (self._folder / "output").read_text()
        if process.returncode:
            raise SideFailed(f"{' '.join(arguments[:2])}: {(told.strip().splitlines() or [''])[-1]}")
        return told


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
