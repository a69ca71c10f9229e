"""Training side by side with PyTorch: `python -m benchmarks.train_step [--device gpu] [--model gpt2] [--quick]`."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bounds import Shape, best_way, measured_by, training_flops
from benchmarks.session import (
    ModelOptions,
    Report,
    Session,
    by_turns,
    gathered,
    make_table,
    megabytes,
    milliseconds,
    other_work,
    run_benchmark,
    spread,
)
from benchmarks.sides import HUGGING_FACE, OURS, REFERENCE
from benchmarks.training_cases import TOLERANCE, TrainingCase, cases
from twin.machine import Neighbours
from twin.sides import Alone, Here, SideFailed

_NOTES = (
    "ms a step: median of all steps (A B A B), in brackets min..max; forward, backward, clipping and AdamW, each step "
    "waited for; no dropout; the first of every turn is not counted. tokens/s counts source and target.",
    "speed: that of the faster torch_ref, eager or compiled = 1. HF: Hugging Face's model with its own loss and "
    "attention kernels and AdamW as one kernel; the compiled torch_ref has that AdamW too.",
    "x floor: the time of a step, over what the fastest matrix product found needs for its operations (causal "
    "attention counted half). x own: the same by the fastest product of the side's own library, JAX or torch. The "
    "products are measured between the turns.",
    "MB: the most that the side's process held from the first step on, compiler and libraries included (+ what was "
    "allocated on the accelerator). first s: the first step, compilation included.",
)
_PRODUCTS = "products"


def main(arguments: Sequence[str]) -> int:
    """Status 1 where sides with the same weights disagree about the loss or ours fails; another side may be absent."""
    return run_benchmark("train_step", __doc__, arguments, _measure, ModelOptions)


def _measure(session: Session) -> Report:
    found = [_measure_case(case, session) for case in session.chosen(cases(session.device, quick=session.quick))]
    shown = [item for case in found for item in _shown(case)]
    ours = {case["name"]: case["sides"]["ours"]["step_seconds"] for case in found}
    return Report({"cases": found}, ours, shown, _NOTES, all(case["agreed"] for case in found))


def _measure_case(case: TrainingCase, session: Session) -> dict[str, Any]:
    """Trains all sides of a case by turns, and multiplies matrices between; without torch.compile where it is quick."""
    session.say(f"{case.name} ...")
    others, absent, rounds = Neighbours(), dict[str, str](), session.rounds(case.rounds)
    products = session.start("benchmarks.bounds:Products", session.device, *_products(case, session))
    sides = _start(case, session)
    try:
        first = _first_steps(case, sides, absent, session)
        turns = by_turns(
            [*first, _PRODUCTS],
            rounds,
            lambda name: products.call("measure") if name == _PRODUCTS else _turn(sides[name], case.steps),
        )
        rates = gathered(turns.pop(_PRODUCTS))
        figures = {}
        for name, taken in turns.items():
            step = spread([seconds for _, turn in taken for seconds in turn])
            figures[name] = {
                "label": _label(case, name),
                "step_seconds": step,
                "steps": rounds * case.steps,
                "tokens_per_second": case.shape.tokens / step["median"],
                "first_step_seconds": first[name][0],
                "compile_seconds": max(first[name][0] - step["median"], 0.0),
                "peak_memory": sides[name].call("peak_memory"),
                "device_memory": sides[name].call("device_memory"),
                # Of the first step, and of the one after it.
                "losses": [first[name][1], taken[0][0]],
            }
    finally:
        for side in (*sides.values(), products):
            side.close()
    return {**_compared(case, figures, rates), "absent": absent, "other_work": others.share()}


def _start(case: TrainingCase, session: Session) -> dict[str, Alone | Here]:
    given = (case.config, case.shape, session.device)
    kinds: dict[str, tuple[Any, ...]] = {"ours": (OURS,), "reference": (REFERENCE,)}
    if not session.quick:
        kinds["reference compiled"] = (REFERENCE, True)
    kinds["hugging face"] = (HUGGING_FACE,)
    if not session.quick and session.device == "gpu":
        kinds["hugging face compiled"] = (HUGGING_FACE, True)
    return {
        name: session.start(f"{module}:training", *given, *compiled, uses_jax=module == OURS)
        for name, (module, *compiled) in kinds.items()
    }


def _first_steps(
    case: TrainingCase, sides: Mapping[str, Alone | Here], absent: dict[str, str], session: Session
) -> dict[str, tuple[float, float]]:
    """Takes the first step of every side that can train at all; returns its seconds and its loss."""
    first = {}
    # First of all, every side is made: what takes the processors meanwhile must not count as compilation.
    for method, *given in (("device_memory",), ("steps", 1)):
        for name, side in sides.items():
            if name in absent:
                continue
            try:
                found = side.call(method, *given)
            except SideFailed as error:
                if name == "ours":
                    raise
                absent[name] = str(error)
                continue
            if given:
                first[name] = found[0], side.call("loss")
                session.say(f"  {_label(case, name)}: the first step took {found[0]:.1f} s")
    return first


def _turn(side: Alone | Here, steps: int) -> tuple[float, list[float]]:
    """Takes one step that does not count, then `steps` that do. Returns the first's loss, the others' seconds."""
    # The first one finds caches cold and memory handed back, as no step does that follows another.
    side.call("steps", 1)
    return side.call("loss"), side.call("steps", steps)


def _products(case: TrainingCase, session: Session) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    """Shapes and types whose rate is measured: a large square, and a feed-forward layer of the case's own."""
    width, inner = case.config.d_model, case.config.output_stack.feedforward_width
    tokens = case.shape.rows * case.shape.length
    square = 64 if session.quick else 2048 if session.device == "cpu" else 8192
    shapes = ((square, square, square), (tokens, width, inner), (tokens, inner, width))
    return shapes, ("float32",) if session.device == "cpu" else ("bfloat16", "float32")


