"""The special tokens around a text: what the tokenizer of a checkpoint adds, and where its decoder starts and ends."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers
from tokenizers import decoders
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from jax_tformer.config.errors import InputError

if TYPE_CHECKING:
    from jax_tformer.data.tokenizers import Tokenizer

_PROBES = ("a", "1", ".", "的")
_CLS, _SEP = ("cls_token", "[CLS]"), ("sep_token", "[SEP]")
_BEGIN, _END = ("cls_token", "<s>"), ("sep_token", "</s>")
_OWN: Mapping[str, tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]] = {
    "BertTokenizer": ((_CLS,), (_SEP,)),
    "DistilBertTokenizer": ((_CLS,), (_SEP,)),
    "RobertaTokenizer": ((_BEGIN,), (_END,)),
    "BartTokenizer": ((_BEGIN,), (_END,)),
    "T5Tokenizer": ((), (("eos_token", "</s>"),)),
    "GPTNeoXTokenizer": ((), ()),
}
"""Class in `transformers` -> what it always puts before and after a text: Hugging Face's name of the token, and the
token if the settings do not say."""
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


class Framing(NamedTuple):
    """The special tokens of a checkpoint, which its tokenizer and its generation settings say."""

    before: tuple[int, ...]
    """Ids before a whole text: a prompt, a source or a target."""
    after: tuple[int, ...]
    """Ids after it."""
    start_id: int | None = None
    """The first token that a decoder reads after an encoder."""
    end_ids: tuple[int, ...] = ()
    """Any of these ends an answer."""

    @property
    def size(self) -> int:
        """How many tokens there are around a text."""
        return len(self.before) + len(self.after)


def read_framing(values: Any, where: str) -> Framing:
    """Makes a Framing of what `_asdict()` became in JSON; raises InputError for anything else."""
    fields = {"before": list, "after": list, "start_id": int | None, "end_ids": list}
    good = isinstance(values, dict) and values.keys() == fields.keys()
    if not good or not all(isinstance(values[name], kind) for name, kind in fields.items()):
        raise InputError(f"{where} holds {values!r:.80}; expected {', '.join(fields)}; restore it")
    ids = [*values["before"], *values["after"], *values["end_ids"], values["start_id"] or 0]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise InputError(f"{where} holds ids that are no whole numbers of at least 0; restore it")
    before, after, end_ids = (tuple(values[name]) for name in ("before", "after", "end_ids"))
    return Framing(before, after, values["start_id"], end_ids)


def added_ids(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the ids that the tokenizer's post-processor puts before and after every text."""
    for probe in _PROBES:
        ids, inner = backend.encode(probe).ids, backend.encode(probe, add_special_tokens=False).ids
        if not inner:
            continue
        for start in range(len(ids) - len(inner) + 1):
            if ids[start : start + len(inner)] == inner:
                return tuple(ids[:start]), tuple(ids[start + len(inner) :])
    return (), ()


def follow_settings(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], tokens: Mapping[str, str]) -> None:
    """Makes `backend` encode and decode as `transformers` does.

    `settings` is tokenizer_config.json, `tokens` has the special tokens by name. The post-processor of tokenizer.json
    says which tokens are added, whatever add_bos_token and add_eos_token are; but some classes have their own. Spaces
    and letters are treated as the settings say, if they do. The text of a BPE is not cleaned up.
    """
    kind = str(settings.get("tokenizer_class")).removesuffix("Fast")
    if kind in _OWN:
        sides = [[backend.token_to_id(tokens.get(*named)) for named in side] for side in _OWN[kind]]
        before, after = (tuple(id for id in side if id is not None) for side in sides)
        if None not in (*sides[0], *sides[1]) and added_ids(backend) != (before, after):
            backend.post_processor = template(backend, Framing(before, after))
    first, normalizer = backend.pre_tokenizer, backend.normalizer
    if isinstance(first, ByteLevel) and isinstance(spaced := settings.get("add_prefix_space"), bool):
        first.add_prefix_space = spaced
        backend.pre_tokenizer = first
    if isinstance(normalizer, BertNormalizer):
        for name, theirs in _LETTERS.items():
            if isinstance(given := settings.get(theirs), bool):
                setattr(normalizer, name, given)
        backend.normalizer = normalizer
    cleans = settings.get("clean_up_tokenization_spaces") is True
    if cleans and (not isinstance(backend.model, tokenizers.models.BPE) or settings.get(_FORCED) is True):
        backend.decoder = _cleaning(backend.decoder)


def _cleaning(decoder: Any) -> decoders.Sequence:
    """Returns a decoder that takes spaces before punctuation out of the text of `decoder`."""
    # Without one, the library joins tokens by spaces; no token begins with this.
    first = decoders.WordPiece(prefix="\0", cleanup=False) if decoder is None else decoder
    return decoders.Sequence([first, decoders.Fuse(), *(decoders.Replace(*pair) for pair in _CLEANED)])


def cleans_spaces(decoder: Mapping[str, Any] | None) -> bool:
    """Whether a decoder, as in tokenizer.json, is one of `follow_settings` that cleans spaces up."""
    steps = [(step.get("pattern"), step.get("content")) for step in (decoder or {}).get("decoders", [])]
    return steps[-len(_CLEANED) :] == [({"String": pattern}, content) for pattern, content in _CLEANED]


def template(backend: tokenizers.Tokenizer, framing: Framing) -> TemplateProcessing:
    """Returns the post-processor that adds the tokens of `framing`."""
    tokens = {id: backend.id_to_token(id) for id in (*framing.before, *framing.after)}
    single = [*map(tokens.get, framing.before), "$A", *map(tokens.get, framing.after)]
    return TemplateProcessing(single=single, special_tokens=[(token, id) for id, token in tokens.items()])


def pair_framing(tokenizer: "Tokenizer") -> Framing:
    """Returns what stands around sources and targets; raises InputError if the tokenizer lacks a token for it."""
    framing = tokenizer.framing
    if framing is None:
        start, end = tokenizer.require("start", "for pairs"), tokenizer.require("end", "for pairs")
        return Framing((), (end,), start, (end,))
    if framing.start_id is None:
        raise InputError("the checkpoint has no decoder_start_token_id; expected the id that its decoder starts with")
    return framing
