"""Decoding side by side with PyTorch: `python -m benchmarks.decoding [--device gpu] [--out FILE] [--quick]`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

_MEGABYTES = {"cpu": 512, "gpu": 4096}


def main(arguments: Sequence[str]) -> int:
    """Status 1 where sides disagree about a token that is no tie (the figures are written all the same) or fail."""
    # Every process of a side imports this file again; only here is the rest needed.
    from benchmarks.output import Session, options

    given = options("decoding", __doc__, arguments, _model_option)
    session = Session(given)

    from benchmarks.cases import full, quick
    from benchmarks.harness import SideFailed
    from benchmarks.measure import measure_suite
    from benchmarks.report import notes, shown
    from jax_tformer_comparison.machine import cores

    try:
        # 1. What reads the memory, between the turns of the others.
        megabytes = 4 if given.quick else _MEGABYTES[given.device]
        reading = session.start("benchmarks.bandwidth:Bandwidth", given.device, megabytes, cores())

        # 2. Every model: its sides, its cases, the cost of a token by position.
        suites = [
            measure_suite(
                suite, session.start, reading, given.device, given.rounds, compiled=not given.quick, say=session.say
            )
            for suite in (quick() if given.quick else full())
            if given.model in (None, suite.model)
        ]
        reading.close()
    except SideFailed as error:
        print(f"python -m benchmarks.decoding: {error}", file=sys.stderr)
        return 1

    # 3. What came out.
    figures: dict[str, Any] = {"megabytes": megabytes, "suites": [suite.as_dict() for suite in suites]}
    session.finish(figures, shown(figures), notes(megabytes))
    return 0 if all(case["agreed"] for suite in figures["suites"] for case in suite["cases"]) else 1


def _model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=("gpt2", "vaswani-base"), help="this one alone (default: both)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
