"""The figures as tables for people."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import TIE

_QUIET = 0.05
"""Up to this fraction of other work the times mean something."""


def notes(report: Mapping[str, Any]) -> list[str]:
    """What the figures mean, a line each."""
    machine, megabytes = report["machine"], report["megabytes"]
    found = [
        "tokens/s: new tokens of all rows; 'with prompt' counts the time of reading the prompt (or source) too, "
        "and ms/step leaves it out (a generation of one token is subtracted).",
        "median of the turns (A B A B), in brackets min..max. 'speed' is that of the first Hugging Face side = 1.",
        f"bound: weights and cache that a step reads, over the speed of the fastest way of reading {megabytes} MiB, "
        "measured between the turns.",
        "MB: the most that the side's process held while compiling and decoding, libraries and weights included, "
        "up to and with this case; each side is alone in its process"
        + (", but for --quick." if megabytes < 64 else "."),
        "HF: Hugging Face's generate; BART: of vaswani-base's shape. torch_ref has no cache and computes the whole "
        "forward pass for every token, so that only a few tokens are measured, once.",
        "On the processor every side runs with the allocator settings of startup.keep_freed_memory.",
    ]
    if machine["vendor"] == "AuthenticAMD" and machine["device"] == "cpu":
        found.append("This is an AMD processor: torch multiplies matrices with MKL, which is slow on those.")
    return found


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Machine, a table a case, the cost by position, notes."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    console.print(f"\n{machine['processor']}, {machine['cores']} cores; on {machine['device']}; {versions}")
    for suite in report["suites"]:
        if suite["other_work"] is not None:
            busy = f"{suite['other_work']:.0%} of the processors' time went to other work"
            warning = "; too much to compare times, and PyTorch suffers most" if suite["other_work"] > _QUIET else ""
            console.print(f"\n{suite['model']}: {busy}{warning}", highlight=False)
        for case in suite["cases"]:
            console.print(_case_table(suite["model"], case))
            for line in _case_lines(case):
                console.print(f"  {line}", highlight=False)
        if suite["windows"] is not None:
            console.print(_windows_table(suite["model"], suite["windows"]))
    console.print()
    for note in report["notes"]:
        console.print(f"- {note}", highlight=False)


def _case_table(model: str, case: Mapping[str, Any]) -> Table:
    title = f"{model}, {case['name']}: {case['prompt']} + {case['new_tokens']} tokens"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("tokens/s", "with prompt", "ms/step", "speed", "of bound", "compile s", "MB"):
        table.add_column(name, justify="right", no_wrap=name == "ms/step")
    for side in case["sides"].values():
        speed, bound = side["times_theirs"], side["of_bound"]
        table.add_row(
            side["label"],
            f"{side['tokens_per_second_without_prefill']:.1f}",
            f"{side['tokens_per_second']:.1f}",
            _milliseconds(side["step_seconds"]),
            "" if speed is None else f"{speed:.2f}",
            "" if bound is None else f"{bound:.0%}",
            f"{side['compile_seconds']:.1f}",
            _memory(side),
        )
    return table


def _case_lines(case: Mapping[str, Any]) -> list[str]:
    megabytes = case["weight_bytes"] / 1e6, case["cache_bytes"] / 1e6
    speed = f"{case['bandwidth']['bytes_per_second'] / 1e9:.1f} GB/s ({case['bandwidth']['way']})"
    lines = [
        f"bound: {1000 * case['bound_seconds']:.2f} ms/step for {megabytes[0]:.1f} MB of weights "
        f"and {megabytes[1]:.1f} MB of cache at {speed}"
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


def _windows_table(model: str, windows: Mapping[str, Any]) -> Table:
    early, late = windows["positions"]
    title = (
        f"{model}, batch 1, token by token: {windows['count']} tokens around positions {early} and {late}, "
        f"ours in a cache of {windows['slots']} slots"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for name in (f"ms/token at {early}", f"ms/token at {late}", "late / early"):
        table.add_column(name, justify="right")
    for side in windows["sides"].values():
        early_ms, late_ms = _milliseconds(side["early_seconds"]), _milliseconds(side["late_seconds"])
        table.add_row(side["label"], early_ms, late_ms, f"{side['late_over_early']:.2f}")
    return table


def _milliseconds(spread: Mapping[str, float]) -> str:
    median, low, high = (1000 * spread[name] for name in ("median", "low", "high"))
    return f"{median:.2f} ({low:.2f}..{high:.2f})"


def _memory(side: Mapping[str, Any]) -> str:
    device = side["device_memory"]
    host = f"{side['peak_memory'] / 1e6:.0f}"
    return host if device is None else f"{host} + {device / 1e6:.0f}"
