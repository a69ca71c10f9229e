"""Tokenizers: of Hugging Face, of bytes, characters or words, or BPE trained here; and the tokens around a text."""

import dataclasses
import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, chain, count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from jax_tformer.config.errors import WHY, Count, InputError, TokenIds, checked, explained, require
from jax_tformer.config.experiment import TokenizerConfig
from jax_tformer.files import (
    Json,
    batched,
    from_dict,
    hub_folder,
    kept,
    read_json,
    read_text,
    user_path,
    write_json,
    write_text,
)

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
_ALPHABET = ByteLevel.alphabet()
_OTHERS = map(chr, count(256))
BYTES = [chr(byte) if chr(byte) in _ALPHABET else next(_OTHERS) for byte in range(256)]
"""The printable character that stands for each byte in GPT-2's byte-level BPE: its own, or one of those after."""
_PROBES = ("a", "1", ".", "的")
"""Of these characters nearly every tokenizer has one."""
_BERT = ("cls_token", "[CLS]"), ("sep_token", "[SEP]")
_ROBERTA = ("cls_token", "<s>"), ("sep_token", "</s>")
_OWN: Mapping[str, tuple[tuple[str, str] | None, ...]] = {
    "BertTokenizer": _BERT,
    "DistilBertTokenizer": _BERT,
    "RobertaTokenizer": _ROBERTA,
    "BartTokenizer": _ROBERTA,
    "T5Tokenizer": (None, ("eos_token", "</s>")),
    "GPTNeoXTokenizer": (None, None),
}
"""Class in `transformers` -> what it always puts before and after a text: Hugging Face's name of the token, and the
token if the settings do not say; None: nothing."""
_AS_SAVED = ("PreTrainedTokenizer", "TokenizersBackend")
"""Classes in `transformers` that put a space before a text where tokenizer.json does, whatever the settings say."""
_CLEANED = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
"""What clean_up_tokenization_spaces replaces in a decoded text, in this order, and by what."""
_FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_LETTERS = {
    "lowercase": "do_lower_case",
    "handle_chinese_chars": "tokenize_chinese_chars",
    "strip_accents": "strip_accents",
}
"""Field of BertNormalizer -> its name in tokenizer_config.json."""
_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
_HUB_FILES = ["tokenizer.json", *_SETTINGS]
_LARGEST = 2**28
"""The most bytes of tokenizer.json; a quarter of a million tokens take 35 MB."""
WORD = re.compile(r"[\S\x1c-\x1f]+")
"""What stands between white space as WhitespaceSplit knows it."""
_PIECE_BYTES = 8192
_PIECES_TOGETHER = 128


