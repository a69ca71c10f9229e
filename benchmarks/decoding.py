"""Decoding side by side with PyTorch: `python -m benchmarks.decoding [--device gpu] [--out FILE] [--quick]`."""

import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bounds import cache_bytes, weight_bytes
from benchmarks.session import (
    Kinds,
    ModelOptions,
    Report,
    Session,
    Sides,
    by_turns,
    make_table,
    megabytes,
    other_work,
    run_benchmark,
    spread,
)
from benchmarks.sides import HUGGING_FACE, OURS, REFERENCE, Decoded, Prompts, draw_prompts
from jax_tformer.config import TransformerConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.hub.families import llama
from parity.machine import count_cores
from twin.machine import Neighbours
from twin.sides import Alone, Here, SideFailed

TIE = 1e-4
"""Where two sides choose different tokens, float32 may be the reason if the logits are no further apart than this."""
_OURS, _DYNAMIC, _STATIC, _OWN_WEIGHTS = (
    "jax_tformer",
    "HF, dynamic cache",
    "HF, static cache",
    "BART (HF), own weights",
)
_REFERENCE, _READING = "torch_ref, no cache", "reading"
_CASE_SECONDS = 60.0
"""After this long, the sides of a case get no third turn."""
_MEGABYTES = {"cpu": 512, "gpu": 4096}
"""What is read to see how fast the memory is."""

_NOTES = (
    "tokens/s: new tokens of all rows; 'with prompt' counts the time of reading the prompt (or source) too, "
    "and ms/step leaves it out (a generation of one token is subtracted). Of one token, ms/step is the time to it.",
    "median of the turns (A B A B), in brackets min..max. 'speed' is that of the first Hugging Face side = 1.",
    "bound: weights and cache that a step reads, over the speed of the fastest way of reading a large array, "
    "measured between the turns.",
    "MB: the most that the side's process held while compiling and decoding, libraries and weights included, "
    "up to and with this case; each side is alone in its process, but for --quick, on a processor with huge pages.",
    "HF: Hugging Face's generate, its static cache compiled, but for --quick; BART: of vaswani-base's shape. "
    "torch_ref has no cache and computes the whole forward pass for every token, so that only a few tokens are "
    "measured, once.",
)
"""What the figures mean, a line each."""

LLAMA = replace(
    llama.TEMPLATE,
    d_model=768,
    decoder=replace(llama.STACK, num_layers=12, num_heads=12, key_value_heads=4, feedforward_width=2048),
)
"""The shape of a Llama with about as many parameters as the smallest GPT-2: 124,668,672."""


@dataclass(frozen=True)
class Case:
    """One setting in which all sides decode."""

    batch: int
    prompt: int
    """Tokens of each prompt, or of each source."""
    new_tokens: int
    """Where it is 1, the time of a step is the time to the first token."""
    rounds: int
    reference_tokens: int = 0
    """Tokens that the side without a cache decodes; 0: it has no part in this case."""
    beams: int = 1

    @property
    def name(self) -> str:
        """For people."""
        search = f"beam search, {self.beams} beams" if self.beams > 1 else "greedy"
        return f"batch {self.batch}, {search}: {self.prompt} + {self.new_tokens} tokens"


class Suite(NamedTuple):
    """One model and its cases, in the order of their needs."""

    model: str
    config: TransformerConfig
    cases: tuple[Case, ...]

    @property
    def translates(self) -> bool:
        """Whether it has a source to read."""
        return self.config.encoder is not None


def suites(*, quick: bool) -> tuple[Suite, ...]:
    """The figures that are published; quick: the same on models of no size, to see whether it runs, not how fast."""
    gpt2, translator = ARCHITECTURES["gpt2"], ARCHITECTURES["vaswani-base"]
    if quick:
        from twin.cases import reduced  # which imports JAX

        case, first = Case(2, 4, 4, rounds=2, reference_tokens=2), Case(2, 4, 1, rounds=1)
        return (
            Suite("gpt2", reduced(gpt2), (case, first)),
            Suite("vaswani-base", reduced(translator), (case, Case(2, 4, 4, rounds=2, beams=2))),
        )
    first_tokens = [Case(rows, length, 1, 5) for rows, length in ((1, 32), (1, 128), (1, 512), (1, 992), (8, 128))]
    one, eight = Case(1, 128, 128, rounds=4, reference_tokens=8), Case(8, 128, 128, rounds=3, reference_tokens=3)
    pairs = (
        Case(1, 64, 64, rounds=5, reference_tokens=8),
        Case(8, 64, 64, rounds=5, reference_tokens=4),
        Case(1, 64, 64, rounds=5, beams=4),
        Case(8, 64, 64, rounds=3, beams=4),
    )
    return (
        Suite("gpt2", gpt2, (one, eight, *first_tokens)),
        Suite("llama", LLAMA, (Case(1, 128, 128, rounds=4), Case(8, 128, 128, rounds=3))),
        Suite("vaswani-base", translator, pairs),
    )


