"""What a Hugging Face folder holds: its settings, special ids and generation defaults, the tokenizer's files, and its
arrays in safetensors, each of which is read part by part, where somebody asks."""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from jax_tformer.config import Dtype
from jax_tformer.config.errors import WHY, InputError, explained, is_id, reason_of, require
from jax_tformer.files import Json, not_regular, read_json, shortened, write_json

if TYPE_CHECKING:
    from jax_tformer.data.tokenizers import Tokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The types of weights that we read, as safetensors calls them."""
STORED = {dtype.name: type_ for type_, dtype in TYPES.items()}
"""NumPy's name of a type -> what safetensors calls it."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".npz", ".bin.index.json")
_MOST_INDEX = 100_000_000
CONFIG = "config.json"
GENERATION = "generation_config.json"
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


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_id, value))


def _is_number(value: Any, least: float = 0) -> bool:
    return value is None or (isinstance(value, int | float) and type(value) is not bool and least <= value < math.inf)


_NUMBERS = "temperature top_p min_p repetition_penalty"
_TABLE: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    (
        "max_length max_new_tokens min_length min_new_tokens num_beams top_k bos_token_id pad_token_id "
        "decoder_start_token_id forced_bos_token_id no_repeat_ngram_size encoder_no_repeat_ngram_size",
        "a whole number of at least 0",
        is_id,
    ),
    (_NUMBERS, "a number of at least 0", _is_number),
    ("length_penalty", "a number", lambda value: _is_number(value, -math.inf)),
    (
        "bad_words_ids",
        "lists of one or more ids",
        lambda value: isinstance(value, list) and all(word and _are_ids(word) for word in value),
    ),
    ("suppress_tokens begin_suppress_tokens", "a list of ids", _are_ids),
    ("do_sample renormalize_logits", "true or false", lambda value: isinstance(value, bool)),
    ("early_stopping", 'true, false or "never"', lambda value: isinstance(value, bool) or value == "never"),
    ("eos_token_id forced_eos_token_id", "an id, or a list of ids", lambda value: is_id(value) or _are_ids(value)),
)
_KINDS = {name: (told, fits) for names, told, fits in _TABLE for name in names.split()}
"""Setting that is read -> what it has to be, in words and as a test."""
_SAME = (
    "length_penalty",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "renormalize_logits",
    "early_stopping",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
)
"""Settings that mean the same in a DecodingConfig."""
_NEUTRAL: Mapping[str, object] = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "guidance_scale": 1.0,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "force_words_ids": None,
    "constraints": None,
    "penalty_alpha": 0.0,
    "stop_strings": None,
    "max_time": None,
    "top_h": None,
    "token_healing": False,
    "watermarking_config": None,
    "num_return_sequences": 1,
}
"""Setting that changes what is generated, which we do not have -> the value with which it changes nothing."""


@dataclass(frozen=True)
class Origin:
    """Where a model came from. `net.origin` holds it; it changes no number, so equality of nets ignores it."""

    config: Json
    """config.json, as it was."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """generation_config.json and the tokenizer's files, as they were, by name."""
    types: Mapping[str, str] = field(default_factory=dict)
    """The stored type of each array by its name in the file, as safetensors calls it ("F16")."""
    converted: bool = False
    """Whether `load_pretrained` was told another type, in which the weights are then saved as well."""

    tokenizer: "Tokenizer | None" = None
    """What those files are, if `load_pretrained` has read them."""

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
    def generation(self) -> Json | None:
        """generation_config.json; None: there was none."""
        return json.loads(self.files[GENERATION]) if GENERATION in self.files else None


