"""Compilation and steps by depth, steps by length of the rows: sides by turns, and what they should cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.flops import training_flops
from benchmarks.harness import Spread, by_turns
from benchmarks.output import Session
from benchmarks.training_cases import small_gpt
from benchmarks.training_sides import BatchShape
from jax_tformer.config import TransformerConfig
from jax_tformer.model.functional import transformer

_OURS, _REFERENCE = "benchmarks.training_ours:Ours", "benchmarks.training_torch:Reference"
_LABELS = {_OURS: "jax_tformer", _REFERENCE: "torch_ref"}
_SEED = 0


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


def quick(device: str) -> Plan:
    """The same program on models of no size."""
    return Plan((1, 2), 1, 64, BatchShape(2, 8), (1, 2), 64, BatchShape(2, 8), (4, 8), 16, rounds=1)


def measure_compilation(session: Session, plan: Plan) -> dict[str, Any]:
    """Seconds to compile the training step, by depth."""
    session.say("compilation by depth ...")
    side = session.start("benchmarks.training_ours:Compilation", session.options.device)

    def compile_step(layers: str) -> float:
        return side.call("seconds", small_gpt(int(layers), plan.compiled_width), plan.compiled_shape)

    try:
        # What the very first compilation of a process takes longer is none of this.
        compile_step("1")
        turns = by_turns([str(layers) for layers in plan.compiled_layers], _rounds(session, plan), compile_step)
    finally:
        side.close()
    spreads = {int(layers): Spread.of(seconds) for layers, seconds in turns.items()}
    base = spreads[plan.growth_from].median
    return {
        "width": plan.compiled_width,
        "shape": plan.compiled_shape._asdict(),
        "from_to": [plan.growth_from, plan.compiled_layers[-1]],
        "growth": spreads[plan.compiled_layers[-1]].median / base,
        "entries": [
            {"layers": layers, "seconds": spread._asdict(), "growth": spread.median / base}
            for layers, spread in spreads.items()
        ],
    }


def measure_depths(session: Session, plan: Plan) -> dict[str, Any]:
    """Seconds of a step by depth, of ours and of the eager reference."""
    session.say("steps by depth ...")
    cases = [(_OURS, layers) for layers in plan.layers]
    cases += [(_REFERENCE, layers) for layers in (plan.layers[0], plan.layers[-1])]
    sides = [(kind, small_gpt(layers, plan.width), plan.shape) for kind, layers in cases]
    spreads = _by_turns(session, plan, sides)
    entries = []
    for (kind, layers), spread in zip(cases, spreads, strict=True):
        first = spreads[cases.index((kind, plan.layers[0]))].median
        flops = [_flops(small_gpt(count, plan.width), plan.shape) for count in (layers, plan.layers[0])]
        entry = {"label": _LABELS[kind], "layers": layers}
        entries.append(entry | _growth(spread, first, flops[0], flops[1]))
    return {"width": plan.width, "shape": plan.shape._asdict(), "entries": entries}


def measure_lengths(session: Session, plan: Plan) -> dict[str, Any]:
    """Seconds of a step of ours by the length of the rows, with as many rows as make the same tokens."""
    session.say("steps by length ...")
    config = small_gpt(plan.layers[0], plan.width)
    shapes = [BatchShape(plan.tokens // length, length) for length in plan.lengths]
    spreads = _by_turns(session, plan, [(_OURS, config, shape) for shape in shapes])
    first, first_flops = spreads[0].median, _flops(config, shapes[0])
    return {
        "layers": plan.layers[0],
        "tokens": plan.tokens,
        "entries": [
            {"shape": shape._asdict()} | _growth(spread, first, _flops(config, shape), first_flops)
            for shape, spread in zip(shapes, spreads, strict=True)
        ],
    }


def _by_turns(session: Session, plan: Plan, cases: Sequence[tuple[str, TransformerConfig, BatchShape]]) -> list[Spread]:
    """Seconds of a step of each side, after one that compiles."""
    device = session.options.device
    count = 1 if device == "cpu" else 10
    sides = [session.start(kind, *given, _SEED, device, uses_jax=kind == _OURS) for kind, *given in cases]
    try:
        for side in sides:
            side.call("steps", 1)
        names = [str(number) for number in range(len(sides))]
        turns = by_turns(names, _rounds(session, plan), lambda name: sides[int(name)].call("steps", count + 1)[1:])
    finally:
        for side in sides:
            side.close()
    return [Spread.of([second for turn in found for second in turn]) for found in turns.values()]


def _growth(spread: Spread, first: float, flops: int, first_flops: int) -> dict[str, Any]:
    growth, flops_growth = spread.median / first, flops / first_flops
    return {
        "step_seconds": spread._asdict(),
        "flops": flops,
        "operations_per_second": flops / spread.median,
        "growth": growth,
        "flops_growth": flops_growth,
        "over_flops": growth / flops_growth,
    }


def _flops(config: TransformerConfig, shape: BatchShape) -> int:
    return training_flops(transformer(config), *shape).needed


def _rounds(session: Session, plan: Plan) -> int:
    return session.options.rounds or plan.rounds