@checked
class Framing:
    """The special tokens of a checkpoint, which its tokenizer and its generation settings say."""

    before: TokenIds = ()
    """Ids before a whole text: a prompt, a source or a target."""
    after: TokenIds = ()
    """Ids after it."""
    start_id: Count | None = None
    """The first token that a decoder reads after an encoder."""
    end_ids: TokenIds = ()
    """Any of these ends an answer."""

    @property
    def size(self) -> int:
        """How many tokens there are around a text."""
        return len(self.before) + len(self.after)


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
        self._roles = dict(roles)
        self.framing = framing
        if "end" in roles:
            self._roles.setdefault("pad", roles["end"])
        vocabulary = backend.get_vocab()
        for role, token in roles.items():
            require(
                token in vocabulary, f"the tokenizer's {role} token {token!r} has no id; expected one in its vocabulary"
            )
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        require(
            self.vocab_size <= _MOST_IDS, f"a token has the id {self.vocab_size - 1}; expected ids below {_MOST_IDS}"
        )
        self.id_type: Any = np.uint16 if self.vocab_size <= 2**16 else np.int32
        self.start_id, self.end_id, self.pad_id, self.mask_id = (
            vocabulary[self._roles[role]] if role in self._roles else None for role in FIELDS
        )
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: id for id, token in added.items() if token.special}
        needed = vocabulary.keys() - self._special.keys() | set(self._roles.values())
        self.table_rows = max((vocabulary[token] for token in needed), default=-1) + 1
        # The longest one that matches counts. Without any, nothing matches.
        spelled = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, spelled)) or "(?!)")
        outline = json.loads(backend.to_str())
        self._table = _table(outline, self._special)
        self.cleans_spaces = cleans_spaces(outline["decoder"])

    def framed(self, start_id: int | None = None, end_ids: TokenIds = ()) -> "Tokenizer":
        """Returns this tokenizer with the `framing` of its post-processor; without `end_ids`, its end token ends."""
        framing = Framing(*added_ids(self._backend), start_id, end_ids or _known(self.end_id))
        return Tokenizer(self._backend, self._roles, framing)

    def adding(self, framing: Framing) -> "Tokenizer":
        """Returns a tokenizer for other programs, which adds the tokens of `framing` by itself."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.post_processor = template(backend, framing)
        return Tokenizer(backend, self._roles)

    def require(self, role: Role, purpose: str) -> int:
        """Returns the id of the token with this role; raises InputError with the `purpose` if there is none."""
        found = getattr(self, f"{role}_id")
        require(found is not None, f"the tokenizer has no {role} token; expected one, {purpose}; use another tokenizer")
        return found

    @property
    def ordinary_ids(self) -> np.ndarray:
        """The ids of all tokens that are not special, int32[N], ascending."""
        ids = self._backend.get_vocab().values()
        return np.setdiff1d([*ids], [*self._special.values()]).astype(np.int32)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32[N]; adds no special tokens, but recognises those spelled out in it.

        Raises InputError if `text` is not valid Unicode, or has a character or word that a tokenizer of them lacks.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of every text, as `encode` does."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
                    "expected valid Unicode; was it read in the wrong encoding?"
                ) from error
        if self._table is not None:
            # Raises an error for an unknown character in any text. Where a token is spelled out, the library finds it.
            plain = [self._added.sub("", text) for text in texts]
            ids = _look_up(*self._table, plain)
            if plain == list(texts):
                return ids
        try:
            found = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise InputError(
                f"a word of {' '.join(texts)!r:.60} is not in the tokenizer's vocabulary; expected words of the text "
                "that it was made from; leave it out, or train with the bytes tokenizer"
            ) from error
        # numpy takes three times as long to read a list.
        return [np.asarray(array("I", each.ids)).view(np.int32) for each in found]

    def encode_texts(self, texts: Sequence[memoryview], first: Sequence[int] = ()) -> np.ndarray:
        """Returns `first` and then the ids of a text (valid UTF-8), for each of the texts, `id_type`[N].

        Encodes long ones in `Pieces`, or all at once if a piece would get other ids. Ids are cached unless a table of
        bytes or characters gives them in less time.
        """
        if self._table is not None:
            return self._encode_texts(texts, first)
        said = "ids of pieces with gaps", tokenizers.__version__, self.as_json, str(list(first))
        key: Iterable[str | memoryview] = chain(said, texts)
        return np.frombuffer(kept(key, lambda: self._encode_texts(texts, first).data), self.id_type)

    def _encode_texts(self, texts: Sequence[memoryview], first: Sequence[int]) -> np.ndarray:
        ids = bytearray()
        begin = np.array(first, self.id_type).tobytes()
        cut, gaps = self.can_be_cut, self.has_gaps
        pieces = (
            piece
            for text in texts
            for piece in enumerate(
                Pieces([text], gaps=gaps) if cut and len(text) > _PIECE_BYTES else [str(text, "utf-8")]
            )
        )
        for group in batched(pieces, _PIECES_TOGETHER):
            for (number, _), part in zip(group, self.encode_batch([piece for _, piece in group]), strict=True):
                ids += begin * (number == 0) + part.astype(self.id_type).tobytes()
        return np.frombuffer(ids, self.id_type)

    @property
    def around(self) -> Framing:
        """What stands around a text and ends an answer: that of a framing, or start and end token, if there are any."""
        return self.framing or Framing(_known(self.start_id), (), None, _known(self.end_id))

    @property
    def separator(self) -> TokenIds:
        """What begins each document among many: the tokens before a text, or an end token."""
        return self.around.before or _known(self.end_id)

    @cached_property
    def can_be_cut(self) -> bool:
        """Whether a text has the same ids if it is cut before a space: Llama 2 puts a space before each piece."""
        return self._can_be_cut("a", " a")

    @cached_property
    def has_gaps(self) -> bool:
        """Whether it has the same ids, too, if it is cut where `Pieces` cuts text without spaces."""
        return self._can_be_cut("a", "\n\u5b57", "\u3002\n", "a")

    def _can_be_cut(self, *pieces: str) -> bool:
        words = isinstance(self._backend.pre_tokenizer, pre_tokenizers.WhitespaceSplit)
        if self._table is not None:
            return True
        if words and self._backend.normalizer is None:
            return "\u3002\n" not in pieces
        try:
            whole, *parts = self.encode_batch(["".join(pieces), *pieces])
        except InputError:
            # It does not know these words.
            return False
        return whole.tolist() == np.concatenate(parts).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids` without special tokens."""
        return self._backend.decode([int(id) for id in ids], skip_special_tokens=True)

    @property
    def spelling(self) -> str:
        """All that decides the ids of a text, whatever stands around it, as JSON."""
        outline = json.loads(self._backend.to_str())
        return json.dumps({name: outline[name] for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")})

    @cached_property
    def as_json(self) -> str:
        """All that decides the ids, as one line of JSON."""
        # Takes 0.2 s for the vocabulary of GPT-2, and both the cache and the fingerprint need it.
        framing = {} if self.framing is None else {"framing": dataclasses.asdict(self.framing)}
        said = {"tokenizer": json.loads(self._backend.to_str()), "roles": self._roles, **framing}
        return json.dumps(said, sort_keys=True)

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which the AutoTokenizer of transformers reads too."""
        settings: Json = {FIELDS[role][0]: token for role, token in self._roles.items()}
        if self.framing is not None:
            settings["framing"] = dataclasses.asdict(self.framing)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # tokenizer.json is written last, so that its roles exist if it does.
        write_json(folder / "tokenizer_config.json", settings)
        write_text(folder / "tokenizer.json", self._backend.to_str(pretty=True) + "\n")


def _known(id: int | None) -> TokenIds:
    return () if id is None else (id,)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises InputError if the tokenizer needs more rows than the embedding of a model with `vocab_size` has."""
    require(
        tokenizer.table_rows <= vocab_size,
        f"the tokenizer has {tokenizer.table_rows} ids and the model a vocabulary of {vocab_size}; "
        f"expected at least {tokenizer.table_rows}; leave --model.vocab-size out to have it follow the tokenizer",
    )


class Pieces(Iterable[str]):
    """Iterates over a text, given in blocks of UTF-8, in parts of about 8,192 bytes: the library is slow on long texts.

    Cuts before a space, which is where no token of GPT-2, BERT, Llama 3 or Qwen 2 crosses: the ids are those of the
    whole text. Text without spaces is cut elsewhere, if `gaps` says so: around the end of a line, or between a Chinese
    character (or kana) and a comma or full stop. Where the blocks end does not matter.
    """

    def __init__(self, blocks: Iterable[bytes | memoryview], *, gaps: bool = True) -> None:
        self._blocks = blocks
        self.gaps = gaps

    def __iter__(self) -> Iterator[str]:
        least, most = _PIECE_BYTES, 2 * _PIECE_BYTES
        places = b"%s|%s" % (_SPACE, _GAP) if self.gaps else _SPACE
        piece = re.compile(rb"(?s).{%d,%d}?%s|.{%d,}?(?:%s)|.+" % (least, most - 1, _SPACE, least, places))
        rest: bytes | memoryview = b""
        for block in self._blocks:
            rest = b"".join((rest, block)) if len(rest) else block
            end = 0
            for found in piece.finditer(rest):
                if len(rest) < max(end + most, found.end() + 3):
                    # Where it ends may depend on the next block.
                    break
                yield str(found[0], "utf-8")
                end = found.end()
            rest = rest[end:]
        for found in piece.finditer(rest):
            yield str(found[0], "utf-8")


_SPACE = rb"(?<=\S)(?= )"
_LETTER = rb"(?:(?<=[\xe5-\xe9]..)|(?<=\xe3\x81.))"
"""Behind a Chinese character (from U+5000 on) or kana (to U+307F): all of these are letters."""
_GAP = b"|".join(
    [
        _LETTER + rb"(?=\n|\xe3\x80[\x81\x82]|\xef\xbc\x8c)",
        rb"(?<=[0-9A-Za-z])(?=\n)",
        # Llama 3 takes a full stop and the line end for one word, and GPT-2 all white space around that but the last.
        # What may be white space in UTF-8 begins with one of these bytes.
        rb"(?<=\S\n)(?<!\xc2.\n)(?<![\xe1\xe2]..\n)(?<!\xe3\x80\x80\n)(?![\s/\xc2\xe1\xe2]|\xe3\x80\x80)",
    ]
)


def _look_up(table: np.ndarray, encoding: str, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the id of each byte or character of every text; raises InputError if one has none.

    The table has the id of each byte or code point, or -1. Gives the library's ids, 100 times faster.
    """
    rows = [text.encode(encoding) for text in texts]
    units = np.frombuffer(b"".join(rows), np.uint8 if encoding == "utf-8" else np.uint32)
    ids: np.ndarray = table[np.minimum(units, len(table) - 1)]
    if ids.min(initial=0) < 0:
        character = "".join(texts)[int(np.argmin(ids))]
        raise InputError(
            f"the character {character!r} (U+{ord(character):04X}) is not in the tokenizer's vocabulary; expected "
            "characters of the text that it was made from; leave it out, or train with the bytes tokenizer"
        )
    sizes = [len(row) // units.itemsize for row in rows]
    return [ids[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _table(outline: Json, special: Mapping[str, int]) -> tuple[np.ndarray, str] | None:
    """Makes the table of a tokenizer whose tokens are bytes or characters, and says in which encoding it looks them up;
    returns None for others."""
    of_bytes = json.loads(_of_bytes().to_str())
    model = outline["model"]
    if all(outline[part] == of_bytes[part] for part in ("normalizer", "pre_tokenizer", "model")):
        return np.arange(256, dtype=np.int32), "utf-8"
    pattern = (outline["pre_tokenizer"] or {}).get("pattern")
    if outline["normalizer"] or model["type"] != "WordLevel" or pattern != {"Regex": ONE_CHARACTER}:
        return None
    characters = {token: id for token, id in model["vocab"].items() if token not in special}
    for token in characters:
        require(
            len(token) == 1,
            f"the token {token[:40]!r} is not one character; expected a vocabulary of single characters",
        )
    table = np.full(max(map(ord, characters), default=0) + 2, -1, np.int32)
    table[[ord(character) for character in characters]] = list(characters.values())
    return table, "utf-32-le"


def added_ids(backend: tokenizers.Tokenizer) -> tuple[TokenIds, TokenIds]:
    """Returns the ids that the tokenizer's post-processor puts before and after every text."""
    for probe in (*_PROBES, *backend.get_vocab(with_added_tokens=False)):
        # Without a token for what is unknown, a vocabulary of words or characters raises for it.
        with suppress(Exception):
            encoded = backend.encode(probe)
            inner = [place for place, added in enumerate(encoded.special_tokens_mask) if not added]
            if inner:
                return tuple(encoded.ids[: inner[0]]), tuple(encoded.ids[inner[-1] + 1 :])
    return (), ()


def follow_settings(backend: tokenizers.Tokenizer, settings: Json, tokens: Mapping[str, str]) -> None:
    """Makes `backend` encode and decode as `transformers` does.

    `settings` is tokenizer_config.json, `tokens` has the special tokens by name. The post-processor of tokenizer.json
    says which tokens are added, whatever add_bos_token and add_eos_token are; but some classes have their own. Spaces
    and letters are treated as the settings say, if they do. The text of a BPE is not cleaned up.
    """
    kind = str(settings.get("tokenizer_class")).removesuffix("Fast")
    if kind in _OWN:
        around: Any = tuple((backend.token_to_id(tokens.get(*named)),) if named else () for named in _OWN[kind])
        if (None,) not in around and added_ids(backend) != around:
            backend.post_processor = template(backend, Framing(*around))
    first = backend.pre_tokenizer
    normalizer = backend.normalizer
    spaced = None if kind in _AS_SAVED else settings.get("add_prefix_space")
    if isinstance(first, ByteLevel) and isinstance(spaced, bool):
        first.add_prefix_space = spaced
        backend.pre_tokenizer = first
    if isinstance(normalizer, BertNormalizer):
        for name, theirs in _LETTERS.items():
            if isinstance(given := settings.get(theirs), bool):
                setattr(normalizer, name, given)
        backend.normalizer = normalizer
    cleans = settings.get("clean_up_tokenization_spaces") is True
    if cleans and (not isinstance(backend.model, tokenizers.models.BPE) or settings.get(_FORCED) is True):
        # Without a decoder, the library joins tokens by spaces; no token begins with this prefix.
        own = backend.decoder or decoders.WordPiece(prefix="\0", cleanup=False)
        backend.decoder = decoders.Sequence([own, decoders.Fuse(), *(decoders.Replace(*pair) for pair in _CLEANED)])


def cleans_spaces(decoder: Json | None) -> bool:
    """Whether a decoder, as in tokenizer.json, is one of `follow_settings` that cleans spaces up."""
    steps = [(step.get("pattern"), step.get("content")) for step in (decoder or {}).get("decoders", [])]
    return steps[-len(_CLEANED) :] == [({"String": pattern}, content) for pattern, content in _CLEANED]


def template(backend: tokenizers.Tokenizer, framing: Framing) -> TemplateProcessing:
    """Returns the post-processor that adds the tokens of `framing`."""
    tokens = {id: backend.id_to_token(id) for id in (*framing.before, *framing.after)}
    single = [*map(tokens.get, framing.before), "$A", *map(tokens.get, framing.after)]
    return TemplateProcessing(single=single, special_tokens=[(token, id) for id, token in tokens.items()])


def pair_framing(tokenizer: Tokenizer) -> Framing:
    """Returns what stands around sources and targets; raises InputError if the tokenizer lacks a token for it."""
    framing = tokenizer.framing
    if framing is None:
        start = tokenizer.require("start", "for pairs")
        end = tokenizer.require("end", "for pairs")
        return Framing((), (end,), start, (end,))
    if framing.start_id is None:
        raise InputError("the checkpoint has no decoder_start_token_id; expected the id that its decoder starts with")
    return framing


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str], special: Mapping[Role, str]) -> Tokenizer:
    """Makes the tokenizer that `config` describes; characters, words and BPE come from `texts`.

    `special` names the token of each role; two roles may share one. Special tokens get the highest ids. A Hugging Face
    tokenizer has its own special tokens and ignores `special`.

    Raises InputError if characters or words are to come from no text, or if a Hugging Face tokenizer cannot be loaded.
    """
    if config.kind == "huggingface":
        name = config.name
        if name is None:
            raise InputError(
                "tokenizer kind is 'huggingface' without a name; give --data.tokenizer.name a folder or a hub name"
            )
        if (folder := user_path(name)).is_dir():
            require(config.revision is None, f"the tokenizer {name!r} is a folder, which has no revision; leave it out")
            return load_tokenizer(folder)
        # Tokenizer.from_pretrained would not fetch the files that hold the roles.
        return load_tokenizer(hub_folder("tokenizer", name, config.revision, "--data.tokenizer.revision", _HUB_FILES))
    tokens = list(dict.fromkeys(special.values()))
    if config.kind == "bytes":
        backend = _of_bytes()
    elif config.kind in ("characters", "words"):
        found: set[str] = set()
        for text in texts:
            found.update(WORD.findall(text) if config.kind == "words" else text)
        require(found, f"the text is empty; expected text to take the tokenizer's {config.kind} from")
        backend = tokenizers.Tokenizer(models.WordLevel({token: id for id, token in enumerate(sorted(found))}))
        if config.kind == "words":
            # Without a decoder, the library puts spaces between tokens.
            backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        else:
            backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(ONE_CHARACTER), "isolated")
            backend.decoder = decoders.Fuse()
    else:
        assert config.vocab_size is not None  # checked on construction
        backend = _trained_bpe(texts, config.vocab_size - len(tokens))
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in tokens])
    return Tokenizer(backend, special)


