"""One model through all its cases, on all sides by turns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bounds import best_way, cache_bytes, weight_bytes
from benchmarks.cases import Case, Suite, Windows
from benchmarks.harness import Alone, Here, SideFailed, Spread, by_turns
from benchmarks.sides import Decoded, draw_prompts
from jax_tformer.model.functional import AnyTransformer, transformer
from jax_tformer_comparison.machine import Neighbours

Start = Callable[..., Alone | Here]
OURS, THEIRS, STATIC, REFERENCE = "ours", "hugging face", "hugging face static", "reference"
TIE = 1e-4
"""Where two sides choose different tokens, float32 may be the reason if the logits are no further apart than this."""
_READING = "reading"
_CASE_SECONDS = 60.0
"""After this long, the sides of a case get no third turn."""
_SEED = 0


class Timed(NamedTuple):
    """One turn of one side: all new tokens, and the first alone."""

    whole: Decoded
    first: Decoded


@dataclass
class Figures:
    """What was measured of one side in one case."""

    label: str
    batch: int
    new_tokens: int
    cached: bool
    first_call: float
    warm_tokens: int
    turns: list[Timed]
    peak_memory: int
    device_memory: int | None
    prefill: bool = True
    """The first token takes longer than the others; not so where there is no cache."""

    def step(self) -> Spread:
        """Seconds of one step, which gives every row a token, without prefill."""
        if not self.prefill:
            return Spread.of([turn.whole.seconds / self.new_tokens for turn in self.turns])
        return Spread.of([self._step(turn) for turn in self.turns])

    def _step(self, turn: Timed) -> float:
        rest = turn.whole.seconds - turn.first.seconds
        # In a smoke test the first token may take longer than all of them.
        return rest / (self.new_tokens - 1) if rest > 0 else turn.whole.seconds / self.new_tokens

    def as_dict(self, theirs: Spread | None, bound: float) -> dict[str, Any]:
        """For JSON; `theirs` is the step of the side that the ratio is to, `bound` the least seconds of a step."""
        step, whole = self.step(), Spread.of([turn.whole.seconds for turn in self.turns])
        first = Spread.of([turn.first.seconds for turn in self.turns])
        usual = first.median + (self.warm_tokens - 1) * step.median
        tokens = self.batch * self.new_tokens
        return {
            "label": self.label,
            "new_tokens": self.new_tokens,
            "rounds": len(self.turns),
            "tokens_per_second": tokens / whole.median,
            "tokens_per_second_without_prefill": self.batch / step.median,
            "seconds": whole._asdict(),
            "first_token_seconds": first._asdict(),
            "step_seconds": step._asdict(),
            "times_theirs": None if theirs is None else theirs.median / step.median,
            "of_bound": bound / step.median if self.cached else None,
            "first_call_seconds": self.first_call,
            "compile_seconds": max(self.first_call - usual, 0.0),
            "peak_memory": self.peak_memory,
            "device_memory": self.device_memory,
        }


@dataclass
class CaseFigures:
    """One case: all sides, and whether they chose the same tokens."""

    case: Case
    weight_bytes: int
    cache_bytes: int
    reading: dict[str, list[float]] = field(default_factory=dict)
    """Bytes a second that the memory gave between the turns, by the way of reading."""
    sides: dict[str, Figures] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Sides that could not be measured, and why."""
    agreement: dict[str, dict[str, Any]] = field(default_factory=dict)
    different_tokens: float = 0.0
    """In a row of ours, on average: agreement about rows of one token says little."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        theirs = self.sides[THEIRS].step() if THEIRS in self.sides else None
        way, bandwidth = best_way(self.reading)
        bound = (self.weight_bytes + self.cache_bytes) / bandwidth
        return {
            "name": self.case.name,
            "batch": self.case.batch,
            "prompt": self.case.prompt,
            "new_tokens": self.case.new_tokens,
            "beams": self.case.beams,
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "bandwidth": {"bytes_per_second": bandwidth, "way": way, "ways": self.reading},
            "bound_seconds": bound,
            "sides": {name: figures.as_dict(theirs, bound) for name, figures in self.sides.items()},
            "absent": self.absent,
            "agreement": self.agreement,
            "agreed": all(found["largest_gap"] <= TIE for found in self.agreement.values()),
            "different_tokens": self.different_tokens,
        }


@dataclass
class SuiteFigures:
    """One model."""

    suite: Suite
    cases: list[CaseFigures]
    windows: dict[str, Any] | None
    other_work: float | None
    """Fraction of the processors' time that others took meanwhile; None where that is not known."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        cases = [case.as_dict() for case in self.cases]
        return {
            "model": self.suite.model,
            "cases": cases,
            "windows": self.windows,
            "other_work": self.other_work,
        }


