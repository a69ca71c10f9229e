"""Makes tokenizers of bytes or characters, trains BPE, and loads tokenizers from folders or the Hugging Face hub."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import TokenizerConfig
from jax_tformer.data.framing import follow_settings, read_framing
from jax_tformer.data.tokenizers import BYTES, FIELDS, ONE_CHARACTER, Role, Tokenizer
from jax_tformer.files import hub_folder, kept, read_json, read_text, user_path

_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
_HUB_FILES = ["tokenizer.json", *_SETTINGS]
_LARGEST = 2**28
"""The most bytes of tokenizer.json; a quarter of a million tokens take 35 MB."""


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str], special: Mapping[Role, str]) -> Tokenizer:
    """Makes the tokenizer that `config` describes; characters and BPE come from `texts`.

    `special` names the token of each role; two roles may share one. Special tokens get the highest ids. A Hugging Face
    tokenizer has its own special tokens and ignores `special`.

    Raises InputError if a character tokenizer gets no text, or the Hugging Face tokenizer cannot be loaded.
    """
    if config.kind == "huggingface":
        return _load_huggingface(config.name, config.revision)
    tokens = list(dict.fromkeys(special.values()))
    if config.kind == "bytes":
        backend = _byte_level(
            models.BPE({character: byte for byte, character in enumerate(BYTES)}, []), use_regex=False
        )
    elif config.kind == "characters":
        backend = _characters(texts)
    else:
        assert config.vocab_size is not None  # checked on construction
        backend = _trained_bpe(texts, config.vocab_size - len(tokens))
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in tokens])
    return Tokenizer(backend, special)


def _byte_level(model: models.BPE, use_regex: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return backend


def _characters(texts: Iterable[str]) -> tokenizers.Tokenizer:
    found: set[str] = set()
    for text in texts:
        found.update(text)
    characters = sorted(found)
    if not characters:
        raise InputError("the text is empty; expected text to take the tokenizer's characters from")
    backend = tokenizers.Tokenizer(models.WordLevel({character: id for id, character in enumerate(characters)}))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(ONE_CHARACTER), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _trained_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Trains BPE on `texts`, which are read twice, or takes it from the cache of an earlier run."""

    def train() -> bytes:
        backend = _byte_level(models.BPE(), use_regex=True)
        # All 256 bytes are in the alphabet, so that any text can be encoded.
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
        return backend.to_str().encode()

    key = chain(["bpe", tokenizers.__version__, str(vocab_size)], texts)
    return tokenizers.Tokenizer.from_str(str(kept(key, train), "utf-8"))


def _load_huggingface(name: str | None, revision: str | None) -> Tokenizer:
    if name is None:
        raise InputError(
            "tokenizer kind is 'huggingface' without a name; give --data.tokenizer.name a folder or a hub name"
        )
    if user_path(name).is_dir():
        if revision is not None:
            raise InputError(f"the tokenizer {name!r} is a folder, which has no revision; leave it out")
        return load_tokenizer(user_path(name))
    # Tokenizer.from_pretrained would not fetch the files that hold the roles.
    return load_tokenizer(hub_folder("tokenizer", name, revision, "--data.tokenizer.revision", _HUB_FILES))


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer that we or Hugging Face saved in `folder`.

    Raises InputError if one of its files is missing or damaged.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        raise InputError(f"{path} does not exist; expected a tokenizer there, as a run or Hugging Face saves it")
    text = read_text(path, _LARGEST)
    roles, settings = _read_roles(Path(folder)), read_settings(Path(folder))
    where = str(Path(folder) / "tokenizer_config.json")
    framing = read_framing(settings["framing"], where) if "framing" in settings else None
    try:
        backend = tokenizers.Tokenizer.from_str(text)
        follow_settings(backend, settings, special_tokens(settings))
        return Tokenizer(backend, roles, framing)
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())
        raise InputError(f"{path} is not a tokenizer ({reason}); restore it, or start a new run") from error


def load_run_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Loads what `Tokenizer.save` wrote; raises InputError if one of its two files is missing or damaged."""
    tokenizer = load_tokenizer(folder)
    if not (Path(folder) / "tokenizer_config.json").exists():
        raise InputError(f"{Path(folder) / 'tokenizer_config.json'} is missing; restore it, or start a new run")
    return tokenizer


def tokenizer_digests(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Returns, for each file of the tokenizer in `folder`, a SHA-256 of its ids or of its special tokens' roles.

    Reads the files, because another version of the library may write a `Tokenizer` differently. Raises InputError as
    `load_tokenizer` does.
    """
    roles: dict[str, Any] = {str(role): token for role, token in _read_roles(Path(folder)).items()}
    if "framing" in (settings := read_settings(Path(folder))):
        roles["framing"] = settings["framing"]
    said = {
        "tokenizer.json": read_json(Path(folder) / "tokenizer.json", _LARGEST),
        "tokenizer_config.json": roles,
    }
    texts = {name: json.dumps(content, sort_keys=True) for name, content in said.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads special_tokens_map.json and tokenizer_config.json, as far as they exist; the second one counts.

    Raises InputError if one is damaged.
    """
    found: dict[str, Any] = {}
    for path in (folder / name for name in _SETTINGS):
        if path.exists():
            settings = read_json(path)
            if not isinstance(settings, dict):
                raise InputError(f"{path} is not a JSON object; restore it, or start a new run")
            # A null says nothing.
            found |= {name: value for name, value in settings.items() if value is not None}
    return found


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that `read_settings` has found, by Hugging Face's names ("bos_token")."""
    contents = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in settings.items()
        if name.endswith("_token")
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _read_roles(folder: Path) -> dict[Role, str]:
    named = special_tokens(read_settings(folder))
    found = {role: next((named[field] for field in fields if field in named), None) for role, fields in FIELDS.items()}
    return {role: token for role, token in found.items() if token is not None}
