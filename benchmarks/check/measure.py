"""What is measured anew: steps of the training cases, tokens of GPT-2, starts of train.py; ours alone, by turns."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.check.kept import Figure, Spread
from benchmarks.decoding.measure import Suite, measure_suite, suites
from benchmarks.session import Session, by_turns, spread
from benchmarks.startup.programs import COLD, TINY, WARM, Programs
from benchmarks.train_step import measure_case
from benchmarks.training_cases import TrainingCase, cases
from jax_tformer_comparison.machine import Neighbours, cores

PARTS = ("training", "decoding", "start-up")
_ROUNDS, _MEGABYTES = 3, 512
_IMPORTS = "imports"


class Found(NamedTuple):
    """The figures of cases that are measured together, by name, and the share of other work meanwhile."""

    figures: dict[str, Figure]
    other_work: float | None


Measure = Callable[[Session], Found]


def parts(wanted: str | None, *, quick: bool) -> Iterator[Measure]:
    """What is measured together: every case of training, all of decoding, all of start-up; or of the one `wanted`."""
    if wanted in (None, "training"):
        for case in cases("cpu", quick=quick):
            yield _training(case)
    if wanted in (None, "decoding"):
        yield _decoding
    if wanted in (None, "start-up"):
        yield _start_up


def _training(case: TrainingCase) -> Measure:
    def measure(session: Session) -> Found:
        found = measure_case(replace(case, rounds=_ROUNDS), session, alone=True)
        rates = found["products"]["ways"][found["own_products"]["jax"]["way"]]
        products = spread([found["flops"]["needed"] / rate for rate in rates])
        step = found["sides"]["ours"]["step_seconds"]
        return Found({f"training: {case.name}": _figure(step, products)}, found["other_work"])

    return measure


def _decoding(session: Session) -> Found:
    gpt2 = suites(quick=session.quick)[0]
    alone = Suite(gpt2.model, gpt2.config, tuple(replace(case, reference_tokens=0) for case in gpt2.cases))
    megabytes = 4 if session.quick else _MEGABYTES
    reading = session.start("benchmarks.bounds:Bandwidth", session.device, megabytes, cores())
    try:
        found = measure_suite(alone, session, reading, alone=True)
    finally:
        reading.close()
    return Found({_decoded(case): _token(case) for case in found["cases"]}, found["other_work"])


def _decoded(case: Mapping[str, Any]) -> str:
    return f"decoding: gpt2, batch {case['batch']}, {case['prompt']} + {case['new_tokens']} tokens"


def _token(case: Mapping[str, Any]) -> Figure:
    rates = case["bandwidth"]["ways"][case["bandwidth"]["way"]]
    once = spread([(case["weight_bytes"] + case["cache_bytes"]) / rate for rate in rates])
    return _figure(case["sides"]["ours"]["step_seconds"], once)


def _start_up(session: Session) -> Found:
    session.say("start-up, python-docs: cold, warm ...")
    others, flags = Neighbours(), TINY.split() if session.quick else []
    with tempfile.TemporaryDirectory() as temporary:
        programs = Programs(Path(temporary), session.device)

        def measure(kind: str) -> float:
            if kind == _IMPORTS:
                return programs.small(_IMPORTS)
            return programs.first_step("python-docs", flags, kind)["first_step"]

        turns = by_turns([COLD, WARM, _IMPORTS], session.rounds(1 if session.quick else _ROUNDS), measure)
    imports, size = spread(turns[_IMPORTS]), ", tiny" if session.quick else ""
    names = {kind: f"start-up: python-docs{size}, {kind}" for kind in (COLD, WARM)}
    return Found({name: _figure(spread(turns[kind]), imports) for kind, name in names.items()}, others.share())


def _figure(seconds: Mapping[str, float], machine: Mapping[str, float]) -> Figure:
    return Figure(Spread(**seconds), Spread(**machine))