def measure_suite(
    suite: Suite,
    start: Start,
    reading: Alone | Here,
    device: str,
    rounds: int | None,
    *,
    compiled: bool,
    say: Callable[[str], None],
) -> SuiteFigures:
    """All cases of a model, with the speed of the memory (`reading`) between.

    Raises SideFailed, unless it is the static cache that fails: that may be absent.
    """
    net, others = transformer(suite.config), Neighbours()
    given = (suite.config, _SEED, device)
    # Ours is first, so that its processes are the first to be ready.
    sides = {
        OURS: start("benchmarks.ours:Ours", *given),
        THEIRS: start("benchmarks.hugging_face:HuggingFace", *given, "dynamic"),
        REFERENCE: start("benchmarks.reference:Reference", *given),
    }
    if suite.config.encoder is None:
        kind = "static compiled" if compiled else "static"
        sides[STATIC] = start("benchmarks.hugging_face:HuggingFace", *given, kind)
    try:
        cases = [_measure_case(net, suite, case, sides, reading, rounds, compiled, say) for case in suite.cases]
        windows = None
        if suite.windows is not None:
            say(f"{suite.model}: the time of a token by position ...")
            windows = _measure_windows(net, suite.windows, sides, rounds)
    finally:
        for side in sides.values():
            side.close()
    return SuiteFigures(suite, cases, windows, others.share())


def _measure_case(
    net: AnyTransformer,
    suite: Suite,
    case: Case,
    sides: dict[str, Alone | Here],
    reading: Alone | Here,
    rounds: int | None,
    compiled: bool,
    say: Callable[[str], None],
) -> CaseFigures:
    say(f"{suite.model}: {case.name} ...")
    vocabulary = net.config.vocab_size or 0
    prompts = draw_prompts(vocabulary, case.batch, case.prompt)
    found = CaseFigures(case, weight_bytes(net), cache_bytes(net, case.batch, case.prompt, case.new_tokens, case.beams))

    def decode(name: str, count: int) -> Decoded:
        return sides[name].call("decode", prompts, count, case.new_tokens, case.beams)

    # Ours is compiled for a number of tokens; what the others compile does not depend on it.
    warm_tokens = {OURS: case.new_tokens, THEIRS: min(4, case.new_tokens), STATIC: min(4, case.new_tokens)}
    first_calls = {}
    for name in [name for name in warm_tokens if name in sides]:
        try:
            first_calls[name] = decode(name, warm_tokens[name]).seconds
            decode(name, 1)
        except SideFailed as error:
            if name != STATIC:
                raise
            found.absent[name] = str(error)

    def turn(name: str) -> Any:
        if name == _READING:
            return reading.call("measure", 1)
        return Timed(first=decode(name, 1), whole=decode(name, case.new_tokens))

    turns = by_turns([*first_calls, _READING], rounds or case.rounds, turn, seconds=_CASE_SECONDS)
    for rates in turns.pop(_READING):
        for way, found_rates in rates.items():
            found.reading.setdefault(way, []).extend(found_rates)
    for name, timed in turns.items():
        found.sides[name] = Figures(
            label=_label(name, net, compiled),
            batch=case.batch,
            new_tokens=case.new_tokens,
            cached=True,
            first_call=first_calls[name],
            warm_tokens=warm_tokens[name],
            turns=timed,
            peak_memory=sides[name].peak_memory(),
            device_memory=sides[name].call("device_memory"),
        )
    if case.reference_tokens:
        found.sides[REFERENCE] = _measure_reference(net, case, decode, sides[REFERENCE])
    _compare(found, prompts, sides[REFERENCE], translates=net.config.encoder is not None)
    return found