def read_origin(folder: Path) -> Origin:
    """Reads what `Origin` holds, without `types`, from a folder of `save_pretrained` or of `write_origin`.

    Raises InputError if config.json is missing or damaged or asks for remote code, or if another file is damaged.
    """
    if not (folder / CONFIG).exists():
        require(not any(folder.glob("*.gguf")), what_instead(folder))
        raise InputError(f"{folder} has no {CONFIG}; expected a folder that save_pretrained wrote")
    config = read_object(inside(folder, CONFIG))
    require(
        "auto_map" not in config,
        f"{folder / CONFIG} asks for code of its own (auto_map), which is not run; expected a class of "
        "transformers itself; if the weights are of such a class, remove auto_map",
    )
    names = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    if GENERATION in names:
        generation = read_object(inside(folder, GENERATION))
        for name in generation.keys() & {"length_penalty", *_NUMBERS.split()}:
            # Whatever asks for them later: the file is copied on.
            _require_kind(name, generation[name], str(folder / GENERATION))
    kept = {}
    for name in names:
        if name == GENERATION or any(fnmatch(name, kind) for kind in TOKENIZER_FILES):
            with open(path := inside(folder, name), "rb") as file:
                kept[name] = file.read(_LARGEST + 1)
            require(
                len(kept[name]) <= _LARGEST,
                f"{path} has more than {_LARGEST:,} bytes; expected a file of a tokenizer; restore it",
            )
    return Origin(config, kept)


def write_origin(folder: Path, origin: Origin) -> None:
    """Writes config.json and the other files into a folder that exists; `read_origin` reads them."""
    write_json(folder / CONFIG, dict(origin.config))
    for name, content in origin.files.items():
        (folder / name).write_bytes(content)


def read_object(path: Path) -> Json:
    """Reads an object of JSON; raises InputError for anything else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {type(content).__name__}; expected a JSON object; restore it")
    return content


class GenerationDefaults(NamedTuple):
    """How a checkpoint generates where nobody says otherwise."""

    decoding: Json
    """Fields of DecodingConfig. There is a temperature if tokens are to be drawn."""
    drawing: Json = {}  # noqa: RUF012 (nobody changes it)
    """More of them, for tokens that are drawn because a flag asks for it."""
    most: int | None = None
    """The most new tokens of an answer."""
    longest: int | None = None
    """The most tokens of a prompt and its answer, or of a translation."""
    start_id: int | None = None
    """The first token that a decoder reads after an encoder."""
    end_ids: tuple[int, ...] = ()
    """Any of these ends an answer; empty if the checkpoint does not say."""
    ignored: tuple[str, ...] = ()
    """The settings that we do not have, each with its value."""


def defaults_of(
    origin: Origin, folder: Path, *, translates: bool, vocabulary: int | None
) -> tuple[GenerationDefaults, Path]:
    """Returns the defaults of the checkpoint in `folder`, and the file that says them; raises as `read_defaults`."""
    settings = dict(origin.config)
    where = folder / "config.json"
    if origin.generation is not None:
        start = {name: settings.get(name) for name in ("decoder_start_token_id", "bos_token_id")}
        settings = start | dict(origin.generation)
        where = folder / "generation_config.json"
    return read_defaults(settings, translates=translates, where=str(where), vocabulary=vocabulary), where


def read_defaults(settings: Json, *, translates: bool, where: str, vocabulary: int | None = None) -> GenerationDefaults:
    """Reads generation settings, those of an encoder-decoder if `translates`.

    Raises InputError for a wrong value, and for an end token that the model's `vocabulary` does not have.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for name in given.keys() & _KINDS.keys():
        _require_kind(name, given[name], where)
    ignored = [
        f"{name} {given[name]!r:.40}"
        for name, neutral in _NEUTRAL.items()
        if name in given and given[name] not in (neutral, [])
    ]
    # Those of beams also without num_beams: a flag may ask for a beam search.
    decoding = {"length_penalty": 1.0, "length_penalty_form": "power"}
    decoding |= {name: _as_tuple(given[name]) for name in _SAME if name in given}
    drawing: Json = {name: given[name] for name in ("temperature", "top_p", "min_p") if name in given}
    drawing |= {"top_k": given["top_k"] or None} if "top_k" in given else {}
    if given.get("num_beams", 1) > 1:
        decoding["num_beams"] = given["num_beams"]
        if given.get("do_sample"):
            ignored.append("do_sample with num_beams")
    elif given.get("do_sample"):
        # Without a top_k, transformers takes 50.
        decoding |= {"temperature": 1.0, "top_k": 50} | drawing
    ends, last = (
        ids if isinstance(ids, list) else [ids]
        for ids in (given.get(name, []) for name in ("eos_token_id", "forced_eos_token_id"))
    )
    if unknown := [end for end in ends if vocabulary is not None and end >= vocabulary]:
        raise InputError(f"eos_token_id is {unknown[0]} in {where}; expected ids below {vocabulary}, the vocabulary")
    # Those of translations count the start token.
    lengths = {name: given[name] - translates for name in ("min_length", "max_length") if given.get(name)}
    fewest = given.get("min_new_tokens", 0)
    if translates:
        fewest = fewest or lengths.get("min_length", 0)
    elif "min_length" in lengths and not fewest:
        ignored.append(f"min_length {given['min_length']}")
    decoding["min_new_tokens"] = fewest
    if "forced_bos_token_id" in given and translates:
        decoding["forced_bos_token_id"] = given["forced_bos_token_id"]
    if len(last) == 1:
        decoding["forced_eos_token_id"] = last[0]
    elif last:
        ignored.append(f"forced_eos_token_id {last}")
    longest = None if "max_new_tokens" in given else lengths.get("max_length")
    start_id = given.get("decoder_start_token_id", given.get("bos_token_id")) if translates else None
    return GenerationDefaults(
        decoding, drawing, given.get("max_new_tokens"), longest, start_id, tuple(ends), tuple(ignored)
    )


