"""Training side by side with PyTorch: `python -m benchmarks.train_step [--device gpu] [--model gpt2] [--quick]`."""

import statistics
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks.session import (
    Kinds,
    ModelOptions,
    Report,
    Session,
    Sides,
    by_turns,
    make_table,
    megabytes,
    other_work,
    run_benchmark,
    spread,
)
from benchmarks.sides import HUGGING_FACE, OURS, REFERENCE, Turn
from benchmarks.training_cases import TOLERANCE, TrainingCase, cases
from twin.machine import Neighbours
from twin.sides import SideFailed, StepFigures

_NOTES = (
    "ms a step: median of all steps (A B A B), in brackets min..max; forward, backward, clipping and AdamW, each step "
    "waited for; no dropout; the first of every turn is not counted. tokens/s counts source and target.",
    "speed: that of the faster torch_ref, eager or compiled = 1. HF: Hugging Face's model with its own loss and "
    "attention kernels and AdamW as one kernel; the compiled torch_ref has that AdamW too.",
    "x floor: the time of a step, over what the fastest of the sides' large matrix products needs for its operations "
    "(causal attention counted half). x own: the same by the side's own product, whose rate is GFLOP/s: of two square "
    "matrices, between the turns.",
    "MB: the most that the side's process held from the first step on, compiler and libraries included (+ what was "
    "allocated on the accelerator); on the processor all sides have huge pages. first s: the first step, with its "
    "compilation.",
)
_OURS, _THEIRS, _COMPILED = "jax_tformer", "torch_ref", ", torch.compile"
_OWN_WEIGHTS = "BART (HF), own weights"


def _measure(session: Session) -> Report:
    chosen = session.chosen(cases(session.device, quick=session.quick))
    found = {case.name: _measure_case(case, session) for case in chosen}
    shown = [item for name, case in found.items() for item in _shown(name, case)]
    ours = {name: case["seconds"] for name, case in found.items()}
    return Report({"cases": found}, ours, shown, _NOTES, all(case["agreed"] for case in found.values()))


def _kinds(case: TrainingCase, session: Session) -> Kinds:
    """The sides of a case, without torch.compile where it is quick."""
    given = (case.config, case.shape, session.device)
    theirs, compiled = _OWN_WEIGHTS if case.shape.source else "HF", not session.quick
    kinds: Kinds = {_OURS: (f"{OURS}:training", *given)}
    kinds[_THEIRS] = (f"{REFERENCE}:training", *given)
    if compiled:
        kinds[_THEIRS + _COMPILED] = (f"{REFERENCE}:training", *given, True)
    kinds[theirs] = (f"{HUGGING_FACE}:training", *given)
    if compiled and session.device == "gpu":
        kinds[theirs + _COMPILED] = (f"{HUGGING_FACE}:training", *given, True)
    return kinds


def _measure_case(case: TrainingCase, session: Session) -> dict[str, Any]:
    """Trains all sides of a case by turns."""
    session.say(f"{case.name} ...")
    others, absent = Neighbours(), dict[str, str]()
    size = 64 if session.quick else 2048 if session.device == "cpu" else 8192
    with session.sides(_kinds(case, session)) as sides:
        first = _first_steps(sides, absent)
        calls = {name: partial(sides[name].call, "turn", case.steps, size) for name in first}
        turns = by_turns(calls, session.rounds(case.rounds))
        held = {name: megabytes(sides[name]) for name in first}
    return _figures(case, first, turns, held) | {"absent": absent, "other_work": others.share()}


def _first_steps(sides: Sides, absent: dict[str, str]) -> dict[str, StepFigures]:
    """Takes the first step of every side that can train at all; why others cannot goes to `absent`."""
    found: dict[str, Any] = {}
    # First of all, every side is made: what takes the processors meanwhile must not count as compilation.
    for call in ("device_memory", "first_step"):
        for name in sides.keys() - absent.keys():
            try:
                found[name] = sides[name].call(call)
            except SideFailed as error:
                if name == _OURS:
                    raise
                absent[name] = str(error)
    return {name: found[name] for name in sides if name not in absent}


def _figures(
    case: TrainingCase, first: Mapping[str, StepFigures], turns: Mapping[str, list[Turn]], held: Mapping[str, str]
) -> dict[str, Any]:
    """Sets the sides beside the floor and the faster reference, and their losses beside ours."""
    # Imported here, so that PyTorch is measured in a process without JAX.
    from jax_tformer.training.prepare import training_flops

    flops, tolerance = training_flops(case.config, *case.shape), TOLERANCE[case.config.compute.dtype]
    seconds = {name: [step.seconds for turn in taken for step in turn.steps] for name, taken in turns.items()}
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    rates = {name: statistics.median(turn.product_rate for turn in taken) for name, taken in turns.items()}
    faster = min((name for name in turns if name.startswith(_THEIRS)), key=medians.__getitem__, default=None)
    # Of the first step, and of the one after it.
    losses = {name: (first[name].loss, taken[0].warm.loss) for name, taken in turns.items()}
    disagreement = {
        name: float(np.abs(np.divide(taken, losses[_OURS]) - 1).max())
        for name, taken in losses.items()
        if name != _OURS and not name.startswith(_OWN_WEIGHTS)
    }
    sides = {
        name: {
            "ms a step": spread(taken, 1000),
            "tokens/s": case.shape.tokens / medians[name],
            "first s": first[name].seconds,
            "MB": held[name],
            "x floor": medians[name] * max(rates.values()) / flops.needed,
            "x own": medians[name] * rates[name] / flops.needed,
            "GFLOP/s": rates[name] / 1e9,
            "speed": None if faster is None else medians[faster] / medians[name],
        }
        for name, taken in seconds.items()
    }
    return {
        "model": case.model,
        "seconds": spread(seconds[_OURS]),
        "sides": sides,
        "flops": flops._asdict() | {"needed": flops.needed},
        "floor_seconds": flops.needed / max(rates.values()),
        "faster_reference": faster,
        "losses": losses,
        "disagreement": disagreement,
        "tolerance": tolerance,
        "agreed": all(distance <= tolerance for distance in disagreement.values()),
    }


def _shown(name: str, case: Mapping[str, Any]) -> list[Any]:
    """The table of a case, and lines below it."""
    from rich.markup import escape

    flops, faster = case["flops"], case["faster_reference"]
    lines = [
        f"floor: {1000 * case['floor_seconds']:.1f} ms/step for {flops['needed'] / 1e9:.1f} GFLOP "
        f"({flops['attention'] / flops['needed']:.0%} of it attention) at the rate of the fastest product",
    ]
    if faster is not None:
        ratio = case["sides"][_OURS]["speed"]
        lines.append(f"[bold]{ratio:.2f} times as fast as the faster reference ({faster})[/bold]")
    lines += [f"{name} is absent: {escape(reason)}" for name, reason in case["absent"].items()]
    verdict = "the same losses" if case["agreed"] else "LOSSES DISAGREE"
    apart = ", ".join(f"{name} {distance:.1e}" for name, distance in case["disagreement"].items())
    lines.append(f"{verdict} in the first two steps: relative distance from ours {apart}")
    lines += other_work(case["model"], case["other_work"])
    return [make_table(name, case["sides"], _OURS), *(f"  {line}" for line in lines)]


main = partial(run_benchmark, "train_step", __doc__, measure=_measure, kind=ModelOptions)
"""Status 1 where sides with the same weights disagree about the loss or ours fails; another side may be absent."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