def _measure_reference(
    net: AnyTransformer, case: Case, decode: Callable[[str, int], Decoded], side: Alone | Here
) -> Figures:
    """One turn of a few tokens: every one takes the whole forward pass."""
    warm = decode(REFERENCE, 1)
    turn = Timed(first=decode(REFERENCE, 1), whole=decode(REFERENCE, case.reference_tokens))
    return Figures(
        label=f"{_label(REFERENCE, net, False)}, {case.reference_tokens} tokens",
        batch=case.batch,
        new_tokens=case.reference_tokens,
        cached=False,
        first_call=warm.seconds,
        warm_tokens=1,
        turns=[turn],
        peak_memory=side.peak_memory(),
        device_memory=side.call("device_memory"),
        prefill=False,
    )


def _compare(found: CaseFigures, prompts: list[list[int]], judge: Alone | Here, *, translates: bool) -> None:
    """Counts rows that agree with ours; where one does not, how far apart the two tokens' logits were."""
    ours = found.sides[OURS].turns[0].whole.tokens
    found.different_tokens = float(np.mean([len(np.unique(row)) for row in ours]))
    for name, figures in found.sides.items():
        # The BART has weights of its own.
        if name == OURS or (translates and name == THEIRS):
            continue
        others = figures.turns[0].whole.tokens
        gaps = []
        for prompt, one, other in zip(prompts, ours[:, : others.shape[1]], others, strict=True):
            if (one != other).any():
                at = int((one != other).argmax())
                gaps.append(judge.call("gap", prompt, one[:at].tolist(), int(one[at]), int(other[at])))
        equal = len(prompts) - len(gaps)
        found.agreement[name] = {"rows": len(prompts), "equal_rows": equal, "largest_gap": max(gaps, default=0.0)}


def _measure_windows(
    net: AnyTransformer, windows: Windows, sides: dict[str, Alone | Here], rounds: int | None
) -> dict[str, Any]:
    """Of ours and of the dynamic cache: the median time of a token in each window, and late over early."""
    names = {f"{name} {prompt}": (name, prompt) for prompt in windows.prompts for name in (OURS, THEIRS)}

    def measure(key: str, count: int = windows.count) -> float:
        name, prompt = names[key]
        row = draw_prompts(net.config.vocab_size or 0, 1, prompt)[0]
        return float(np.median(sides[name].call("intervals", row, count, windows.slots - prompt)))

    for key in names:
        measure(key, 2)
    found = {
        key: Spread.of(seconds) for key, seconds in by_turns(list(names), rounds or windows.rounds, measure).items()
    }
    early, late = windows.prompts
    return {
        "slots": windows.slots,
        "count": windows.count,
        "positions": [early + windows.count // 2, late + windows.count // 2],
        "sides": {
            name: {
                "label": _label(name, net, False),
                "early_seconds": found[f"{name} {early}"]._asdict(),
                "late_seconds": found[f"{name} {late}"]._asdict(),
                "late_over_early": found[f"{name} {late}"].median / found[f"{name} {early}"].median,
            }
            for name in (OURS, THEIRS)
        },
    }


def _label(name: str, net: AnyTransformer, compiled: bool) -> str:
    translates = net.config.encoder is not None
    return {
        OURS: "jax_tformer",
        THEIRS: "BART (HF), own weights" if translates else "HF, dynamic cache",
        STATIC: f"HF, static cache{', compiled' if compiled else ''}",
        REFERENCE: "torch_ref",
    }[name]
