"""From the command to the first training step: `python -m benchmarks.startup [--all] [--text FILE] [--quick]`."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.session import Report, Session, by_turns, make_table, other_work, run_benchmark, show, spread
from benchmarks.startup.programs import COLD, TINY, TORCH, WARM, Programs
from twin.machine import Neighbours


def main(arguments: Sequence[str]) -> int:
    """Status 1 where a program fails."""
    return run_benchmark("startup", __doc__, arguments, _measure, _experiment_options)


def _measure(session: Session) -> Report:
    experiments = {"python-docs": TINY.split() if session.quick else []}
    if session.options.all:
        experiments["dates"] = []
    if session.options.text is not None:
        experiments["shakespeare-char"] = ["--data.path", str(session.options.text)]
    rounds, others = session.rounds(1 if session.quick else 2), Neighbours()
    turns: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        programs = Programs(Path(temporary), session.device)
        session.say("an interpreter that does nothing; train.py --help ...")
        alone = by_turns(["nothing", "help"], max(rounds, 3), programs.small)
        for name, flags in experiments.items():
            session.say(f"{name}: cold, warm, torch, by turns ...")
            turns[name] = by_turns([COLD, WARM, TORCH], rounds, partial(programs.first_step, name, flags))
        session.say("python-docs: chapter by chapter ...")
        # A warm one finds what the run before it has compiled.
        kinds = [WARM] if session.quick else [COLD, WARM]
        split = {kind: programs.chapters("python-docs", experiments["python-docs"], kind) for kind in kinds}
    figures: dict[str, Any] = {
        "nothing_seconds": spread(alone["nothing"]),
        "help_seconds": spread(alone["help"]),
        "experiments": {
            name: {
                kind: {figure: spread([turn[figure] for turn in found]) for figure in found[0]}
                for kind, found in kinds.items()
            }
            for name, kinds in turns.items()
        },
        "chapters": split,
        "other_work": others.share(),
    }
    for found in figures["experiments"].values():
        for kind in (COLD, WARM):
            found[f"{kind}_over_torch"] = found[kind]["first_step"]["median"] / found[TORCH]["first_step"]["median"]
    tiny = ", tiny" if session.quick else ""
    ours = {
        f"{name}{tiny}, {kind}": found[kind]["first_step"]
        for name, found in figures["experiments"].items()
        for kind in (COLD, WARM)
    }
    return Report(figures, ours, [*_tables(figures), *other_work("all of it", figures["other_work"])], _NOTES)


def _experiment_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="measures dates too")
    parser.add_argument("--text", type=Path, metavar="FILE", help="measures shakespeare-char too, on this text")


_NOTES = (
    "Seconds, median of the turns (cold, warm, torch, ...), in brackets min..max. cold: a fresh "
    "folder for what JAX compiles; warm: the same command again. first step: from the command until metrics.jsonl has "
    "its line.",
    "torch: a fresh process that imports torch, builds torch_ref's Trainer of the same model and makes one eager step "
    "on random ids; it reads no text, builds no tokenizer and writes no run folder.",
    "whole command: three steps, one evaluation batch, a checkpoint, a sample, a picture.",
    "The chapters are those of one run; 'load' is from JAX's cache of compiled programs. What is imported first brings "
    "along what others would have to import. Initialisation and step are compiled at the same time, so that chapters "
    "can add up to more than all; the rest is then 0.",
)


def _tables(figures: dict[str, Any]) -> list[Any]:
    rows = []
    for name, found in figures["experiments"].items():
        for kind in (COLD, WARM):
            cells = show(found[kind]["first_step"]), show(found[kind]["whole"]), f"{found[f'{kind}_over_torch']:.2f}"
            rows.append([f"{name}, {kind}", *cells])
        rows.append([f"{name}, torch", show(found[TORCH]["first_step"]), "", "1.00"])
    split = figures["chapters"]
    names = sorted(dict.fromkeys(name for found in split.values() for name in found), key="in all".__eq__)
    chapters = [[name, *(f"{found.get(name, 0.0):.2f}" for found in split.values())] for name in names]
    return [
        f"\npython train.py --help: {show(figures['help_seconds'])} s; "
        f"an interpreter that does nothing: {show(figures['nothing_seconds'])} s",
        make_table("from the command to the first step", ["", "first step s", "whole command s", "times torch"], rows),
        make_table("python-docs, chapter by chapter", ["seconds", *split], chapters),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
