"""Memory of a training step by batch and context: `python -m benchmarks.memory [--device gpu] [--quick]`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from benchmarks.session import Report, Session, make_table, megabytes, run_benchmark
from benchmarks.sides import OURS, REFERENCE
from benchmarks.training_cases import TOLERANCE, BatchShape, architecture, bfloat16, small_gpt, tiny
from jax_tformer.config import Remat, TransformerConfig
from jax_tformer_comparison.machine import Neighbours
from jax_tformer_comparison.sides import Alone, Here

_REFERENCE = "torch_ref"
_NOTES = (
    "MB of the process, each side in a fresh one. libraries: before there was a model. first step: the most while "
    "compiling and computing it. later: the most in the steps after it, the compiler's memory handed back. its "
    "own: later without the libraries, that is weights, gradients, AdamW's moments and activations.",
    "none, dots, full: jax_tformer with that ComputeConfig.remat; what is chosen by default is printed in bold. "
    "torch_ref is eager.",
)


def main(arguments: Sequence[str]) -> int:
    """Status 1 where two sides disagree about the loss or one fails."""
    return run_benchmark("memory", __doc__, arguments, _measure)


def _measure(session: Session) -> Report:
    cases = [_measure_case(session, *case) for case in _cases(session)]
    one = ["This was --quick: all sides in one process, and the figures mean nothing."] if not session.alone else []
    gpu = ["its own: the most on the device; JAX counts the first step in."] if session.device == "gpu" else []
    shown = [_table(case) for case in cases]
    return Report({"cases": cases}, shown, [*_NOTES, *one, *gpu], all(case["agreed"] for case in cases))


def _cases(session: Session) -> list[tuple[str, TransformerConfig, BatchShape]]:
    """Name, config and shape of each."""
    translator = architecture("vaswani-base")
    if session.quick:
        return [("small gpt", tiny(small_gpt()), BatchShape(2, 8))]
    if session.device == "cpu":
        small = [("small gpt", small_gpt(), shape) for shape in (BatchShape(8, 256), BatchShape(2, 1024))]
        return [*small, ("vaswani-base", translator, BatchShape(16, 64, 64))]
    sizes = [(8, 256), (16, 256), (4, 1024), (16, 1024)]
    gpt2 = [("gpt2", bfloat16(architecture("gpt2")), BatchShape(*size)) for size in sizes]
    return [*gpt2, ("vaswani-base", bfloat16(translator), BatchShape(64, 256, 256))]


def _measure_case(session: Session, model: str, config: TransformerConfig, shape: BatchShape) -> dict[str, Any]:
    """All sides of a case start together, to spare time, and train one after the other."""
    name, others = f"{model}, {shape}", Neighbours()
    session.say(f"{name} ...")
    # On a processor "auto" is "dots".
    chosen = [remat for remat in get_args(Remat) if remat != "auto" or session.device == "gpu"]
    sides = {}
    for remat in chosen:
        ours = replace(config, compute=replace(config.compute, remat=remat))
        sides[remat] = session.start(f"{OURS}:training", ours, shape, session.device)
    sides[_REFERENCE] = session.start(f"{REFERENCE}:training", config, shape, session.device, uses_jax=False)
    try:
        figures = {label: _measure_side(side, session.rounds(1)) for label, side in sides.items()}
    finally:
        for side in sides.values():
            side.close()
    reference = figures[_REFERENCE]
    for found in figures.values():
        found["of_reference"] = found["own"] / reference["own"]
    tolerance = TOLERANCE[config.compute.dtype]
    return {
        "model": model,
        "name": name,
        "shape": shape._asdict(),
        "dtype": config.compute.dtype,
        "sides": figures,
        "tolerance": tolerance,
        "agreed": all(abs(side["loss"] / reference["loss"] - 1) <= tolerance for side in figures.values()),
        "other_work": others.share(),
    }


def _measure_side(side: Alone | Here, later_steps: int) -> dict[str, Any]:
    libraries = side.call("libraries_memory")
    side.call("forget_peak")
    side.call("steps", 1)
    loss, first = side.call("loss"), side.call("peak_memory")
    side.call("forget_peak")
    side.call("steps", later_steps)
    later, device = side.call("peak_memory"), side.call("device_memory")
    return {
        "libraries": libraries,
        "first_step_peak": first,
        "later_peak": later,
        # In one process for all (--quick) there may be nothing left.
        "own": max(later - libraries, 1) if device is None else device,
        "device_memory": device,
        "loss": loss,
    }


def _table(case: Mapping[str, Any]) -> Any:
    rows = []
    for label, side in case["sides"].items():
        later = megabytes(side["later_peak"], side["device_memory"])
        host = [f"{side[name] / 1e6:.0f}" for name in ("libraries", "first_step_peak")]
        rows.append([label, *host, later, f"{side['own'] / 1e6:.0f}", f"{side['of_reference']:.2f}"])
    verdict = "" if case["agreed"] else ": LOSSES DISAGREE"
    columns = ("", "libraries", "first step", "later", "its own", "of torch_ref's")
    default = "auto" if "auto" in case["sides"] else "dots"
    return make_table(f"{case['name']}, {case['dtype']}, MB{verdict}", columns, rows, default)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
