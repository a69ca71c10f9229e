"""Text to ids and back: one class over a Hugging Face tokenizer, whatever its kind, saved as `tokenizer.json`."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers

from jax_tformer.config_file import read_json, read_text
from jax_tformer.errors import InputError

Role = Literal["start", "end", "pad", "mask"]

# The Hugging Face names that may fill a role, the first one that is given; BERT's start and end are CLS and SEP.
_FIELDS: dict[Role, tuple[str, ...]] = {
    "start": ("bos_token", "cls_token"),
    "end": ("eos_token", "sep_token"),
    "pad": ("pad_token",),
    "mask": ("mask_token",),
}
_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
# Oniguruma's m lets the dot match newlines.
ONE_CHARACTER = "(?m:.)"
_MOST_IDS = 2**31 - 1
_LARGEST = 2**28
"""Bytes of tokenizer.json; those of a quarter of a million tokens take 35 MB."""
_PIECE_LENGTH = 8192
_GROUP = 4096
# GPT-2's pattern joins a space to the word that follows it, never to the one before.
_PIECE_END = re.compile(r"(?<=\w)[ \n]")


class Tokenizer:
    """A tokenizer and the roles that its special tokens play.

    Attributes: `vocab_size`, one more than the highest id, special tokens included; `start_id`, `end_id`, `pad_id` and
    `mask_id`, None where no token has that role. Without a padding token of its own (GPT-2), the end token pads.
    """

    def __init__(self, backend: tokenizers.Tokenizer, roles: Mapping[Role, str]) -> None:
        """Wraps `backend`; `roles` names the token of each role.

        Raises InputError if a named token has no id.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._roles = dict(roles)
        if "end" in roles:
            self._roles.setdefault("pad", roles["end"])
        vocabulary = backend.get_vocab(with_added_tokens=True)
        for role, token in roles.items():
            if token not in vocabulary:
                raise InputError(f"the tokenizer's {role} token {token!r} has no id; expected one in its vocabulary")
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > _MOST_IDS:
            raise InputError(f"a token has the id {self.vocab_size - 1}; expected ids below {_MOST_IDS}")
        self.start_id = self._role_id("start")
        self.end_id = self._role_id("end")
        self.pad_id = self._role_id("pad")
        self.mask_id = self._role_id("mask")
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: id for id, token in added.items() if token.special}
        either = "|".join(map(re.escape, self._special))
        self._spelled = re.compile(f"({either})") if either else None
        outline = json.loads(backend.to_str())
        self._table = _character_table(outline, self._special)
        self._cut = _is_byte_level(outline)

    def _role_id(self, role: Role) -> int | None:
        token = self._roles.get(role)
        return None if token is None else self._backend.token_to_id(token)

    @property
    def has_table(self) -> bool:
        """Whether ids are looked up character by character, in less time than it takes to read them from a file."""
        return self._table is not None

    @property
    def ordinary_ids(self) -> np.ndarray:
        """int32[N], the ids of all tokens that are not special, ascending."""
        ids = set(self._backend.get_vocab(with_added_tokens=True).values()) - set(self._special.values())
        return np.array(sorted(ids), np.int32)

    def encode(self, text: str) -> np.ndarray:
        """int32[N], the ids of `text`; no special tokens are added, those spelled out in it are recognised.

        Raises InputError if `text` is not valid Unicode, or holds a character that a character tokenizer lacks.
        """
        _check_unicode(text)
        if self._table is not None:
            return self._encode_characters(text, self._table)
        if not self._cut:
            return self.encode_batch([text])[0]
        # Pieces keep the library fast, which slows down on long texts; the cuts are where no token can cross.
        return np.concatenate([np.zeros(0, np.int32), *self.encode_batch(pieces(text))])

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of every text, as `encode` gives them."""
        joined = "".join(texts)
        _check_unicode(joined)
        if self._table is None:
            # The library's encodings take a hundred times the memory of the ids: not all at once.
            groups = (texts[first : first + _GROUP] for first in range(0, len(texts), _GROUP))
            encodings = (self._backend.encode_batch_fast(list(group), add_special_tokens=False) for group in groups)
            return [np.array(encoding.ids, np.int32) for group in encodings for encoding in group]
        if self._spelled is not None and self._spelled.search(joined):
            return [self._encode_characters(text, self._table) for text in texts]
        # One id a character: the texts need not be looked up one by one.
        ids = _look_up(joined, self._table)
        ends = list(accumulate(map(len, texts)))
        return [ids[end - len(text) : end] for text, end in zip(texts, ends, strict=True)]

    def _encode_characters(self, text: str, table: np.ndarray) -> np.ndarray:
        """The backend's ids, by table: 100 times faster, and it knows which character was wrong."""
        parts = [text] if self._spelled is None else self._spelled.split(text)
        ids = [np.zeros(0, np.int32)]
        for index, part in enumerate(parts):
            # The pattern is one group, so that every second part is a special token.
            ids.append(np.array([self._special[part]], np.int32) if index % 2 else _look_up(part, table))
        return np.concatenate(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return self._backend.decode([int(id) for id in ids], skip_special_tokens=True)

    def to_json(self) -> str:
        """Everything that decides the ids, in one line of JSON."""
        return self._json

    @cached_property
    def _json(self) -> str:
        # Kept: 0.2 s for the vocabulary of GPT-2, and asked for by the cache and by the fingerprint.
        return json.dumps({"tokenizer": json.loads(self._backend.to_str()), "roles": self._roles}, sort_keys=True)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which transformers' AutoTokenizer reads too."""
        settings = {_FIELDS[role][0]: token for role, token in self._roles.items()}
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        Path(folder).mkdir(parents=True, exist_ok=True)
        # tokenizer.json comes last: where it exists, its roles do too.
        _replace(Path(folder) / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")
        _replace(Path(folder) / "tokenizer.json", self._backend.to_str(pretty=True) + "\n")


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer saved in `folder`, by us or by Hugging Face.

    Raises InputError if a file of it is missing or damaged.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        raise InputError(f"{path} does not exist; expected a tokenizer there, as a run or Hugging Face saves it")
    text = read_text(path, _LARGEST)
    roles = _read_roles(Path(folder))
    try:
        return Tokenizer(tokenizers.Tokenizer.from_str(text), roles)
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())
        raise InputError(f"{path} is not a tokenizer ({reason}); restore it, or start a new run") from error


def load_run_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote; raises InputError if one of its two files is missing or damaged."""
    tokenizer = load_tokenizer(folder)
    if not (Path(folder) / "tokenizer_config.json").exists():
        raise InputError(f"{Path(folder) / 'tokenizer_config.json'} is missing; restore it, or start a new run")
    return tokenizer


def _read_roles(folder: Path) -> dict[Role, str]:
    named: dict[str, str] = {}
    for path in (folder / name for name in _SETTINGS):
        if not path.exists():
            continue
        settings = read_json(path)
        if not isinstance(settings, dict):
            raise InputError(f"{path} is not a JSON object; restore it, or start a new run")
        for field, token in settings.items():
            content = token.get("content") if isinstance(token, dict) else token
            if field.endswith("_token") and isinstance(content, str):
                named[field] = content
    found = {role: next((named[field] for field in fields if field in named), None) for role, fields in _FIELDS.items()}
    return {role: token for role, token in found.items() if token is not None}


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "expected valid Unicode; was it read in the wrong encoding?"
        ) from error


def pieces(text: str) -> list[str]:
    """`text` in parts of about 8,192 characters, cut where no token of byte-level BPE crosses."""
    parts = []
    start = 0
    while start < len(text):
        found = _PIECE_END.search(text, start + _PIECE_LENGTH)
        end = found.start() if found else len(text)
        parts.append(text[start:end])
        start = end
    return parts


def _is_byte_level(outline: dict) -> bool:
    """Whether the pieces of a text can be encoded one by one: GPT-2's way of splitting it, and nothing before that."""
    before = outline["pre_tokenizer"] or {}
    plain = before.get("type") == "ByteLevel" and not before.get("add_prefix_space")
    bounded = before.get("use_regex", True) or not outline["model"].get("merges")
    whole = any(
        token["lstrip"] or token["rstrip"] or _PIECE_END.search(token["content"]) for token in outline["added_tokens"]
    )
    return plain and bounded and outline["normalizer"] is None and not whole


def _character_table(outline: dict, special: Mapping[str, int]) -> np.ndarray | None:
    """int32[code points], the id of each character, -1 where it has none; None if the tokenizer is of another kind."""
    before = outline["pre_tokenizer"] or {}
    if outline["model"]["type"] != "WordLevel" or before.get("pattern") != {"Regex": ONE_CHARACTER}:
        return None
    ids = {token: id for token, id in outline["model"]["vocab"].items() if token not in special}
    longer = next((token for token in ids if len(token) != 1), None)
    if longer is not None:
        raise InputError(f"the token {longer[:40]!r} is not one character; expected a vocabulary of single characters")
    table = np.full(max(map(ord, ids), default=0) + 2, -1, np.int32)
    for character, id in ids.items():
        table[ord(character)] = id
    return table


def _look_up(text: str, table: np.ndarray) -> np.ndarray:
    """int32[N], the entry of `table` for each character; InputError if one has none."""
    ids = table[np.minimum(np.frombuffer(text.encode("utf-32-le"), np.uint32), len(table) - 1)]
    if ids.min(initial=0) < 0:
        character = text[int(np.argmin(ids))]
        raise InputError(
            f"the character {character!r} (U+{ord(character):04X}) is not in the tokenizer's vocabulary; expected "
            "characters of the text that it was made from; leave it out, or train with the bytes tokenizer"
        )
    return ids


def _replace(path: Path, text: str) -> None:
    """Writes a file so that a kill leaves the old one or the new one, never half."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