def _compared(case: TrainingCase, sides: dict[str, dict[str, Any]], rates: dict[str, list[float]]) -> dict[str, Any]:
    """Sets the sides beside the floor and the faster reference, and their losses beside ours."""
    compute, flops = case.config.compute.dtype, training_flops(case.config, *case.shape)
    usable = measured_by(rates, compute)
    way, rate = best_way(usable)
    own = {library: best_way(measured_by(usable, library)) for library in ("jax", "torch")}
    floor = flops.needed / rate
    references = {name: side["step_seconds"]["median"] for name, side in sides.items() if name.startswith("reference")}
    faster = min(references, key=references.__getitem__, default=None)
    for name, side in sides.items():
        median = side["step_seconds"]["median"]
        reference = None if faster is None else references[faster] / median
        _, own_rate = own["jax" if name == "ours" else "torch"]
        side |= {"times_floor": median / floor, "times_reference": reference}
        side["times_own_floor"] = median * own_rate / flops.needed
    disagreement = {
        name: max(abs(x - y) / abs(y) for x, y in zip(side["losses"], sides["ours"]["losses"], strict=True))
        for name, side in sides.items()
        if name != "ours" and not _own_weights(case, name)
    }
    return {
        "model": case.model,
        "name": case.name,
        "shape": case.shape._asdict(),
        "tokens": case.shape.tokens,
        "dtype": compute,
        "flops": {**flops._asdict(), "needed": flops.needed},
        "products": {"operations_per_second": rate, "way": way, "ways": rates},
        "own_products": {name: {"way": way, "operations_per_second": rate} for name, (way, rate) in own.items()},
        "floor_seconds": floor,
        "faster_reference": faster,
        "sides": sides,
        "disagreement": disagreement,
        "tolerance": TOLERANCE[compute],
        "agreed": all(distance <= TOLERANCE[compute] for distance in disagreement.values()),
    }


def _own_weights(case: TrainingCase, name: str) -> bool:
    return case.shape.source > 0 and name.startswith("hugging face")


def _label(case: TrainingCase, name: str) -> str:
    theirs = "BART (HF), own weights" if _own_weights(case, name) else "HF"
    labels = {"ours": "jax_tformer", "reference": "torch_ref", "hugging face": theirs}
    return labels[name.removesuffix(" compiled")] + (", torch.compile" if name.endswith(" compiled") else "")


def _shown(case: Mapping[str, Any]) -> list[Any]:
    from rich.markup import escape

    rows = []
    for side in case["sides"].values():
        speed = side["times_reference"]
        row = [
            side["label"],
            milliseconds(side["step_seconds"], 1),
            f"{side['tokens_per_second']:.0f}",
            f"{side['first_step_seconds']:.1f}",
            megabytes(side["peak_memory"], side["device_memory"]),
            f"{side['times_floor']:.2f}",
            f"{side['times_own_floor']:.2f}",
            "" if speed is None else f"{speed:.2f}",
        ]
        rows.append(row)
    rate, flops = case["products"], case["flops"]
    lines = [
        f"floor: {1000 * case['floor_seconds']:.1f} ms/step for {flops['needed'] / 1e9:.1f} GFLOP "
        f"({flops['attention'] / flops['needed']:.0%} of it attention) at "
        f"{rate['operations_per_second'] / 1e9:.1f} GFLOP/s ({rate['way']})",
        "the fastest product of each library: "
        + "; ".join(
            f"{own['operations_per_second'] / 1e9:.1f} GFLOP/s ({own['way']})" for own in case["own_products"].values()
        ),
    ]
    if case["faster_reference"] is not None:
        ratio = case["sides"]["ours"]["times_reference"]
        faster = case["sides"][case["faster_reference"]]["label"]
        lines.append(f"[bold]{ratio:.2f} times as fast as the faster reference ({faster})[/bold]")
    lines += [f"{name} is absent: {escape(reason)}" for name, reason in case["absent"].items()]
    verdict = "the same losses" if case["agreed"] else "LOSSES DISAGREE"
    apart = ", ".join(f"{name} {distance:.1e}" for name, distance in case["disagreement"].items())
    lines.append(f"{verdict} in the first two steps: relative distance from ours {apart}")
    lines += other_work(case["model"], case["other_work"])
    columns = ("", "ms a step", "tokens/s", "first s", "MB", "x floor", "x own", "speed")
    return [make_table(case["name"], columns, rows, "jax_tformer"), *(f"  {line}" for line in lines)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
