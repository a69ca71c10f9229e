"""Encodes and decodes text with any Hugging Face tokenizer."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers

from jax_tformer.config.errors import InputError
from jax_tformer.data.framing import Framing, added_ids, cleans_spaces, template
from jax_tformer.data.text_files import BLOCK, Pieces, blocks
from jax_tformer.files import write_text

Role = Literal["start", "end", "pad", "mask"]

FIELDS: dict[Role, tuple[str, ...]] = {
    "start": ("bos_token", "cls_token"),
    "end": ("eos_token", "sep_token"),
    "pad": ("pad_token",),
    "mask": ("mask_token",),
}
"""Role -> the Hugging Face names for it; the first that is set counts. BERT's start and end are CLS and SEP."""
# Oniguruma's m lets the dot match newlines.
ONE_CHARACTER = "(?m:.)"
_MOST_IDS = 2**31 - 1
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = [chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)]
"""The printable character that stands for each byte in GPT-2's byte-level BPE."""


class Tokenizer:
    """A Hugging Face tokenizer, `backend`, with the special token of each role.

    Attributes: `vocab_size`, the highest id (special tokens included) plus one; `table_rows`, those that text and
    roles need of a model's table; `id_type`, uint16 or int32, the NumPy type that holds all ids; `start_id`,
    `end_id`, `pad_id` and `mask_id`, None if no token has that role. Without a padding token the end token pads.
    `framing` has the special tokens around the texts of a checkpoint; with None, each kind of data adds its own.
    `cleans_spaces`: decoding takes spaces before punctuation out.

    Raises InputError if the token of a role has no id.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, roles: Mapping[Role, str], framing: Framing | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._roles, self.framing = dict(roles), framing
        if "end" in roles:
            self._roles.setdefault("pad", roles["end"])
        vocabulary = backend.get_vocab(with_added_tokens=True)
        for role, token in roles.items():
            if token not in vocabulary:
                raise InputError(f"the tokenizer's {role} token {token!r} has no id; expected one in its vocabulary")
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > _MOST_IDS:
            raise InputError(f"a token has the id {self.vocab_size - 1}; expected ids below {_MOST_IDS}")
        self.id_type: Any = np.uint16 if self.vocab_size <= 2**16 else np.int32
        self.start_id, self.end_id, self.pad_id, self.mask_id = (
            vocabulary[self._roles[role]] if role in self._roles else None for role in FIELDS
        )
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: id for id, token in added.items() if token.special}
        needed = vocabulary.keys() - self._special.keys() | set(self._roles.values())
        self.table_rows = max((vocabulary[token] for token in needed), default=-1) + 1
        # The longest one that matches counts.
        either = "|".join(map(re.escape, sorted(filter(None, self._special), key=len, reverse=True)))
        self._spelled = re.compile(either.encode()) if either else None
        outline = json.loads(backend.to_str())
        self._table = _table(outline, self._special)
        self._piece_end = _piece_end(outline)
        self.cleans_spaces = cleans_spaces(outline["decoder"])

    def framed(self, start_id: int | None = None, end_ids: tuple[int, ...] | None = None) -> "Tokenizer":
        """Returns this tokenizer with the `framing` of its post-processor; end_ids None: its end token."""
        ends = end_ids if end_ids is not None else () if self.end_id is None else (self.end_id,)
        return Tokenizer(self._backend, self._roles, Framing(*added_ids(self._backend), start_id, ends))

    def adding(self, framing: Framing) -> "Tokenizer":
        """Returns a tokenizer for other programs, which adds the tokens of `framing` by itself."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.post_processor = template(backend, framing)
        return Tokenizer(backend, self._roles)

    def require(self, role: Role, purpose: str) -> int:
        """Returns the id of the token with this role; raises InputError with the `purpose` if there is none."""
        found: int | None = getattr(self, f"{role}_id")
        if found is None:
            raise InputError(f"the tokenizer has no {role} token; expected one, {purpose}; use another tokenizer")
        return found

    @property
    def has_table(self) -> bool:
        """Whether ids are looked up in a table of bytes or characters, which is faster than a cache of ids on disk."""
        return self._table is not None

    @property
    def ordinary_ids(self) -> np.ndarray:
        """The ids of all tokens that are not special, int32[N], ascending."""
        ids = set(self._backend.get_vocab(with_added_tokens=True).values()) - set(self._special.values())
        return np.array(sorted(ids), np.int32)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32[N]; adds no special tokens, but recognises those spelled out in it.

        Raises InputError if `text` is not valid Unicode, or contains a character that a character tokenizer lacks.
        """
        return self.encode_text(memoryview(_utf8(text))).astype(np.int32)

    def encode_text(self, text: memoryview, first: Sequence[int] = ()) -> np.ndarray:
        """Returns `first` and then the ids of `text` (valid UTF-8), `id_type`[N]; the ids are those of `encode`.

        Encodes part by part into one array, to save memory, unless the tokenizer needs the whole text at once.
        """
        ids = np.empty(len(first) + len(text), self.id_type)
        end = 0
        for part in chain([np.array(first, np.int32)], self._parts(text)):
            if end + len(part) > len(ids):  # some text has more tokens than bytes
                ids = np.concatenate([ids[:end], np.empty(max(len(text), len(part)), ids.dtype)])
            ids[end : end + len(part)] = part
            end += len(part)
        return ids[:end]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of every text, as `encode` does."""
        if self._table is None:
            for text in texts:
                _utf8(text)
            return list(self._backend_ids(texts))
        joined = "".join(texts)
        if self._table.encoding == "utf-8" or (self._spelled and self._spelled.search(_utf8(joined))):
            return [self.encode(text) for text in texts]
        # One id per character, so all texts can be looked up together.
        ids = self._table.look_up(joined)
        ends = list(accumulate(map(len, texts)))
        return [ids[end - len(text) : end] for text, end in zip(texts, ends, strict=True)]

    def _parts(self, text: memoryview) -> Iterator[np.ndarray]:
        """Yields the ids of a text in parts."""
        if self._table is not None:
            start = 0
            for found in self._spelled.finditer(text) if self._spelled else ():
                yield from map(self._table.look_up, blocks(text[start : found.start()]))
                yield np.array([self._special[found[0].decode()]], np.int32)
                start = found.end()
            yield from map(self._table.look_up, blocks(text[start:]))
        elif self._piece_end is not None:
            # The library slows down on long texts, so the text is cut where no token can cross.
            yield from self._backend_ids(Pieces(text, self._piece_end))
        else:
            yield from self._backend_ids(["".join(blocks(text))])

    def _backend_ids(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yields the library's ids of each text, a million characters at a time: encodings take 100 times as much."""
        group: list[str] = []
        size = 0
        for text in chain(texts, [None]):
            if text is None or size > BLOCK:
                for encoding in self._backend.encode_batch_fast(group, add_special_tokens=False):
                    yield np.array(encoding.ids, np.int32)
                group, size = [], 0
            if text is not None:
                group.append(text)
                size += len(text) + 100

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids` without special tokens."""
        return self._backend.decode([int(id) for id in ids], skip_special_tokens=True)

    def to_json(self) -> str:
        """Returns all that decides the ids, as one line of JSON."""
        return self._json

    @cached_property
    def _json(self) -> str:
        # Takes 0.2 s for the vocabulary of GPT-2, and both the cache and the fingerprint need it.
        framing = {} if self.framing is None else {"framing": self.framing._asdict()}
        said = {"tokenizer": json.loads(self._backend.to_str()), "roles": self._roles, **framing}
        return json.dumps(said, sort_keys=True)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which the AutoTokenizer of transformers reads too."""
        settings: dict[str, Any] = {FIELDS[role][0]: token for role, token in self._roles.items()}
        if self.framing is not None:
            settings["framing"] = self.framing._asdict()
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        Path(folder).mkdir(parents=True, exist_ok=True)
        # tokenizer.json is written last, so that its roles exist if it does.
        write_text(Path(folder) / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")
        write_text(Path(folder) / "tokenizer.json", self._backend.to_str(pretty=True) + "\n")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises InputError if the tokenizer needs more rows than the embedding of a model with `vocab_size` has."""
    if tokenizer.table_rows > vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.table_rows} ids and the model a vocabulary of {vocab_size}; "
            f"expected at least {tokenizer.table_rows}; leave --model.vocab-size out to have it follow the tokenizer"
        )


@dataclass(frozen=True)
class _Table:
    """Byte or code point -> id, or -1. Gives the library's ids, 100 times faster."""

    encoding: Literal["utf-8", "utf-32-le"]
    ids: np.ndarray

    def look_up(self, text: str) -> np.ndarray:
        """Returns the id of each byte or character of `text`, int32[N]; raises InputError if one has none."""
        units = np.frombuffer(text.encode(self.encoding), np.uint8 if self.encoding == "utf-8" else np.uint32)
        ids: np.ndarray = self.ids[np.minimum(units, len(self.ids) - 1)]
        if ids.min(initial=0) < 0:
            character = text[int(np.argmin(ids))]
            raise InputError(
                f"the character {character!r} (U+{ord(character):04X}) is not in the tokenizer's vocabulary; expected "
                "characters of the text that it was made from; leave it out, or train with the bytes tokenizer"
            )
        return ids


def _table(outline: dict[str, Any], special: Mapping[str, int]) -> _Table | None:
    """Makes the table of a tokenizer whose tokens are bytes or characters; returns None for others."""
    before, model, added = outline["pre_tokenizer"] or {}, outline["model"], outline["added_tokens"]
    # Added tokens must match wherever they are spelled, the longest one first.
    alike = len({token["normalized"] for token in added}) < 2 and all(token["content"] in special for token in added)
    if outline["normalizer"] is not None or not alike or any(map(_looks_around, added)):
        return None
    if model["type"] == "BPE" and before.get("type") == "ByteLevel" and not before.get("add_prefix_space"):
        options = ("merges", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
        ids = [model["vocab"].get(character) for character in BYTES]
        return None if None in ids or any(map(model.get, options)) else _Table("utf-8", np.array(ids, np.int32))
    if model["type"] != "WordLevel" or before.get("pattern") != {"Regex": ONE_CHARACTER}:
        return None
    characters = {token: id for token, id in model["vocab"].items() if token not in special}
    longer = next((token for token in characters if len(token) != 1), None)
    if longer is not None:
        raise InputError(f"the token {longer[:40]!r} is not one character; expected a vocabulary of single characters")
    table = np.full(max(map(ord, characters), default=0) + 2, -1, np.int32)
    table[[ord(character) for character in characters]] = list(characters.values())
    return _Table("utf-32-le", table)


PIECE_END = re.compile(r"(?<=\S)[ \n]")
"""Where text can be cut for byte-level BPE. No match of GPT-2's pattern has whitespace after another character, and
what precedes a match does not change it. Python's whitespace is that of the pattern and four control characters."""
WORD_END = re.compile(r"(?<=\S) ")
"""Where text can be cut for later patterns, which join newlines to preceding characters that are no letter or digit."""
# How Llama 3 and Qwen 2 split text: digits in threes, and one by one.
_SPLITS = [
    [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
    for pattern in (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        rf"{count}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        for count in ("{1,3}", "")
    )
]


def _piece_end(outline: dict[str, Any]) -> re.Pattern[str] | None:
    """Returns where to cut a text so that encoding its parts gives the same ids; None if that is unknown."""
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
        _looks_around(token) or (normalizer and token["normalized"]) or PIECE_END.search(token["content"])
        for token in outline["added_tokens"]
    )
    return None if crossing else end


def _looks_around(token: dict[str, Any]) -> bool:
    """Whether an added token depends on the characters beside it, or takes them in."""
    return bool(token["lstrip"] or token["rstrip"] or token["single_word"])


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "expected valid Unicode; was it read in the wrong encoding?"
        ) from error
