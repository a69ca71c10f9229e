"""Batches of every kind: what is in them, that seed and number alone decide them, and that they resume exactly."""

import dataclasses
import json
import tracemalloc
from collections import Counter
from functools import cache

import jax
import numpy as np
import pytest

from jax_tformer.config import IGNORED, StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import (
    MaskedTextData,
    MeshConfig,
    PairData,
    TextData,
    TokenizerConfig,
    TrainingConfig,
)
from jax_tformer.config.presets import EXPERIMENTS
from jax_tformer.data import dates, pairs
from jax_tformer.data.order import Items, Part, Shape, Source, choose, evaluation_batches, permute
from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for
from jax_tformer.data.sources import check_files
from jax_tformer.data.text import Masking
from jax_tformer.data.tokenizers import Framing, build_tokenizer, load_tokenizer
from jax_tformer.functional import transformer
from jax_tformer.training.step import evaluation_step

TEXT = "".join(f"{n} bottles of beer on the wall, take one down and pass it around.\n" for n in range(60))
TRAINING = TrainingConfig(batch_size=4, evaluate_batches=3, seed=5)
EIGHT = dataclasses.replace(TRAINING, batch_size=8)
CHARACTERS, BYTES = TokenizerConfig("characters"), TokenizerConfig("bytes")
DATES = PairData("dates", source_length=48, target_length=11)
IDS = np.random.default_rng(0).integers(0, 60, 3000) % 57 + 200
"""With an end token, 256, now and then."""
SHARDS = ("windows", "concatenate", "best_fit", "crop", "mixed")
KINDS = (*SHARDS, "text", "masked", "equations", "pairs", "tokens", "dates")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Text, pairs, and the same ids in one file ("1") and in several ("5")."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text.txt").write_text(TEXT)
    (folder / "pairs.tsv").write_text("".join(f"{n % 7 * 'a'}s {n}\tziel {n}\n" for n in range(300)))
    for name, cuts in {"1": [], "5": [1, 8, 300, 1999]}.items():
        (folder / name).mkdir()
        for number, ids in enumerate(np.split(IDS.astype(np.uint16), cuts)):
            ids.tofile(folder / name / f"{number:02}.bin")
    return folder


def data_of(kind, place, split="1"):
    shards, text = str(place / split), str(place / "text.txt")
    if kind in ("windows", "mixed"):
        return TextData(path=f"{shards}=0.7,{text}=0.3" if kind == "mixed" else shards, context_length=16)
    if kind in SHARDS:
        return TextData(path=shards, context_length=32, packing=kind)
    return {
        "text": TextData(path=text, context_length=16),
        "masked": MaskedTextData(path=text, context_length=16),
        "equations": TextData("modular-addition", context_length=4, tokenizer=TokenizerConfig("words")),
        "pairs": PairData(path=str(place / "pairs.tsv"), source_length=14, target_length=10),
        "tokens": PairData(path=str(place / "pairs.tsv"), source_length=14, target_length=10, tokens_per_batch=400),
        "dates": DATES,
    }[kind]


@cache
def pipelines(kind, place, split, count):
    """Those of so many processes, and the tokenizer."""
    data = data_of(kind, place, split)
    tokenizer = build_tokenizer_for(data)
    rows = np.split(np.arange(8), count)
    return [build_pipeline(data, EIGHT, tokenizer, each) for each in rows], tokenizer


@pytest.fixture(params=sorted({*KINDS} - {"equations"}))
def every(request, place):
    """Data of every kind, with its pipeline and tokenizer."""
    (pipeline,), tokenizer = pipelines(request.param, place, "1", 1)
    return data_of(request.param, place), pipeline, tokenizer


def text_data(path, **changes):
    return TextData(path=str(path), context_length=16, **changes)


@pytest.fixture
def text_path(place):
    return place / "text.txt"


