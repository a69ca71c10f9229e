"""Text to ids and back: one class over a Hugging Face tokenizer, whatever its kind; and text from ids as they come."""

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

from jax_tformer.data.text_files import BLOCK, Pieces, blocks
from jax_tformer.errors import InputError
from jax_tformer.files import write_text

Role = Literal["start", "end", "pad", "mask"]

FIELDS: dict[Role, tuple[str, ...]] = {
    "start": ("bos_token", "cls_token"),
    "end": ("eos_token", "sep_token"),
    "pad": ("pad_token",),
    "mask": ("mask_token",),
}
"""The Hugging Face names that may fill a role, the first one that is given; BERT's start and end are CLS and SEP."""
# Oniguruma's m lets the dot match newlines.
ONE_CHARACTER = "(?m:.)"
_MOST_IDS = 2**31 - 1
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = [chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)]
"""The printable character that stands for each byte in GPT-2's byte-level BPE."""


class Tokenizer:
    """A tokenizer and the roles that its special tokens play.

    Attributes: `vocab_size`, one more than the highest id, special tokens included; `id_type`, the type of NumPy that
    holds all ids, uint16 or int32; `start_id`, `end_id`, `pad_id` and `mask_id`, None where no token has that role.
    Without a padding token of its own (GPT-2), the end token pads.
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
        self.id_type: Any = np.uint16 if self.vocab_size <= 2**16 else np.int32
        self.start_id, self.end_id, self.pad_id, self.mask_id = (
            vocabulary[self._roles[role]] if role in self._roles else None for role in FIELDS
        )
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: id for id, token in added.items() if token.special}
        # Of two that begin alike the longer one counts.
        either = "|".join(map(re.escape, sorted(filter(None, self._special), key=len, reverse=True)))
        self._spelled = re.compile(either.encode()) if either else None
        outline = json.loads(backend.to_str())
        self._table = _table(outline, self._special)
        self._piece_end = _piece_end(outline)

    def require(self, role: Role, purpose: str) -> int:
        """The id of the token with this role; raises InputError, which names the `purpose`, if there is none."""
        found: int | None = getattr(self, f"{role}_id")
        if found is None:
            raise InputError(f"the tokenizer has no {role} token; expected one, {purpose}; use another tokenizer")
        return found

    @property
    def has_table(self) -> bool:
        """Whether the ids of bytes or characters are looked up in a table: faster than reading them from a file."""
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
        return self.encode_text(memoryview(_utf8(text))).astype(np.int32)

    def encode_text(self, text: memoryview, first: Sequence[int] = ()) -> np.ndarray:
        """`id_type`[N], the ids `first` and then those of `text`, valid UTF-8, as `encode` gives them.

        They go part by part into the array that is returned, so that a long text takes little memory besides, but for
        tokenizers that need all of it at once.
        """
        ids = np.empty(len(first) + len(text), self.id_type)
        end = 0
        for part in chain([np.array(first, np.int32)], self._parts(text)):
            if end + len(part) > len(ids):  # a token for every byte is not enough
                ids = np.concatenate([ids[:end], np.empty(max(len(text), len(part)), ids.dtype)])
            ids[end : end + len(part)] = part
            end += len(part)
        return ids[:end]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of every text, as `encode` gives them."""
        if self._table is None:
            for text in texts:
                _utf8(text)
            return list(self._backend_ids(texts))
        joined = "".join(texts)
        if self._table.encoding == "utf-8" or (self._spelled and self._spelled.search(_utf8(joined))):
            return [self.encode(text) for text in texts]
        # One id a character: the texts need not be looked up one by one.
        ids = self._table.look_up(joined)
        ends = list(accumulate(map(len, texts)))
        return [ids[end - len(text) : end] for text, end in zip(texts, ends, strict=True)]

    def _parts(self, text: memoryview) -> Iterator[np.ndarray]:
        """The ids of a text in parts."""
        if self._table is not None:
            start = 0
            for found in self._spelled.finditer(text) if self._spelled else ():
                yield from map(self._table.look_up, blocks(text[start : found.start()]))
                yield np.array([self._special[found[0].decode()]], np.int32)
                start = found.end()
            yield from map(self._table.look_up, blocks(text[start:]))
        elif self._piece_end is not None:
            # Pieces keep the library fast, which slows down on long texts; the cuts are where no token can cross.
            yield from self._backend_ids(Pieces(text, self._piece_end))
        else:
            yield from self._backend_ids(["".join(blocks(text))])

    def _backend_ids(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The library's ids of each text. It gets a million characters at a time: encodings take 100 times as much."""
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
        settings = {FIELDS[role][0]: token for role, token in self._roles.items()}
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        Path(folder).mkdir(parents=True, exist_ok=True)
        # tokenizer.json comes last: where it exists, its roles do too.
        write_text(Path(folder) / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")
        write_text(Path(folder) / "tokenizer.json", self._backend.to_str(pretty=True) + "\n")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises InputError if the tokenizer has ids that a model of `vocab_size` has no rows for."""
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model a vocabulary of {vocab_size}; "
            f"expected at least {tokenizer.vocab_size}; leave --model.vocab-size out to have it follow the tokenizer"
        )


@dataclass(frozen=True)
class _Table:
    """The id of every unit of an encoding, -1 where it has none: the library's ids, 100 times faster."""

    encoding: Literal["utf-8", "utf-32-le"]
    ids: np.ndarray

    def look_up(self, text: str) -> np.ndarray:
        """int32[N], the id of each unit of `text`; raises InputError for a character that has none."""
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
    """The ids of bytes or characters; None if those of the tokenizer stand for something else."""
    before, model, added = outline["pre_tokenizer"] or {}, outline["model"], outline["added_tokens"]
    # What is added must be found in a text wherever it is spelled, the longest one first.
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
"""Where byte-level BPE can be cut: no match of GPT-2's pattern has whitespace behind a character that is none, and what
stands before a match does not decide it. Python's whitespace is that of the pattern, and four control characters."""
WORD_END = re.compile(r"(?<=\S) ")
"""Where later patterns can be cut too, which join newlines to what is neither letter nor digit before them."""
# How Llama 3 and Qwen 2 split a text: numbers in threes, and one by one.
_SPLITS = [
    [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
    for pattern in (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        rf"{count}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        for count in ("{1,3}", "")
    )
]


def _piece_end(outline: dict[str, Any]) -> re.Pattern[str] | None:
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
        _looks_around(token) or (normalizer and token["normalized"]) or PIECE_END.search(token["content"])
        for token in outline["added_tokens"]
    )
    return None if crossing else end


def _looks_around(token: dict[str, Any]) -> bool:
    """Whether what stands beside an added token decides if it is one, or belongs to it."""
    return bool(token["lstrip"] or token["rstrip"] or token["single_word"])


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "expected valid Unicode; was it read in the wrong encoding?"
        ) from error


_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_HELD = 32
"""Replacement characters at the end that are held back: one stands for the bytes of a character that is not complete,
or (byte fallback) for one byte of it. A longer row of them is no text, and is handed out but for the last ones."""
_KEPT = 48
"""Tokens that are decoded again for their neighbours' sake. More than are held back, and a character's bytes."""


class TextStream:
    """`push` takes one token and returns the text that is certain with it; `finish` returns the rest.

    All that is returned, put together, is what decoding all tokens at once adds to the text of `before`. However long
    the stream, a token costs the decoding of some last ones, fewer than a hundred.
    """

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._ids = list(before)[-_KEPT:]
        self._sent = len(self._decode(self._ids))
        """Characters of the window's text that have been returned, or belong to `before`."""

    def push(self, token: int) -> str:
        """The text that `token` makes certain; often its own, sometimes none, or that of several tokens."""
        self._ids.append(token)
        text = self._decode(self._ids)
        unsure = min(len(text) - len(text.rstrip(_UNKNOWN)), _HELD)
        new = text[self._sent : len(text) - unsure]
        self._sent += len(new)
        if len(self._ids) >= 2 * _KEPT:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """What was held back."""
        return self._decode(self._ids)[self._sent :]

    def _shorten(self, text: str) -> None:
        """Forgets all but the last tokens, if their text alone is the end of `text` and the rest was returned."""
        ids = self._ids[-_KEPT:]
        end = self._decode(ids)
        forgotten = len(text) - len(end)
        # A cut inside of a character changes the text: then the next token is as good a place.
        if forgotten <= self._sent and text.endswith(end):
            self._ids, self._sent = ids, self._sent - forgotten


def added_text(tokenizer: Tokenizer, before: Iterable[int], tokens: Iterable[int]) -> str:
    """What `tokens` add to the text of the tokens before them."""
    before = list(before)
    return tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]
