"""Where the time goes, of a training step or a token: `python -m benchmarks.profile [--device gpu] [--model NAME]`."""

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from benchmarks.decoding.measure import suites
from benchmarks.profile.instructions import COPIES, GROUPS, WAITING
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
from benchmarks.sides import draw_prompts
from benchmarks.training_cases import cases
from jax_tformer_comparison.machine import Neighbours, cores

_EXPENSIVE = 10
_TOKENS = 32
"""So many steps of decoding make a turn."""


class Program(NamedTuple):
    """What is profiled: training on one batch, or decoding after some prompts."""

    model: str
    """What `--model` calls it."""
    name: str
    """For people."""
    kind: str
    """The class in traced.py."""
    given: tuple[Any, ...]
    """For that class."""
    steps: int
    """So many make a turn."""


def programs(device: str, *, quick: bool) -> list[Program]:
    """All cases of training, and GPT-2 that decodes one row and several."""
    found = [
        Program(case.model, case.name, "Training", (case.config, case.shape, device), 2)
        for case in cases(device, quick=quick)
    ]
    gpt2 = suites(quick=quick)[0]
    for case in gpt2.cases:
        prompts = draw_prompts(gpt2.config.vocab_size or 0, case.batch, case.prompt)
        name = f"{gpt2.model} decoding, batch {case.batch}"
        tokens = f"{name}, {case.prompt} + {case.new_tokens} tokens, {gpt2.config.compute.dtype}"
        given = (gpt2.config, prompts, case.new_tokens, device)
        found.append(Program(name, tokens, "Decoding", given, min(_TOKENS, case.new_tokens - 1)))
    return found


def measure(program: Program, session: Session) -> dict[str, Any]:
    """Steps without the profiler and with it, by turns."""
    session.say(f"{program.name} ...")
    others = Neighbours()
    side = session.start(f"benchmarks.profile.traced:{program.kind}", *program.given)
    try:
        # The first steps fetch memory.
        side.call("steps", 2)
        rounds = session.rounds(1 if session.quick else 2)
        turns = by_turns(["steps", "profile"], rounds, lambda which: side.call(which, program.steps))
    finally:
        side.close()
    steps = [seconds for found in turns["steps"] for seconds in found]
    threads = cores() if session.device == "cpu" else 1
    return summary(program, threads, steps, turns["profile"]) | {"other_work": others.share()}


def summary(program: Program, threads: int, steps: list[float], profiles: list[dict[str, Any]]) -> dict[str, Any]:
    """One program: seconds a step on all threads together, by group, and the instructions that take most."""
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
        "model": program.model,
        "name": program.name,
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
    digits = 0 if figures["step_seconds"]["median"] > 0.1 else 1
    step, traced = (milliseconds(figures[name], digits) for name in ("step_seconds", "traced_step_seconds"))
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
    chosen = session.chosen(programs(session.device, quick=session.quick))
    models = [measure(program, session) for program in chosen]
    shown: list[Any] = []
    for found in models:
        shown += [*_tables(found), *other_work(found["model"], found["other_work"])]
    return Report({"models": models}, shown, _NOTES)


_NOTES = (
    "ms a step: median, in brackets min..max; of decoding, a step is a token of every row, and a turn gives one "
    "average. In the table, time is summed over the threads that XLA computes with, as many as there are cores: with "
    "two of them, 100% are two seconds of a step of one.",
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
