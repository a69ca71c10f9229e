"""From the command to the first training step: `python -m benchmarks.startup [--all] [--text FILE] [--quick]`."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.session import Options, Report, Session, by_turns, make_table, run_benchmark, show, spreads
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


def _measure(session: Session) -> Report:
    experiments = {"python-docs": TINY.split() if session.quick else []}
    if session.options.all:
        experiments["dates"] = []
    if session.options.text is not None:
        experiments["shakespeare-char"] = ["--data.path", str(session.options.text)]
    rounds = session.rounds(1 if session.quick else 2)
    session.say("an interpreter that does nothing; train.py --help ...")
    small = {"nothing": ["-c", "pass"], "help": ["train.py", "--help"]}
    calls = {name: partial(time_programs, [command], session.device) for name, command in small.items()}
    alone = {name: spreads(taken)["whole"] for name, taken in by_turns(calls, max(rounds, 3)).items()}
    found = {}
    for name, flags in experiments.items():
        session.say(f"{name}: cold, warm, torch, by turns ...")
        with tempfile.TemporaryDirectory() as folder:
            starts = Starts(Path(folder), session.device, [name, *_SHORT.split(), *flags])
            turns = by_turns({kind: partial(starts.take, kind) for kind in (COLD, WARM, TORCH)}, rounds)
        found[name] = {kind: spreads(taken) for kind, taken in turns.items()}
    rows = {
        f"{name}, {kind}": {
            "first step s": taken["first_step"],
            "whole command s": None if kind == TORCH else taken["whole"],
            "times torch": taken["first_step"]["median"] / kinds[TORCH]["first_step"]["median"],
        }
        for name, kinds in found.items()
        for kind, taken in kinds.items()
    }
    tiny = ", tiny" if session.quick else ""
    nothing, help_page = (show(alone[name]) for name in small)
    shown = [
        f"\npython train.py --help: {help_page} s; an interpreter that does nothing: {nothing} s",
        make_table("from the command to the first step", rows),
    ]
    ours = {f"{name}{tiny}, {kind}": found[name][kind]["first_step"] for name in found for kind in (COLD, WARM)}
    return Report({**alone, "starts": rows}, ours, shown, _NOTES)


class Starts:
    """Short runs of one experiment, each in a fresh folder."""

    def __init__(self, folder: Path, device: str, arguments: Sequence[str]) -> None:
        self._folder, self._device, self._arguments = folder, device, arguments
        self._run = self._cache = folder

    def take(self, kind: str) -> dict[str, float]:
        """The seconds of train.py, "cold" or "warm"; or in "torch", of one step of the model of the run before."""
        run = Path(tempfile.mkdtemp(dir=self._folder)) / "run"
        if kind == TORCH:
            config, device = str(self._run / "config.json"), "cuda" if self._device == "gpu" else self._device
            command = ["-m", "benchmarks.first_torch_step", config, device, str(run)]
        else:
            command = ["train.py", *self._arguments, "--run", str(run)]
            self._run, self._cache = run, run.parent if kind == COLD else self._cache
        return time_programs([command], self._device, {"XDG_CACHE_HOME": str(self._cache)}, run)


def time_programs(
    commands: Sequence[Sequence[str]], device: str, extra: Mapping[str, str] = {}, run: Path | None = None
) -> dict[str, float]:
    """Runs programs of Python side by side, with `extra` variables: seconds until all had ended, the "whole".

    With `run`, also until its metrics.jsonl had a line: the "first_step". Raises SideFailed, with the last line that it
    said, if a program failed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu" if device == "cpu" else "cuda,cpu", "PYTHONPATH": str(_ROOT), **extra}
    start = partial(
        subprocess.Popen[str], cwd=_ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    found, began = dict[str, float](), time.perf_counter()
    programs = [start([sys.executable, *command]) for command in commands]
    while any(program.poll() is None for program in programs):
        if run and not found and (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size:
            found["first_step"] = time.perf_counter() - began
        time.sleep(0.005)
    found["whole"] = time.perf_counter() - began
    for program, command in zip(programs, commands, strict=True):
        _, errors = program.communicate()
        if program.returncode:
            raise SideFailed(f"{' '.join(command[:2])}: {(errors.strip().splitlines() or [''])[-1]}")
    return found


main = partial(run_benchmark, "startup", __doc__, measure=_measure, kind=StartupOptions)
"""Status 1 where a program fails."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
