"""Batches of pairs, from files and of dates: padding, masks, the decoder input, and what is held out."""

import dataclasses
import tracemalloc

import pytest

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import PairData, TextData, TokenizerConfig, TrainingConfig
from jax_tformer.data import dates
from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for

TRAINING = TrainingConfig(batch_size=4, evaluate_batches=3, seed=5)
CHARACTERS = TokenizerConfig("characters")
PAIRS = [(f"source {n}", f"ziel {n}") for n in range(40)]


def pair_data(tmp_path, pairs, **changes):
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return PairData(path=str(tmp_path / "pairs.tsv"), source_length=12, target_length=8, **changes)


def build(data):
    tokenizer = build_tokenizer_for(data)
    return build_pipeline(data, TRAINING, tokenizer), tokenizer


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
    pipeline, tokenizer = build(PairData("dates", source_length=48, target_length=11))
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
