"""Batches of text, masked text, pairs and dates: what is in them, in which order, and that they resume exactly."""

import dataclasses
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import MaskedTextData, PairData, TextData, TokenizerConfig, TrainingConfig
from jax_tformer.config.presets import EXPERIMENTS
from jax_tformer.data import dates
from jax_tformer.data.order import Items, Shape, make_batches, permute, shuffled
from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for
from jax_tformer.data.text import mask_tokens
from jax_tformer.data.tokenizers import load_tokenizer

TEXT = "".join(f"{n} bottles of beer on the wall, take one down and pass it around.\n" for n in range(60))
TRAINING = TrainingConfig(batch_size=4, evaluate_batches=3, seed=5)
CHARACTERS = TokenizerConfig("characters")
DATES = PairData("dates", source_length=48, target_length=11)
Data = TextData | PairData


@pytest.fixture
def text_path(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def text_data(text_path, **changes):
    return TextData(path=text_path, context_length=16, **changes)


@pytest.fixture(params=["text", "masked", "pairs", "dates", "scan", "chain"])
def every_data(request, tmp_path, text_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"source {n}\tziel {n}\n" for n in range(40)))
    kinds = {
        "text": text_data(text_path),
        "masked": MaskedTextData(path=text_path, context_length=16),
        "pairs": PairData(path=str(tmp_path / "pairs.tsv"), source_length=12, target_length=8),
        "dates": DATES,
        "scan": EXPERIMENTS["scan"].config.data,
        "chain": EXPERIMENTS["masked-chain"].config.data,
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


def test_training_batches_depend_on_the_seed_and_evaluation_on_nothing(every_data):
    first, again, other = (build(every_data, dataclasses.replace(TRAINING, seed=seed))[0] for seed in (5, 5, 6))
    for number in range(3):
        assert same(first.train[number], again.train[number])
        assert not same(first.train[number], other.train[number])
    assert not same(first.train[0], first.train[1])
    assert 1 <= len(first.evaluation) <= 3
    assert all(map(same, first.evaluation, other.evaluation))


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
        build_pipeline(dataclasses.replace(every_data, held_out=0.3), TRAINING, tokenizer).fingerprint,
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
    order = [
        tuple(permute(number, 10, seed=3)[1] for number in range(10 * epoch, 10 * epoch + 10)) for epoch in range(4)
    ]
    assert [sorted(epoch) for epoch in order] == [list(range(10))] * 4
    assert len(set(order)) == 4
    assert permute(2, 1, seed=3) == (2, 0)


def test_evaluation_items_are_spread_over_all():
    def evaluated(count):
        items = Items(count, lambda numbers: {"item": numbers, "labels": numbers.copy()})
        _, batches = make_batches([Shape(4, shuffled(items, 0), items)], TRAINING, np.arange(4))
        return [batch["item"].tolist() for batch in batches]

    assert evaluated(5) == [[0, 1, 2, 3], [4, 4, 4, 4]]
    assert evaluated(24) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]


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


def test_characters_have_no_special_tokens_and_bytes_per_token_are_those_of_utf8(tmp_path):
    (tmp_path / "text.txt").write_text("é€" * 200, encoding="utf-8")
    pipeline, tokenizer = build(text_data(str(tmp_path / "text.txt"), tokenizer=CHARACTERS))
    assert (tokenizer.vocab_size, tokenizer.start_id) == (2, None)
    assert (pipeline.bytes_per_token, pipeline.examples, pipeline.notes) == (2.5, None, [])
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


# Masked text


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
    batch = mask_tokens(windows, np.random.default_rng(1), 0.15, 3, ordinary, rows=np.arange(400), of=400)
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
    batch = mask_tokens(windows, np.random.default_rng(1), 0.01, 99, windows[0], rows=np.arange(4), of=4)
    assert ((batch["labels"] != IGNORED).sum(axis=1) == 1).all()


def test_masking_needs_a_mask_token(text_path):
    without = build_tokenizer_for(TextData(path=text_path))
    with pytest.raises(InputError, match="no mask token"):
        build_pipeline(MaskedTextData(path=text_path, context_length=16), TRAINING, without)


# Pairs

PAIRS = [(f"source {n}", f"ziel {n}") for n in range(40)]


def pair_data(tmp_path, pairs, **changes):
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return PairData(path=str(tmp_path / "pairs.tsv"), source_length=12, target_length=8, **changes)


def test_pair_batch_is_padded_masked_and_shifted(tmp_path):
    pipeline, tokenizer = build(pair_data(tmp_path, PAIRS))
    expected = dict(PAIRS)
    start, end, pad = tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id
    assert len({start, end, pad, None}) == 4
    for batch in [pipeline.train[number] for number in range(20)]:
        for row in range(4):
            source = batch["source"][row].tolist()
            text = tokenizer.decode(source)
            ids, target_ids = tokenizer.encode(text).tolist(), tokenizer.encode(expected[text]).tolist()
            assert source == [*ids, end, *[pad] * (11 - len(ids))]
            assert batch["source_mask"][row].tolist() == [True] * (len(ids) + 1) + [False] * (11 - len(ids))
            rest = 7 - len(target_ids)
            assert batch["labels"][row].tolist() == [*target_ids, end, *[IGNORED] * rest]
            assert batch["target"][row].tolist() == [start, *target_ids, *[pad] * rest]
            assert batch["target_mask"][row].tolist() == [True] * (len(target_ids) + 1) + [False] * rest


def sources_of(batches, tokenizer):
    return [tokenizer.decode(row) for batch in batches for row in batch["source"]]


