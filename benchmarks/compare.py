"""Whether ours became slower than in a result that was saved on the same processor: `--against FILE`."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from jax_tformer.config.errors import InputError
from twin.machine import Machine

TOLERANCE = 0.1
"""A case became slower if its median grew by more than this fraction."""
_SAME = ("device", "processor", "generation", "cores")
"""What two results must have in common before their times are compared."""


def read_saved(path: Path, benchmark: str, machine: Machine) -> dict[str, float]:
    """Reads the median seconds of ours in each case of a file that `--out` has written.

    Raises InputError if the file is damaged, or belongs to another benchmark or another processor.
    """
    try:
        saved = json.loads(path.read_text("utf-8"))
        medians = {str(name): float(times["median"]) for name, times in saved["ours"].items()}
        of, where = saved["benchmark"], {name: saved["machine"][name] for name in _SAME}
        if of != benchmark or not all(0 < median < math.inf for median in medians.values()):
            raise ValueError
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"--against {path} cannot be read as a result of this benchmark; expected a file that "
            f"python -m benchmarks.{benchmark} --out has written"
        ) from error
    for name, found in where.items():
        if found != getattr(machine, name):
            raise InputError(
                f"--against {path} was measured with {name} {found!r}, and here it is {getattr(machine, name)!r}; "
                "expected a result of this processor: measure the earlier commit here with --out"
            )
    return medians


def compare(saved: Mapping[str, float], ours: Mapping[str, Mapping[str, float]]) -> bool:
    """Prints a line for each case of `ours`, beside the saved medians; returns whether the floor held.

    It did not if a case became slower, or if no case is saved, as a floor under nothing holds nothing.
    """
    ratios = {name: times["median"] / saved[name] for name, times in ours.items() if name in saved}
    for name, times in ours.items():
        if name not in ratios:
            print(f"{name}: nothing is saved")
            continue
        ratio = ratios[name]
        verdict = "SLOWER" if ratio > 1 + TOLERANCE else "faster" if ratio < 1 - TOLERANCE else "as fast"
        print(
            f"{name}: {verdict}, {1000 * times['median']:.1f} ms now and {1000 * saved[name]:.1f} ms saved, "
            f"{ratio:.2f} times as long"
        )
    return bool(ratios) and max(ratios.values()) <= 1 + TOLERANCE