def _as_tuple(value: Any) -> Any:
    """Returns a list of JSON, and lists in it, as tuples; anything else as it is."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _require_kind(name: str, value: Any, where: str) -> None:
    expected, fits = _KINDS[name]
    require(fits(value), f"{name} is {value!r:.60} in {where}; expected {expected}")


@dataclass(frozen=True)
class Stored:
    """An array in a file of safetensors: a view, which maps that part of the file where somebody reads it.

    The file is open for a moment only, so that what was read of it takes no memory later.
    """

    shape: tuple[int, ...]
    type: str
    """The type as safetensors calls it."""
    path: Path
    begin: int
    """The array's first byte in the file."""
    written: int
    """When the file was written, in nanoseconds."""

    @property
    def dtype(self) -> np.dtype:
        """The type of the elements; one byte for types that we do not read."""
        return TYPES.get(self.type, np.dtype(np.uint8))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Maps the array; raises InputError if the file is no longer the one that was opened."""
        with explained(
            f"{self.path} changed while it was read ({WHY}); restore it, and load it again", (OSError, ValueError)
        ):
            array = np.memmap(self.path, self.dtype, "r", self.begin, self.shape)
            require(self.path.stat().st_mtime_ns == self.written, "it was written again")
        return array


def open_tensors(folder: Path) -> dict[str, Stored]:
    """Opens the safetensors of a folder: the arrays of model.safetensors, or of the shards that its index names.

    Raises InputError for pickles, and for files that are missing, truncated, outside of the folder, or not as the
    index says.
    """
    if os.path.lexists(folder / WEIGHTS):
        return open_file(folder, WEIGHTS)
    require(os.path.lexists(folder / INDEX), what_instead(folder))
    files = read_index(folder, INDEX, ".safetensors", f"; {_CONVERT}")
    tensors: dict[str, Stored] = {}
    for file in sorted(set(files.values())):
        found = open_file(folder, file)
        listed = {name for name, at in files.items() if at == file}
        if lacks := sorted(listed - found.keys()):
            raise InputError(
                f"{folder / file} lacks {shortened(lacks, 1)}, which the index promises; restore the folder"
            )
        if holds := sorted(found.keys() - listed):
            raise InputError(
                f"{folder / file} holds {shortened(holds, 1)}, which the index does not list; restore the folder"
            )
        tensors |= found
    return tensors


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a regular file in a folder; raises InputError if it is missing, or really elsewhere.

    In the Hugging Face cache files are links to the blobs of the same model, which counts as inside.
    """
    path = folder / name
    problem = not_regular(path)
    require(not problem, f"{path} {problem}; expected a file; restore the folder, or load it again")
    real = path.resolve()
    home = folder.resolve()
    allowed = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    require(
        any(real.is_relative_to(place) for place in allowed),
        f"{path} is a link out of the folder, to {real}; expected the file itself; copy it there",
    )
    return path


