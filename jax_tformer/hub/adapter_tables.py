"""Converts low-rank adapters to those of PEFT and back, by the rows of the family's tables.

PEFT has A `[R, inputs]` and B `[outputs, R]` for a module, whatever the layout of the module's own weight. Where
several of our projections are one fused matrix there (GPT-2's c_attn), it has one A for all, and we have one for each:

- theirs become ours with A repeated and B split;
- ours become theirs with that A where all projections have adapters and equal As; otherwise with their As below one
  another, and each B beside zeros, in the columns that belong to its A. That is as many times the rank.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import einops
import numpy as np

from jax_tformer.config import LoraConfig, TransformerConfig
from jax_tformer.hub.names import STACKED, WeightsError, listed
from jax_tformer.hub.tables import Arrays, Row, known_names, places_of

PREFIX = "base_model.model."
"""Before the names of all modules, because PEFT wraps the model twice."""
_KEY = re.compile(rf"({re.escape(PREFIX)})?(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_NAMES = ("query", "key", "value", "output", "gate", "up", "down")


class Module(NamedTuple):
    """One of their modules that is a projection, or several fused ones, of a layer."""

    name: str
    ours: tuple[str, ...]
    """Our projections (`decoder.blocks.0.self_attention.query`)."""
    axes: str
    """How its weight becomes ours, as in einops."""
    sizes: Mapping[str, int]
    outputs: int
    inputs: int

    def split(self, b: np.ndarray) -> list[np.ndarray]:
        """Splits a B into those of our projections."""
        laid = b.T if self.inputs_first else b
        return list(einops.rearrange(laid, self.axes, n=len(self.ours), **self.sizes))

    def fuse(self, parts: Iterable[np.ndarray]) -> np.ndarray:
        """Inverts `split`."""
        before, after = self.axes.split(" -> ")
        laid = einops.rearrange(np.stack(list(parts)), f"{after} -> {before}", **self.sizes)
        return np.ascontiguousarray(laid.T if self.inputs_first else laid)

    @property
    def inputs_first(self) -> bool:
        """Whether its weight is `[inputs, outputs]`, as in GPT-2's Conv1D."""
        return self.axes.startswith("i ")


def modules(rows: tuple[Row, ...], config: TransformerConfig) -> dict[str, Module]:
    """Returns the modules that are projections of layers, by name; `config` is that of the model without adapters."""
    found = {}
    for place in places_of(rows, config):
        ours = tuple(name.removesuffix(".weight") for name in place.ours)
        if f".{STACKED}." in ours[0] and place.ours[0].endswith(".weight") and ours[0].split(".")[-1] in _NAMES:
            name = place.theirs.removesuffix(".weight")
            outputs, inputs = place.shape[::-1] if place.axes.startswith("i ") else place.shape
            found[name] = Module(name, ours, place.axes, place.sizes, outputs, inputs)
    return found


def shortest(name: str, others: Collection[str]) -> str:
    """Returns the shortest end of a module's name with which none of the `others` ends. PEFT finds modules by ends."""
    parts = name.split(".")
    ends = (".".join(parts[-count:]) for count in range(1, len(parts)))
    return next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)), name)


def write_adapters(found: Mapping[str, Module], ours: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, ...]]:
    """Returns (A, B) of their modules, from adapters with the names and layouts of `torch_ref`."""
    theirs: dict[str, tuple[np.ndarray, ...]] = {}
    for name, module in found.items():
        adapted = [part for part in module.ours if f"{part}.lora.a.weight" in ours]
        if not adapted:
            continue
        first, *others = (ours[f"{part}.lora.a.weight"] for part in adapted)
        bs = {part: ours[f"{part}.lora.b.weight"] for part in adapted}
        if len(adapted) == len(module.ours) and all(other.tobytes() == first.tobytes() for other in others):
            theirs[name] = first, module.fuse(bs.values())
            continue
        rank, a = len(first), np.concatenate([first, *others])
        wide = {part: np.zeros((len(bs[adapted[0]]), len(a)), a.dtype) for part in module.ours}
        for number, part in enumerate(adapted):
            wide[part][:, number * rank : (number + 1) * rank] = bs[part]
        theirs[name] = a, module.fuse(wide.values())
    return theirs


def read_adapters(
    found: Mapping[str, Module], theirs: Mapping[str, tuple[np.ndarray, np.ndarray]], lora: LoraConfig | None
) -> Arrays:
    """Inverts `write_adapters`; `lora` is the config that they were written with, None for those of PEFT.

    Raises WeightsError for adapters of other shapes than the modules that they are for.
    """
    ours: Arrays = {}
    wrong = []
    for name, (a, b) in theirs.items():
        for side, array, shape in (
            ("A", a, (len(a), found[name].inputs)),
            ("B", b, (found[name].outputs, len(a))),
        ):
            if array.shape != shape:
                wrong.append(f"{name}.lora_{side} is {list(array.shape)}, expected {list(shape)}")
    if wrong:
        raise WeightsError(f"{len(wrong)} of another shape ({listed(wrong)})")
    for name, (a, b) in theirs.items():
        module = found[name]
        adapted = [part for part in module.ours if lora is None or lora.adapts(part.split(".")[-1])]
        parts = dict(zip(module.ours, module.split(b), strict=True))
        step = 0 if lora is None or len(a) == lora.rank else lora.rank
        for number, part in enumerate(adapted):
            columns = slice(number * step, number * step + (step or len(a)))
            ours[f"{part}.lora.a.weight"] = np.ascontiguousarray(a[columns])
            ours[f"{part}.lora.b.weight"] = np.ascontiguousarray(parts[part][:, columns])
    return ours


def pairs(
    rows: tuple[Row, ...], config: TransformerConfig, found: Collection[str], arrays: Mapping[str, np.ndarray]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns (A, B) by module from the arrays of a file of PEFT.

    Raises WeightsError, which lists them, for arrays that are no adapters or are for other modules, and for an A
    without its B.
    """
    sides: dict[str, dict[str, np.ndarray]] = {}
    others = []
    for key, array in arrays.items():
        match = _KEY.fullmatch(key)
        named = f"{match['module']}.weight" if match else key
        module = (known_names(rows, config, [named])[named] or "").removesuffix(".weight")
        if match is None or module not in found:
            others.append(key)
        else:
            sides.setdefault(module, {})[match["side"]] = array
    halves = [module for module, pair in sides.items() if len(pair) != 2]
    if others or halves or not sides:
        told = [f"{len(others)} not for a projection of this model ({listed(others)})"] if others else []
        told += [f"{len(halves)} modules with one of lora_A and lora_B alone ({listed(halves)})"] if halves else []
        raise WeightsError(f"the adapters do not fit the model: {'; '.join(told) or 'there are none'}")
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}
