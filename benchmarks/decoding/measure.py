"""What is decoded, and one model through all its cases, on all sides by turns."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bounds import best_way, cache_bytes, weight_bytes
from benchmarks.session import Session, by_turns, gathered, spread
from benchmarks.sides import HUGGING_FACE, OURS, REFERENCE, Decoded, draw_prompts
from benchmarks.training_cases import tiny
from jax_tformer.config import TransformerConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.hub.families import llama
from twin.machine import Neighbours
from twin.sides import Alone, Here, SideFailed

TIE = 1e-4
"""Where two sides choose different tokens, float32 may be the reason if the logits are no further apart than this."""
_OURS, _THEIRS, _STATIC, _REFERENCE, _READING = "ours", "hugging face", "hugging face static", "reference", "reading"
_CASE_SECONDS = 60.0
"""After this long, the sides of a case get no third turn."""

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
    rounds: int
    reference_tokens: int
    """Tokens that the side without a cache decodes; 0: it has no part in this case."""
    beams: int = 1

    @property
    def name(self) -> str:
        """For people."""
        return f"batch {self.batch}, {f'beam search, {self.beams} beams' if self.beams > 1 else 'greedy'}"


@dataclass(frozen=True)
class Windows:
    """The time of a token early and late: `count` tokens after each of `prompts`, in a cache of `slots`."""

    prompts: tuple[int, int]
    count: int
    slots: int
    rounds: int


@dataclass(frozen=True)
class FirstTokens:
    """The time until the first token comes, after prompts of each of `shapes`: rows, and tokens of each."""

    shapes: tuple[tuple[int, int], ...]
    rounds: int


@dataclass(frozen=True)
class Suite:
    """One model and its cases, in the order of their needs."""

    model: str
    config: TransformerConfig
    cases: tuple[Case, ...]
    windows: Windows | None = None
    first_tokens: FirstTokens | None = None

    @property
    def translates(self) -> bool:
        """Whether it has a source to read."""
        return self.config.encoder is not None


def suites(*, quick: bool) -> tuple[Suite, ...]:
    """The figures that are published; quick: the same on models of no size, to see whether it runs, not how fast."""
    gpt2, translator = ARCHITECTURES["gpt2"], ARCHITECTURES["vaswani-base"]
    if quick:
        case = Case(batch=2, prompt=4, new_tokens=4, rounds=2, reference_tokens=2)
        windows, first_tokens = Windows(prompts=(4, 8), count=2, slots=16, rounds=1), FirstTokens(((2, 4),), rounds=1)
        return (
            Suite("gpt2", tiny(gpt2, 1), (case,), windows, first_tokens),
            Suite("vaswani-base", tiny(translator, 1), (case, replace(case, beams=2, reference_tokens=0))),
        )
    return (
        Suite(
            "gpt2",
            gpt2,
            (
                Case(batch=1, prompt=128, new_tokens=128, rounds=4, reference_tokens=8),
                Case(batch=8, prompt=128, new_tokens=128, rounds=3, reference_tokens=3),
            ),
            Windows(prompts=(96, 864), count=64, slots=1024, rounds=2),
            FirstTokens(((1, 32), (1, 128), (1, 512), (1, 992), (8, 128)), rounds=5),
        ),
        Suite(
            "llama",
            LLAMA,
            (
                Case(batch=1, prompt=128, new_tokens=128, rounds=4, reference_tokens=0),
                Case(batch=8, prompt=128, new_tokens=128, rounds=3, reference_tokens=0),
            ),
        ),
        Suite(
            "vaswani-base",
            translator,
            (
                Case(batch=1, prompt=64, new_tokens=64, rounds=5, reference_tokens=8),
                Case(batch=8, prompt=64, new_tokens=64, rounds=5, reference_tokens=4),
                Case(batch=1, prompt=64, new_tokens=64, rounds=5, reference_tokens=0, beams=4),
                Case(batch=8, prompt=64, new_tokens=64, rounds=3, reference_tokens=0, beams=4),
            ),
        ),
    )


class Timed(NamedTuple):
    """One turn of one side: the first token alone, and all of them."""

    first: Decoded
    whole: Decoded


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
        windows = _measure_windows(suite, suite.windows, sides, session) if suite.windows else None
        first = _measure_first_tokens(suite, suite.first_tokens, sides, session) if suite.first_tokens else []
    finally:
        for side in sides.values():
            side.close()
    return {
        "model": suite.model,
        "cases": cases,
        "windows": windows,
        "first_tokens": first,
        "other_work": others.share(),
    }


def _measure_case(suite: Suite, case: Case, sides: Sides, reading: Alone | Here, session: Session) -> dict[str, Any]:
    session.say(f"{suite.model}: {case.name} ...")
    prompts = draw_prompts(suite.config.vocab_size or 0, case.batch, case.prompt)
    absent: dict[str, str] = {}

    def decode(name: str, count: int) -> Decoded:
        return sides[name].call("decode", prompts, count, case.new_tokens, case.beams)

    # Ours is compiled for a number of tokens; what the others compile does not depend on it.
    few = min(4, case.new_tokens)
    warm_tokens = {_OURS: case.new_tokens, _THEIRS: few, _STATIC: few}
    first_calls = {}
    for name in [name for name in warm_tokens if name in sides]:
        try:
            first_calls[name] = decode(name, warm_tokens[name]).seconds
            decode(name, 1)
        except SideFailed as error:
            if name != _STATIC:
                raise
            absent[name] = str(error)

    def turn(name: str) -> Any:
        return reading.call("measure") if name == _READING else Timed(decode(name, 1), decode(name, case.new_tokens))

    turns = by_turns([*first_calls, _READING], session.rounds(case.rounds), turn, seconds=_CASE_SECONDS)
    ways = gathered(turns.pop(_READING))
    way, bandwidth = best_way(ways)
    read = weight_bytes(suite.config), cache_bytes(suite.config, case.batch, case.prompt, case.new_tokens, case.beams)
    bound = sum(read) / bandwidth
    found = {
        name: _figures(timed, case.batch, case.new_tokens, first_calls[name], warm_tokens[name], bound)
        for name, timed in turns.items()
    }
    if case.reference_tokens:
        # One turn of a few tokens: every one takes the whole forward pass.
        warm = decode(_REFERENCE, 1).seconds
        turns[_REFERENCE] = [Timed(decode(_REFERENCE, 1), decode(_REFERENCE, case.reference_tokens))]
        found[_REFERENCE] = _figures(turns[_REFERENCE], case.batch, case.reference_tokens, warm, 1, None)
    theirs = found[_THEIRS]["step_seconds"]["median"]
    for name, figures in found.items():
        few_tokens = f", {case.reference_tokens} tokens" if name == _REFERENCE else ""
        figures["label"] = _label(name, suite, session) + few_tokens
        figures["times_theirs"] = theirs / figures["step_seconds"]["median"]
        figures["peak_memory"] = sides[name].call("peak_memory")
        figures["device_memory"] = sides[name].call("device_memory")
    tokens = {name: timed[0].whole.tokens for name, timed in turns.items()}
    # The BART has weights of its own.
    compared = [name for name in tokens if name != _OURS and not (suite.translates and name == _THEIRS)]
    agreement = {name: _agreement(prompts, tokens[_OURS], tokens[name], sides[_REFERENCE]) for name in compared}
    return {
        "name": case.name,
        "batch": case.batch,
        "prompt": case.prompt,
        "new_tokens": case.new_tokens,
        "beams": case.beams,
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
    """Of one side; without a `bound` it has no cache, and the first token takes no longer than the others."""

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


def _measure_windows(suite: Suite, windows: Windows, sides: Sides, session: Session) -> dict[str, Any]:
    """Measures the median time of a token in each window, of ours and of the dynamic cache."""
    session.say(f"{suite.model}: the time of a token by position ...")
    early, late = windows.prompts
    keys = {f"{name} {prompt}": (name, prompt) for prompt in windows.prompts for name in (_OURS, _THEIRS)}

    def measure(key: str, count: int = windows.count) -> float:
        name, prompt = keys[key]
        row = draw_prompts(suite.config.vocab_size or 0, 1, prompt)[0]
        return float(np.median(sides[name].call("intervals", row, count, windows.slots - prompt)))

    for key in keys:
        measure(key, 2)
    turns = by_turns(list(keys), session.rounds(windows.rounds), measure)
    found: dict[str, Any] = {}
    for name in (_OURS, _THEIRS):
        times = [spread(turns[f"{name} {prompt}"]) for prompt in (early, late)]
        found[name] = {
            "label": _label(name, suite, session),
            "early_seconds": times[0],
            "late_seconds": times[1],
            "late_over_early": times[1]["median"] / times[0]["median"],
        }
    positions = [prompt + windows.count // 2 for prompt in windows.prompts]
    return {"slots": windows.slots, "count": windows.count, "positions": positions, "sides": found}


def _measure_first_tokens(suite: Suite, asked: FirstTokens, sides: Sides, session: Session) -> list[dict[str, Any]]:
    """Measures how long each shape of prompts takes to be read and to give a token, by ours and the dynamic cache."""
    session.say(f"{suite.model}: the time to the first token ...")
    found = []
    for batch, length in asked.shapes:
        prompts = draw_prompts(suite.config.vocab_size or 0, batch, length)

        def measure(name: str, prompts: list[list[int]] = prompts) -> float:
            return float(sides[name].call("decode", prompts, 1, 1, 1).seconds)

        first_calls = {name: measure(name) for name in (_OURS, _THEIRS)}
        turns = by_turns([*first_calls], session.rounds(asked.rounds), measure)
        times = {name: spread(seconds) for name, seconds in turns.items()}
        figures = {
            name: {
                "label": _label(name, suite, session),
                "seconds": seconds,
                "first_call_seconds": first_calls[name],
                "prompt_tokens_per_second": batch * length / seconds["median"],
                "times_theirs": times[_THEIRS]["median"] / seconds["median"],
            }
            for name, seconds in times.items()
        }
        found.append({"batch": batch, "prompt": length, "sides": figures})
    return found


def _label(name: str, suite: Suite, session: Session) -> str:
    return {
        _OURS: "jax_tformer",
        _THEIRS: "BART (HF), own weights" if suite.translates else "HF, dynamic cache",
        _STATIC: f"HF, static cache{'' if session.quick else ', compiled'}",
        _REFERENCE: "torch_ref",
    }[name]
