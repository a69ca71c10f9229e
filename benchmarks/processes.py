"""Two processes beside one with as many devices, and what the rows of each cost: `python -m benchmarks.processes`."""

import itertools
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.session import Report, Session, by_turns, make_table, run_benchmark, spread, spreads
from benchmarks.startup import TINY, time_programs
from jax_tformer.config.errors import require
from jax_tformer.config.presets import EXPERIMENTS
from jax_tformer.files import read_json

_DEVICES = 4
_TOGETHER = {"1 process of 4 devices": 1, "2 processes of 2 devices": 2}
_SHARES = {"the whole batch": 1, "one of 2 processes": 2, "one of 4": 4, "one of 8": 8}
_BATCH, _ROWS = 8, 64
_SHORT = f"--training.log-every 1 --training.evaluate-batches 1 --sample.count 1 --training.batch-size {_BATCH}"
_DATA = ("python-docs", "masked-docs", "dates")
_NOTES = (
    "By turns: one process, two, one, ...; in brackets min..max of the turns. All devices are virtual ones of this "
    "processor, so two processes have no more cores than one. Each command ran once before, but JAX keeps programs for "
    "CPUs for the first process alone: the other one compiles every time.",
    "first_step: seconds from the start of all processes until metrics.jsonl has its line. step: the median of a run "
    "of train.py python-docs, rows of the batch split over all devices.",
    f"rows: the processor's milliseconds in which a process makes its rows of a batch of {_ROWS}.",
)


def _measure(session: Session) -> Report:
    require(session.device == "cpu", "--device is 'gpu'; expected cpu: the devices of this benchmark are virtual ones")
    flags = f"{TINY} --steps 3" if session.quick else "--steps 100"
    with tempfile.TemporaryDirectory() as folder:
        calls = {name: partial(_train, Path(folder), flags.split(), count) for name, count in _TOGETHER.items()}
        session.say("each once, to compile ...")
        by_turns(calls, 1)
        session.say("one process and two, by turns ...")
        turns = by_turns(calls, session.rounds(1 if session.quick else 5))
    trained: dict[str, Any] = {name: spreads(taken) for name, taken in turns.items()}
    one, two = trained.values()
    ratios = {column: two[column]["median"] / one[column]["median"] for column in one}
    session.say("rows of a batch ...")
    made = {name: _rows(name, 5 if session.quick else 200) for name in _DATA}
    rows = {share: {name: spread(made[name][share], 1000) for name in _DATA} for share in _SHARES}
    shown = [
        make_table("one process and two, seconds", trained | {"two / one": ratios}),
        make_table("rows of a batch, ms", rows),
    ]
    ours = {f"{name}, {figure}": times for name, taken in trained.items() for figure, times in taken.items()}
    return Report({"trained": trained, "two_over_one": ratios, "rows": rows}, ours, shown, _NOTES)


def _train(folder: Path, flags: Sequence[str], count: int) -> dict[str, float]:
    """Trains in `count` processes; returns the seconds to the first step's end, and of a later step."""
    from jax_tformer.runs.metrics import read_metrics  # which imports JAX

    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        where = f"localhost:{probe.getsockname()[1]}"
    command = ["train.py", "python-docs", *flags, *_SHORT.split(), "--run", str(run)]
    together = f"--distributed.coordinator {where} --distributed.processes {count} --distributed.process".split()
    commands = [[*command, *together, str(number)] for number in range(count)] if count > 1 else [command]
    xla = f"--xla_force_host_platform_device_count={_DEVICES // count}"
    extra = {"XDG_CACHE_HOME": str(folder / "cache"), "XLA_FLAGS": xla}
    first = time_programs(commands, "cpu", extra, run)["first_step"]
    rates = [row["tokens_per_second"] for row in read_metrics(run / "metrics.jsonl") if "tokens_per_second" in row]
    tokens = _BATCH * read_json(run / "config.json")["data"]["context_length"]
    return {"first_step": first, "step": tokens / statistics.median(rates)}


def _rows(name: str, batches: int) -> dict[str, list[float]]:
    """Share -> the processor's seconds in which the first of so many processes makes its rows of each batch."""
    from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for

    experiment = EXPERIMENTS[name].config
    training = replace(experiment.training, batch_size=_ROWS, evaluate_batches=1)
    tokenizer = build_tokenizer_for(experiment.data)

    def seconds(made: Any, numbers: Iterator[int]) -> float:
        began = time.thread_time()
        made[next(numbers)]
        return time.thread_time() - began

    calls = {}
    for share, count in _SHARES.items():
        made = build_pipeline(experiment.data, training, tokenizer, np.arange(_ROWS // count)).train
        calls[share] = partial(seconds, made, itertools.count())
    by_turns(calls, 1)
    return by_turns(calls, batches)


main = partial(run_benchmark, "processes", __doc__, measure=_measure)
"""Status 1 where a program fails."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
