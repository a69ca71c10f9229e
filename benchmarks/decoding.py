"""Decoding side by side with PyTorch: `python -m benchmarks.decoding [--device gpu] [--out FILE] [--quick]`."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MEGABYTES = {"cpu": 512, "gpu": 4096}


def main(arguments: Sequence[str]) -> int:
    """Status 1 where sides disagree about a token that is no tie (the figures are written all the same) or fail."""
    options = _options(arguments)
    # The smoke test runs in one process; on an accelerator both frameworks need their environment.
    alone = not options.quick or options.device == "gpu"
    if alone:
        # This process only asks the others, and takes no accelerator.
        os.environ["JAX_PLATFORMS"] = "cpu"

    # Every process of a side imports this file again; only here is the rest needed.
    from rich.console import Console

    from benchmarks.cases import full, quick
    from benchmarks.harness import Alone, Here, SideFailed, side_environment
    from benchmarks.machine import cores, describe_machine
    from benchmarks.measure import measure_suite
    from benchmarks.report import notes, print_report

    began, console = time.perf_counter(), Console()
    if not console.is_terminal:
        console.width = 120

    def start(kind: str, *given: Any) -> Alone | Here:
        return Alone(kind, *given, environment=side_environment(kind, options.device)) if alone else Here(kind, *given)

    def say(text: str) -> None:
        console.print(f"{time.perf_counter() - began:5.0f} s  {text}", highlight=False)

    try:
        # 1. What reads the memory, between the turns of the others.
        megabytes = 4 if options.quick else _MEGABYTES[options.device]
        reading = start("benchmarks.bandwidth:Bandwidth", options.device, megabytes, cores())

        # 2. Every model: its sides, its cases, the cost of a token by position.
        suites = [
            measure_suite(suite, start, reading, options.device, options.rounds, compiled=not options.quick, say=say)
            for suite in (quick() if options.quick else full())
            if options.model in (None, suite.model)
        ]
        reading.close()
    except SideFailed as error:
        print(f"python -m benchmarks.decoding: {error}", file=sys.stderr)
        return 1

    # 3. What came out.
    report: dict[str, Any] = {
        "machine": describe_machine(options.device),
        "megabytes": megabytes,
        "suites": [suite.as_dict() for suite in suites],
        "seconds": time.perf_counter() - began,
    }
    report["notes"] = notes(report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    print_report(report, console)
    console.print(f"written to {options.out} after {report['seconds']:.0f} s", highlight=False, soft_wrap=True)
    return 0 if all(case["agreed"] for suite in report["suites"] for case in suite["cases"]) else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="where all sides compute (default: cpu)"
    )
    parser.add_argument("--model", choices=("gpt2", "vaswani-base"), help="this one alone (default: both)")
    parser.add_argument("--rounds", type=_positive, help="turns of every side in every case (default: up to 5)")
    parser.add_argument("--quick", action="store_true", help="tiny models: shows that it runs, measures nothing")
    default = Path("benchmarks/results/decoding.json")
    parser.add_argument("--out", type=Path, default=default, metavar="FILE", help=f"JSON (default: {default})")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
