"""Batches for encoder-only models: windows of text, some tokens of which are to be restored (BERT, section 3.1)."""

import numpy as np

from jax_tformer.data.batches import Batch, Pipeline, endless, evaluation_items, fill_up, fingerprint, shuffled_items
from jax_tformer.data.ids import IGNORED
from jax_tformer.data.sources import load_text
from jax_tformer.data.splits import split_text
from jax_tformer.data.token_cache import cached_ids
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.data.windows import Windows, require_window
from jax_tformer.errors import InputError
from jax_tformer.experiment import MaskedTextData, TrainingConfig


def masked_pipeline(data: MaskedTextData, training: TrainingConfig, tokenizer: Tokenizer) -> Pipeline:
    """Batches {"tokens": int32[B, T], "labels": int32[B, T]}: the label is the token that was there, or IGNORED.

    A window is masked in another way in every epoch, but always in the same way for one seed; held-out windows are
    masked in one way for all seeds.

    Raises InputError if either part of the text is too short for one window, or the tokenizer has no mask token.
    """
    mask_id = tokenizer.mask_id
    if mask_id is None:
        raise InputError("the tokenizer has no mask token; expected one, to mask text with; use another tokenizer")
    text = load_text(data)
    training_text, held_out_text = split_text(text, data.held_out)
    length = data.context_length
    windows = require_window(Windows(cached_ids(tokenizer, training_text), length, data.stride), "training")
    held_out = require_window(Windows(cached_ids(tokenizer, held_out_text), length, length), "held-out")
    ordinary_ids = tokenizer.ordinary_ids

    def mask(rows: np.ndarray, generator: np.random.Generator) -> Batch:
        return mask_tokens(rows, generator, data.masked, mask_id, ordinary_ids)

    def make_batch(number: int, generator: np.random.Generator) -> Batch:
        return mask(windows.cut(shuffled_items(number, training.batch_size, len(windows), training.seed)), generator)

    generator = np.random.default_rng(0)
    return Pipeline(
        train=endless(make_batch, training.seed),
        evaluation=[
            fill_up(mask(held_out.cut(chosen), generator), training.batch_size)
            for chosen in evaluation_items(len(held_out), training)
        ],
        fingerprint=fingerprint([text], tokenizer, data, training),
    )


def mask_tokens(
    windows: np.ndarray, generator: np.random.Generator, fraction: float, mask_id: int, ordinary_ids: np.ndarray
) -> Batch:
    """The batch of `windows`, int32[B, T], in which `fraction` of each, at least one token, is to be restored.

    Of those tokens 80% become the mask token, 10% a random one of `ordinary_ids`, int32[N], and 10% stay.
    """
    count = max(1, round(fraction * windows.shape[1]))
    chosen = generator.random(windows.shape).argsort(axis=1) < count
    fate = generator.random(windows.shape)
    tokens = np.where(chosen & (fate < 0.8), np.int32(mask_id), windows)
    tokens = np.where(chosen & (fate >= 0.8) & (fate < 0.9), generator.choice(ordinary_ids, windows.shape), tokens)
    return {"tokens": tokens, "labels": np.where(chosen, windows, np.int32(IGNORED))}
