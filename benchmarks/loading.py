"""Opening and saving a sharded Hugging Face folder of 1.5 GB: `python -m benchmarks.loading [--quick]`."""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.session import Report, Session, by_turns, make_table, run_benchmark, show, side_environment, spread
from jax_tformer_comparison.machine import Neighbours, peak_memory
from jax_tformer_comparison.sides import SideFailed

_OURS, _THEIRS, _FLOOR = "jax_tformer", "transformers", "fresh memory alone"
_ROUNDS = 5
_NOTES = (
    "Every turn is a fresh process. open: load_pretrained or from_pretrained, imports not counted. use: open, and then "
    "every number read once. save: save_pretrained into shards of 500 MB; ours also waits until the disk has them.",
    "peak: the process's largest resident set (VmHWM) by then, less what it was before, over the parameters' bytes.",
    "The files are in the system's cache. transformers maps them; ours copies them into memory, since it stacks the "
    "layers. fresh memory alone: as many bytes filled with ones, which is the least that any copy takes.",
)


def main(arguments: Sequence[str]) -> int:
    """Status 1 where the two hold other numbers, or one fails."""
    return run_benchmark("loading", __doc__, arguments, _measure)


def _measure(session: Session) -> Report:
    others = Neighbours()
    with tempfile.TemporaryDirectory(prefix="loading.") as scratch:
        folder = Path(scratch) / "model"
        size = _write_model(folder, session)
        sides = {_OURS: "_ours", _THEIRS: "_theirs", _FLOOR: "_floor"}

        def turn(name: str) -> dict[str, float]:
            session.say(f"{name} ...")
            return _in_fresh_process(sides[name], folder, Path(scratch) / "copy")

        turns = by_turns(list(sides), session.rounds(1 if session.quick else _ROUNDS), turn)
    figures = {
        name: {what: spread([found[what] for found in turns[name]]) for what in turns[name][0]} for name in turns
    }
    agreed = math.isclose(*(figures[name]["squares"]["median"] for name in (_OURS, _THEIRS)), rel_tol=1e-6)
    times, peaks = ("open", "use", "save"), ("open_peak", "use_peak", "save_peak")
    rows = [
        [name]
        + [show(side[what]) if what in side else "" for what in times]
        + [f"{side[what]['median'] / size:.2f}" if what in side else "" for what in peaks]
        for name, side in figures.items()
    ]
    columns = ("", "open, s", "use, s", "save, s", "open: peak", "use: peak", "save: peak")
    title = f"{size / 1e9:.2f} GB in float32, shards of 500 MB{'' if agreed else ': OTHER NUMBERS'}"
    quick = ["This was --quick: the figures mean nothing."] if session.quick else []
    measured = {"bytes": size, "sides": figures, "other_work": others.share()}
    return Report(measured, [make_table(title, columns, rows, _OURS)], [*_NOTES, *quick], agreed)


def _write_model(folder: Path, session: Session) -> int:
    """Writes a GPT-2 of 380 million parameters; returns their bytes."""
    import jax

    from jax_tformer import ARCHITECTURES, save_pretrained, transformer

    gpt2 = ARCHITECTURES["gpt2"]
    stack = replace(gpt2.output_stack, num_layers=26, num_heads=16, feedforward_width=4096)
    if session.quick:
        stack = replace(stack, num_layers=2, num_heads=2, feedforward_width=64)
    net = transformer(replace(gpt2, d_model=32 if session.quick else 1024, decoder=stack))
    session.say("a model ...")
    params = net.init(jax.random.key(0))
    save_pretrained(folder, net, params, max_shard_size="1MB" if session.quick else "500MB")
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def _in_fresh_process(side: str, folder: Path, copy: Path) -> dict[str, float]:
    command = [sys.executable, "-c", f"from benchmarks import loading; loading.{side}()", str(folder), str(copy)]
    done = subprocess.run(
        command, env=os.environ | side_environment("cpu"), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SideFailed(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _ours() -> None:
    import jax
    import numpy as np

    from jax_tformer import load_pretrained, save_pretrained

    def squares(loaded: Any) -> float:
        # On the processor an array of JAX is one of NumPy, without a copy.
        return sum(_squares(np.asarray(leaf)) for leaf in jax.tree.leaves(loaded[1]))

    jax.device_put(np.zeros(4)).block_until_ready()
    _report(
        lambda folder: jax.block_until_ready(load_pretrained(folder)),
        squares,
        lambda loaded, copy: save_pretrained(copy, *loaded, max_shard_size="500MB"),
    )


def _theirs() -> None:
    from transformers.models.gpt2 import GPT2LMHeadModel

    def squares(model: Any) -> float:
        return sum(_squares(tensor.detach().numpy()) for tensor in model.parameters())

    _report(
        lambda folder: GPT2LMHeadModel.from_pretrained(folder, dtype="auto"),
        squares,
        lambda model, copy: model.save_pretrained(copy, max_shard_size="500MB"),
    )


def _floor() -> None:
    import jax
    import numpy as np

    size = sum(path.stat().st_size for path in Path(sys.argv[1]).glob("*.safetensors"))
    jax.device_put(np.zeros(4)).block_until_ready()
    began, filled = time.perf_counter(), []
    for part in range(16):
        filled.append(np.full(size // 16, part, np.uint8))
    print(json.dumps({"open": time.perf_counter() - began}))


def _squares(array: Any) -> float:
    """The sum of squares in blocks, so that it takes no memory of its own."""
    import numpy as np

    flat = array.reshape(-1)
    return sum(float(np.dot(part, part)) for part in np.array_split(flat, max(1, len(flat) // 10**6)))


def _report(load: Callable[[str], Any], squares: Callable[[Any], float], save: Callable[[Any, str], object]) -> None:
    """Loads, uses and saves; prints seconds and peaks as JSON."""
    folder, copy = sys.argv[1:]
    before, found = peak_memory(), {}
    began = time.perf_counter()
    loaded = load(folder)
    found["open"], found["open_peak"] = time.perf_counter() - began, peak_memory() - before
    found["squares"] = squares(loaded)
    found["use"], found["use_peak"] = time.perf_counter() - began, peak_memory() - before
    began = time.perf_counter()
    save(loaded, copy)
    found["save"], found["save_peak"] = time.perf_counter() - began, peak_memory() - before
    for path in Path(copy).iterdir():
        path.unlink()
    Path(copy).rmdir()
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
