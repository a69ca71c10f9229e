"""From the command to the first training step: `python -m benchmarks.startup [--all] [--text FILE] [--quick]`."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.session import Report, Session, by_turns, make_table, other_work, run_benchmark, show, spread
from jax_tformer_comparison.machine import Neighbours
from jax_tformer_comparison.sides import SideFailed

_ROOT = Path(__file__).resolve().parents[2]
_SHORT = "--training.steps 3 --training.log-every 1 --training.evaluate-batches 1 --sample.count 1"
_TINY = (
    "--data.tokenizer.kind bytes --data.tokenizer.vocab-size None --data.context-length 16 --training.batch-size 2 "
    "--model.d-model 16 --model.decoder.num-layers 1 --model.decoder.num-heads 2 --model.decoder.feedforward-width 32"
)
_COLD, _WARM, _TORCH = "cold", "warm", "torch"


def main(arguments: Sequence[str]) -> int:
    """Status 1 where a program fails."""
    return run_benchmark("startup", __doc__, arguments, _measure, _experiment_options)


def _measure(session: Session) -> Report:
    experiments = {"python-docs": _TINY.split() if session.quick else []}
    if session.options.all:
        experiments["dates"] = []
    if session.options.text is not None:
        experiments["shakespeare-char"] = ["--data.path", str(session.options.text)]
    rounds, others = session.rounds(1 if session.quick else 2), Neighbours()
    turns: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        programs = Programs(Path(temporary), session.device)
        session.say("an interpreter that does nothing; train.py --help ...")
        alone = by_turns(["nothing", "help"], max(rounds, 3), programs.small)
        for name, flags in experiments.items():
            session.say(f"{name}: cold, warm, torch, by turns ...")
            turns[name] = by_turns([_COLD, _WARM, _TORCH], rounds, partial(programs.first_step, name, flags))
        session.say("python-docs: chapter by chapter ...")
        # A warm one finds what the run before it has compiled.
        kinds = [_WARM] if session.quick else [_COLD, _WARM]
        split = {kind: programs.chapters("python-docs", experiments["python-docs"], kind) for kind in kinds}
    figures: dict[str, Any] = {
        "nothing_seconds": spread(alone["nothing"]),
        "help_seconds": spread(alone["help"]),
        "experiments": {
            name: {
                kind: {figure: spread([turn[figure] for turn in found]) for figure in found[0]}
                for kind, found in kinds.items()
            }
            for name, kinds in turns.items()
        },
        "chapters": split,
        "other_work": others.share(),
    }
    for found in figures["experiments"].values():
        for kind in (_COLD, _WARM):
            found[f"{kind}_over_torch"] = found[kind]["first_step"]["median"] / found[_TORCH]["first_step"]["median"]
    return Report(figures, [*_tables(figures), *other_work("all of it", figures["other_work"])], _NOTES)


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
        self._run(["-c", "pass"] if which == "nothing" else ["train.py", "--help"])
        return time.perf_counter() - began

    def first_step(self, experiment: str, flags: Sequence[str], kind: str) -> dict[str, float]:
        """A short run of train.py, "cold" or "warm"; or in "torch", one step of the model of the run before."""
        return self._torch() if kind == _TORCH else self._train(experiment, flags, kind)

    def _train(self, experiment: str, flags: Sequence[str], kind: str) -> dict[str, float]:
        """Its first step is over when metrics.jsonl has a line."""
        began, run = time.perf_counter(), self._new_run()
        arguments = ["train.py", experiment, *_SHORT.split(), *flags, "--run", str(run)]
        with self._start(arguments, self._cached(kind)) as process:
            metrics, first = run / "metrics.jsonl", None
            while process.poll() is None:
                if first is None and metrics.exists() and metrics.stat().st_size:
                    first = time.perf_counter() - began
                time.sleep(0.005)
            whole = time.perf_counter() - began
            self._require_success(process, arguments)
        summary = json.loads((run / "summary.json").read_text())
        assert first is not None
        return {"first_step": first, "own_first_step": summary["seconds_to_first_step"], "whole": whole}

    def _torch(self) -> dict[str, float]:
        """The first step of torch_ref's Trainer with the model of the run before, on random ids."""
        began = time.perf_counter()
        code = "import sys; from benchmarks.startup.measured import first_torch_step as f; f(*sys.argv[1:])"
        config = self._folder / f"run{self._runs}" / "config.json"
        found = json.loads(self._run(["-c", code, str(config), self._device]))
        # Less what the process took to end.
        return {"first_step": time.perf_counter() - began - (time.time() - found.pop("at")), **found}

    def chapters(self, experiment: str, flags: Sequence[str], kind: str) -> dict[str, float]:
        """Seconds of each part of train.py up to the first step, "cold" or "warm"."""
        code = "import sys; from benchmarks.startup.measured import chapters as f; f(sys.argv[1:])"
        arguments = [experiment, *_SHORT.split(), *flags, "--run", str(self._new_run())]
        return json.loads(self._run(["-c", code, *arguments], self._cached(kind)).splitlines()[-1])

    def _new_run(self) -> Path:
        self._runs += 1
        return self._folder / f"run{self._runs}"

    def _cached(self, kind: str) -> dict[str, str]:
        self._caches += kind == _COLD
        return {"XDG_CACHE_HOME": str(self._folder / f"cache{self._caches}")}

    def _start(self, arguments: Sequence[str], extra: dict[str, str] | None = None) -> subprocess.Popen[str]:
        with (self._folder / "output").open("w") as output:
            environment = self._environment | (extra or {})
            command = [sys.executable, *arguments]
            return subprocess.Popen(
                command, cwd=_ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
            )

    def _run(self, arguments: Sequence[str], extra: dict[str, str] | None = None) -> str:
        with self._start(arguments, extra) as process:
            process.wait()
            return self._require_success(process, arguments)

    def _require_success(self, process: subprocess.Popen[str], arguments: Sequence[str]) -> str:
        told = (self._folder / "output").read_text()
        if process.returncode:
            raise SideFailed(f"{' '.join(arguments[:2])}: {(told.strip().splitlines() or [''])[-1]}")
        return told


