"""The programs that are timed from the command on: train.py, a fresh PyTorch, and interpreters that do little."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from twin.sides import SideFailed

_ROOT = Path(__file__).resolve().parents[2]
_SHORT = "--training.steps 3 --training.log-every 1 --training.evaluate-batches 1 --sample.count 1"
TINY = (
    "--data.tokenizer.kind bytes --data.tokenizer.vocab-size None --data.context-length 16 --training.batch-size 2 "
    "--model.d-model 16 --model.decoder.num-layers 1 --model.decoder.num-heads 2 --model.decoder.feedforward-width 32"
)
"""A python-docs of no size."""
COLD, WARM, TORCH = "cold", "warm", "torch"
"""An empty cache of compiled programs; that of the run before; PyTorch instead."""
_SMALL = {"nothing": ["-c", "pass"], "help": ["train.py", "--help"]}


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
        self._caches += kind == COLD
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
