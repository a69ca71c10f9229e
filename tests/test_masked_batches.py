"""Masked text: which tokens are hidden, how, and that the labels restore them."""

import numpy as np
import pytest

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import MaskedTextData, TextData, TokenizerConfig, TrainingConfig
from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for
from jax_tformer.data.text import mask_tokens

TEXT = "".join(f"{n} bottles of beer on the wall, take one down and pass it around.\n" for n in range(60))
TRAINING = TrainingConfig(batch_size=4, evaluate_batches=3, seed=5)
CHARACTERS = TokenizerConfig("characters")


@pytest.fixture
def text_path(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def build(data):
    tokenizer = build_tokenizer_for(data)
    return build_pipeline(data, TRAINING, tokenizer), tokenizer


def test_masked_tokens_are_restored_by_their_labels(text_path):
    data = MaskedTextData(path=text_path, context_length=20, held_out=0.2, tokenizer=CHARACTERS)
    pipeline, tokenizer = build(data)
    ids = tokenizer.encode(TEXT[: int(len(TEXT) * 0.8)]).tolist()
    windows = {tuple(ids[i : i + 20]) for i in range(len(ids) - 19)}
    for number in range(50):
        batch = pipeline.train[number]
        assert ((batch["labels"] != IGNORED).sum(axis=1) == 3).all()
        restored = np.where(batch["labels"] == IGNORED, batch["tokens"], batch["labels"])
        assert {tuple(row) for row in restored.tolist()} <= windows


def test_a_window_is_masked_in_another_way_in_every_epoch(text_path):
    data = MaskedTextData(path=text_path, context_length=40, stride=997, held_out=0.5, tokenizer=CHARACTERS)
    pipeline, _ = build(data)
    # Three windows only, so that each comes 20 times.
    labels = [tuple(row) for number in range(15) for row in pipeline.train[number]["labels"].tolist()]
    assert len(set(labels)) == 60


def test_masking_is_bert_s():
    windows = np.random.default_rng(0).integers(10, 1000, (400, 100), np.int32)
    ordinary = np.arange(10, 1000, dtype=np.int32)
    batch = mask_tokens(windows, np.random.default_rng(1), 0.15, mask_id=3, ordinary_ids=ordinary)
    chosen = batch["labels"] != IGNORED
    assert (chosen.sum(axis=1) == 15).all()
    # Every position is equally likely to be chosen.
    assert 30 < chosen.sum(axis=0).min() <= chosen.sum(axis=0).max() < 95
    assert (batch["tokens"] == windows)[~chosen].all()
    tokens = batch["tokens"][chosen]
    assert (tokens == 3).mean() == pytest.approx(0.8, abs=0.02)
    assert (tokens == windows[chosen]).mean() == pytest.approx(0.1, abs=0.02)
    replaced = tokens[(tokens != 3) & (tokens != windows[chosen])]
    assert replaced.min() >= 10
    assert len(set(replaced.tolist())) > 300


def test_at_least_one_token_of_a_window_is_masked():
    windows = np.arange(12, dtype=np.int32).reshape(4, 3)
    batch = mask_tokens(windows, np.random.default_rng(1), 0.01, mask_id=99, ordinary_ids=np.arange(12, dtype=np.int32))
    assert ((batch["labels"] != IGNORED).sum(axis=1) == 1).all()


def test_masking_needs_a_mask_token(text_path):
    without = build_tokenizer_for(TextData(path=text_path))
    with pytest.raises(InputError, match="no mask token"):
        build_pipeline(MaskedTextData(path=text_path, context_length=16), TRAINING, without)
