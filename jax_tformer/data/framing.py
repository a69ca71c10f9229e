"""The special tokens around a text: what the tokenizer of a checkpoint adds, and where its decoder starts and ends."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers
from tokenizers.processors import TemplateProcessing

from jax_tformer.errors import InputError

if TYPE_CHECKING:
    from jax_tformer.data.tokenizers import Tokenizer

_PROBES = ("a", "1", ".", "的")
_OWN_TEMPLATES = ("Bert", "DistilBert", "T5", "Roberta", "Bart")
"""Beginnings of classes in `transformers` that always add the same tokens, whatever add_bos_token says."""


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
    """Makes `backend` add the tokens that `transformers` adds.

    `settings` is tokenizer_config.json, `tokens` has the special tokens by name. If add_bos_token or add_eos_token is
    set there, these count and not the post-processor of tokenizer.json.
    """
    kind = str(settings.get("tokenizer_class"))
    asked = "add_bos_token" in settings or "add_eos_token" in settings or kind.startswith("GPTNeoX")
    if not asked or kind.startswith(_OWN_TEMPLATES):
        return
    first, last = (
        tokens.get(f"{role}_token") if settings.get(f"add_{role}_token") else None for role in ("bos", "eos")
    )
    sides = [() if token is None else (token,) for token in (first, last)]
    before, after = (tuple(id for token in side if (id := backend.token_to_id(token)) is not None) for side in sides)
    if len(before) + len(after) == sum(map(len, sides)):
        backend.post_processor = template(backend, Framing(before, after))


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
