"""Text to ids and back: one class over a Hugging Face tokenizer, whatever its kind, saved as `tokenizer.json`."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers

from jax_tformer.data.utf8 import BLOCK, PIECE_END, WORD_END, Pieces, blocks
from jax_tformer.errors import InputError
from jax_tformer.files import read_json, read_text, write_text

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
# How Llama 3 and Qwen 2 split a text: numbers in threes, and one by one.
_SPLITS = [
    [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
    for pattern in (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        rf"{count}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        for count in ("{1,3}", "")
    )
]
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = [chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)]
"""The printable character that stands for each byte in GPT-2's byte-level BPE."""


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
        # Of two that begin alike the longer one counts.
        either = "|".join(map(re.escape, sorted(filter(None, self._special), key=len, reverse=True)))
        self._spelled = re.compile(either.encode()) if either else None
        outline = json.loads(backend.to_str())
        self._table = _character_table(outline, self._special)
        self._byte_table = _byte_table(outline, self._special)
        self._piece_end = _piece_end(outline)

    def _role_id(self, role: Role) -> int | None:
        token = self._roles.get(role)
        return None if token is None else self._backend.token_to_id(token)

    @property
    def has_table(self) -> bool:
        """Whether ids are looked up one by one, in less time than it takes to read them from a file."""
        return self._table is not None or self._byte_table is not None

    @property
    def ordinary_ids(self) -> np.ndarray:
        """int32[N], the ids of all tokens that are not special, ascending."""
        ids = set(self._backend.get_vocab(with_added_tokens=True).values()) - set(self._special.values())
        return np.array(sorted(ids), np.int32)

    def encode(self, text: str) -> np.ndarray:
        """int32[N], the ids of `text`; no special tokens are added, those spelled out in it are recognised.

        Raises InputError if `text` is not valid Unicode, or holds a character that a character tokenizer lacks.
        """
        return np.concatenate([np.zeros(0, np.int32), *self._parts(memoryview(_utf8(text)))])

    def encode_text(self, text: memoryview, first: Sequence[int] = ()) -> np.ndarray:
        """uint16[N] where all ids fit, else int32[N]: the ids `first` and then those of `text`, valid UTF-8.

        They are `encode`'s, and go part by part into the array that is returned: besides it, and what a tokenizer that
        needs all of a text makes of it, a long text takes no memory.
        """
        ids = np.empty(len(first) + len(text), np.uint16 if self.vocab_size <= 2**16 else np.int32)
        end = 0
        for part in chain([np.array(first, np.int32)], self._parts(text)):
            if end + len(part) > len(ids):  # a token for every byte is not enough
                ids = np.concatenate([ids[:end], np.empty(max(len(text), len(part)), ids.dtype)])
            ids[end : end + len(part)] = part
            end += len(part)
        return ids[:end]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of every text, as `encode` gives them."""
        if not self.has_table:
            for text in texts:
                _utf8(text)
            return list(self._backend_ids(texts))
        joined = "".join(texts)
        if self._table is None or (self._spelled is not None and self._spelled.search(_utf8(joined))):
            return [self.encode(text) for text in texts]
        # One id a character: the texts need not be looked up one by one.
        ids = _look_up(joined, self._table)
        ends = list(accumulate(map(len, texts)))
        return [ids[end - len(text) : end] for text, end in zip(texts, ends, strict=True)]

    def _parts(self, text: memoryview) -> Iterator[np.ndarray]:
        """The ids of a text in parts."""
        if self.has_table:
            start = 0
            for found in self._spelled.finditer(text) if self._spelled else ():
                yield from self._looked_up(text[start : found.start()])
                yield np.array([self._special[found[0].decode()]], np.int32)
                start = found.end()
            yield from self._looked_up(text[start:])
        elif self._piece_end is not None:
            # Pieces keep the library fast, which slows down on long texts; the cuts are where no token can cross.
            yield from self._backend_ids(Pieces(text, self._piece_end))
        else:
            yield from self._backend_ids(["".join(blocks(text))])

    def _looked_up(self, text: memoryview) -> Iterator[np.ndarray]:
        """The backend's ids, by table: 100 times faster, and it knows which character was wrong."""
        if self._byte_table is not None:
            for start in range(0, len(text), BLOCK):
                yield self._byte_table[np.frombuffer(text[start : start + BLOCK], np.uint8)]
        elif self._table is not None:
            for block in blocks(text):
                yield _look_up(block, self._table)

    def _backend_ids(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The library's ids of each text. Its encodings take a hundred times their memory: not all at once."""
        for group in _groups(texts):
            for encoding in self._backend.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, np.int32)

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
        write_text(Path(folder) / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")
        write_text(Path(folder) / "tokenizer.json", self._backend.to_str(pretty=True) + "\n")


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


def tokenizer_digests(folder: str | os.PathLike[str]) -> dict[str, str]:
    """By file, a SHA-256 of what the tokenizer in `folder` says: of its ids, and of the roles of its special tokens.

    Of the files and not of a `Tokenizer`, which another version of its library writes in another way.

    Raises InputError as `load_tokenizer` does.
    """
    said = {
        "tokenizer.json": read_json(Path(folder) / "tokenizer.json", _LARGEST),
        "tokenizer_config.json": _read_roles(Path(folder)),
    }
    texts = {name: json.dumps(content, sort_keys=True) for name, content in said.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


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


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts, so many at a time that their encodings take some tens of megabytes."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text) + 100
        if size > BLOCK:
            yield group
            group, size = [], 0
    yield group


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "expected valid Unicode; was it read in the wrong encoding?"
        ) from error


def _piece_end(outline: dict) -> re.Pattern[str] | None:
    """Where a text can be cut so that its parts, encoded one by one, give its ids; None where nothing is known."""
    before, normalizer = outline["pre_tokenizer"] or {}, (outline["normalizer"] or {}).get("type")
    *splits, last = before.get("pretokenizers") or [before]
    plain_bytes = last.get("type") == "ByteLevel" and not last.get("add_prefix_space")
    splits_bytes = plain_bytes and last.get("use_regex", True)
    bert = last.get("type") == "BertPreTokenizer" and normalizer in (None, "BertNormalizer")
    end = None
    if not splits and (bert or (splits_bytes and normalizer is None)):
        end = PIECE_END
    elif splits in _SPLITS and plain_bytes and not splits_bytes and normalizer in (None, "NFC"):
        end = WORD_END
    crossing = any(
        token["lstrip"]
        or token["rstrip"]
        or token["single_word"]
        or (normalizer and token["normalized"])
        or PIECE_END.search(token["content"])
        for token in outline["added_tokens"]
    )
    return None if crossing else end


def _byte_table(outline: dict, special: Mapping[str, int]) -> np.ndarray | None:
    """int32[256], the id of each byte; None if ids are not those of single bytes and special tokens."""
    before, model = outline["pre_tokenizer"] or {}, outline["model"]
    if before.get("type") != "ByteLevel" or before.get("add_prefix_space") or outline["normalizer"] is not None:
        return None
    options = ("merges", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] != "BPE" or any(map(model.get, options)) or not _only_special(outline, special):
        return None
    ids = [model["vocab"].get(character) for character in BYTES]
    return None if None in ids else np.array(ids, np.int32)


def _character_table(outline: dict, special: Mapping[str, int]) -> np.ndarray | None:
    """int32[code points], the id of each character, -1 where it has none; None if the tokenizer is of another kind."""
    before = outline["pre_tokenizer"] or {}
    if outline["model"]["type"] != "WordLevel" or before.get("pattern") != {"Regex": ONE_CHARACTER}:
        return None
    if outline["normalizer"] is not None or not _only_special(outline, special):
        return None
    ids = {token: id for token, id in outline["model"]["vocab"].items() if token not in special}
    longer = next((token for token in ids if len(token) != 1), None)
    if longer is not None:
        raise InputError(f"the token {longer[:40]!r} is not one character; expected a vocabulary of single characters")
    table = np.full(max(map(ord, ids), default=0) + 2, -1, np.int32)
    for character, id in ids.items():
        table[ord(character)] = id
    return table


def _only_special(outline: dict, special: Mapping[str, int]) -> bool:
    """Whether what is added to the model's tokens is found in a text wherever it is spelled, the longest one first."""
    added = outline["added_tokens"]
    plain = not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
    return plain and all(token["content"] in special for token in added) and len({t["normalized"] for t in added}) < 2


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
