"""Reads and writes low-rank adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors.

PEFT has A `[R, inputs]` and B `[outputs, R]` for a module, whatever the layout of the module's own weight. Where
several of our projections are one fused matrix there (GPT-2's c_attn), it has one A for all, and we have one for each:

- theirs become ours with A repeated and B split;
- ours become theirs with that A where all As are equal; otherwise with the As below one another, and each B beside
  zeros, in the columns that belong to its A. That is as many times the rank.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import jax
import numpy as np
import safetensors
from safetensors.numpy import save_file

from jax_tformer.config import LoraConfig, LoraTarget
from jax_tformer.config.errors import WHY, InputError, explained, require
from jax_tformer.files import Json, new_folder, require_new_folder, user_path, write_json
from jax_tformer.functional import AnyTransformer, Params, transformer
from jax_tformer.hub.families import Arrays, Layout, Place, family_called
from jax_tformer.hub.folder import open_file, read_object
from jax_tformer.hub.names import (
    STACKED,
    WeightsError,
    from_reference,
    listed,
    read_header,
    require_fit,
    slots,
    to_reference,
)
from jax_tformer.lora import join_adapters, split_adapters, without_adapters

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
_KEY = "jax_tformer.lora"
_CHANGE_NOTHING = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha"),
    *("lora_dropout", "megatron_config", "megatron_core"),
    *("peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type"),
    "use_rslora",
}
"""Fields of adapter_config.json that we read, or that change nothing once the adapters are there."""


PREFIX = "base_model.model."
"""Before the names of all modules, because PEFT wraps the model twice."""
_NAMED = re.compile(rf"({re.escape(PREFIX)})?(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_PROJECTIONS = tuple(f".{name}.weight" for name in get_args(LoraTarget) if name != "all")

T = TypeVar("T")
Pair = tuple[np.ndarray, np.ndarray]
"""The A and the B of a module."""


class Module(Place):
    """The place of the weight of one of their modules that is a projection, or several fused ones, of a layer."""

    @property
    def parts(self) -> list[str]:
        """Our projections (`decoder.blocks.0.self_attention.query`)."""
        return [name.removesuffix(".weight") for name in self.ours]

    @property
    def inputs_first(self) -> bool:
        """Whether its weight is `[inputs, outputs]`, as in GPT-2's Conv1D."""
        return self.axes.startswith("i ")

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the shapes of its A and its B."""
        outputs, inputs = self.shape[::-1] if self.inputs_first else self.shape
        return (rank, inputs), (outputs, rank)

    def own_parts(self, adapted: Sequence[str], rank: int, b: np.ndarray) -> Iterator[tuple[str, slice, np.ndarray]]:
        """Yields each adapted projection with the rows of A that are its own, and its part `[..., rank]` of B.

        An A of `rank` rows is one for all, a longer one has the rows of each below one another.
        """
        parts = dict(zip(self.parts, self.split(b.T if self.inputs_first else b), strict=True))
        for number, name in enumerate(adapted):
            start = number * rank if b.shape[1] > rank else 0
            rows = slice(start, start + rank)
            yield name, rows, parts[name][..., rows]


def save_adapters(
    folder: str | Path, net: AnyTransformer, params: Params, *, architecture: str | None = None, base: str | None = None
) -> None:
    """Writes the adapters of a model to a new folder that PEFT's `PeftModel.from_pretrained(model, folder)` opens.

    `architecture` is the class in `transformers` of the model that they are for (None: that of the folder which `net`
    was loaded from), and `base` the folder or name of that model, for those who open the adapters. Where modules are
    fused there, the adapters may have a higher rank (see `the top of this file`); the function is the same.

    Raises InputError if there are no adapters, if the class is unknown or has no such modules, or if the folder holds
    something.
    """
    out = user_path(folder)
    lora = net.config.lora
    if lora is None:
        raise InputError("the model has no adapters to save; expected one with TransformerConfig.lora")
    require_new_folder(out)
    layout = _layout(net, architecture)
    found = modules(layout)
    theirs = write_adapters(found, to_reference(split_adapters(params)[0]))
    arrays = {f"{PREFIX}{name}.weight": array for name, array in _by_side(theirs).items()}
    names = {place.theirs.removesuffix(".weight") for place in layout.places}
    ranks = {name: len(a) for name, (a, _) in theirs.items()}
    rank = min(ranks.values())
    wider = {name: size for name, size in ranks.items() if size != rank}
    patterns = {shortest(name, names - wider.keys()): size for name, size in wider.items()}

    def alpha(size: int) -> float:
        exact = lora.alpha * (math.sqrt(size / lora.rank) if lora.rank_stabilized else size / lora.rank)
        return int(exact) if exact == int(exact) else exact

    said = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha(rank),
        "lora_dropout": lora.dropout,
        "fan_in_fan_out": any(found[name].inputs_first for name in theirs),
        "use_rslora": lora.rank_stabilized,
        "target_modules": sorted({shortest(name, names - ranks.keys()) for name in ranks}),
        "rank_pattern": patterns,
        "alpha_pattern": {name: alpha(size) for name, size in patterns.items()},
        "bias": "none",
    }
    metadata = {"format": "pt", _KEY: json.dumps(asdict(lora))}
    with explained(f"cannot write {out}: {WHY}", (OSError, safetensors.SafetensorError)), new_folder(out) as whole:
        save_file(arrays, whole / WEIGHTS, metadata=metadata)
        write_json(whole / CONFIG, said)


def load_adapters(
    folder: str | Path, net: AnyTransformer, params: Params, *, architecture: str | None = None
) -> tuple[AnyTransformer, Params]:
    """Loads adapters that PEFT or `save_adapters` wrote; returns the model with them, and its parameters.

    `net` and `params` are the model that they are for, as `load_pretrained` returns it; `architecture` is its class in
    `transformers` if it comes from elsewhere. The adapters take the type of the parameters, and may then be trained
    further, or merged by `merge_lora`.

    Raises InputError, in one line, for folders that are not whole, for kinds of adapters that we do not have, and for
    adapters of another model.
    """
    path = user_path(folder)
    require(net.config.lora is None, "the model has adapters already; expected one without, as merge_lora returns")
    require((path / CONFIG).exists(), f"{path} has no {CONFIG}; expected a folder that PEFT's save_pretrained wrote")
    require(
        (path / WEIGHTS).exists() or not (path / PICKLE).exists(),
        f"{path} holds {PICKLE} and no {WEIGHTS}; such files can run code when they are read, so they are not; "
        "where you trust it, let PEFT write it again with safe_serialization=True",
    )
    said = _read_config(path / CONFIG)
    layout = _layout(net, architecture)
    arrays = {name: np.asarray(tensor) for name, tensor in open_file(path, WEIGHTS).items()}
    with explained(f"{path} does not hold adapters for this model: {WHY}", InputError):
        found = modules(layout)
        theirs = pairs(layout, found, arrays)
        lora, ours = _read(said, found, theirs, read_header(path / WEIGHTS, _KEY, LoraConfig))
        adapted = transformer(replace(net.config, lora=lora))
        shapes = split_adapters(adapted.shapes)[0]
        if missing := slots(shapes).keys() - ours.keys():
            raise InputError(f"it leaves out {listed(missing)}, and our adapters are in every layer")
        dtype = np.dtype(net.config.compute.parameter_dtype)
        adapters = from_reference({name: array.astype(dtype) for name, array in ours.items()}, shapes)
    adapted.origin = net.origin
    return adapted, join_adapters(jax.tree.map(jax.numpy.asarray, adapters), params)


def _layout(net: AnyTransformer, architecture: str | None) -> Layout:
    """Returns the layout of the model that adapters are for."""
    config = without_adapters(net.config)
    return Layout(family_called(architecture or (net.origin and net.origin.architecture)).rows(config), config)


def _read_config(path: Path) -> Json:
    """Reads adapter_config.json; raises InputError for kinds of adapters and settings that we do not have."""
    said = read_object(path)
    kind = said.get("peft_type")
    require(kind == "LORA", f"{path} has peft_type {kind!r}; expected 'LORA', the only kind of adapters that we have")
    for name, value in said.items():
        if name not in _CHANGE_NOTHING and value and value != "none":
            raise InputError(f"{path} has {name} {value!r}, which our adapters cannot express; expected it unset")
    start = said.get("init_lora_weights")
    require(
        not isinstance(start, str) or start in ("gaussian", "eva", "orthogonal"),
        f"{path} has init_lora_weights {start!r}, which changes the model itself; expected adapters beside it: "
        "let PEFT convert them (path_initial_model_for_weight_conversion)",
    )
    for name, whole in (("r", True), ("lora_alpha", False)):
        value = said.get(name)
        if not isinstance(value, int if whole else int | float) or isinstance(value, bool) or value <= 0:
            raise InputError(f"{path} has {name} {value!r}; expected a number above 0")
    return said


def _read(
    said: Json,
    found: Mapping[str, Module],
    theirs: Mapping[str, Pair],
    own: LoraConfig | None,
) -> tuple[LoraConfig, Arrays]:
    """Returns the config of the adapters, and the adapters by the names of `torch_ref`."""
    alphas = {name: float(_pattern(said, "alpha_pattern", name, said["lora_alpha"])) for name in theirs}
    ranks = {name: int(_pattern(said, "rank_pattern", name, said["r"])) for name in theirs}
    stabilized = bool(said.get("use_rslora"))
    for name, (a, _) in theirs.items():
        require(
            len(a) == ranks[name],
            f"{name}.lora_A has {len(a)} rows, and {CONFIG} says rank {ranks[name]}; expected as many",
        )
    if own is not None and own.rank_stabilized == stabilized:
        ours = read_adapters(found, theirs, own)
        again = write_adapters(found, ours)
        # Unless others have trained them since, they are as `save_adapters` lays them out.
        if again.keys() == theirs.keys() and jax.tree.all(jax.tree.map(np.array_equal, again, dict(theirs))):
            return own, ours
    targets = {part.split(".")[-1] for name in theirs for part in found[name].parts}
    for what, values in (("ranks", ranks.values()), ("alphas", alphas.values())):
        told = ", ".join(map(str, sorted(set(values))))
        require(len(set(values)) == 1, f"its {what} are {told}; expected the same for all modules")
    ordered = tuple(target for target in get_args(LoraTarget) if target in targets)
    dropout = float(said.get("lora_dropout") or 0.0)
    lora = LoraConfig(ranks.popitem()[1], alphas.popitem()[1], ordered, dropout, stabilized)
    return lora, read_adapters(found, theirs, None)


def _pattern(said: Json, field: str, module: str, otherwise: Any) -> Any:
    """Looks up a module as PEFT does: by patterns of the end of its name."""
    patterns = said.get(field) or {}
    return next((value for end, value in patterns.items() if re.fullmatch(rf"(.*\.)?({end})", module)), otherwise)


def modules(layout: Layout) -> dict[str, Module]:
    """Returns the modules that are projections of layers, by name."""
    return {
        place.theirs.removesuffix(".weight"): Module(*place)
        for place in layout.places
        if f".{STACKED}." in place.ours[0] and place.ours[0].endswith(_PROJECTIONS)
    }


def shortest(name: str, others: Collection[str]) -> str:
    """Returns the shortest end of a module's name with which none of the `others` ends. PEFT finds modules by ends."""
    parts = name.split(".")
    ends = (".".join(parts[-count:]) for count in range(1, len(parts)))
    return next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)), name)