def build(data, training=TRAINING):
    tokenizer = build_tokenizer_for(data)
    return build_pipeline(data, training, tokenizer), tokenizer


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def whole(parts):
    """A batch of the rows that several processes have made."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def windows_of(batches, name="tokens"):
    return [tuple(row) for batch in batches for row in batch[name].tolist()]


# What holds for all of them


@pytest.mark.parametrize("start", [0, 1, 1000])
@pytest.mark.parametrize(("kind", "split"), [*((kind, "5") for kind in SHARDS), *((kind, "1") for kind in KINDS)])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_seed_and_number_decide_a_batch(kind, split, count, start, place):
    """Byte for byte, whoever makes its rows, however the ids are split into files, from any step on."""
    (one,), _ = pipelines(kind, place, "1", 1)
    several, _ = pipelines(kind, place, split, count)
    iterators = [part.train_iterator() for part in several]
    for iterator in iterators:
        state = iterator.get_state() | {"next_index": start}
        assert len(json.dumps(state)) < 200
        iterator.set_state(state)
    made = [whole([next(iterator) for iterator in iterators]) for _ in range(3)]
    assert all(same(made[n], one.train[start + n]) for n in range(3))
    assert iterators[0].get_state() == {"next_index": start + 3}
    assert not same(made[0], made[1])
    held_out = [whole(batch) for batch in zip(*(part.evaluation for part in several), strict=True)]
    assert all(map(same, held_out, one.evaluation))
    assert len(held_out) == len(one.evaluation) > 0


def test_another_seed_is_another_order_and_the_same_evaluation(every):
    data, pipeline, tokenizer = every
    other = build_pipeline(data, dataclasses.replace(EIGHT, seed=6), tokenizer)
    assert not any(same(pipeline.train[number], other.train[number]) for number in range(3))
    assert all(map(same, pipeline.evaluation, other.evaluation))


def test_batches_have_few_shapes_and_ids_of_the_vocabulary(every):
    data, pipeline, tokenizer = every
    batches = [*map(pipeline.train.__getitem__, [*range(30), 10**9]), *pipeline.evaluation]
    shapes = {str({name: (rows.shape, rows.dtype) for name, rows in batch.items()}) for batch in batches}
    tokens = getattr(data, "tokens_per_batch", None)
    assert len(shapes) == 1 if tokens is None else 2 <= len(shapes) <= 6
    for batch in batches:
        for name, rows in batch.items():
            assert len(rows) == 8 if tokens is None else (len(rows) % 8 == 0 and rows.size <= tokens)
            assert rows.dtype == (bool if name.endswith("mask") else np.int32)
            if name in ("tokens", "source", "target"):
                assert 0 <= rows.min() <= rows.max() < tokenizer.vocab_size


def test_fingerprint_is_kept_by_a_restart_and_changed_by_what_changes_batches(every, tmp_path):
    data, pipeline, tokenizer = every
    tokenizer.save(tmp_path / "run")
    later = dataclasses.replace(EIGHT, steps=5, evaluate_batches=1, log_every=3)
    assert build_pipeline(data, later, load_tokenizer(tmp_path / "run")).fingerprint == pipeline.fingerprint
    paired = isinstance(data, PairData)
    longer = {"source_length": data.source_length + 1} if paired else {"context_length": data.context_length + 1}
    other = build_tokenizer(TokenizerConfig("bpe", 300), [TEXT], {"mask": "M", "start": "S", "end": "E", "pad": "P"})
    wide = dataclasses.replace(data, **({"source_length": 120, "tokens_per_batch": None} if paired else {}))
    fingerprints = [
        pipeline.fingerprint,
        build_pipeline(data, dataclasses.replace(EIGHT, seed=6), tokenizer).fingerprint,
        build_pipeline(data, dataclasses.replace(EIGHT, batch_size=16), tokenizer).fingerprint,
        build_pipeline(dataclasses.replace(data, held_out=0.2), EIGHT, tokenizer).fingerprint,
        build_pipeline(dataclasses.replace(data, **longer), EIGHT, tokenizer).fingerprint,
        build_pipeline(wide, EIGHT, other).fingerprint,
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert all(len(fingerprint) == 64 for fingerprint in fingerprints)


def test_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path):
    texts = {"a.txt": TEXT, "b.txt": TEXT, "c.txt": TEXT.replace("7 bottles", "7 b0ttles")}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    tokenizer = build_tokenizer_for(text_data(tmp_path / "c.txt"))
    a, b, c = (build_pipeline(text_data(tmp_path / name), TRAINING, tokenizer).fingerprint for name in texts)
    assert a == b != c


def test_fields_that_came_later_leave_older_fingerprints_as_they_were():
    """Of 2026-11-24: runs from then go on."""
    pipeline, _ = build(
        TextData("python-docs", context_length=16, tokenizer=BYTES), TrainingConfig(batch_size=4, seed=5)
    )
    assert pipeline.fingerprint.startswith("3ef3d210f7777c61")


def test_tables_that_a_pattern_finds_are_text_with_a_note(text_path, tmp_path):
    (tmp_path / "table.CSV").write_text(TEXT)
    assert build(text_data(tmp_path / "t*"))[0].notes == ["1 .csv files are read as plain text"]
    assert build(text_data(text_path))[0].notes == []


# The order


def test_every_epoch_is_another_permutation_of_all_items():
    order = [tuple(permute(number, 10, seed=3)[1] for number in range(first, first + 10)) for first in (0, 10, 20, 30)]
    assert [sorted(epoch) for epoch in order] == [list(range(10))] * 4
    assert len(set(order)) == 4
    assert permute(2, 1, seed=3) == (2, 0)


def test_evaluation_items_are_spread_over_all():
    def evaluated(*counts):
        counted = [Items(count, lambda numbers: {"item": numbers, "labels": numbers * 1}) for count in counts]
        shapes = [Shape(4, [Part(items, items)]) for items in counted]
        return [batch["item"].tolist() for batch in evaluation_batches(Source(shapes, []), TRAINING, np.arange(4))]

    assert evaluated(5) == [[0, 1, 2, 3], [4, 4, 4, 4]]
    assert evaluated(24) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]
    # Of two shapes, with 1 and 3 batches, three batches.
    assert evaluated(2, 12) == [[0, 1, 1, 1], [0, 1, 3, 4], [6, 7, 9, 10]]


# Mixtures


def test_a_mixture_has_its_weights_and_each_source_its_own_epochs(place):
    """Of 10,000 rows, each source has its share exactly; wherever they begin, about so many."""
    shares = (7000, 2500, 500)
    drawn = [choose(number, shares, seed=3) for number in range(20_000)]
    for source, share in enumerate(shares):
        numbers = [number for of, number in drawn if of == source]
        assert sorted(numbers) == list(range(2 * share)), "each draw of a source comes once"
        for first in (0, 1, 4321, 9999):
            count = sum(of == source for of, _ in drawn[first : first + 10_000])
            assert abs(count - share) < 5 * (share * (1 - share / 10_000)) ** 0.5
    assert all(len(set(of for of, _ in drawn[first : first + 100])) > 1 for first in range(0, 20_000, 100))
    (pipeline,), _ = pipelines("mixed", place, "1", 1)
    shards, text = str(place / "1"), str(place / "text.txt")
    counts = {shards: 2700 - 16, text: round(len(TEXT) * 0.9) + 1 - 16}
    assert pipeline.epochs(1000) == pytest.approx(
        {f"epochs/{shards}": 5600 / counts[shards], f"epochs/{text}": 2400 / counts[text]}, rel=1e-3
    )
    rows = [row for number in range(300) for row in pipeline.train[number]["tokens"]]
    assert np.mean([row.min() >= 200 for row in rows]) == pytest.approx(0.7, abs=0.03)
    held_out = [row for batch in pipeline.evaluation for row in batch["tokens"]]
    assert sum(row.min() >= 200 for row in held_out) == 16
    assert pipeline.notes == [f"{shards}: 2,700 ids to train on, 300 held out"]


@pytest.mark.parametrize("path", ["A=0.7,B=", "A=0.7,A=0.3", "A=0,B=1", "A=1,B=0.00001", "=1,B=2", "A=1,B=2=x"])
def test_a_mixture_is_checked_at_the_door(path):
    with pytest.raises(InputError, match=r"expected sources with weights, such as A=0\.7,B=0\.3") as caught:
        check_files(TextData(path=path))
    assert "\n" not in str(caught.value)


def test_pairs_are_mixed_too(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{name} {n}\t{name} {n}\n" for n in range(50)))
    data = PairData(path=f"{tmp_path}/a.tsv=1,{tmp_path}/b.tsv=3", source_length=8, target_length=8)
    pipeline, tokenizer = build(data)
    read = Counter(text[0] for text in sources_of([pipeline.train[number] for number in range(100)], tokenizer))
    assert read["b"] == pytest.approx(300, abs=20)
    assert {source[0] for source, _ in pipeline.examples[:2]} == {"a", "b"}
    for changes in ({"target_path": "x"}, {"tokens_per_batch": 400}):
        with pytest.raises(InputError, match=r"give a \.tsv or \.jsonl file of each source, and no --data\.target"):
            check_files(dataclasses.replace(data, **changes))


# Text


@pytest.mark.parametrize("tokenizer", [CHARACTERS, BYTES])
@pytest.mark.parametrize("stride", [1, 7])
def test_an_epoch_reads_every_window_once_with_the_next_tokens_as_labels(stride, tokenizer, text_path):
    """Both parts begin with the start token, if there is one."""
    pipeline, made = build(text_data(text_path, stride=stride, held_out=0.9, tokenizer=tokenizer))
    start = [] if made.start_id is None else [made.start_id]
    ids = [*start, *made.encode(TEXT[: int(len(TEXT) * (1 - 0.9))]).tolist()]
    expected = Counter(tuple(ids[i : i + 17]) for i in range(0, len(ids) - 16, stride))
    count = expected.total()
    batches = [pipeline.train[number] for number in range(2 * count // 4 + 1)]
    read = [(*x, y[-1]) for x, y in zip(windows_of(batches), windows_of(batches, "labels"), strict=True)]
    assert all(x[1:] == y[:-1] for x, y in zip(windows_of(batches), windows_of(batches, "labels"), strict=True))
    assert Counter(read[:count]) == Counter(read[count : 2 * count]) == expected
    assert read[:count] != read[count : 2 * count]
    assert pipeline.evaluation[0]["tokens"][0, : len(start)].tolist() == start


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
    pipeline, tokenizer = build(text_data(tmp_path / "text.txt", tokenizer=CHARACTERS))
    assert (tokenizer.vocab_size, tokenizer.start_id) == (2, None)
    assert (pipeline.bytes_per_token, pipeline.examples, pipeline.notes) == (2.5, (), [])
    assert build(text_data(tmp_path / "text.txt", tokenizer=BYTES))[0].bytes_per_token == 1.0


def test_bpe_is_trained_on_the_training_part_alone(tmp_path):
    for name, end in (("a.txt", "abcdefg " * 50), ("b.txt", "tuvwxyz " * 50)):
        (tmp_path / name).write_text("some words that come again and again " * 100 + end)
    tokenizers = [
        build_tokenizer_for(text_data(tmp_path / name, tokenizer=TokenizerConfig("bpe", 300), held_out=0.2))
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
    (tmp_path / "more.txt").write_text(TEXT + "€" * 20)
    with pytest.raises(InputError, match="'€'"):
        build_pipeline(text_data(tmp_path / "more.txt", tokenizer=CHARACTERS), TRAINING, tokenizer)


# Masked text


def test_masked_tokens_are_restored_by_their_labels(text_path):
    data = MaskedTextData(path=str(text_path), context_length=20, held_out=0.2, tokenizer=CHARACTERS)
    pipeline, tokenizer = build(data)
    ids = tokenizer.encode(TEXT[: int(len(TEXT) * 0.8)]).tolist()
    windows = {tuple(ids[i : i + 20]) for i in range(len(ids) - 19)}
    for number in range(50):
        batch = pipeline.train[number]
        assert ((batch["labels"] != IGNORED).sum(axis=1) == 3).all()
        restored = np.where(batch["labels"] == IGNORED, batch["tokens"], batch["labels"])
        assert {tuple(row) for row in restored.tolist()} <= windows


def test_a_window_is_masked_in_another_way_in_every_epoch(text_path):
    data = MaskedTextData(path=str(text_path), context_length=40, stride=997, held_out=0.5, tokenizer=CHARACTERS)
    pipeline, _ = build(data)
    # Three windows only, so that each comes 20 times.
    labels = [tuple(row) for number in range(15) for row in pipeline.train[number]["labels"].tolist()]
    assert len(set(labels)) == 60


def test_masking_is_bert_s():
    data, generator = MaskedTextData(), np.random.default_rng(0)
    tokenizer = build_tokenizer(BYTES, [], {"mask": "<|mask|>"})
    windows, every = generator.integers(10, 256, (400, 100), np.int32), np.arange(400)
    batch = Masking(data, tokenizer, Framing((), ()))({"tokens": windows}, generator, every, 400)
    chosen = batch["labels"] != IGNORED
    assert (chosen.sum(axis=1) == 15).all()
    # Every position is equally likely to be chosen.
    assert 30 < chosen.sum(axis=0).min() <= chosen.sum(axis=0).max() < 95
    assert (batch["tokens"] == windows)[~chosen].all()
    tokens = batch["tokens"][chosen]
    assert (tokens == tokenizer.mask_id).mean() == pytest.approx(0.8, abs=0.02)
    assert (tokens == windows[chosen]).mean() == pytest.approx(0.1, abs=0.02)
    replaced = tokens[(tokens != tokenizer.mask_id) & (tokens != windows[chosen])]
    assert len(set(replaced.tolist())) > 200
    few = Masking(dataclasses.replace(data, masked=0.01), tokenizer, Framing((), ()))
    one = few({"tokens": windows[:4, :3]}, generator, every[:4], 4)
    assert ((one["labels"] != IGNORED).sum(axis=1) == 1).all(), "at least one"


def test_masking_needs_a_mask_token(text_path):
    without = build_tokenizer_for(TextData(path=str(text_path)))
    with pytest.raises(InputError, match="no mask token"):
        build_pipeline(MaskedTextData(path=str(text_path), context_length=16), TRAINING, without)


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


def test_batches_by_tokens_read_every_pair_as_often(place, monkeypatch):
    """In so many epochs as the shapes have their shares of, to within one batch; and no held-out one."""
    monkeypatch.setattr(pairs, "_EPOCHS", 10)
    pipeline, tokenizer = build(data_of("tokens", place), EIGHT)
    shapes = [
        tuple(map(int, shape.split(" x "))) for shape in pipeline.notes[0].split(" are ")[1].split(":")[0].split(", ")
    ]
    assert shapes == sorted(shapes, key=lambda shape: -shape[1]), "the longest first"
    assert all(400 - 8 * max(lengths) < rows * max(lengths) <= 400 for rows, *lengths in shapes)
    assert pipeline.largest["source"].shape == shapes[0][:2]
    batches = [pipeline.train[number] for number in range(57 + 25 + 3)]
    assert {(*batch["source"].shape, batch["labels"].shape[1]) for batch in batches} == set(shapes)
    read = Counter(sources_of(batches, tokenizer))
    assert len(read) == 270
    assert not read.keys() & {source for source, _ in pipeline.examples}
    assert 10 <= min(read.values()) <= max(read.values()) <= 14


def test_the_loss_of_a_batch_by_tokens_is_that_of_its_rows_one_by_one(place):
    (pipeline,), tokenizer = pipelines("tokens", place, "1", 1)
    stack = StackConfig(1, 2, 16, positions="learned", max_positions=14)
    config = TransformerConfig(vocab_size=tokenizer.vocab_size, d_model=8, encoder=stack, decoder=stack)
    batch = next(batch for batch in map(pipeline.train.__getitem__, range(50)) if len(batch["labels"]) > 30)
    longest = {"source": 14, "source_mask": 14, "target": 10, "target_mask": 10, "labels": 10}
    fill = {"labels": IGNORED}
    with jax.enable_x64(True):
        net = transformer(config.with_dtype("float64"))
        params, loss = net.init(jax.random.key(0)), jax.jit(evaluation_step(net))
        alone = [
            loss(
                params,
                {
                    n: np.pad(x[row : row + 1], ((0, 0), (0, longest[n] - x.shape[1])), constant_values=fill.get(n, 0))
                    for n, x in batch.items()
                },
            )
            for row in range(len(batch["labels"]))
        ]
        np.testing.assert_allclose(loss(params, batch), np.sum(alone, axis=0), rtol=1e-12)


@pytest.mark.parametrize(("less", "context"), [(1, 1), (0, 2)])
def test_batches_by_tokens_are_checked_at_the_door(less, context):
    experiment = EXPERIMENTS["pairs"].config
    data = dataclasses.replace(experiment.data, tokens_per_batch=64 * experiment.training.batch_size - less)
    with pytest.raises(InputError, match="expected at least 2048, for batch_size rows of the longest pairs"):
        dataclasses.replace(experiment, data=data, mesh=MeshConfig(context=context))
    with pytest.raises(InputError, match="expected None with dates"):
        dataclasses.replace(DATES, tokens_per_batch=4096)


# Dates


@pytest.mark.parametrize("tokenizer", [CHARACTERS, BYTES, TokenizerConfig("bpe", 500)])
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
    assert len(pipeline.examples) == 512
    held_out = {target for _, target in pipeline.examples}
    evaluated = {tokenizer.decode(row) for batch in pipeline.evaluation for row in batch["target"]}
    assert not trained & (held_out | evaluated)


def test_a_rare_date_that_is_too_long_is_drawn_again(monkeypatch):
    monkeypatch.setattr(dates, "longest_sources", lambda: ["x"])
    data = PairData("dates", source_length=24, target_length=11, tokenizer=BYTES)
    pipeline, tokenizer = build(data)
    sources = [source for source, _ in pipeline.examples]
    sources += sources_of([*(pipeline.train[number] for number in range(20)), *pipeline.evaluation], tokenizer)
    assert len(sources) == 512 + 80 + 12
    assert max(len(source.encode()) for source in sources) == 23


def test_dates_that_do_not_fit_are_refused_with_the_numbers():
    message = "source_length is 20 and target_length is 10; the dates need at least 44 and 11"
    with pytest.raises(InputError, match=message):
        build(PairData("dates", source_length=20, target_length=10))
