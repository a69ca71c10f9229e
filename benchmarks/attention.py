"""Every implementation behind `attend`, and torch's: `python -m benchmarks.attention [--device gpu] [--quick]`."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np

from benchmarks.bounds import best_way
from benchmarks.session import (
    Report,
    Session,
    by_turns,
    gathered,
    make_table,
    milliseconds,
    other_work,
    run_benchmark,
    spread,
)
from jax_tformer.config import AttentionImplementation
from jax_tformer_comparison.machine import Neighbours
from jax_tformer_comparison.sides import Alone, Here, SideFailed, one_line

_OURS, _TORCH, _PRODUCTS = "ours", "torch sdpa", "products"
_REFERENCE = "einsum"
"""The implementation whose time is 1, and whose output the others are compared with."""
_PASSES = {"forward": 1, "forward and backward": 3}
"""Pass -> its products, in forward passes: a backward pass has four where a forward pass has two."""
_LEAST_SECONDS = 0.04
"""Calls are repeated for this long in one turn."""
_PRODUCT = {"cpu": 2048, "gpu": 8192}


@dataclass(frozen=True)
class Case:
    """Self-attention of `tokens` tokens in sequences of `length`, with heads of `width`."""

    tokens: int
    length: int
    heads: int
    width: int
    causal: bool
    dtype: str

    @property
    def name(self) -> str:
        """For people."""
        batch = self.tokens // self.length
        return f"T {self.length}, B {batch}, head width {self.width}, {'causal' if self.causal else 'full'}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, T, H, C]."""
        return self.tokens // self.length, self.length, self.heads, self.width

    def flops(self) -> float:
        """Of the two products of a forward pass; where it is causal, half of the square and its diagonal."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 4 * self.tokens / self.length * self.heads * self.width * pairs

    def arrays(self) -> list[np.ndarray]:
        """Query, key, value and the gradient of the output: the same numbers for every side."""
        return list(np.random.default_rng(0).standard_normal((4, *self.shape), np.float32))


def full(device: str) -> list[Case]:
    """The figures that are published: float32 on the processor, bfloat16 and more tokens on a GPU."""
    tokens, dtype = (2048, "float32") if device == "cpu" else (32768, "bfloat16")
    sizes = [(128, 64, True), (128, 64, False), (256, 32, True), (256, 64, True), (256, 64, False), (256, 128, True)]
    sizes += [(512, 64, True), (512, 64, False), (1024, 64, True), (1024, 64, False)]
    return [Case(tokens, length, 6, width, causal, dtype) for length, width, causal in sizes]


def quick() -> list[Case]:
    """Whether it runs, not how fast."""
    return [Case(64, 32, 2, 16, causal, "float32") for causal in (True, False)]


class Side:
    """One framework's attention: a call for each case, implementation and pass, made once."""

    def __init__(self, framework: str, device: str) -> None:
        """`framework` is "jax" or "torch", `device` "cpu" or "gpu"."""
        self._make, self._device = {"jax": _call_of_jax, "torch": _call_of_torch}[framework], device
        self._ready: dict[tuple[Case, str, str], Callable[[], Any]] = {}

    def output(self, case: Case, implementation: str) -> np.ndarray:
        """What it computes, in float32; raises what `attend` raises where the implementation is not to be had."""
        found = self._call(case, implementation, "forward")()
        return found.float().cpu().numpy() if hasattr(found, "cpu") else np.asarray(found, np.float32)

    def seconds(self, case: Case, implementation: str, which: str) -> float:
        """Of one call: the mean of several, where it takes little. The first in a process compiles: leave it out."""
        call, calls, began = self._call(case, implementation, which), 0, time.perf_counter()
        while calls == 0 or time.perf_counter() - began < _LEAST_SECONDS:
            call()
            calls += 1
        return (time.perf_counter() - began) / calls

    def _call(self, *key: Any) -> Callable[[], Any]:
        if key not in self._ready:
            self._ready = {known: call for known, call in self._ready.items() if known[0] == key[0]}
            self._ready[key] = self._make(self._device, *key)
        return self._ready[key]


def _call_of_jax(device: str, case: Case, implementation: Any, which: str) -> Callable[[], Any]:
    """Any implementation behind `attend`."""
    import jax
    import jax.numpy as jnp

    from jax_tformer.model.attention import attend
    from jax_tformer.model.masks import Mask

    def forward(query: Any, key: Any, value: Any) -> Any:
        scale = case.width**-0.5
        return attend(query, key, value, Mask(causal=case.causal), scale=scale, implementation=implementation)

    def both(query: Any, key: Any, value: Any, gradient: Any) -> Any:
        output, backward = jax.vjp(forward, query, key, value)
        return output, backward(gradient)

    place = jax.local_devices(backend=device)[0]
    arrays = [jax.device_put(jnp.asarray(array, case.dtype), place) for array in case.arrays()]
    function, given = (jax.jit(forward), arrays[:3]) if which == "forward" else (jax.jit(both), arrays)
    return lambda: jax.block_until_ready(function(*given))


