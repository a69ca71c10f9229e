"""Decoding side by side with PyTorch: `python -m benchmarks.decoding [--device gpu] [--out FILE] [--quick]`."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.decoding.measure import TIE, measure_suite, suites
from benchmarks.session import (
    Report,
    Session,
    make_table,
    megabytes,
    milliseconds,
    model_option,
    other_work,
    run_benchmark,
)
from twin.machine import cores

_MEGABYTES = {"cpu": 512, "gpu": 4096}


def main(arguments: Sequence[str]) -> int:
    """Status 1 where sides disagree about a token that is no tie, or fail."""
    return run_benchmark("decoding", __doc__, arguments, _measure, model_option)


def _measure(session: Session) -> Report:
    chosen = session.chosen(suites(quick=session.quick))
    # What reads the memory, between the turns of the others.
    megabytes = 4 if session.quick else _MEGABYTES[session.device]
    reading = session.start("benchmarks.bounds:Bandwidth", session.device, megabytes, cores())
    found = [measure_suite(suite, session, reading) for suite in chosen]
    reading.close()
    figures: dict[str, Any] = {"megabytes": megabytes, "suites": found}
    agreed = all(case["agreed"] for suite in found for case in suite["cases"])
    ours = {
        _title(suite["model"], case): case["sides"]["ours"]["step_seconds"]
        for suite in found
        for case in suite["cases"]
    }
    return Report(figures, ours, shown(figures), notes(megabytes), agreed)


def notes(read_megabytes: int) -> list[str]:
    """What the figures mean, a line each."""
    return [
        "tokens/s: new tokens of all rows; 'with prompt' counts the time of reading the prompt (or source) too, "
        "and ms/step leaves it out (a generation of one token is subtracted).",
        "median of the turns (A B A B), in brackets min..max. 'speed' is that of the first Hugging Face side = 1.",
        f"bound: weights and cache that a step reads, over the speed of the fastest way of reading {read_megabytes} "
        "MiB, measured between the turns.",
        "MB: the most that the side's process held while compiling and decoding, libraries and weights included, "
        "up to and with this case; each side is alone in its process"
        + (", but for --quick." if read_megabytes < 64 else "."),
        "HF: Hugging Face's generate; BART: of vaswani-base's shape. torch_ref has no cache and computes the whole "
        "forward pass for every token, so that only a few tokens are measured, once.",
    ]


def shown(figures: Mapping[str, Any]) -> list[Any]:
    """A table a case, the cost by position, the time to the first token."""
    found: list[Any] = []
    for suite in figures["suites"]:
        busy = other_work(suite["model"], suite["other_work"])
        found += ["", *busy] if busy else []
        for case in suite["cases"]:
            found += [_case_table(suite["model"], case), *(f"  {line}" for line in _case_lines(case))]
        if suite["windows"] is not None:
            found.append(_windows_table(suite["model"], suite["windows"]))
        if suite["first_tokens"]:
            found.append(_first_tokens_table(suite["model"], suite["first_tokens"]))
    return found


def _case_table(model: str, case: Mapping[str, Any]) -> Any:
    rows = []
    for side in case["sides"].values():
        bound = side["of_bound"]
        rows.append(
            (
                side["label"],
                f"{side['tokens_per_second_without_prefill']:.1f}",
                f"{side['tokens_per_second']:.1f}",
                milliseconds(side["step_seconds"]),
                f"{side['times_theirs']:.2f}",
                "" if bound is None else f"{bound:.0%}",
                f"{side['compile_seconds']:.1f}",
                megabytes(side["peak_memory"], side["device_memory"]),
            )
        )
    columns = ("", "tokens/s", "with prompt", "ms/step", "speed", "of bound", "compile s", "MB")
    return make_table(_title(model, case), columns, rows)


def _title(model: str, case: Mapping[str, Any]) -> str:
    return f"{model}, {case['name']}: {case['prompt']} + {case['new_tokens']} tokens"


def _case_lines(case: Mapping[str, Any]) -> list[str]:
    bound_megabytes = case["weight_bytes"] / 1e6, case["cache_bytes"] / 1e6
    speed = f"{case['bandwidth']['bytes_per_second'] / 1e9:.1f} GB/s ({case['bandwidth']['way']})"
    lines = [
        f"bound: {1000 * case['bound_seconds']:.2f} ms/step for {bound_megabytes[0]:.1f} MB of weights "
        f"and {bound_megabytes[1]:.1f} MB of cache at {speed}"
    ]
    lines += [f"{name} is absent: {reason}" for name, reason in case["absent"].items()]
    for name, found in case["agreement"].items():
        line = f"the same tokens as {name}: {found['equal_rows']} of {found['rows']} rows"
        if found["equal_rows"] < found["rows"]:
            tie = "ties in float32" if found["largest_gap"] <= TIE else "NO TIES"
            line += f"; elsewhere the two logits are up to {found['largest_gap']:.1e} apart: {tie}"
        lines.append(line)
    lines.append(f"different tokens in a row: {case['different_tokens']:.1f} on average")
    return lines


def _windows_table(model: str, windows: Mapping[str, Any]) -> Any:
    early, late = windows["positions"]
    title = (
        f"{model}, batch 1, token by token: {windows['count']} tokens around positions {early} and {late}, "
        f"ours in a cache of {windows['slots']} slots"
    )
    rows = [
        (
            side["label"],
            milliseconds(side["early_seconds"]),
            milliseconds(side["late_seconds"]),
            f"{side['late_over_early']:.2f}",
        )
        for side in windows["sides"].values()
    ]
    return make_table(title, ("", f"ms/token at {early}", f"ms/token at {late}", "late / early"), rows)


def _first_tokens_table(model: str, found: Sequence[Mapping[str, Any]]) -> Any:
    rows = [
        (
            f"{shape['batch']} x {shape['prompt']}",
            side["label"],
            milliseconds(side["seconds"]),
            f"{side['prompt_tokens_per_second']:.0f}",
            f"{side['times_theirs']:.2f}",
        )
        for shape in found
        for side in shape["sides"].values()
    ]
    columns = ("prompts", "", "ms to the first token", "prompt tokens/s", "speed")
    return make_table(f"{model}, greedy: reading the prompts and choosing a token", columns, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
