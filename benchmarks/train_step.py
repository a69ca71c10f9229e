"""Training side by side with PyTorch: `python -m benchmarks.train_step [--device gpu] [--model gpt2] [--quick]`."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.bounds import Shape, fastest
from benchmarks.session import (
    ModelOptions,
    Report,
    Session,
    by_turns,
    make_table,
    megabytes,
    milliseconds,
    other_work,
    peaks,
    run_benchmark,
    spread,
)
from benchmarks.sides import HUGGING_FACE, OURS, REFERENCE
from benchmarks.training_cases import TOLERANCE, TrainingCase, cases
from twin.machine import Neighbours
from twin.sides import Alone, Here, SideFailed, StepFigures

_NOTES = (
    "ms a step: median of all steps (A B A B), in brackets min..max; forward, backward, clipping and AdamW, each step "
    "waited for; no dropout; the first of every turn is not counted. tokens/s counts source and target.",
    "speed: that of the faster torch_ref, eager or compiled = 1. HF: Hugging Face's model with its own loss and "
    "attention kernels and AdamW as one kernel; the compiled torch_ref has that AdamW too.",
    "x floor: the time of a step, over what the fastest matrix product found needs for its operations (causal "
    "attention counted half). x own: the same by the fastest product of the side's own library, JAX or torch. The "
    "products are measured between the turns.",
    "MB: the most that the side's process held from the first step on, compiler and libraries included (+ what was "
    "allocated on the accelerator); on the processor all sides have huge pages. first s: the first step, with its "
    "compilation.",
)
_OURS, _THEIRS, _COMPILED, _PRODUCTS = "jax_tformer", "torch_ref", ", torch.compile", "products"
_OWN_WEIGHTS = "BART (HF), own weights"


def main(arguments: Sequence[str]) -> int:
    """Status 1 where sides with the same weights disagree about the loss or ours fails; another side may be absent."""
    return run_benchmark("train_step", __doc__, arguments, _measure, ModelOptions)


def _measure(session: Session) -> Report:
    chosen = session.chosen(cases(session.device, quick=session.quick))
    found = {case.name: _measure_case(case, session) for case in chosen}
    shown = [item for name, case in found.items() for item in _shown(name, case)]
    ours = {name: case["sides"][_OURS]["step_seconds"] for name, case in found.items()}
    return Report({"cases": found}, ours, shown, _NOTES, all(case["agreed"] for case in found.values()))


def _kinds(case: TrainingCase, session: Session) -> dict[str, tuple[Any, ...]]:
    """The sides of a case, without torch.compile where it is quick, and what multiplies matrices between them."""
    given = (case.config, case.shape, session.device)
    theirs, compiled = _OWN_WEIGHTS if case.shape.source else "HF", not session.quick
    kinds: dict[str, tuple[Any, ...]] = {_OURS: (f"{OURS}:training", *given)}
    kinds[_THEIRS] = (f"{REFERENCE}:training", *given)
    if compiled:
        kinds[_THEIRS + _COMPILED] = (f"{REFERENCE}:training", *given, True)
    kinds[theirs] = (f"{HUGGING_FACE}:training", *given)
    if compiled and session.device == "gpu":
        kinds[theirs + _COMPILED] = (f"{HUGGING_FACE}:training", *given, True)
    return kinds | {_PRODUCTS: ("benchmarks.bounds:Products", session.device, *_products(case, session))}


def _products(case: TrainingCase, session: Session) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    """Shapes and types whose rate is measured: a large square, and a feed-forward layer of the case's own."""
    width, inner = case.config.d_model, case.config.output_stack.feedforward_width
    tokens = case.shape.rows * case.shape.length
    square = 64 if session.quick else 2048 if session.device == "cpu" else 8192
    shapes = ((square, square, square), (tokens, width, inner), (tokens, inner, width))
    return shapes, ("float32",) if session.device == "cpu" else ("bfloat16", "float32")


def _measure_case(case: TrainingCase, session: Session) -> dict[str, Any]:
    """Trains all sides of a case by turns."""
    session.say(f"{case.name} ...")
    others, absent = Neighbours(), dict[str, str]()
    with session.sides(_kinds(case, session)) as sides:
        products = sides.pop(_PRODUCTS)
        first = _first_steps(sides, absent)
        # A turn's first step finds caches cold and memory handed back, as no step does that follows another.
        calls = {name: partial(sides[name].call, "steps", 1 + case.steps) for name in first}
        turns = by_turns(calls | {_PRODUCTS: partial(products.call, "measure")}, session.rounds(case.rounds))
        rates = turns.pop(_PRODUCTS)
        figures = {name: _figures(case, first[name], taken) | peaks(sides[name]) for name, taken in turns.items()}
    return {**_compare(case, figures, rates), "absent": absent, "other_work": others.share()}