def _experiment_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="measures dates too")
    parser.add_argument("--text", type=Path, metavar="FILE", help="measures shakespeare-char too, on this text")


_NOTES = (
    "Seconds, median of the turns (cold, warm, torch, ...), in brackets min..max. cold: a fresh "
    "folder for what JAX compiles; warm: the same command again. first step: from the command until metrics.jsonl has "
    "its line.",
    "torch: a fresh process that imports torch, builds torch_ref's Trainer of the same model and makes one eager step "
    "on random ids; it reads no text, builds no tokenizer and writes no run folder.",
    "whole command: three steps, one evaluation batch, a checkpoint, a sample, a picture.",
    "The chapters are those of one run; 'load' is from JAX's cache of compiled programs. What is imported first brings "
    "along what others would have to import. Initialisation and step are compiled at the same time, so that chapters "
    "can add up to more than all; the rest is then 0.",
)


def _tables(figures: dict[str, Any]) -> list[Any]:
    rows = []
    for name, found in figures["experiments"].items():
        for kind in (_COLD, _WARM):
            cells = show(found[kind]["first_step"]), show(found[kind]["whole"]), f"{found[f'{kind}_over_torch']:.2f}"
            rows.append([f"{name}, {kind}", *cells])
        rows.append([f"{name}, torch", show(found[_TORCH]["first_step"]), "", "1.00"])
    split = figures["chapters"]
    names = sorted(dict.fromkeys(name for found in split.values() for name in found), key="in all".__eq__)
    chapters = [[name, *(f"{found.get(name, 0.0):.2f}" for found in split.values())] for name in names]
    return [
        f"\npython train.py --help: {show(figures['help_seconds'])} s; "
        f"an interpreter that does nothing: {show(figures['nothing_seconds'])} s",
        make_table("from the command to the first step", ["", "first step s", "whole command s", "times torch"], rows),
        make_table("python-docs, chapter by chapter", ["seconds", *split], chapters),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
