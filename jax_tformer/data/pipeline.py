"""Makes the tokenizer and the batches that an experiment's data describes; text.py and pairs.py read the sources."""

from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from jax_tformer.config.experiment import MaskedTextData, PairData, TextData, TrainingConfig
from jax_tformer.data import dates
from jax_tformer.data.batches import Pipeline
from jax_tformer.data.pairs import load_pairs, pair_files, pairs_pipeline, training_texts
from jax_tformer.data.text import check_file, load_text, split_text, text_files, text_pipeline
from jax_tformer.data.tokenizers import Pieces, Role, Tokenizer, build_tokenizer

_DATE_SAMPLES = 10_000


def check_files(data: TextData | PairData) -> None:
    """Raises InputError unless all files that `data` names are readable; does not open them."""
    if data.source == "files":
        for path in pair_files(data) if isinstance(data, PairData) else text_files(data):
            check_file(path)


def build_tokenizer_for(data: TextData | PairData) -> Tokenizer:
    """Makes the tokenizer for `data`, from its text if its kind needs that.

    BPE is trained on the training part only. A character tokenizer takes the characters of all text, because held-out
    text must be encodable.

    Raises InputError if the text cannot be read or the tokenizer cannot be loaded.
    """
    return build_tokenizer(data.tokenizer, _texts(data), _special_tokens(data))


def build_pipeline(
    data: TextData | PairData, training: TrainingConfig, tokenizer: Tokenizer, rows: np.ndarray | None = None
) -> Pipeline:
    """Makes the batches of `data`; `text_pipeline` and `pairs_pipeline` describe them.

    `rows`, int[R], are those of each batch that this process makes, in rising order; None: all. They are the same
    numbers whichever others are made. Raises InputError if the text cannot be read, is too short, or does not suit the
    tokenizer.
    """
    rows = np.arange(training.batch_size) if rows is None else rows
    if isinstance(data, PairData):
        return pairs_pipeline(data, training, tokenizer, rows)
    return text_pipeline(data, training, tokenizer, rows)


def _special_tokens(data: TextData | PairData) -> Mapping[Role, str]:
    if isinstance(data, PairData):
        return {"pad": "<|pad|>", "start": "<|start|>", "end": "<|end|>"}
    if isinstance(data, MaskedTextData):
        return {"pad": "<|pad|>", "mask": "<|mask|>"}
    # One token begins and ends texts, as in GPT-2. A character tokenizer has characters only, as in nanoGPT.
    return {} if data.tokenizer.kind == "characters" else {"start": "<|endoftext|>", "end": "<|endoftext|>"}


def _texts(data: TextData | PairData) -> Iterable[str]:
    """Returns the texts from which a tokenizer of this kind is made."""
    kind = data.tokenizer.kind
    if kind in ("bytes", "huggingface"):
        return ()
    if isinstance(data, TextData):
        text = load_text(data)
        return Pieces(text if kind == "characters" else split_text(text, data.held_out)[0])
    if data.source == "dates" and kind == "characters":
        return (dates.alphabet(),)
    if data.source == "dates":
        generator = np.random.default_rng(0)
        pairs = (dates.make_pair(generator, False, data.held_out) for _ in range(_DATE_SAMPLES))
        return list(chain.from_iterable(pairs))
    texts = load_pairs(data)
    return training_texts(texts, data.held_out) if kind == "bpe" else texts