def _first_steps(sides: Mapping[str, Alone | Here], absent: dict[str, str]) -> dict[str, StepFigures]:
    """Takes the first step of every side that can train at all; why others cannot goes to `absent`."""
    found: dict[str, Any] = {}
    # First of all, every side is made: what takes the processors meanwhile must not count as compilation.
    for call in (("device_memory",), ("steps", 1)):
        for name in sides.keys() - absent.keys():
            try:
                found[name] = sides[name].call(*call)
            except SideFailed as error:
                if name == _OURS:
                    raise
                absent[name] = str(error)
    return {name: found[name][0] for name in sides if name not in absent}


def _figures(case: TrainingCase, first: StepFigures, turns: list[list[StepFigures]]) -> dict[str, Any]:
    step = spread([taken.seconds for turn in turns for taken in turn[1:]])
    return {
        "step_seconds": step,
        "tokens_per_second": case.shape.tokens / step["median"],
        "first_step_seconds": first.seconds,
        # Of the first step, and of the one after it.
        "losses": [first.loss, turns[0][0].loss],
    }


def _compare(case: TrainingCase, sides: dict[str, dict[str, Any]], rates: list[dict[str, float]]) -> dict[str, Any]:
    """Sets the sides beside the floor and the faster reference, and their losses beside ours."""
    from jax_tformer.training.work import training_flops

    compute, flops = case.config.compute.dtype, training_flops(case.config, *case.shape)
    products = {library: fastest(rates, library, compute) for library in ("jax", "torch")}
    floor = flops.needed / max(way.rate for way in products.values())
    medians = {name: side["step_seconds"]["median"] for name, side in sides.items()}
    faster = min((name for name in sides if name.startswith(_THEIRS)), key=medians.__getitem__, default=None)
    for name, side in sides.items():
        own = products["jax" if name == _OURS else "torch"]
        side["times_floor"] = medians[name] / floor
        side["times_own_floor"] = medians[name] * own.rate / flops.needed
        side["times_reference"] = None if faster is None else medians[faster] / medians[name]
    ours = sides[_OURS]["losses"]
    disagreement = {
        name: max(abs(x - y) / abs(y) for x, y in zip(side["losses"], ours, strict=True))
        for name, side in sides.items()
        if name != _OURS and not name.startswith(_OWN_WEIGHTS)
    }
    return {
        "model": case.model,
        "flops": {**flops._asdict(), "needed": flops.needed},
        "products": {library: way._asdict() for library, way in products.items()},
        "floor_seconds": floor,
        "faster_reference": faster,
        "sides": sides,
        "disagreement": disagreement,
        "tolerance": TOLERANCE[compute],
        "agreed": all(distance <= TOLERANCE[compute] for distance in disagreement.values()),
    }


def _shown(name: str, case: Mapping[str, Any]) -> list[Any]:
    """The table of a case, and lines below it."""
    from rich.markup import escape

    rows = [
        [
            label,
            milliseconds(side["step_seconds"], 1),
            f"{side['tokens_per_second']:.0f}",
            f"{side['first_step_seconds']:.1f}",
            megabytes(side),
            f"{side['times_floor']:.2f}",
            f"{side['times_own_floor']:.2f}",
            "" if side["times_reference"] is None else f"{side['times_reference']:.2f}",
        ]
        for label, side in case["sides"].items()
    ]
    flops, faster = case["flops"], case["faster_reference"]
    products = [f"{way['rate'] / 1e9:.1f} GFLOP/s ({way['name']})" for way in case["products"].values()]
    lines = [
        f"floor: {1000 * case['floor_seconds']:.1f} ms/step for {flops['needed'] / 1e9:.1f} GFLOP "
        f"({flops['attention'] / flops['needed']:.0%} of it attention) by the faster of the libraries",
        f"the fastest product of each library: {'; '.join(products)}",
    ]
    if faster is not None:
        ratio = case["sides"][_OURS]["times_reference"]
        lines.append(f"[bold]{ratio:.2f} times as fast as the faster reference ({faster})[/bold]")
    lines += [f"{name} is absent: {escape(reason)}" for name, reason in case["absent"].items()]
    verdict = "the same losses" if case["agreed"] else "LOSSES DISAGREE"
    apart = ", ".join(f"{name} {distance:.1e}" for name, distance in case["disagreement"].items())
    lines.append(f"{verdict} in the first two steps: relative distance from ours {apart}")
    lines += other_work(case["model"], case["other_work"])
    columns = ("", "ms a step", "tokens/s", "first s", "MB", "x floor", "x own", "speed")
    return [make_table(name, columns, rows, _OURS), *(f"  {line}" for line in lines)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