class Turn(NamedTuple):
    """One turn of one side: the first token alone, and all of them."""

    first: Decoded
    whole: Decoded


def _measure(session: Session) -> Report:
    chosen = session.chosen(suites(quick=session.quick))
    read_megabytes = 4 if session.quick else _MEGABYTES[session.device]
    cases, shown = dict[str, dict[str, Any]](), list[Any]()
    for suite in chosen:
        others = Neighbours()
        cases |= _measure_suite(suite, session, read_megabytes)
        shown += ["", *other_work(suite.model, others.share())]
    shown += [item for name, case in cases.items() for item in _shown(name, case)]
    ours = {name: case["seconds"] for name, case in cases.items()}
    agreed = all(case["agreed"] for case in cases.values())
    return Report({"megabytes": read_megabytes, "cases": cases}, ours, shown, _NOTES, agreed)


def _measure_suite(suite: Suite, session: Session, read_megabytes: int) -> dict[str, dict[str, Any]]:
    """Measures all cases of a model, and between them how fast the memory is read.

    Raises SideFailed, unless the static cache fails, which may be absent.
    """
    given = (suite.config, session.device)
    # Ours is first, so that its processes are the first to be ready.
    kinds: Kinds = {_OURS: (f"{OURS}:Decoding", *given)}
    kinds[_OWN_WEIGHTS if suite.translates else _DYNAMIC] = (f"{HUGGING_FACE}:Decoding", *given, "dynamic")
    if not suite.translates:
        static = "static" if session.quick else "static compiled"
        kinds[_STATIC] = (f"{HUGGING_FACE}:Decoding", *given, static)
    kinds[_REFERENCE] = (f"{REFERENCE}:Decoding", *given)
    kinds[_READING] = ("benchmarks.bounds:Bandwidth", session.device, read_megabytes, count_cores())
    with session.sides(kinds) as sides:
        return {
            f"{suite.model}, {case.name}": _measure_case(suite.config, case, sides, session) for case in suite.cases
        }


