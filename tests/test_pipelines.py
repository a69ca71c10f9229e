"""Batches: what is in them, that they come in the promised order, and that they resume exactly."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import MaskedTextData, PairData, TextData, TokenizerConfig, TrainingConfig
from jax_tformer.data.batches import evaluation_items, shuffled_items
from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for
from jax_tformer.data.tokenizers import load_tokenizer

TEXT = "".join(f"{n} bottles of beer on the wall, take one down and pass it around.\n" for n in range(60))
TRAINING = TrainingConfig(batch_size=4, evaluate_batches=3, seed=5)
CHARACTERS = TokenizerConfig("characters")
Data = TextData | PairData


@pytest.fixture
def text_path(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def text_data(text_path, **changes):
    return TextData(path=text_path, context_length=16, **changes)


@pytest.fixture(params=["text", "masked", "pairs", "dates"])
def every_data(request, tmp_path, text_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"source {n}\tziel {n}\n" for n in range(40)))
    kinds = {
        "text": text_data(text_path),
        "masked": MaskedTextData(path=text_path, context_length=16),
        "pairs": PairData(path=str(tmp_path / "pairs.tsv"), source_length=12, target_length=8),
        "dates": PairData("dates", source_length=48, target_length=11),
    }
    return kinds[request.param]


def build(data, training=TRAINING):
    tokenizer = build_tokenizer_for(data)
    return build_pipeline(data, training, tokenizer), tokenizer


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def windows_of(batches, name="tokens"):
    return [tuple(row) for batch in batches for row in batch[name].tolist()]


# What holds for all of them


def test_resume_is_exact_and_its_state_is_small_json(every_data):
    iterator = build(every_data)[0].train_iterator()
    for _ in range(7):
        next(iterator)
    state = json.dumps(iterator.get_state())
    assert len(state) < 200
    following = [next(iterator) for _ in range(5)]
    # All is made anew, as after a restart; then the used iterator is set back.
    fresh = build(every_data)[0].train_iterator()
    for resumed in (fresh, iterator):
        resumed.set_state(json.loads(state))
        assert all(same(next(resumed), batch) for batch in following)


def test_batches_depend_on_the_seed_and_on_nothing_else(every_data):
    first = [build(every_data)[0].train[number] for number in range(3)]
    again = [build(every_data)[0].train[number] for number in range(3)]
    other = [build(every_data, dataclasses.replace(TRAINING, seed=6))[0].train[number] for number in range(3)]
    assert all(map(same, first, again))
    assert not any(map(same, first, other))
    assert not same(first[0], first[1])


def test_evaluation_does_not_depend_on_the_seed(every_data):
    evaluation = build(every_data)[0].evaluation
    assert 1 <= len(evaluation) <= 3
    assert all(map(same, evaluation, build(every_data, dataclasses.replace(TRAINING, seed=6))[0].evaluation))


def test_all_batches_have_the_same_shapes_and_types(every_data):
    pipeline, tokenizer = build(every_data)
    batches = [pipeline.train[0], pipeline.train[10**9], *pipeline.evaluation]
    assert len({str({name: (rows.shape, rows.dtype) for name, rows in batch.items()}) for batch in batches}) == 1
    for batch in batches:
        for name, rows in batch.items():
            assert len(rows) == 4
            assert rows.dtype == (bool if name.endswith("mask") else np.int32)
            if name in ("tokens", "source", "target"):
                assert 0 <= rows.min() <= rows.max() < tokenizer.vocab_size


def test_fingerprint_is_kept_by_a_restart_and_changed_by_what_changes_batches(every_data, tmp_path):
    pipeline, tokenizer = build(every_data)
    tokenizer.save(tmp_path / "run")
    loaded = load_tokenizer(tmp_path / "run")
    later = dataclasses.replace(TRAINING, steps=5, evaluate_batches=1, log_every=3)
    assert build_pipeline(every_data, later, loaded).fingerprint == pipeline.fingerprint
    field = "source_length" if isinstance(every_data, PairData) else "context_length"
    change = {field: getattr(every_data, field) + 1}
    longer = dataclasses.replace(every_data, **change)
    other_tokenizer = build_tokenizer_for(dataclasses.replace(every_data, tokenizer=TokenizerConfig("bpe", 300)))
    wide = dataclasses.replace(every_data, source_length=120) if isinstance(every_data, PairData) else every_data
    fingerprints = [
        pipeline.fingerprint,
        build_pipeline(every_data, dataclasses.replace(TRAINING, seed=6), tokenizer).fingerprint,
        build_pipeline(every_data, dataclasses.replace(TRAINING, batch_size=5), tokenizer).fingerprint,
        build_pipeline(dataclasses.replace(every_data, held_out=0.2), TRAINING, tokenizer).fingerprint,
        build_pipeline(longer, TRAINING, tokenizer).fingerprint,
        build_pipeline(wide, TRAINING, other_tokenizer).fingerprint,
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert all(len(fingerprint) == 64 for fingerprint in fingerprints)


def test_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path):
    for name, text in (("a.txt", TEXT), ("b.txt", TEXT), ("c.txt", TEXT.replace("7 bottles", "7 b0ttles"))):
        (tmp_path / name).write_text(text)
    tokenizer = build_tokenizer_for(text_data(str(tmp_path / "c.txt")))
    a, b, c = (
        build_pipeline(text_data(str(tmp_path / name)), TRAINING, tokenizer).fingerprint
        for name in ("a.txt", "b.txt", "c.txt")
    )
    assert a == b != c


def test_tables_that_a_pattern_finds_are_text_with_a_note(text_path, tmp_path):
    (tmp_path / "table.CSV").write_text(TEXT)
    assert build(text_data(str(tmp_path / "t*")))[0].notes == ["1 .csv files are read as plain text"]
    assert build(text_data(text_path))[0].notes == []


# The order


def test_every_epoch_is_another_permutation_of_all_items():
    # Batches of 4 cross the borders of epochs of 10.
    order = np.concatenate([shuffled_items(batch, 4, 10, seed=3) for batch in range(10)]).reshape(4, 10)
    assert [sorted(epoch) for epoch in order.tolist()] == [list(range(10))] * 4
    assert len({tuple(epoch) for epoch in order.tolist()}) == 4
    assert shuffled_items(0, 3, 1, seed=3).tolist() == [0, 0, 0]


def test_evaluation_items_are_spread_over_all():
    training = TrainingConfig(batch_size=4, evaluate_batches=3)
    assert [items.tolist() for items in evaluation_items(5, training)] == [[0, 1, 2, 3], [4]]
    assert [items.tolist() for items in evaluation_items(24, training)] == [
        [0, 2, 4, 6],
        [8, 10, 12, 14],
        [16, 18, 20, 22],
    ]


# Text


def test_text_windows_predict_the_next_token(text_path):
    pipeline, tokenizer = build(text_data(text_path, tokenizer=TokenizerConfig("bytes")))
    stream = [tokenizer.start_id, *TEXT[: int(len(TEXT) * 0.9)].encode()]
    windows = {tuple(stream[i : i + 17]) for i in range(len(stream) - 16)}
    batches = [pipeline.train[number] for number in range(20)]
    for tokens, labels in zip(windows_of(batches), windows_of(batches, "labels"), strict=True):
        assert tokens[1:] == labels[:-1]
        assert (*tokens, labels[-1]) in windows


def test_text_begins_with_the_start_token(text_path):
    pipeline, tokenizer = build(text_data(text_path, stride=16, held_out=0.5, tokenizer=TokenizerConfig("bytes")))
    epoch = windows_of([pipeline.train[number] for number in range(40)])
    assert (tokenizer.start_id, *TEXT[:15].encode()) in epoch
    assert pipeline.evaluation[0]["tokens"][0, 0] == tokenizer.start_id


def test_an_epoch_reads_every_window_once(text_path):
    for stride in (1, 7):
        data = text_data(text_path, stride=stride, held_out=0.9, tokenizer=CHARACTERS)
        pipeline, tokenizer = build(data)
        ids = tokenizer.encode(TEXT[: int(len(TEXT) * (1 - 0.9))]).tolist()
        expected = Counter(tuple(ids[i : i + 16]) for i in range(0, len(ids) - 16, stride))
        count = expected.total()
        read = windows_of([pipeline.train[number] for number in range(2 * count // 4 + 1)])
        assert Counter(read[:count]) == Counter(read[count : 2 * count]) == expected
        assert read[:count] != read[count : 2 * count]


def test_held_out_text_is_read_once_and_never_trained_on(tmp_path):
    # Text that never repeats itself, and a length that leaves a last batch of 2 rows.
    text = "".join(np.random.default_rng(0).choice(list("abcdefgh"), 3950))
    (tmp_path / "text.txt").write_text(text)
    data = TextData(path=str(tmp_path / "text.txt"), context_length=15, tokenizer=CHARACTERS)
    pipeline, tokenizer = build(data, dataclasses.replace(TRAINING, evaluate_batches=100))
    end = text[int(len(text) * 0.9) :]
    rows = (len(end) - 1) // 15
    labels = np.concatenate([batch["labels"] for batch in pipeline.evaluation])
    assert tokenizer.decode(labels[:rows].ravel()) == end[1 : rows * 15 + 1]
    # The last batch is filled up with rows that do not count.
    assert len(labels) == -(-rows // 4) * 4 > rows
    assert (labels[rows:] == IGNORED).all()
    trained = set(windows_of([pipeline.train[number] for number in range(2000)]))
    assert not trained & set(windows_of(pipeline.evaluation))


def test_character_model_has_characters_only_and_one_byte_each(text_path):
    pipeline, tokenizer = build(text_data(text_path, tokenizer=CHARACTERS))
    assert tokenizer.vocab_size == len(set(TEXT))
    assert tokenizer.start_id is None
    assert pipeline.bytes_per_token == 1.0
    assert pipeline.examples is None
    assert pipeline.notes == []


def test_bytes_per_token_counts_utf8_bytes(tmp_path):
    (tmp_path / "text.txt").write_text("é€" * 200, encoding="utf-8")
    assert build(text_data(str(tmp_path / "text.txt"), tokenizer=CHARACTERS))[0].bytes_per_token == 2.5
    assert build(text_data(str(tmp_path / "text.txt"), tokenizer=TokenizerConfig("bytes")))[0].bytes_per_token == 1.0


def test_bpe_is_trained_on_the_training_part_alone(tmp_path):
    for name, end in (("a.txt", "abcdefg " * 50), ("b.txt", "tuvwxyz " * 50)):
        (tmp_path / name).write_text("some words that come again and again " * 100 + end)
    tokenizers = [
        build_tokenizer_for(text_data(str(tmp_path / name), tokenizer=TokenizerConfig("bpe", 300), held_out=0.2))
        for name in ("a.txt", "b.txt")
    ]
    assert tokenizers[0].to_json() == tokenizers[1].to_json()


def test_too_short_text_is_refused_with_the_numbers(text_path, tmp_path):
    (tmp_path / "short.txt").write_text("x" * 180)
    # 162 characters to train on, 18 held out.
    fits = TextData(path=str(tmp_path / "short.txt"), context_length=17, tokenizer=CHARACTERS)
    assert build(fits)[0].evaluation[0]["tokens"].shape == (4, 17)
    message = r"held-out part of the text has 18 tokens; expected at least 19"
    with pytest.raises(InputError, match=message):
        build(dataclasses.replace(fits, context_length=18))
    message = r"training part of the text has 162 tokens; expected at least 181"
    with pytest.raises(InputError, match=message):
        build(dataclasses.replace(fits, context_length=180))


def test_a_saved_tokenizer_that_lacks_a_character_is_refused(text_path, tmp_path):
    tokenizer = build_tokenizer_for(text_data(text_path, tokenizer=CHARACTERS))
    Path(text_path).write_text(TEXT + "€" * 20)
    with pytest.raises(InputError, match="'€'"):
        build_pipeline(text_data(text_path, tokenizer=CHARACTERS), TRAINING, tokenizer)
