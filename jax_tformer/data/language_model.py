"""Batches for decoder-only models: windows of text, and for each token the one that comes next."""

import numpy as np

from jax_tformer.data.batches import Batch, Pipeline, endless, evaluation_items, fill_up, fingerprint, shuffled_items
from jax_tformer.data.sources import load_text
from jax_tformer.data.splits import split_text
from jax_tformer.data.token_cache import cached_ids
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.data.windows import Windows, require_window
from jax_tformer.experiment import TextData, TrainingConfig


def language_model_pipeline(data: TextData, training: TrainingConfig, tokenizer: Tokenizer) -> Pipeline:
    """Batches {"tokens": int32[B, T], "labels": int32[B, T]}: the label of a token is the one after it.

    Windows are cut from the start token, if the tokenizer has one, and then the text. Held-out windows follow one
    another without overlap, and are thinned out evenly to the number of evaluation batches.

    Raises InputError if either part of the text is too short for one window.
    """
    text = load_text(data)
    training_text, held_out_text = split_text(text, data.held_out)
    start = [] if tokenizer.start_id is None else [tokenizer.start_id]
    length = data.context_length + 1
    windows = require_window(Windows(cached_ids(tokenizer, training_text, start), length, data.stride), "training")
    held_out_stream = cached_ids(tokenizer, held_out_text, start)
    held_out = require_window(Windows(held_out_stream, length, data.context_length), "held-out")

    def make_batch(number: int, _: np.random.Generator) -> Batch:
        chosen = shuffled_items(number, training.batch_size, len(windows), training.seed)
        return next_token_batch(windows.cut(chosen))

    return Pipeline(
        train=endless(make_batch, training.seed),
        evaluation=[
            fill_up(next_token_batch(held_out.cut(chosen)), training.batch_size)
            for chosen in evaluation_items(len(held_out), training)
        ],
        fingerprint=fingerprint([text], tokenizer, data, training),
        bytes_per_token=len(held_out_text) / (len(held_out_stream) - len(start)),
    )


def next_token_batch(windows: np.ndarray) -> Batch:
    """int32[B, T + 1] -> the batch that predicts every token but the first from those before it."""
    return {"tokens": np.ascontiguousarray(windows[:, :-1]), "labels": np.ascontiguousarray(windows[:, 1:])}
