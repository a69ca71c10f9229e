"""Decoding side by side with PyTorch: `python -m benchmarks.decoding [--device gpu] [--out FILE] [--quick]`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bounds import best_way, cache_bytes, weight_bytes
from benchmarks.session import (
    ModelOptions,
    Report,
    Session,
    by_turns,
    gathered,
    make_table,
    megabytes,
    milliseconds,
    other_work,
    run_benchmark,
    spread,
)
from benchmarks.sides import HUGGING_FACE, OURS, REFERENCE, Decoded, draw_prompts
from benchmarks.training_cases import tiny
from jax_tformer.config import TransformerConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.hub.families import llama
from twin.machine import Neighbours, cores
from twin.sides import Alone, Here, SideFailed

TIE = 1e-4
"""Where two sides choose different tokens, float32 may be the reason if the logits are no further apart than this."""
_OURS, _THEIRS, _STATIC, _REFERENCE, _READING = "ours", "hugging face", "hugging face static", "reference", "reading"
_CASE_SECONDS = 60.0
"""After this long, the sides of a case get no third turn."""
_MEGABYTES = {"cpu": 512, "gpu": 4096}
"""What is read to see how fast the memory is."""

LLAMA = replace(
    llama.TEMPLATE,
    d_model=768,
    decoder=replace(llama.STACK, num_layers=12, num_heads=12, key_value_heads=4, feedforward_width=2048),
)
"""The shape of a Llama with about as many parameters as the smallest GPT-2: 124,668,672."""

Sides = dict[str, Alone | Here]


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
        case = Case(batch=2, prompt=4, new_tokens=4, rounds=2, reference_tokens=2)
        first = Case(batch=2, prompt=4, new_tokens=1, rounds=1)
        return (
            Suite("gpt2", tiny(gpt2, 1), (case, first)),
            Suite("vaswani-base", tiny(translator, 1), (case, replace(case, beams=2, reference_tokens=0))),
        )
    one, eight = Case(1, 128, 128, rounds=4), Case(8, 128, 128, rounds=3)
    pair = Case(1, 64, 64, rounds=5)
    first_tokens = [Case(rows, length, 1, 5) for rows, length in ((1, 32), (1, 128), (1, 512), (1, 992), (8, 128))]
    return (
        Suite("gpt2", gpt2, (replace(one, reference_tokens=8), replace(eight, reference_tokens=3), *first_tokens)),
        Suite("llama", LLAMA, (one, eight)),
        Suite(
            "vaswani-base",
            translator,
            (
                replace(pair, reference_tokens=8),
                replace(pair, batch=8, reference_tokens=4),
                replace(pair, beams=4),
                replace(pair, batch=8, rounds=3, beams=4),
            ),
        ),
    )


class Timed(NamedTuple):
    """One turn of one side: the first token alone, and all of them."""

    first: Decoded
    whole: Decoded


def main(arguments: Sequence[str]) -> int:
    """Status 1 where sides disagree about a token that is no tie, or fail."""
    return run_benchmark("decoding", __doc__, arguments, _measure, ModelOptions)


def _measure(session: Session) -> Report:
    chosen = session.chosen(suites(quick=session.quick))
    # What reads the memory, between the turns of the others.
    read_megabytes = 4 if session.quick else _MEGABYTES[session.device]
    reading = session.start("benchmarks.bounds:Bandwidth", session.device, read_megabytes, cores())
    found = [measure_suite(suite, session, reading) for suite in chosen]
    reading.close()
    cases = {f"{suite['model']}, {case['name']}": case for suite in found for case in suite["cases"]}
    ours = {name: case["sides"][_OURS]["step_seconds"] for name, case in cases.items()}
    shown = [line for suite in found for line in ("", *other_work(suite["model"], suite["other_work"]))]
    shown += [item for name, case in cases.items() for item in _shown(name, case)]
    agreed = all(case["agreed"] for case in cases.values())
    return Report({"megabytes": read_megabytes, "suites": found}, ours, shown, notes(read_megabytes), agreed)


def measure_suite(suite: Suite, session: Session, reading: Alone | Here) -> dict[str, Any]:
    """Measures all cases of a model, and between them how fast the memory is read (`reading`).

    Raises SideFailed, unless the static cache fails, which may be absent.
    """
    others, given = Neighbours(), (suite.config, session.device)
    # Ours is first, so that its processes are the first to be ready.
    sides = {
        _OURS: session.start(f"{OURS}:Decoding", *given),
        _THEIRS: session.start(f"{HUGGING_FACE}:Decoding", *given, "dynamic", uses_jax=False),
        _REFERENCE: session.start(f"{REFERENCE}:Decoding", *given, uses_jax=False),
    }
    if not suite.translates:
        kind = "static" if session.quick else "static compiled"
        sides[_STATIC] = session.start(f"{HUGGING_FACE}:Decoding", *given, kind, uses_jax=False)
    try:
        cases = [_measure_case(suite, case, sides, reading, session) for case in suite.cases]
    finally:
        for side in sides.values():
            side.close()
    return {"model": suite.model, "cases": cases, "other_work": others.share()}


def _measure_case(suite: Suite, case: Case, sides: Sides, reading: Alone | Here, session: Session) -> dict[str, Any]:
    session.say(f"{suite.model}: {case.name} ...")
    prompts = draw_prompts(suite.config.vocab_size or 0, case.batch, case.prompt)
    absent: dict[str, str] = {}

    def decode(name: str, count: int) -> Decoded:
        return sides[name].call("decode", prompts, count, case.new_tokens, case.beams)

    def timed(name: str, count: int) -> Timed:
        first = decode(name, 1)
        return Timed(first, decode(name, count) if count > 1 else first)

    # Ours is compiled for a number of tokens; what the others compile does not depend on it.
    few = min(4, case.new_tokens)
    warm_tokens = {_OURS: case.new_tokens, _THEIRS: few}
    if _STATIC in sides and case.new_tokens > 1:
        warm_tokens[_STATIC] = few
    first_calls = {}
    for name, count in warm_tokens.items():
        try:
            first_calls[name] = decode(name, count).seconds
            decode(name, 1)
        except SideFailed as error:
            if name != _STATIC:
                raise
            absent[name] = str(error)

    def turn(name: str) -> Any:
        return reading.call("measure") if name == _READING else timed(name, case.new_tokens)

    turns = by_turns([*first_calls, _READING], session.rounds(case.rounds), turn, seconds=_CASE_SECONDS)
    ways = gathered(turns.pop(_READING))
    way, bandwidth = best_way(ways)
    read = weight_bytes(suite.config), cache_bytes(suite.config, case.batch, case.prompt, case.new_tokens, case.beams)
    bound = sum(read) / bandwidth if case.new_tokens > 1 else None
    found = {
        name: _figures(taken, case.batch, case.new_tokens, first_calls[name], warm_tokens[name], bound)
        for name, taken in turns.items()
    }
    if case.reference_tokens:
        # One turn of a few tokens: every one takes the whole forward pass.
        warm = decode(_REFERENCE, 1).seconds
        turns[_REFERENCE] = [timed(_REFERENCE, case.reference_tokens)]
        found[_REFERENCE] = _figures(turns[_REFERENCE], case.batch, case.reference_tokens, warm, 1, None)
    labels = {
        _OURS: "jax_tformer",
        _THEIRS: "BART (HF), own weights" if suite.translates else "HF, dynamic cache",
        _STATIC: f"HF, static cache{'' if session.quick else ', compiled'}",
        _REFERENCE: f"torch_ref, {case.reference_tokens} tokens",
    }
    theirs = found[_THEIRS]["step_seconds"]["median"]
    for name, figures in found.items():
        figures["label"] = labels[name]
        figures["times_theirs"] = theirs / figures["step_seconds"]["median"]
        figures["peak_memory"] = sides[name].call("peak_memory")
        figures["device_memory"] = sides[name].call("device_memory")
    tokens = {name: taken[0].whole.tokens for name, taken in turns.items()}
    # The BART has weights of its own.
    compared = [name for name in tokens if name != _OURS and not (suite.translates and name == _THEIRS)]
    agreement = {name: _agreement(prompts, tokens[_OURS], tokens[name], sides[_REFERENCE]) for name in compared}
    return asdict(case) | {
        "name": case.name,
        "weight_bytes": read[0],
        "cache_bytes": read[1],
        "bandwidth": {"bytes_per_second": bandwidth, "way": way, "ways": ways},
        "bound_seconds": bound,
        "sides": found,
        "absent": absent,
        "agreement": agreement,
        "agreed": all(rows["largest_gap"] <= TIE for rows in agreement.values()),
        # Agreement about rows of one token says little.
        "different_tokens": float(np.mean([len(np.unique(row)) for row in tokens[_OURS]])),
    }


def _figures(
    turns: list[Timed], batch: int, new_tokens: int, first_call: float, warm_tokens: int, bound: float | None
) -> dict[str, Any]:
    """Of one side; without a `bound` it has no cache, or no token but the first, which is then one like the others."""

    def step(turn: Timed) -> float:
        rest = turn.whole.seconds - turn.first.seconds
        # In a smoke test the first token may take longer than all of them.
        prefilled = bound is not None and rest > 0
        return rest / (new_tokens - 1) if prefilled else turn.whole.seconds / new_tokens

    steps = spread([step(turn) for turn in turns])
    whole = spread([turn.whole.seconds for turn in turns])
    first = spread([turn.first.seconds for turn in turns])
    usual = first["median"] + (warm_tokens - 1) * steps["median"]
    return {
        "new_tokens": new_tokens,
        "rounds": len(turns),
        "tokens_per_second": batch * new_tokens / whole["median"],
        "tokens_per_second_without_prefill": batch / steps["median"],
        "seconds": whole,
        "first_token_seconds": first,
        "step_seconds": steps,
        "of_bound": None if bound is None else bound / steps["median"],
        "first_call_seconds": first_call,
        "compile_seconds": max(first_call - usual, 0.0),
    }


def _agreement(prompts: list[list[int]], ours: np.ndarray, others: np.ndarray, judge: Alone | Here) -> dict[str, float]:
    """Counts the rows that agree with ours; of the others, says how far apart the two tokens' logits were."""
    gaps = []
    for prompt, one, other in zip(prompts, ours[:, : others.shape[1]], others, strict=True):
        if (one != other).any():
            at = int((one != other).argmax())
            gaps.append(judge.call("gap", prompt, one[:at].tolist(), int(one[at]), int(other[at])))
    return {"rows": len(prompts), "equal_rows": len(prompts) - len(gaps), "largest_gap": max(gaps, default=0.0)}


