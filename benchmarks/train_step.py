"""Training side by side with PyTorch: `python -m benchmarks.train_step [--device gpu] [--model gpt2] [--quick]`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def main(arguments: Sequence[str]) -> int:
    """Status 1 where sides with the same weights disagree about the loss (the figures are written) or ours fails."""
    # Every process of a side imports this file again; only here is the rest needed.
    from benchmarks.output import Session, options

    given = options("train_step", __doc__, arguments, _model_option)
    session = Session(given)

    from benchmarks.harness import SideFailed
    from benchmarks.training_cases import full, quick
    from benchmarks.training_measure import measure_case

    cases = (quick if given.quick else full)(given.device)
    known = [case.model for case in cases]
    if given.model not in (None, *known):
        print(f"--model is {given.model!r}; expected one of {', '.join(map(repr, known))}", file=sys.stderr)
        return 2
    try:
        found = [
            measure_case(case, session, compiled=not given.quick).as_dict()
            for case in cases
            if given.model in (None, case.model)
        ]
    except SideFailed as error:
        print(f"python -m benchmarks.train_step: {error}", file=sys.stderr)
        return 1
    session.finish({"cases": found}, [item for case in found for item in _shown(case)], _NOTES)
    return 0 if all(case["agreed"] for case in found) else 1


def _model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="this case alone, as the tables name it (default: all)")


_NOTES = (
    "ms a step: median of all steps (A B A B), in brackets min..max; forward, backward, clipping and AdamW, each step "
    "waited for; no dropout; the first of every turn is not counted. tokens/s counts source and target.",
    "speed: that of the faster torch_ref, eager or compiled = 1. HF: Hugging Face's model with its own loss and "
    "attention kernels and AdamW as one kernel; the compiled torch_ref has that AdamW too.",
    "of rate: operations that a step needs (causal attention counted half), over what the fastest matrix product "
    "found could do in that time; x floor is the inverse. The products are measured between the turns.",
    "MB: the most that the side's process held from the first step on, compiler and libraries included (+ what was "
    "allocated on the accelerator). first s: the first step, compilation included.",
)


def _shown(case: Mapping[str, Any]) -> list[Any]:
    from rich.markup import escape

    from benchmarks.output import make_table, megabytes, milliseconds, other_work_line

    rows = []
    for name, side in case["sides"].items():
        speed = side["times_reference"]
        cells = (
            side["label"],
            milliseconds(side["step_seconds"], 1),
            f"{side['tokens_per_second']:.0f}",
            f"{side['first_step_seconds']:.1f}",
            megabytes(side["peak_memory"], side["device_memory"]),
            f"{side['of_rate']:.0%}",
            f"{side['times_floor']:.2f}",
            "" if speed is None else f"{speed:.2f}",
        )
        rows.append([f"[bold]{cell}[/bold]" for cell in cells] if name == "ours" else cells)
    rate, flops = case["products"], case["flops"]
    lines = [
        f"floor: {1000 * case['floor_seconds']:.1f} ms/step for {flops['needed'] / 1e9:.1f} GFLOP "
        f"({flops['attention'] / flops['needed']:.0%} of it attention) at "
        f"{rate['operations_per_second'] / 1e9:.1f} GFLOP/s ({rate['way']})"
    ]
    if case["faster_reference"] is not None:
        ratio = case["sides"]["ours"]["times_reference"]
        faster = case["sides"][case["faster_reference"]]["label"]
        lines.append(f"[bold]{ratio:.2f} times as fast as the faster reference ({faster})[/bold]")
    lines += [f"{name} is absent: {escape(reason)}" for name, reason in case["absent"].items()]
    verdict = "the same losses" if case["agreed"] else "LOSSES DISAGREE"
    apart = ", ".join(f"{name} {distance:.1e}" for name, distance in case["disagreement"].items())
    lines.append(f"{verdict} in the first two steps: relative distance from ours {apart}")
    lines += filter(None, [other_work_line(case["model"], case["other_work"])])
    columns = ("", "ms a step", "tokens/s", "first s", "MB", "of rate", "x floor", "speed")
    return [make_table(case["name"], columns, rows), *(f"  {line}" for line in lines)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
