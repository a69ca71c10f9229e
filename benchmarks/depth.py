"""What depth and length cost in training: `python -m benchmarks.depth [--device gpu] [--out FILE] [--quick]`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bounds import training_flops
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
from benchmarks.sides import OURS, REFERENCE
from benchmarks.training_cases import BatchShape, small_gpt
from jax_tformer.config import TransformerConfig
from jax_tformer_comparison.machine import Neighbours

_LABELS = {OURS: "jax_tformer", REFERENCE: "torch_ref"}
_NOTES = (
    "Medians of the turns (A B A B), in brackets min..max. Compilation is tracing, lowering and compiling of the "
    "whole training step, with nothing kept from before.",
    "Layers run under one scan, so that compilation must not grow with depth, and the time of a step must grow as "
    "the operations do.",
    "/ operations: growth of the time over growth of the operations that a step needs (causal attention counted "
    "half); 1 is proportional.",
)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    compiled_layers: tuple[int, ...]
    growth_from: int
    """The number of these layers that the growth of compilation is reported from, to the last."""
    compiled_width: int
    compiled_shape: BatchShape
    layers: tuple[int, ...]
    """Of ours; PyTorch's side has the first and the last."""
    width: int
    shape: BatchShape
    lengths: tuple[int, ...]
    tokens: int
    """Of a step at every length."""
    rounds: int


QUICK = Plan((1, 2), 1, 64, BatchShape(2, 8), (1, 2), 64, BatchShape(2, 8), (4, 8), 16, rounds=1)
"""The same program on models of no size."""


def full(device: str) -> Plan:
    """The figures that are published."""
    return Plan(
        compiled_layers=(6, 12, 96),
        growth_from=12,
        compiled_width=128,
        compiled_shape=BatchShape(4, 64),
        layers=(6, 12, 24),
        width=384,
        shape=BatchShape(4, 256) if device == "cpu" else BatchShape(64, 256),
        lengths=(128, 256, 512, 1024),
        tokens=2048 if device == "cpu" else 65536,
        rounds=2,
    )


def main(arguments: Sequence[str]) -> int:
    """Status 1 where a side fails."""
    return run_benchmark("depth", __doc__, arguments, _measure)


def _measure(session: Session) -> Report:
    plan, others = QUICK if session.quick else full(session.device), Neighbours()
    figures: dict[str, Any] = {
        "compilation": measure_compilation(session, plan),
        "depths": measure_depths(session, plan),
        "lengths": measure_lengths(session, plan),
        "other_work": others.share(),
    }
    shown = [_compilation_table(figures), _depths_table(figures["depths"]), _lengths_table(figures["lengths"])]
    return Report(figures, shown, [*_NOTES, *other_work("all", figures["other_work"])])


def measure_compilation(session: Session, plan: Plan) -> dict[str, Any]:
    """Measures how long the training step takes to compile, by depth."""
    session.say("compilation by depth ...")
    side = session.start(f"{OURS}:Compilation", session.device)

    def compile_step(layers: str) -> float:
        return side.call("seconds", small_gpt(int(layers), plan.compiled_width), plan.compiled_shape)

    try:
        # The first compilation of a process takes longer than the others, and is left out.
        compile_step("1")
        turns = by_turns([str(layers) for layers in plan.compiled_layers], session.rounds(plan.rounds), compile_step)
    finally:
        side.close()
    spreads = {int(layers): spread(seconds) for layers, seconds in turns.items()}
    base = spreads[plan.growth_from]["median"]
    return {
        "width": plan.compiled_width,
        "shape": plan.compiled_shape._asdict(),
        "from_to": [plan.growth_from, plan.compiled_layers[-1]],
        "growth": spreads[plan.compiled_layers[-1]]["median"] / base,
        "entries": [
            {"layers": layers, "seconds": seconds, "growth": seconds["median"] / base}
            for layers, seconds in spreads.items()
        ],
    }


