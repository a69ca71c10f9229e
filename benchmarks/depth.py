"""What depth and length cost in training: `python -m benchmarks.depth [--device gpu] [--out FILE] [--quick]`."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any


def main(arguments: Sequence[str]) -> int:
    """Status 1 where a side fails."""
    # Every process of a side imports this file again; only here is the rest needed.
    from benchmarks.output import Session, options, other_work_line

    given = options("depth", __doc__, arguments)
    session = Session(given)

    from benchmarks.depth_measure import full, measure_compilation, measure_depths, measure_lengths, quick
    from benchmarks.harness import SideFailed
    from jax_tformer_comparison.machine import Neighbours

    plan, others = (quick if given.quick else full)(given.device), Neighbours()
    try:
        compilation, depths = measure_compilation(session, plan), measure_depths(session, plan)
        lengths = measure_lengths(session, plan)
    except SideFailed as error:
        print(f"python -m benchmarks.depth: {error}", file=sys.stderr)
        return 1
    share = others.share()
    figures = {"compilation": compilation, "depths": depths, "lengths": lengths, "other_work": share}
    shown = [_compilation_table(compilation), _depths_table(depths), _lengths_table(lengths)]
    notes = [
        "Medians of the turns (A B A B), in brackets min..max. Compilation is tracing, lowering and compiling of the "
        "whole training step, with nothing kept from before.",
        "Layers run under one scan, so that compilation must not grow with depth, and the time of a step must grow as "
        "the operations do.",
        "/ operations: growth of the time over growth of the operations that a step needs (causal attention counted "
        "half); 1 is proportional.",
        *filter(None, [other_work_line("all", share)]),
    ]
    session.finish(figures, shown, notes)
    return 0


def _compilation_table(found: Mapping[str, Any]) -> Any:
    from benchmarks.output import make_table

    rows = [
        (
            str(entry["layers"]),
            f"{entry['seconds']['median']:.2f} ({entry['seconds']['low']:.2f}..{entry['seconds']['high']:.2f})",
            f"{entry['growth']:.2f}",
        )
        for entry in found["entries"]
    ]
    title = f"Compilation of a step, width {found['width']}: {found['growth']:.2f} times as long for "
    title += f"{found['from_to'][1]} layers as for {found['from_to'][0]}"
    return make_table(title, ("layers", "s", "growth"), rows)


def _depths_table(found: Mapping[str, Any]) -> Any:
    from benchmarks.output import make_table, milliseconds

    rows = [
        (
            f"{entry['label']}, {entry['layers']} layers",
            milliseconds(entry["step_seconds"], 1),
            f"{entry['growth']:.2f}",
            f"{entry['flops_growth']:.2f}",
            f"{entry['over_flops']:.2f}",
        )
        for entry in found["entries"]
    ]
    title = f"Small GPT, {found['shape']['rows']} x {found['shape']['length']} tokens, by depth"
    return make_table(title, ("", "ms a step", "growth", "operations", "/ operations"), rows)


def _lengths_table(found: Mapping[str, Any]) -> Any:
    from benchmarks.output import make_table, milliseconds

    rows = [
        (
            f"{entry['shape']['rows']} x {entry['shape']['length']}",
            milliseconds(entry["step_seconds"], 1),
            f"{entry['growth']:.2f}",
            f"{entry['flops_growth']:.2f}",
            f"{entry['over_flops']:.2f}",
            f"{entry['operations_per_second'] / 1e9:.0f}",
        )
        for entry in found["entries"]
    ]
    title = f"Small GPT, {found['layers']} layers, {found['tokens']} tokens a step, by length of the rows"
    return make_table(title, ("rows", "ms a step", "growth", "operations", "/ operations", "GFLOP/s"), rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