def notes(read_megabytes: int) -> list[str]:
    """What the figures mean, a line each."""
    return [
        "tokens/s: new tokens of all rows; 'with prompt' counts the time of reading the prompt (or source) too, "
        "and ms/step leaves it out (a generation of one token is subtracted). Of one token, ms/step is the time to it.",
        "median of the turns (A B A B), in brackets min..max. 'speed' is that of the first Hugging Face side = 1.",
        f"bound: weights and cache that a step reads, over the speed of the fastest way of reading {read_megabytes} "
        "MiB, measured between the turns.",
        "MB: the most that the side's process held while compiling and decoding, libraries and weights included, "
        "up to and with this case; each side is alone in its process"
        + (", but for --quick." if read_megabytes < 64 else "."),
        "HF: Hugging Face's generate; BART: of vaswani-base's shape. torch_ref has no cache and computes the whole "
        "forward pass for every token, so that only a few tokens are measured, once.",
    ]


def _shown(name: str, case: Mapping[str, Any]) -> list[Any]:
    """The table of a case, and lines below it."""
    rows = [
        (
            side["label"],
            f"{side['tokens_per_second_without_prefill']:.1f}",
            f"{side['tokens_per_second']:.1f}",
            milliseconds(side["step_seconds"]),
            f"{side['times_theirs']:.2f}",
            "" if side["of_bound"] is None else f"{side['of_bound']:.0%}",
            f"{side['compile_seconds']:.1f}",
            megabytes(side["peak_memory"], side["device_memory"]),
        )
        for side in case["sides"].values()
    ]
    columns = ("", "tokens/s", "with prompt", "ms/step", "speed", "of bound", "compile s", "MB")
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
    return [make_table(name, columns, rows), *(f"  {line}" for line in lines)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
