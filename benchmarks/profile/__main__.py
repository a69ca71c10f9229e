"""Where the time of one training step goes: `python -m benchmarks.profile [--device gpu] [--out FILE] [--quick]`."""

import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.profile.instructions import COPIES, GROUPS, WAITING, instructions
from benchmarks.session import (
    Report,
    Session,
    by_turns,
    make_table,
    milliseconds,
    model_option,
    other_work,
    run_benchmark,
    spread,
)
from benchmarks.training_cases import OPTIMIZER, TRAINING, BatchShape, TrainingCase, cases, draw_batch
from jax_tformer.config import TransformerConfig
from jax_tformer.run.startup import compiler_options
from jax_tformer_comparison.machine import Neighbours, cores

_EXPENSIVE, _BEGIN = 10, "profiled from here"
_UNKNOWN = {"group": "other", "source": "", "shape": ""}
_WRAPPERS = ("while", "call", "conditional")
"""Instructions whose time is that of others."""


class _Open:
    """Something that runs on a thread: an instruction, or a task that one has handed out."""

    def __init__(self, start: float, end: float, owner: str | None) -> None:
        self.start, self.end, self.owner = start, end, owner
        self.others = 0.0
        """Nanoseconds that others took meanwhile, on the same thread."""


def recorded_seconds(folder: Path) -> dict[str, float]:
    """Instruction -> seconds, summed over threads, in the newest trace in `folder`, from the mark `_BEGIN` on.

    On the processor an instruction hands out tasks to other threads, and that of a plain product ends long before its
    tasks do. The profiler marks where a task is handed out (Record) and where it runs (StartRegion .. StopRegion): its
    time belongs to the instruction that handed it out.
    """
    from jax.profiler import ProfileData

    path = max(folder.glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    events = []
    for plane in ProfileData.from_file(str(path)).planes:
        for number, thread in enumerate(plane.lines):
            # On the host any thread may compute, whatever its name; a GPU has lines that sum others up.
            if plane.name.startswith("/host") or "XLA" in thread.name or "Stream" in thread.name:
                events += [(event.start_ns, -event.duration_ns, (plane.name, number), event) for event in thread.events]
    first = next(start for start, _, _, event in events if event.name == _BEGIN)
    totals: dict[str, float] = defaultdict(float)
    running: dict[tuple[str, int], list[_Open]] = defaultdict(list)
    owners: dict[int, str | None] = {}

    def close(stack: list[_Open], now: float) -> None:
        done = stack.pop()
        taken = min(done.end, now) - done.start
        if done.owner is not None and done.start >= first:
            totals[done.owner] += taken - done.others
        if stack:
            stack[-1].others += taken

    for start, negative, place, event in sorted(events, key=itemgetter(0, 1)):
        stack, stats = running[place], dict(event.stats)
        while stack and stack[-1].end <= start:
            close(stack, start)
        if "hlo_op" in stats and not event.name.startswith(_WRAPPERS):
            stack.append(_Open(start, start - negative, event.name))
        elif event.name.endswith("::Record"):
            owners[stats["_p"]] = stack[-1].owner if stack else None
        elif event.name.endswith("::StartRegion"):
            stack.append(_Open(start, math.inf, owners.get(stats.get("_c", -1))))
        elif event.name.endswith("::StopRegion") and stack:
            close(stack, start)
    for stack in running.values():
        while stack:
            close(stack, min(stack[-1].end, start))
    return {name: taken / 1e9 for name, taken in totals.items()}


class Traced:
    """One model that trains on one batch, watched by the profiler."""

    def __init__(self, config: TransformerConfig, shape: BatchShape, device: str) -> None:
        import jax
        import jax.numpy as jnp

        from jax_tformer.model.functional import transformer
        from jax_tformer.training.optimizer import optimizer
        from jax_tformer.training.step import init_state, train_step

        net, tx = transformer(config), optimizer(OPTIMIZER, TRAINING.steps)
        with jax.default_device(jax.local_devices(backend=device)[0]):
            self._state = jax.jit(lambda key: init_state(net, tx, key))(jax.random.key(0))
            self._batch = {name: jnp.array(ids) for name, ids in draw_batch(config, shape).items()}
            step = jax.jit(train_step(net, tx), donate_argnums=0, compiler_options=compiler_options())
            self._step = step.lower(self._state, self._batch).compile()
        self._instructions = instructions(self._step.as_text() or "")

    def steps(self, count: int) -> list[float]:
        """Seconds of each, without the profiler."""
        import jax

        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self._state, _ = jax.block_until_ready(self._step(self._state, self._batch))
            seconds.append(time.perf_counter() - began)
        return seconds

    def profile(self, count: int) -> dict[str, Any]:
        """`count` steps under the profiler: their seconds, and those of every instruction a step."""
        import jax

        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                # The first one waits for the profiler.
                self.steps(1)
                with jax.profiler.TraceAnnotation(_BEGIN):
                    seconds = self.steps(count)
            recorded = recorded_seconds(Path(folder))
        found = []
        for name, taken in sorted(recorded.items(), key=itemgetter(1), reverse=True):
            known = self._instructions.get(name)
            described = {"group": known.group(), "source": known.source(), "shape": known.shape} if known else _UNKNOWN
            found.append({"name": name, **described, "seconds": taken / count})
        return {"step_seconds": seconds, "instructions": found}


def measure(case: TrainingCase, session: Session) -> dict[str, Any]:
    """Steps without the profiler and with it, by turns."""
    session.say(f"{case.name} ...")
    others = Neighbours()
    side = session.start("benchmarks.profile.__main__:Traced", case.config, case.shape, session.device)
    try:
        # The first steps fetch memory.
        side.call("steps", 2)
        rounds = session.rounds(1 if session.quick else 2)
        turns = by_turns(["steps", "profile"], rounds, lambda which: side.call(which, 2))
    finally:
        side.close()
    steps = [seconds for found in turns["steps"] for seconds in found]
    threads = cores() if session.device == "cpu" else 1
    return summary(case, threads, steps, turns["profile"]) | {"other_work": others.share()}


def summary(case: TrainingCase, threads: int, steps: list[float], profiles: list[dict[str, Any]]) -> dict[str, Any]:
    """One model: seconds a step on all threads together, by group, and the instructions that take most."""
    traced = [seconds for profile in profiles for seconds in profile["step_seconds"]]
    whole = threads * statistics.fmean(traced)
    groups: dict[str, float] = defaultdict(float)
    single: dict[str, dict[str, Any]] = {}
    for found in (found for profile in profiles for found in profile["instructions"]):
        groups[found["group"]] += found["seconds"] / len(profiles)
        kept = single.setdefault(found["name"], found | {"seconds": 0.0})
        kept["seconds"] += found["seconds"] / len(profiles)
    groups[WAITING] = max(whole - sum(groups.values()), 0.0)
    return {
        "model": case.model,
        "name": case.name,
        "threads": threads,
        "step_seconds": spread(steps),
        "traced_step_seconds": spread(traced),
        "thread_seconds": whole,
        "recorded_share": 1 - groups[WAITING] / whole,
        "groups": {group: {"seconds": groups[group], "share": groups[group] / whole} for group in GROUPS},
        "expensive": sorted(single.values(), key=itemgetter("seconds"), reverse=True)[:_EXPENSIVE],
    }


def _tables(figures: Mapping[str, Any]) -> list[Any]:
    threads = figures["threads"]
    step, traced = (milliseconds(figures[name], 0) for name in ("step_seconds", "traced_step_seconds"))
    title = f"{figures['name']}: {step} ms a step, {traced} with the profiler"
    rows = [(group, found["seconds"], found["share"]) for group, found in figures["groups"].items() if found["seconds"]]
    ordered = sorted(rows, key=lambda row: (row[0] == WAITING, -row[1]))
    columns = ["", f"ms a step on {threads} threads", "share"]
    whole = figures["thread_seconds"]
    groups = [[group, f"{1000 * seconds:.1f}", f"{share:.1%}"] for group, seconds, share in ordered]
    single = [
        [
            found["name"],
            f"{1000 * found['seconds']:.1f}",
            f"{found['seconds'] / whole:.1%}",
            found["shape"],
            found["source"],
        ]
        for found in figures["expensive"]
    ]
    return [
        make_table(title, columns, groups),
        make_table("the most expensive instructions", ["", "ms a step", "share", "result", "from"], single),
    ]


def main(arguments: Sequence[str]) -> int:
    """Status 1 where a model cannot be profiled."""
    return run_benchmark("profile", __doc__, arguments, _measure, model_option)


def _measure(session: Session) -> Report:
    models = [measure(case, session) for case in session.chosen(cases(session.device, quick=session.quick))]
    shown: list[Any] = []
    for found in models:
        shown += [*_tables(found), *other_work(found["model"], found["other_work"])]
    return Report({"models": models}, shown, _NOTES)


_NOTES = (
    "ms a step: median, in brackets min..max. In the table, time is summed over the threads that XLA computes with, as "
    "many as there are cores: with two of them, 100% are two seconds of a step of one.",
    f"'{WAITING}' is what the profiler recorded no work for: steps x threads, less all that is above it. An "
    "instruction that waits for tasks which other threads still compute counts as working.",
    "What XLA fuses counts where its result comes from, but with a product in it, as a product: the softmax of a row "
    "that is computed along with its scores is among the products.",
    f"'{COPIES}': instructions that only move numbers, or that read from or write to what a scan keeps; of these some "
    "compute what they write.",
    "optimizer: clipping, AdamW, and the division of gradients by the number of tokens.",
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