def test_an_epoch_reads_every_training_pair_once_and_no_held_out_one(tmp_path):
    pipeline, tokenizer = build(pair_data(tmp_path, PAIRS))
    read = sources_of([pipeline.train[number] for number in range(18)], tokenizer)
    assert pipeline.examples is not None
    held_out = {source for source, _ in pipeline.examples}
    assert len(held_out) == 4
    assert sorted(read[:36]) == sorted(read[36:]) == sorted({source for source, _ in PAIRS} - held_out)
    assert set(sources_of(pipeline.evaluation, tokenizer)) == held_out
    assert set(pipeline.examples) <= set(PAIRS)
    assert pipeline.bytes_per_token is None


def test_a_source_with_two_targets_is_on_one_side(tmp_path):
    twice = [(f"s {n}", f"{word} {n}") for n in range(40) for word in ("eins", "zwei")]
    pipeline, tokenizer = build(pair_data(tmp_path, twice, held_out=0.5))
    trained = set(sources_of([pipeline.train[number] for number in range(10)], tokenizer))
    assert len(trained) == 20
    assert not trained & set(sources_of(pipeline.evaluation, tokenizer))


def test_too_long_pairs_are_left_out_and_counted(tmp_path):
    # 11 characters and the end token fit 12; start token and 7 characters fit 8.
    long = [("s" * 12, "t"), ("s", "t" * 8), ("u" * 11, "t" * 7)]
    pipeline, tokenizer = build(pair_data(tmp_path, PAIRS + long))
    told = "2 of 43 pairs (4.7%) are left out: 1 sources have more than 11 tokens and 1 targets have more than 7 tokens"
    assert pipeline.notes == [told]
    read = sources_of([*(pipeline.train[number] for number in range(10)), *pipeline.evaluation], tokenizer)
    assert "u" * 11 in read
    assert len(set(read)) == 41
    assert build(pair_data(tmp_path, PAIRS))[0].notes == []


def test_many_pairs_left_out_are_a_warning_with_the_lengths_that_would_keep_them(tmp_path):
    long = [("s" * (12 + n), "t") for n in range(197)] + [("s" * 900, "t")]
    data = pair_data(tmp_path, PAIRS[:10] + long)
    (note,) = build(data)[0].notes
    told = "warning: 198 of 208 pairs (95.2%) are left out: 198 sources have more than 11 tokens; --data.source-length "
    assert note == told + "209 and --data.target-length 8 would keep 99% of them all"
    assert build(dataclasses.replace(data, source_length=209))[0].notes[0].startswith("1 of 208 pairs (0.5%)")


def test_pairs_take_a_few_times_their_file_in_memory(tmp_path):
    build(pair_data(tmp_path, PAIRS))  # imports what is imported at first use
    pairs = [(f"source with some more words {n}", f"ziel {n}") for n in range(15_000)]
    data = dataclasses.replace(pair_data(tmp_path, pairs), source_length=40, target_length=20)
    tracemalloc.start()
    build(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    times = peak / (tmp_path / "pairs.tsv").stat().st_size
    assert times < 8


@pytest.mark.parametrize("pairs", [[("s" * 20, "t")] * 3, [("a", "b")], [("a", "b"), ("a", "c")]])
def test_no_pair_left_on_a_side_is_refused(tmp_path, pairs):
    with pytest.raises(InputError, match=r"there are 0 training and \d held-out pairs") as caught:
        build(pair_data(tmp_path, pairs))
    assert "\n" not in str(caught.value)


def test_pairs_need_start_end_and_padding(tmp_path):
    bare = build_tokenizer_for(TextData("python-docs", tokenizer=CHARACTERS))
    with pytest.raises(InputError, match="no start token"):
        build_pipeline(pair_data(tmp_path, PAIRS), TRAINING, bare)


# Dates


@pytest.mark.parametrize("tokenizer", [CHARACTERS, TokenizerConfig("bytes"), TokenizerConfig("bpe", 500)])
def test_dates_with_every_tokenizer(tokenizer):
    data = PairData("dates", source_length=108, target_length=12, tokenizer=tokenizer)
    pipeline, made = build(data)
    batch = pipeline.train[0]
    targets = [made.decode(row[row != IGNORED]) for row in batch["labels"]]
    assert all(len(target) == 10 and target[4] == target[7] == "-" for target in targets)
    assert all(": " in made.decode(row) for row in batch["source"])


def test_dates_are_unlimited_and_held_out_days_stay_out():
    pipeline, tokenizer = build(DATES)
    trained = {tokenizer.decode(row) for number in range(300) for row in pipeline.train[number]["target"]}
    assert len(trained) > 1100
    assert pipeline.examples is not None
    assert len(pipeline.examples) == 512
    held_out = {target for _, target in pipeline.examples}
    evaluated = {tokenizer.decode(row) for batch in pipeline.evaluation for row in batch["target"]}
    assert not trained & (held_out | evaluated)


def test_a_rare_date_that_is_too_long_is_drawn_again(monkeypatch):
    monkeypatch.setattr(dates, "longest_sources", lambda: ["x"])
    data = PairData("dates", source_length=24, target_length=11, tokenizer=TokenizerConfig("bytes"))
    pipeline, tokenizer = build(data)
    assert pipeline.examples is not None
    sources = [source for source, _ in pipeline.examples]
    sources += sources_of([*(pipeline.train[number] for number in range(20)), *pipeline.evaluation], tokenizer)
    assert len(sources) == 512 + 80 + 12
    assert max(len(source.encode()) for source in sources) == 23


def test_dates_that_do_not_fit_are_refused_with_the_numbers():
    message = "source_length is 20 and target_length is 10; the dates need at least 44 and 11"
    with pytest.raises(InputError, match=message):
        build(PairData("dates", source_length=20, target_length=10))
