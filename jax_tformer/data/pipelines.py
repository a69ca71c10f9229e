"""From the data part of an experiment to its tokenizer and its batches."""

from collections.abc import Iterable, Mapping

import numpy as np

from jax_tformer.data import dates
from jax_tformer.data.batches import Pipeline
from jax_tformer.data.language_model import language_model_pipeline
from jax_tformer.data.masked import masked_pipeline
from jax_tformer.data.pairs import pairs_pipeline, split_pairs
from jax_tformer.data.sources import load_pairs, load_text
from jax_tformer.data.splits import split_text
from jax_tformer.data.token_cache import cached_tokenizer
from jax_tformer.data.tokenizers import Role, Tokenizer
from jax_tformer.data.utf8 import Pieces
from jax_tformer.experiment import MaskedTextData, PairData, TextData, TrainingConfig

_DATE_SAMPLES = 10_000


def build_tokenizer_for(data: TextData | PairData) -> Tokenizer:
    """The tokenizer for `data`, made from its text where its kind asks for that.

    BPE sees the training part only; characters are those of all text, since others could not be evaluated.

    Raises InputError if the text or the tokenizer cannot be had.
    """
    return cached_tokenizer(data.tokenizer, _texts(data), _special_tokens(data))


def build_pipeline(data: TextData | PairData, training: TrainingConfig, tokenizer: Tokenizer) -> Pipeline:
    """The batches of `data`; see the pipeline of each kind for what is in them.

    Raises InputError if the text cannot be had, is too little, or does not suit the tokenizer.
    """
    if isinstance(data, PairData):
        return pairs_pipeline(data, training, tokenizer)
    if isinstance(data, MaskedTextData):
        return masked_pipeline(data, training, tokenizer)
    return language_model_pipeline(data, training, tokenizer)


def _special_tokens(data: TextData | PairData) -> Mapping[Role, str]:
    if isinstance(data, PairData):
        return {"pad": "<|pad|>", "start": "<|start|>", "end": "<|end|>"}
    if isinstance(data, MaskedTextData):
        return {"pad": "<|pad|>", "mask": "<|mask|>"}
    # One token begins and ends texts, as in GPT-2; a character model has characters only, as in nanoGPT.
    return {} if data.tokenizer.kind == "characters" else {"start": "<|endoftext|>", "end": "<|endoftext|>"}


def _texts(data: TextData | PairData) -> Iterable[str]:
    kind = data.tokenizer.kind
    if kind in ("bytes", "huggingface"):
        return ()
    if isinstance(data, PairData):
        if data.source == "dates" and kind == "characters":
            return (dates.alphabet(),)
        pairs = _sample_dates(data) if data.source == "dates" else load_pairs(data)
        if kind == "bpe":
            pairs, _ = split_pairs(pairs, data.held_out)
        return [text for pair in pairs for text in pair]
    text = load_text(data)
    return Pieces(text if kind == "characters" else split_text(text, data.held_out)[0])


def _sample_dates(data: PairData) -> list[tuple[str, str]]:
    generator = np.random.default_rng(0)
    return [dates.make_pair(generator, False, data.held_out) for _ in range(_DATE_SAMPLES)]