def measure_depths(session: Session, plan: Plan) -> dict[str, Any]:
    """Measures a step by depth, of ours and of the eager reference."""
    session.say("steps by depth ...")
    entries = []
    for kind, layers in ((OURS, plan.layers), (REFERENCE, (plan.layers[0], plan.layers[-1]))):
        entries += [(kind, count, small_gpt(count, plan.width)) for count in layers]
    measured = _by_turns(session, plan, [(kind, config, plan.shape) for kind, _, config in entries])
    return {
        "width": plan.width,
        "shape": plan.shape._asdict(),
        "entries": [
            {"label": _LABELS[kind], "layers": count, **figures}
            for (kind, count, _), figures in zip(entries, measured, strict=True)
        ],
    }


def measure_lengths(session: Session, plan: Plan) -> dict[str, Any]:
    """Measures a step of ours by the length of the rows, with as many rows as make the same number of tokens."""
    session.say("steps by length ...")
    config = small_gpt(plan.layers[0], plan.width)
    shapes = [BatchShape(plan.tokens // length, length) for length in plan.lengths]
    measured = _by_turns(session, plan, [(OURS, config, shape) for shape in shapes])
    entries = [{"shape": shape._asdict(), **figures} for shape, figures in zip(shapes, measured, strict=True)]
    return {"layers": plan.layers[0], "tokens": plan.tokens, "entries": entries}


def _by_turns(
    session: Session, plan: Plan, cases: Sequence[tuple[str, TransformerConfig, BatchShape]]
) -> list[dict[str, Any]]:
    """Measures a step of each side, after one that compiles. Growth counts from the first case of the same kind."""
    count = 1 if session.device == "cpu" else 10
    sides = [session.start(f"{kind}:training", *given, session.device, uses_jax=kind == OURS) for kind, *given in cases]
    try:
        for side in sides:
            side.call("steps", 1)
        names = [str(number) for number in range(len(sides))]
        turns = by_turns(names, session.rounds(plan.rounds), lambda name: sides[int(name)].call("steps", count + 1)[1:])
    finally:
        for side in sides:
            side.close()
    found: list[dict[str, Any]] = []
    for (kind, config, shape), taken in zip(cases, turns.values(), strict=True):
        step, flops = spread([second for turn in taken for second in turn]), training_flops(config, *shape).needed
        first = next((found[place] for place in range(len(found)) if cases[place][0] == kind), None)
        growth = step["median"] / first["step_seconds"]["median"] if first else 1.0
        flops_growth = flops / first["flops"] if first else 1.0
        found.append(
            {
                "step_seconds": step,
                "flops": flops,
                "operations_per_second": flops / step["median"],
                "growth": growth,
                "flops_growth": flops_growth,
                "over_flops": growth / flops_growth,
            }
        )
    return found


def _compilation_table(figures: Mapping[str, Any]) -> Any:
    found = figures["compilation"]
    rows = [(str(entry["layers"]), show(entry["seconds"]), f"{entry['growth']:.2f}") for entry in found["entries"]]
    title = f"Compilation of a step, width {found['width']}: {found['growth']:.2f} times as long for "
    title += f"{found['from_to'][1]} layers as for {found['from_to'][0]}"
    return make_table(title, ("layers", "s", "growth"), rows)


def _depths_table(found: Mapping[str, Any]) -> Any:
    rows = [(f"{entry['label']}, {entry['layers']} layers", *_cells(entry)) for entry in found["entries"]]
    title = f"Small GPT, {found['shape']['rows']} x {found['shape']['length']} tokens, by depth"
    return make_table(title, ("", "ms a step", "growth", "operations", "/ operations"), rows)


def _lengths_table(found: Mapping[str, Any]) -> Any:
    rows = []
    for entry in found["entries"]:
        shape, rate = entry["shape"], f"{entry['operations_per_second'] / 1e9:.0f}"
        rows.append((f"{shape['rows']} x {shape['length']}", *_cells(entry), rate))
    title = f"Small GPT, {found['layers']} layers, {found['tokens']} tokens a step, by length of the rows"
    return make_table(title, ("rows", "ms a step", "growth", "operations", "/ operations", "GFLOP/s"), rows)


def _cells(entry: Mapping[str, Any]) -> list[str]:
    growths = [f"{entry[name]:.2f}" for name in ("growth", "flops_growth", "over_flops")]
    return [milliseconds(entry["step_seconds"], 1), *growths]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