def read_index(folder: Path, name: str, ending: str, mend: str = "") -> dict[str, str]:
    """Reads an index of several files: the name of each array -> that of its file.

    Raises InputError if it is missing or damaged, or if it names anything but files of the folder with this `ending`.
    """
    index = inside(folder, name)
    content = read_json(index, _MOST_INDEX)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise InputError(f"{index} has no weight_map; expected the name of a file for each array; restore it")
    for array, file in files.items():
        if not isinstance(file, str) or not file or file in (".", "..") or Path(file).name != file or "\\" in file:
            raise InputError(f"{index} says that {array} is in {file!r}; expected a file of this folder, by its name")
    if others := sorted(file for file in files.values() if not file.endswith(ending)):
        raise InputError(f"{index} names {others[0]}; expected files that end in {ending}{mend}")
    return files


def open_file(folder: Path, name: str) -> dict[str, Stored]:
    """Opens one file of safetensors in a folder; raises InputError as `open_tensors` does.

    The library checks that its header is sound and that all of the data is there.
    """
    path = inside(folder, name)
    try:
        with safetensors.safe_open(path, framework="numpy"), open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            begin = file.tell()
            written = os.fstat(file.fileno()).st_mtime_ns
        header.pop("__metadata__", None)
        return {
            name: Stored(tuple(told["shape"]), told["dtype"], path, begin + told["data_offsets"][0], written)
            for name, told in header.items()
        }
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        with open(path, "rb") as damaged:
            start = damaged.read(8)
        # Safetensors begin with the length of a header of less than 4 GB.
        if start.startswith(b"PK\x03\x04") or (start.startswith(b"\x80") and any(start[4:])):
            raise InputError(
                f"{path} is a pickle by another name, which is not read, because it can run code; {_CONVERT}"
            ) from error
        raise InputError(
            f"{path} is truncated or damaged ({reason_of(error)}); restore it, or load it again"
        ) from error


_CONVERT = (
    "where you trust it, let transformers rewrite it: AutoModel.from_pretrained(folder).save_pretrained(new_folder), "
    "with the AutoModel class of its head"
)


def what_instead(folder: Path) -> str:
    """Says what the folder holds instead of safetensors."""
    names = sorted(path.name for path in folder.iterdir())
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return (
            f"{folder} holds {gguf[0]}, which is GGUF and not read; expected safetensors; take the folder that it was "
            "made of, or let transformers rewrite it: AutoModelForCausalLM.from_pretrained(folder, "
            f"gguf_file={gguf[0]!r}).save_pretrained(new_folder)"
        )
    if "flax_model.msgpack" in names:
        return f"{folder} holds a flax_model.msgpack; write it as safetensors first: jax-tformer from-flax {folder} OUT"
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        return (
            f"{folder} holds {pickles[0]} and no {WEIGHTS}; expected safetensors, since reading other files can run "
            f"code; {_CONVERT}"
        )
    return f"{folder} has neither {WEIGHTS} nor {INDEX}; expected the weights in one of them; restore the folder"
