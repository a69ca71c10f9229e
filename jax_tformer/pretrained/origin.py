"""What a Hugging Face folder holds beyond our config: special ids, generation defaults, the tokenizer's files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from jax_tformer.config import Dtype
from jax_tformer.errors import InputError
from jax_tformer.files import read_json, write_json
from jax_tformer.pretrained.tensor_files import inside

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.spm",
    "chat_template.json",
    "*.jinja",
)
"""What a tokenizer may consist of."""
_LARGEST = 2**28
"""The most bytes of one of these files; the vocabulary of Gemma takes 35 MB."""

_HOLDS: dict[str, Dtype] = {"F64": "float64", "F32": "float32", "F16": "float32", "BF16": "bfloat16"}
"""Stored type -> ours without loss. Our arithmetic has no float16: it overflows at 65,504, and TPUs lack it."""
_BY_WIDTH: tuple[Dtype, ...] = ("float64", "float32", "bfloat16")


@dataclass(frozen=True)
class Origin:
    """Where a model came from. `net.origin` holds it; it changes no number, so equality of nets ignores it."""

    config: Mapping[str, Any]
    """config.json, as it was."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """generation_config.json and the tokenizer's files, as they were, by name."""
    types: Mapping[str, str] = field(default_factory=dict)
    """The stored type of each array by its name in the file, as safetensors calls it ("F16")."""
    converted: bool = False
    """Whether `load_pretrained` was told another type, in which the weights are then saved as well."""

    @property
    def architecture(self) -> str:
        """The class in `transformers`."""
        return str(self.config["architectures"][0])

    @property
    def dtype(self) -> Dtype:
        """The type of parameters that holds all stored numbers."""
        found = {_HOLDS[type_] for type_ in self.types.values()}
        return next((dtype for dtype in _BY_WIDTH if dtype in found), "float32")

    @property
    def generation(self) -> Mapping[str, Any] | None:
        """generation_config.json; None: there was none."""
        if GENERATION not in self.files:
            return None
        found: dict[str, Any] = json.loads(self.files[GENERATION])
        return found


def read_origin(folder: Path) -> Origin:
    """Reads what `Origin` holds, without `types`, from a folder of `save_pretrained` or of `write_origin`.

    Raises InputError if config.json is missing or damaged or asks for remote code, or if another file is damaged.
    """
    if not (folder / CONFIG).exists():
        raise InputError(f"{folder} has no {CONFIG}; expected a folder that save_pretrained wrote")
    config = read_json(inside(folder, CONFIG))
    if not isinstance(config, dict):
        raise InputError(f"{folder / CONFIG} holds {type(config).__name__}; expected a JSON object; restore it")
    if "auto_map" in config:
        raise InputError(
            f"{folder / CONFIG} asks for code of its own (auto_map), which is not run; expected a class of "
            "transformers itself; if the weights are of such a class, remove auto_map"
        )
    names = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    if GENERATION in names:
        generation = read_json(inside(folder, GENERATION))
        if not isinstance(generation, dict):
            raise InputError(f"{folder / GENERATION} holds {type(generation).__name__}; expected a JSON object")
    kept = [name for name in names if name == GENERATION or any(fnmatch(name, kind) for kind in TOKENIZER_FILES)]
    return Origin(config, {name: _bytes(inside(folder, name)) for name in kept})


def write_origin(folder: Path, origin: Origin) -> None:
    """Writes config.json and the other files into a folder that exists; `read_origin` reads them."""
    write_json(folder / CONFIG, dict(origin.config))
    for name, content in origin.files.items():
        (folder / name).write_bytes(content)


def _bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise InputError(f"{path} has more than {_LARGEST:,} bytes; expected a file of a tokenizer; restore it")
    return content
