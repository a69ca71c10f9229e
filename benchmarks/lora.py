"""Training adapters side by side with PEFT: `python -m benchmarks.lora [--device gpu] [--model gpt2] [--quick]`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.session import (
    Report,
    Session,
    by_turns,
    make_table,
    megabytes,
    milliseconds,
    model_option,
    other_work,
    run_benchmark,
    spread,
)
from benchmarks.sides import HUGGING_FACE, OURS
from benchmarks.training_cases import TOLERANCE, BatchShape, TrainingCase, architecture, bfloat16, small_gpt, tiny
from jax_tformer.config import LoraConfig
from jax_tformer_comparison.machine import Neighbours
from jax_tformer_comparison.sides import Alone, Here

_PEFT = "benchmarks.sides.adapters"
_LORA = LoraConfig(rank=8, alpha=16.0, targets=("output", "up", "down"))
"""One module there for each of ours; queries, keys and values share one in GPT-2, which would have another rank."""
_NOTES = (
    "ms a step: median of all steps (A B A B), in brackets min..max; forward, backward, clipping and AdamW, each step "
    "waited for; no dropout; the first of every turn is not counted. Eager PyTorch, AdamW as one kernel.",
    "MB: the most that the side's process held in the later steps, its libraries included. its own: without them.",
    f"LoRA: rank {_LORA.rank} for {', '.join(_LORA.targets)} of every layer. all: the same model without adapters.",
)
_LABELS = {
    "ours, LoRA": "jax_tformer, LoRA",
    "theirs, LoRA": "PEFT, LoRA",
    "ours, all": "jax_tformer, all",
    "theirs, all": "HF, all",
}


def main(arguments: Sequence[str]) -> int:
    """Status 1 where two sides disagree about the loss or one fails."""
    return run_benchmark("lora", __doc__, arguments, _measure, model_option)


def _measure(session: Session) -> Report:
    found = [_measure_case(session, case) for case in session.chosen(_cases(session))]
    shown = [item for case in found for item in _shown(case)]
    return Report({"cases": found}, shown, _NOTES, all(case["agreed"] for case in found))


def _cases(session: Session) -> list[TrainingCase]:
    if session.quick:
        return [TrainingCase("small gpt", tiny(small_gpt()), BatchShape(2, 8), 1, 2)]
    if session.device == "gpu":
        return [TrainingCase("gpt2", bfloat16(architecture("gpt2")), BatchShape(16, 1024), 4, 10)]
    small = TrainingCase("small gpt", small_gpt(), BatchShape(8, 256), 4, 3)
    return [small, TrainingCase("gpt2", architecture("gpt2"), BatchShape(4, 128), 4, 3)]


def _measure_case(session: Session, case: TrainingCase) -> dict[str, Any]:
    others, rounds, config, shape = Neighbours(), session.rounds(case.rounds), case.config, case.shape
    adapted = replace(config, lora=_LORA)
    session.say(f"{case.name} ...")
    kinds = {"ours, LoRA": (OURS, adapted), "theirs, LoRA": (_PEFT, adapted)}
    kinds |= {"ours, all": (OURS, config), "theirs, all": (HUGGING_FACE, config)}
    sides = {
        name: session.start(f"{module}:training", described, shape, session.device, uses_jax=module == OURS)
        for name, (module, described) in kinds.items()
    }
    try:
        first = {name: _first_step(side) for name, side in sides.items()}
        session.say("  all have taken their first step")
        turns = by_turns(list(sides), rounds, lambda name: _turn(sides[name], case.steps))
        figures = {}
        for name, side in sides.items():
            peak, device = side.call("peak_memory"), side.call("device_memory")
            figures[name] = {
                "label": _LABELS[name],
                "step_seconds": spread([seconds for _, turn in turns[name] for seconds in turn]),
                "steps": rounds * case.steps,
                "peak_memory": peak,
                "device_memory": device,
                # In one process for all (--quick) there may be nothing left.
                "own": max(peak - first[name][1], 1) if device is None else device,
                # Of the first step, and of the one after it.
                "losses": [first[name][0], turns[name][0][0]],
            }
    finally:
        for side in sides.values():
            side.close()
    apart = {
        kind: max(
            abs(x / y - 1)
            for x, y in zip(figures[f"ours, {kind}"]["losses"], figures[f"theirs, {kind}"]["losses"], strict=True)
        )
        for kind in ("LoRA", "all")
    }
    return {
        "model": case.model,
        "name": case.name,
        "shape": shape._asdict(),
        "dtype": config.compute.dtype,
        "lora": {"rank": _LORA.rank, "targets": list(_LORA.targets)},
        "sides": figures,
        "disagreement": apart,
        "agreed": max(apart.values()) <= TOLERANCE[config.compute.dtype],
        "other_work": others.share(),
    }


def _first_step(side: Alone | Here) -> tuple[float, int]:
    """Takes the first step, which compiles; returns its loss, and the memory of the libraries."""
    libraries = side.call("libraries_memory")
    side.call("steps", 1)
    loss = side.call("loss")
    side.call("forget_peak")
    return loss, libraries


def _turn(side: Alone | Here, steps: int) -> tuple[float, list[float]]:
    """Takes one step that does not count, then those that do. Returns the first's loss, the others' seconds."""
    side.call("steps", 1)
    return side.call("loss"), side.call("steps", steps)


def _shown(case: Mapping[str, Any]) -> list[Any]:
    rows = [
        [
            side["label"],
            milliseconds(side["step_seconds"], 1),
            megabytes(side["peak_memory"], side["device_memory"]),
            f"{side['own'] / 1e6:.0f}",
        ]
        for side in case["sides"].values()
    ]
    ours, theirs = (case["sides"][f"{whose}, LoRA"] for whose in ("ours", "theirs"))
    time = theirs["step_seconds"]["median"] / ours["step_seconds"]["median"]
    verdict = "the same losses" if case["agreed"] else "LOSSES DISAGREE"
    apart = ", ".join(f"{kind} {distance:.1e}" for kind, distance in case["disagreement"].items())
    lines = [
        f"adapters: {time:.2f} times as fast as PEFT, with {ours['own'] / theirs['own']:.2f} times its memory",
        f"{verdict} in the first two steps: relative distance {apart}",
        *other_work(case["model"], case["other_work"]),
    ]
    table = make_table(case["name"], ("", "ms a step", "MB", "its own"), rows, "jax_tformer, LoRA")
    return [table, *(f"  {line}" for line in lines)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