def write_adapters(found: Mapping[str, Module], ours: Mapping[str, np.ndarray]) -> dict[str, Pair]:
    """Returns (A, B) of their modules, from adapters with the names and layouts of `torch_ref`."""
    theirs = {}
    for name, module in found.items():
        if adapted := [part for part in module.parts if f"{part}.lora.a.weight" in ours]:
            several = [ours[f"{part}.lora.a.weight"] for part in adapted]
            alike = all(a.tobytes() == several[0].tobytes() for a in several)
            a = np.concatenate(several[:1] if alike else several)
            b = np.zeros(module.shapes(len(a))[1], a.dtype)
            for part, _, columns in module.own_parts(adapted, len(several[0]), b):
                columns[...] = ours[f"{part}.lora.b.weight"].reshape(columns.shape)
            theirs[name] = a, b
    return theirs


def read_adapters(found: Mapping[str, Module], theirs: Mapping[str, Pair], lora: LoraConfig | None) -> Arrays:
    """Inverts `write_adapters`; `lora` is the config that they were written with, None for those of PEFT.

    Raises WeightsError for adapters of other shapes than the modules that they are for.
    """
    shapes = {name: found[name].shapes(len(a)) for name, (a, _) in theirs.items()}
    require_fit("adapters", _by_side(theirs), _by_side(shapes))
    ours = {}
    for name, (a, b) in theirs.items():
        module = found[name]
        adapted = [part for part in module.parts if lora is None or lora.adapts(part.split(".")[-1])]
        rank = len(a) if lora is None else lora.rank
        for part, rows, columns in module.own_parts(adapted, rank, b):
            ours[f"{part}.lora.a.weight"] = a[rows]
            ours[f"{part}.lora.b.weight"] = columns.reshape(-1, rank)
    return ours


def _by_side(pairs: Mapping[str, tuple[T, T]]) -> dict[str, T]:
    return {f"{name}.lora_{side}": one for name, pair in pairs.items() for side, one in zip("AB", pair, strict=True)}


def pairs(layout: Layout, found: Collection[str], arrays: Mapping[str, np.ndarray]) -> dict[str, Pair]:
    """Returns (A, B) by module from the arrays of a file of PEFT.

    Raises WeightsError, which lists them, for arrays that are no adapters or are for other modules, and for an A
    without its B.
    """
    sides: dict[str, dict[str, np.ndarray]] = {}
    others = []
    for key, array in arrays.items():
        match = _NAMED.fullmatch(key)
        named = f"{match['module']}.weight" if match else key
        module = (layout.known([named])[named] or "").removesuffix(".weight")
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
