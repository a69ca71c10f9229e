"""Memory of a training step by batch and context: `python -m benchmarks.memory [--device gpu] [--quick]`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

_SEED = 0
_TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}
_REFERENCE = "torch_ref"


def main(arguments: Sequence[str]) -> int:
    """Status 1 where two sides disagree about the loss (the figures are written all the same) or one fails."""
    # Every process of a side imports this file again; only here is the rest needed.
    from benchmarks.output import Session, options

    given = options("memory", __doc__, arguments)
    session = Session(given)

    from benchmarks.harness import SideFailed

    try:
        cases = [_measure(session, *case) for case in _cases(given.device, quick=given.quick)]
    except SideFailed as error:
        print(f"python -m benchmarks.memory: {error}", file=sys.stderr)
        return 1
    notes = (
        "MB of the process, each side in a fresh one. libraries: before there was a model. first step: the most while "
        "compiling and computing it. later: the most in the steps after it, the compiler's memory handed back. its "
        "own: later without the libraries, that is weights, gradients, AdamW's moments and activations.",
        "none, dots, full: jax_tformer with that ComputeConfig.remat; what is chosen by default is printed in bold. "
        "torch_ref is eager.",
        *(["This was --quick: all sides in one process, and the figures mean nothing."] if not session.alone else []),
        *(["its own: the most on the device; JAX counts the first step in."] if given.device == "gpu" else []),
    )
    session.finish({"cases": cases}, [_table(case) for case in cases], notes)
    return 0 if all(case["agreed"] for case in cases) else 1


def _cases(device: str, *, quick: bool) -> list[tuple[str, Any, Any]]:
    """Name, config and shape of each."""
    from benchmarks.training_cases import small_gpt, tiny, without_dropout
    from benchmarks.training_sides import BatchShape
    from jax_tformer.presets import ARCHITECTURES

    gpt, translator = small_gpt(), without_dropout(ARCHITECTURES["vaswani-base"])
    if quick:
        return [("small gpt", tiny(gpt), BatchShape(2, 8))]
    if device == "cpu":
        shapes = [BatchShape(8, 256), BatchShape(2, 1024)]
        return [
            *(("small gpt", gpt, shape) for shape in shapes),
            ("vaswani-base", translator, BatchShape(16, 64, 64)),
        ]
    large = [without_dropout(ARCHITECTURES["gpt2"]), translator]
    gpt2, translator = (replace(config, compute=replace(config.compute, dtype="bfloat16")) for config in large)
    shapes = [BatchShape(8, 256), BatchShape(16, 256), BatchShape(4, 1024), BatchShape(16, 1024)]
    return [*(("gpt2", gpt2, shape) for shape in shapes), ("vaswani-base", translator, BatchShape(64, 256, 256))]


def _measure(session: Any, model: str, config: Any, shape: Any) -> dict[str, Any]:
    """All sides of a case start together, to spare time, and train one after the other."""
    from jax_tformer.config import Remat
    from jax_tformer_comparison.machine import Neighbours

    source = f"{shape.source} source and " if shape.source else ""
    name, others = f"{model}, {shape.rows} x {source}{shape.length} tokens", Neighbours()
    session.say(f"{name} ...")
    given, sides = (shape, _SEED, session.options.device), {}
    # On a processor "auto" is "dots".
    chosen = [remat for remat in get_args(Remat) if remat != "auto" or session.options.device == "gpu"]
    for remat in chosen:
        ours = replace(config, compute=replace(config.compute, remat=remat))
        sides[remat] = session.start("benchmarks.training_ours:Ours", ours, *given)
    sides[_REFERENCE] = session.start("benchmarks.training_torch:Reference", config, *given, uses_jax=False)
    try:
        figures = {label: _measure_side(side, session.options.rounds or 1) for label, side in sides.items()}
    finally:
        for side in sides.values():
            side.close()
    reference = figures[_REFERENCE]
    for side in figures.values():
        side["of_reference"] = side["own"] / reference["own"]
    tolerance = _TOLERANCE[config.compute.dtype]
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


def _measure_side(side: Any, later_steps: int) -> dict[str, Any]:
    libraries = side.call("libraries_memory")
    side.call("forget_peak")
    side.call("steps", 1)
    loss, first = side.call("loss"), side.peak_memory()
    side.call("forget_peak")
    side.call("steps", later_steps)
    later, device = side.peak_memory(), side.call("device_memory")
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
    from benchmarks.output import make_table, megabytes

    rows = []
    for label, side in case["sides"].items():
        later = megabytes(side["later_peak"], side["device_memory"])
        host = [f"{side[name] / 1e6:.0f}" for name in ("libraries", "first_step_peak")]
        cells = [label, *host, later, f"{side['own'] / 1e6:.0f}", f"{side['of_reference']:.2f}"]
        default = "auto" if "auto" in case["sides"] else "dots"
        rows.append([f"[bold]{cell}[/bold]" for cell in cells] if label == default else cells)
    verdict = "" if case["agreed"] else ": LOSSES DISAGREE"
    columns = ("", "libraries", "first step", "later", "its own", "of torch_ref's")
    return make_table(f"{case['name']}, {case['dtype']}, MB{verdict}", columns, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