def _measure_case(config: TransformerConfig, case: Case, sides: Sides, session: Session) -> dict[str, Any]:
    session.say(f"{case.name} ...")
    prompts, absent = draw_prompts(config.vocab_size or 0, case.batch, case.prompt), dict[str, str]()

    def decode(name: str, count: int) -> Decoded:
        return sides[name].call("decode", prompts, count, case.new_tokens, case.beams)

    def turn(name: str, count: int = case.new_tokens) -> Turn:
        first = decode(name, 1)
        return Turn(first, decode(name, count) if count > 1 else first)

    compile_seconds = {}
    left_out = (_REFERENCE, _READING, *([_STATIC] if case.new_tokens == 1 else []))
    for name in [name for name in sides if name not in left_out]:
        # Ours is compiled for a number of tokens; what the others compile does not depend on it.
        count = case.new_tokens if name == _OURS else min(4, case.new_tokens)
        try:
            first = decode(name, count)
            decode(name, 1)
            compile_seconds[name] = max(first.seconds - decode(name, count).seconds, 0.0)
        except SideFailed as error:
            if name != _STATIC:
                raise
            absent[name] = str(error)
    calls: dict[str, Any] = {name: partial(turn, name) for name in compile_seconds}
    calls[_READING] = partial(sides[_READING].call, "measure")
    turns = by_turns(calls, session.rounds(case.rounds), seconds=_CASE_SECONDS)
    rates = turns.pop(_READING)
    way, bandwidth = max(
        ((name, statistics.median(turn[name] for turn in rates)) for name in rates[0]), key=itemgetter(1)
    )
    if case.reference_tokens:
        # One turn of a few tokens: every one takes the whole forward pass.
        decode(_REFERENCE, 1)
        turns[_REFERENCE] = [turn(_REFERENCE, case.reference_tokens)]
    read = weight_bytes(config), cache_bytes(config, case.batch, case.prompt, case.new_tokens, case.beams)
    bound = sum(read) / bandwidth if case.new_tokens > 1 else None
    steps = {name: [_step_seconds(name, turn) for turn in taken] for name, taken in turns.items()}
    medians = {name: statistics.median(taken) for name, taken in steps.items()}
    theirs = medians[_DYNAMIC if _DYNAMIC in medians else _OWN_WEIGHTS]
    found = {
        name: {
            "tokens/s": case.batch / medians[name],
            "with prompt": statistics.median(turn.whole.tokens.size / turn.whole.seconds for turn in taken),
            "ms/step": spread(steps[name], 1000),
            "speed": theirs / medians[name],
            "of bound": bound / medians[name] if bound and name != _REFERENCE else None,
            "compile s": compile_seconds.get(name),
            "MB": megabytes(sides[name]),
        }
        for name, taken in turns.items()
    }
    tokens = {name: taken[0].whole.tokens for name, taken in turns.items()}
    agreement = {
        name: _agreement(prompts, tokens[_OURS], theirs, sides[_REFERENCE])
        for name, theirs in tokens.items()
        if name not in (_OURS, _OWN_WEIGHTS)
    }
    return asdict(case) | {
        "seconds": spread(steps[_OURS]),
        "weight_bytes": read[0],
        "cache_bytes": read[1],
        "bandwidth": {"way": way, "bytes_per_second": bandwidth},
        "bound_seconds": bound,
        "sides": found,
        "absent": absent,
        "agreement": agreement,
        "agreed": all(rows["largest_gap"] <= TIE for rows in agreement.values()),
        # Agreement about rows of one token says little.
        "different_tokens": float(np.mean([len(np.unique(row)) for row in tokens[_OURS]])),
    }


def _step_seconds(name: str, turn: Turn) -> float:
    """Seconds of a token after the first; without a cache, or with no token but the first, each is like the others."""
    new_tokens = turn.whole.tokens.shape[1]
    rest = turn.whole.seconds - turn.first.seconds
    # In a smoke test the first token may take longer than all of them.
    cached = name != _REFERENCE and new_tokens > 1 and rest > 0
    return rest / (new_tokens - 1) if cached else turn.whole.seconds / new_tokens


def _agreement(prompts: Prompts, ours: np.ndarray, others: np.ndarray, judge: Alone | Here) -> dict[str, float]:
    """Counts the rows that agree with ours; of the others, says how far apart the two tokens' logits were."""
    gaps = []
    for prompt, one, other in zip(prompts, ours[:, : others.shape[1]], others, strict=True):
        if (one != other).any():
            at = int((one != other).argmax())
            gaps.append(judge.call("gap", prompt, one[:at].tolist(), int(one[at]), int(other[at])))
    return {"rows": len(prompts), "equal_rows": len(prompts) - len(gaps), "largest_gap": float(np.max(gaps, initial=0))}


def _shown(name: str, case: Mapping[str, Any]) -> list[Any]:
    """The table of a case, and lines below it."""
    lines = [f"{name} is absent: {reason}" for name, reason in case["absent"].items()]
    if case["bound_seconds"] is not None:
        lines.append(
            f"bound: {1000 * case['bound_seconds']:.2f} ms/step for {case['weight_bytes'] / 1e6:.1f} MB of weights "
            f"and {case['cache_bytes'] / 1e6:.1f} MB of cache at "
            f"{case['bandwidth']['bytes_per_second'] / 1e9:.1f} GB/s ({case['bandwidth']['way']})"
        )
    for other, found in case["agreement"].items():
        line = f"the same tokens as {other}: {found['equal_rows']} of {found['rows']} rows"
        if found["equal_rows"] < found["rows"]:
            tie = "ties in float32" if found["largest_gap"] <= TIE else "NO TIES"
            line += f"; elsewhere the two logits are up to {found['largest_gap']:.1e} apart: {tie}"
        lines.append(line)
    lines.append(f"different tokens in a row: {case['different_tokens']:.1f} on average")
    return [make_table(name, case["sides"], _OURS), *(f"  {line}" for line in lines)]


main = partial(run_benchmark, "decoding", __doc__, measure=_measure, kind=ModelOptions)
"""Status 1 where sides disagree about a token that is no tie, or fail."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