def _of_bytes() -> tokenizers.Tokenizer:
    """Makes a tokenizer whose ids are the bytes of a text."""
    return _byte_level(models.BPE({character: byte for byte, character in enumerate(BYTES)}, []), use_regex=False)


def _byte_level(model: models.BPE, use_regex: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return backend


def _trained_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Trains BPE on `texts`, which are read twice, or takes it from the cache of an earlier run."""

    def train() -> bytes:
        backend = _byte_level(models.BPE(), use_regex=True)
        # All 256 bytes are in the alphabet, so that any text can be encoded.
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=_ALPHABET, show_progress=False)
        backend.train_from_iterator(texts, trainer)
        return backend.to_str().encode()

    key = chain(["bpe", tokenizers.__version__, str(vocab_size)], texts)
    return tokenizers.Tokenizer.from_str(str(kept(key, train), "utf-8"))


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Loads the tokenizer that we or Hugging Face saved in `folder`.

    Raises InputError if one of its files is missing or damaged.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    require(path.exists(), f"{path} does not exist; expected a tokenizer there, as a run or Hugging Face saves it")
    text = read_text(path, _LARGEST)
    settings = read_settings(folder)
    where = str(folder / "tokenizer_config.json")
    framing = from_dict(Framing, settings["framing"], where=where) if "framing" in settings else None
    # The library raises nothing narrower.
    with explained(f"{path} is not a tokenizer ({WHY}); restore it, or start a new run", Exception):
        backend = tokenizers.Tokenizer.from_str(text)
        follow_settings(backend, settings, special_tokens(settings))
        return Tokenizer(backend, _roles(settings), framing)


def tokenizer_digests(folder: str | Path) -> dict[str, str]:
    """Returns, for each file of the tokenizer in `folder`, a SHA-256 of its ids or of its special tokens' roles.

    Reads the files, because another version of the library may write a `Tokenizer` differently. Raises InputError as
    `load_tokenizer` does.
    """
    settings = read_settings(Path(folder))
    framing = {"framing": settings["framing"]} if "framing" in settings else {}
    said = {
        "tokenizer.json": read_json(Path(folder) / "tokenizer.json", _LARGEST),
        "tokenizer_config.json": _roles(settings) | framing,
    }
    return {
        name: hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest() for name, content in said.items()
    }


def read_settings(folder: Path) -> Json:
    """Reads special_tokens_map.json and tokenizer_config.json, as far as they exist; the second one counts.

    Raises InputError if one is damaged.
    """
    found: Json = {}
    for path in (folder / name for name in _SETTINGS):
        if path.exists():
            settings = read_json(path)
            if not isinstance(settings, dict):
                raise InputError(f"{path} is not a JSON object; restore it, or start a new run")
            # A null says nothing.
            found |= {name: value for name, value in settings.items() if value is not None}
    return found


def special_tokens(settings: Json) -> dict[str, str]:
    """Returns the special tokens that `read_settings` has found, by Hugging Face's names ("bos_token")."""
    contents = ((name, x.get("content") if isinstance(x, dict) else x) for name, x in settings.items())
    return {name: content for name, content in contents if name.endswith("_token") and isinstance(content, str)}


def _roles(settings: Json) -> dict[Role, str]:
    named = special_tokens(settings)
    # The first of the names counts, and a dict keeps the last.
    return {role: named[field] for role, fields in FIELDS.items() for field in reversed(fields) if field in named}
