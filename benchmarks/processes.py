"""Two processes beside one with as many devices, and what the rows of each cost: `python -m benchmarks.processes`."""

import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.session import (
    Report,
    Session,
    by_turns,
    make_table,
    milliseconds,
    other_work,
    run_benchmark,
    show,
    spread,
)
from benchmarks.startup import TINY, Programs, wait_for_end
from jax_tformer.config.errors import require
from jax_tformer.config.presets import EXPERIMENTS
from twin.machine import Neighbours

_DEVICES = 4
_TOGETHER = {"1 process of 4 devices": 1, "2 processes of 2 devices": 2}
_SHARES = {1: "the whole batch", 2: "one of 2 processes", 4: "one of 4", 8: "one of 8"}
_BATCH, _ROWS = 8, 64
_SHORT = "--training.log-every 1 --training.evaluate-batches 1 --sample.count 1"
_DATA = ("python-docs", "masked-docs", "dates")
_NOTES = (
    "By turns: one process, two, one, ...; in brackets min..max of the turns. All devices are virtual ones of this "
    "processor, so two processes have no more cores than one. Each command ran once before, but JAX keeps programs for "
    "CPUs for the first process alone: the other one compiles every time.",
    "first step: seconds from the start of all processes until metrics.jsonl has its line. a step: the median of a run "
    "of train.py python-docs, rows of the batch split over all devices.",
    f"rows: the processor's milliseconds in which a process makes its rows of a batch of {_ROWS}.",
)


def main(arguments: Sequence[str]) -> int:
    """Status 1 where a program fails."""
    return run_benchmark("processes", __doc__, arguments, _measure)


def _measure(session: Session) -> Report:
    require(session.device == "cpu", "--device is 'gpu'; expected cpu: the devices of this benchmark are virtual ones")
    flags = f"{TINY} --steps 3" if session.quick else "--steps 100"
    others = Neighbours()
    with tempfile.TemporaryDirectory() as temporary:
        train = partial(_train, Path(temporary), [*flags.split(), "--training.batch-size", str(_BATCH)])
        session.say("each once, to compile ...")
        by_turns([*_TOGETHER], 1, train)
        session.say("one process and two, by turns ...")
        turns = by_turns([*_TOGETHER], session.rounds(1 if session.quick else 5), train)
    trained = {
        name: {figure: spread([turn[figure] for turn in taken]) for figure in taken[0]} for name, taken in turns.items()
    }
    one, two = trained.values()
    ratios = {figure: two[figure]["median"] / one[figure]["median"] for figure in one}
    session.say("rows of a batch ...")
    rows = {name: _rows(name, 5 if session.quick else 200) for name in _DATA}
    share = others.share()
    figures = {"trained": trained, "two_over_one": ratios, "rows": rows, "other_work": share}
    shown = [
        make_table(
            "one process and two",
            ["", "first step s", "a step ms"],
            [
                *([name, show(taken["first_step"]), milliseconds(taken["step"], 1)] for name, taken in trained.items()),
                ["two / one", *(f"{ratio:.2f}" for ratio in ratios.values())],
            ],
        ),
        make_table(
            "rows of a batch, ms",
            ["", *rows],
            [[part, *(milliseconds(found[part]) for found in rows.values())] for part in _SHARES.values()],
        ),
        *other_work("all of it", share),
    ]
    ours = {f"{name}, {figure}": taken[figure] for name, taken in trained.items() for figure in taken}
    return Report(figures, ours, shown, _NOTES)


def _train(folder: Path, flags: Sequence[str], name: str) -> dict[str, float]:
    """Trains in the processes of `name`; returns the seconds to the first step's end, and of a later step."""
    count, parent = _TOGETHER[name], Path(tempfile.mkdtemp(dir=folder))
    run = parent / "run"
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        where = f"localhost:{probe.getsockname()[1]}"
    together = ["--distributed.coordinator", where, "--distributed.processes", str(count), "--distributed.process"]
    xla = f"--xla_force_host_platform_device_count={_DEVICES // count}"
    extra = {"XDG_CACHE_HOME": str(folder / "cache"), "XLA_FLAGS": xla}
    with ExitStack() as stack:
        started, began = [], time.perf_counter()
        for number in range(count):
            command = ["train.py", "python-docs", *_SHORT.split(), *flags, "--run", str(run)]
            command += [*together, str(number)] if count > 1 else []
            (parent / str(number)).mkdir()
            programs = Programs(parent / str(number), "cpu")
            started.append((programs, command, stack.enter_context(programs.start(command, extra))))
        first = wait_for_end(run, [process for *_, process in started], began)
        for programs, command, process in started:
            programs.require_success(process, command)
    assert first is not None
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    tokens = _BATCH * json.loads((run / "config.json").read_text())["data"]["context_length"]
    return {"first_step": first, "step": tokens / statistics.median(rates)}


def _rows(name: str, batches: int) -> dict[str, dict[str, float]]:
    """Share -> the processor's seconds in which the first of so many processes makes its rows of each batch."""
    from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for

    experiment = EXPERIMENTS[name].config
    training = replace(experiment.training, batch_size=_ROWS, evaluate_batches=1)
    tokenizer = build_tokenizer_for(experiment.data)
    made = {
        share: build_pipeline(experiment.data, training, tokenizer, np.arange(_ROWS // count)).train
        for count, share in _SHARES.items()
    }
    numbers = {share: iter(range(batches + 1)) for share in made}

    def seconds(share: str) -> float:
        began = time.thread_time()
        made[share][next(numbers[share])]
        return time.thread_time() - began

    by_turns([*made], 1, seconds)
    return {share: spread(taken) for share, taken in by_turns([*made], batches, seconds).items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