def _call_of_torch(device: str, case: Case, _: str, which: str) -> Callable[[], Any]:
    """`torch.nn.functional.scaled_dot_product_attention`, eager."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from jax_tformer_comparison.torch_side import torch_device

    place, dtype = torch_device(device), getattr(torch, case.dtype)
    *given, gradient = (torch.from_numpy(array).to(place, dtype) for array in case.arrays())
    given = [array.requires_grad_(which != "forward") for array in given]

    def forward() -> Any:
        # As in a model: the projections give [B, T, H, C], and torch reads [B, H, T, C].
        query, key, value = (array.transpose(1, 2) for array in given)
        return scaled_dot_product_attention(query, key, value, is_causal=case.causal).transpose(1, 2)

    def waited() -> Any:
        result = forward() if which == "forward" else torch.autograd.grad(forward(), given, gradient)
        if place.type == "cuda":
            torch.cuda.synchronize()
        return result

    return waited


def measure_case(case: Case, sides: dict[str, Alone | Here], rounds: int) -> dict[str, Any]:
    """All implementations on one case by turns, and the fastest product of matrices between the turns."""
    outputs: dict[str, np.ndarray] = {}
    absent: dict[str, str] = {}

    def side(name: str) -> Alone | Here:
        return sides[_TORCH if name == _TORCH else _OURS]

    for name in (*(name for name in get_args(AttentionImplementation) if name != "auto"), _TORCH):
        try:
            output = side(name).call("output", case, name)
            side(name).call("seconds", case, name, "forward and backward")
            outputs[name] = output
        except Exception as error:  # a side in this process raises what it raises
            absent[name] = str(error) if isinstance(error, SideFailed) else one_line(error)
    if _REFERENCE in absent:
        raise SideFailed(absent[_REFERENCE])

    def turn(name: str) -> Any:
        if name == _PRODUCTS:
            return sides[name].call("measure")
        return {which: [side(name).call("seconds", case, name, which)] for which in _PASSES}

    found = {name: gathered(turns) for name, turns in by_turns([*outputs, _PRODUCTS], rounds, turn).items()}
    way, rate = best_way(found.pop(_PRODUCTS))
    times = {name: {which: spread(taken[which]) for which in _PASSES} for name, taken in found.items()}
    flops = {which: count * case.flops() for which, count in _PASSES.items()}
    bounds = {which: count / rate for which, count in flops.items()}

    def ratios(passes: dict[str, dict[str, float]], best: dict[str, float]) -> dict[str, float]:
        return {which: best[which] / taken["median"] for which, taken in passes.items()}

    reference = {which: taken["median"] for which, taken in times[_REFERENCE].items()}
    return {
        "name": case.name,
        **asdict(case),
        "flops": flops,
        "product": way,
        "product_flops_per_second": rate,
        "bound_seconds": bounds,
        "sides": {
            name: {
                "seconds": passes,
                "of_bound": ratios(passes, bounds),
                "speed": ratios(passes, reference),
                "largest_difference": float(np.abs(outputs[name] - outputs[_REFERENCE]).max()),
            }
            for name, passes in times.items()
        },
        "absent": absent,
    }


def _rows(case: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, side in case["sides"].items():
        row = [name]
        for which in _PASSES:
            row += [milliseconds(side["seconds"][which]), f"{side['speed'][which]:.2f}"]
            row += [f"{side['of_bound'][which]:.0%}"]
        rows.append([*row, f"{side['largest_difference']:.0e}"])
    return rows


def main(arguments: Sequence[str]) -> int:
    """Status 1 where a side fails that must be there."""
    return run_benchmark("attention", __doc__, arguments, _measure)


def _measure(session: Session) -> Report:
    cases, others = quick() if session.quick else full(session.device), Neighbours()
    size, rounds = 128 if session.quick else _PRODUCT[session.device], session.rounds(2 if session.quick else 3)
    sides = {
        _OURS: session.start("benchmarks.attention:Side", "jax", session.device),
        _TORCH: session.start("benchmarks.attention:Side", "torch", session.device, uses_jax=False),
        _PRODUCTS: session.start("benchmarks.bounds:Products", session.device, ((size,) * 3,), (cases[0].dtype,)),
    }
    figures = []
    try:
        for case in cases:
            session.say(f"{case.name} ...")
            figures.append(measure_case(case, sides, rounds))
    finally:
        for side in sides.values():
            side.close()
    share = others.share()
    columns = ["", "forward ms", "speed", "of bound", "forward and backward ms", "speed", "of bound", "difference"]
    shown: list[Any] = [make_table(case["name"], columns, _rows(case)) for case in figures]
    absent = {name: reason for case in figures for name, reason in case["absent"].items()}
    for name, reason in absent.items():
        missed = sum(name in case["absent"] for case in figures)
        shown.append(f"  {name} is not here in {missed} of {len(figures)} cases: {reason}")
    best = max(case["product_flops_per_second"] for case in figures)
    found = {"cases": figures, "absent": absent, "other_work": share}
    return Report(found, [*shown, *other_work("all cases", share)], _notes(cases[0], size, best))


def _notes(case: Case, size: int, best: float) -> list[str]:
    return [
        f"{case.tokens} tokens in all, {case.heads} heads, {case.dtype}; median of the turns (A B A B), in brackets "
        "min..max; no dropout and no padding mask.",
        f"'speed' is that of {_REFERENCE} = 1. The bound is the time of the products alone (a backward pass counts "
        "as two forward passes; causal: half of the square) at the speed of the faster of JAX's and torch's product "
        f"of two {size} x {size} matrices, measured between the turns: at best {best / 1e9:.0f} GFLOP/s.",
        f"'difference': the largest absolute difference of an output from {_REFERENCE}'s.",
        "JAX compiles each function before it is measured; torch runs eagerly.",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
