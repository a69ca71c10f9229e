"""What became slower than the figures that are kept for this processor: `python -m benchmarks.check [--keep]`."""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.check.kept import Figure, Measured, add, file_name, read, versions
from benchmarks.check.measure import PARTS, parts
from benchmarks.check.verdicts import TOLERANCE, Verdict
from benchmarks.session import Report, Session, make_table, other_work, run_benchmark
from jax_tformer.errors import InputError, require
from jax_tformer_comparison.machine import DISTURBED, Machine, describe_machine

_KEPT = Path("benchmarks/kept")


def main(arguments: Sequence[str]) -> int:
    """Status 1 where a case became slower by more than 10%, and by more than its own noise."""
    return run_benchmark("check", __doc__, arguments, _measure, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", action="store_true", help="keeps the figures of cases that have none kept yet")
    parser.add_argument(
        "--kept", type=Path, metavar="FOLDER", help=f"the kept figures, a file for each processor (default: {_KEPT})"
    )
    parser.add_argument("--part", choices=PARTS, help="this alone (default: all)")


def _measure(session: Session) -> Report:
    options = session.options
    require(session.device == "cpu", "--device is gpu; expected cpu, of which alone figures are kept")
    folder, machine = _folder(options.kept, keep=options.keep), describe_machine("cpu")
    path = folder / file_name(machine, quick=session.quick)
    before = read(path)
    verdicts, new, shares = [], dict[str, Measured](), list[float | None]()
    for part in parts(options.part, quick=session.quick):
        looks = [part(session)]
        first = _verdicts(before, [looks[0].figures])
        if suspects := [verdict for verdict in first if verdict.slower]:
            for verdict in suspects:
                session.say(f"  {verdict.name}: {str(verdict).lower()} at first; a second look ...")
            looks.append(part(session))
        verdicts += _verdicts(before, [look.figures for look in looks])
        shares += [look.other_work for look in looks]
        new |= {
            name: Measured(figure, time.strftime("%Y-%m-%d"), versions(machine), looks[0].other_work)
            for name, figure in looks[0].figures.items()
        }
    kept = sorted(new.keys() - before.keys()) if options.keep else []
    if kept:
        add(path, machine, before, {name: new[name] for name in kept})
    figures = {
        "kept": str(path) if before else None,
        "cases": {verdict.name: _as_json(verdict) for verdict in verdicts},
        "measured": {name: asdict(measured) for name, measured in new.items()},
    }
    busy = max((share for share in shares if share is not None), default=None)
    shown = [
        _table(verdicts),
        *_lines(verdicts, path, before, machine, kept=bool(kept)),
        *_unmeasured(verdicts, before, options.part),
        *other_work("all of it", busy),
    ]
    if kept and busy is not None and busy > DISTURBED:
        shown.append(f"what was kept in such minutes hides what becomes slower: delete {path} and keep it anew")
    return Report(figures, shown, _NOTES, not any(verdict.slower for verdict in verdicts))


def _folder(given: Path | None, *, keep: bool) -> Path:
    """Where figures are kept. Raises InputError for a folder that is not there, or cannot be made."""
    folder = given or _KEPT
    if keep:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot keep figures in {folder}: {error.strerror}; name another folder") from error
        require(os.access(folder, os.W_OK), f"cannot keep figures in {folder}: it is read-only; name another folder")
    else:
        require(
            given is None or folder.is_dir(), f"--kept is {folder}, which is no folder; expected one, or --keep too"
        )
    return folder


def _verdicts(before: Mapping[str, Measured], looks: Sequence[Mapping[str, Figure]]) -> list[Verdict]:
    return [
        Verdict(name, before[name].figure if name in before else None, [look[name] for look in looks])
        for name in looks[0]
    ]


def _as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "kept": None if verdict.kept is None else asdict(verdict.kept),
        "looks": [asdict(look) for look in verdict.looks],
        "change": verdict.change,
        "slower": verdict.slower,
        "verdict": str(verdict),
    }


def _table(verdicts: Sequence[Verdict]) -> Any:
    rows = []
    for verdict in verdicts:
        before = ("", "") if verdict.kept is None else _cells(verdict.kept)
        (kept_ms, kept_times), (ms, times) = before, _cells(verdict.now)
        ratio = "" if verdict.change is None else f"{verdict.change:.2f}"
        rows.append((verdict.name, kept_ms, ms, kept_times, times, ratio, str(verdict)))
    columns = ("", "kept, ms", "now, ms", "kept, x", "now, x", "ratio", "verdict")
    return make_table("today beside the kept figures", columns, rows)


def _cells(figure: Figure) -> tuple[str, str]:
    return f"{1000 * figure.seconds.low:.1f}", f"{figure.times:.2f}"


def _lines(
    verdicts: Sequence[Verdict], path: Path, before: Mapping[str, Measured], machine: Machine, *, kept: bool
) -> list[str]:
    slower = [verdict for verdict in verdicts if verdict.slower]
    compared = [verdict for verdict in verdicts if verdict.kept is not None]
    found = []
    if not compared:
        of_what = "any of these" if before else "this processor"
        what = "" if kept else "; --keep keeps what this measures"
        found.append(f"no figures were kept for {of_what} ({path}), so nothing was compared{what}")
    elif slower:
        found.append(
            f"[bold]{len(slower)} of {len(compared)} became slower: {'; '.join(v.name for v in slower)}[/bold]"
        )
    else:
        found.append(f"none of {len(compared)} became slower by more than {TOLERANCE:.0%} and its noise")
    if any(verdict.faster for verdict in verdicts):
        found.append(f"to hold on to what became faster, take its entry out of {path} and run with --keep")
    others = {name: measured.versions for name, measured in before.items() if measured.versions != versions(machine)}
    if others:
        told = ", ".join(f"{name} {version}" for name, version in next(iter(others.values())).items())
        found.append(f"{len(others)} of the kept figures are of other versions, such as {told}")
    if kept:
        found.append(f"what had no figures has them now in {path}")
    return found


def _unmeasured(verdicts: Sequence[Verdict], before: Mapping[str, Measured], part: str | None) -> list[str]:
    gone = before.keys() - {verdict.name for verdict in verdicts}
    wanted = sorted(name for name in gone if part is None or name.startswith(f"{part}:"))
    return [f"kept, but measured no longer: {'; '.join(wanted)}"] if wanted else []


_NOTES = (
    "ms: of a training step, a step of decoding or a start; the least of the turns, since other work only ever adds.",
    "x: over what the machine needs for the same at best, in the same minutes: the step's products at the rate of "
    "JAX's fastest product, one reading of weights and cache, or a process that imports JAX.",
    "ratio: now over kept, of ms or of x, whichever is less. SLOWER: at each of two looks it is above 1.1 and above "
    "the usual kept turn over the best one, or above 1.25.",
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
