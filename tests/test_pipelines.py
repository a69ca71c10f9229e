"""Batches of every kind: what is in them, that seed and number alone decide them, and that they resume exactly."""

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest

from jax_tformer import EXPERIMENTS, StackConfig, TransformerConfig, transformer
from jax_tformer.config import IGNORED
from jax_tformer.config.experiment import (
    MaskedTextData,
    MeshConfig,
    PairData,
    TextData,
    TokenizerConfig,
    TrainingConfig,
)
from jax_tformer.data import generated, pairs, tokenizers
from jax_tformer.data.order import Items, Part, Shape, Source, choose, evaluation_batches
from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for
from jax_tformer.data.sources import check_files
from jax_tformer.data.tokenizers import build_tokenizer, load_tokenizer
from jax_tformer.training.step import batch_loss
from tests.memory import traced_peak
from tests.refusals import refused

TEXT = "".join(f"{n} bottles of beer on the wall, take one down and pass it around.\n" for n in range(60))
TRAINING = TrainingConfig(batch_size=4, evaluate_batches=3, seed=5)
EIGHT = replace(TRAINING, batch_size=8)
CHARACTERS, BYTES = TokenizerConfig("characters"), TokenizerConfig("bytes")
DATES = PairData("dates", source_length=48, target_length=11)
IDS = np.random.default_rng(0).integers(0, 60, 3000) % 57 + 200
"""With an end token, 256, now and then."""
SHARDS = ("windows", "concatenate", "best_fit", "crop", "mixed", "masked shards")
KINDS = (*SHARDS, "text", "masked", "equations", "pairs", "tokens", "dates")
PAIRS = [(f"source {n}", f"ziel {n}") for n in range(40)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Text, pairs, and the same ids in one file ("1") and in several ("5")."""
    folder = tmp_path_factory.mktemp("place")
    for name, text in {"text": TEXT, "more": TEXT + "€" * 20, "short": "x" * 180}.items():
        (folder / f"{name}.txt").write_text(text)
    for name, cuts in {"1": [], "5": [1, 8, 300, 1999]}.items():
        (folder / name).mkdir()
        for number, ids in enumerate(np.split(IDS.astype(np.uint16), cuts)):
            ids.tofile(folder / name / f"{number:02}.bin")
    pairs_in(folder, [(f"{n % 7 * 'a'}s {n}", f"ziel {n}") for n in range(300)])
    return folder


def text_in(folder, name="text", kind=TextData, **changes):
    return kind(path=str(folder / f"{name}.txt"), **{"context_length": 16, **changes})


def pairs_in(folder, of=None, **changes):
    path = folder / "pairs.tsv"
    if of is not None:
        path.write_text("".join(f"{source}\t{target}\n" for source, target in of))
    return PairData(path=str(path), **{"source_length": 14, "target_length": 10, **changes})


def data_of(kind, place, split="1"):
    shards = TextData(path=str(place / split), context_length=16)
    if kind in ("concatenate", "best_fit", "crop"):
        return replace(shards, context_length=32, packing=kind)
    return {
        "windows": shards,
        "masked shards": MaskedTextData(path=shards.path, context_length=16),
        "mixed": replace(shards, path=f"{shards.path}=0.7,{place}/text.txt=0.3"),
        "text": text_in(place),
        "masked": text_in(place, kind=MaskedTextData),
        "equations": TextData("modular-addition", context_length=4, tokenizer=TokenizerConfig("words")),
        "pairs": pairs_in(place),
        "tokens": pairs_in(place, tokens_per_batch=400),
        "dates": DATES,
    }[kind]


@cache
def pipelines(kind, place, split="1", count=1):
    """Those of so many processes, and the tokenizer."""
    data = data_of(kind, place, split)
    tokenizer = build_tokenizer_for(data)
    return [build_pipeline(data, EIGHT, tokenizer, rows) for rows in np.split(np.arange(8), count)], tokenizer


@pytest.fixture(params=sorted({*KINDS} - {"equations"}))
def every(request, place):
    """Data of every kind, with its pipeline and tokenizer."""
    (pipeline,), tokenizer = pipelines(request.param, place)
    return data_of(request.param, place), pipeline, tokenizer


def build(data, training=TRAINING):
    tokenizer = build_tokenizer_for(data)
    return build_pipeline(data, training, tokenizer), tokenizer


def first(pipeline, count):
    return [pipeline.train[number] for number in range(count)]


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def whole(parts):
    """A batch of the rows that several processes have made."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def rows_of(batches, name="tokens"):
    return [tuple(row) for batch in batches for row in batch[name].tolist()]


def sources_of(batches, tokenizer, side="source"):
    return [tokenizer.decode(row) for batch in batches for row in batch[side]]


# What holds for all of them


@pytest.mark.parametrize("start", [0, 1, 10**9])
@pytest.mark.parametrize("kind, split", [*((kind, "5") for kind in SHARDS), *((kind, "1") for kind in KINDS)])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_seed_and_number_decide_a_batch(kind, split, count, start, place):
    """Byte for byte, whoever makes its rows, however the ids are split into files, from any step on."""
    (one,), _ = pipelines(kind, place)
    several, _ = pipelines(kind, place, split, count)
    iterators = [part.train_iterator() for part in several]
    for iterator in iterators:
        iterator.set_state(json.loads(json.dumps(iterator.get_state() | {"next_index": start})))
    made = [whole([next(iterator) for iterator in iterators]) for _ in range(3)]
    assert all(same(made[n], one.train[start + n]) for n in range(3))
    assert iterators[0].get_state() == {"next_index": start + 3}
    assert not same(made[0], made[1])
    types = {name: bool if name.endswith("mask") else np.int32 for name in made[0]}
    assert {name: rows.dtype for name, rows in made[0].items()} == types
    held_out = [whole(batch) for batch in zip(*(part.evaluation for part in several), strict=True)]
    assert all(map(same, held_out, one.evaluation))
    assert len(held_out) == len(one.evaluation) > 0


def test_another_seed_is_another_order_and_the_same_evaluation(every):
    data, pipeline, tokenizer = every
    other = build_pipeline(data, replace(EIGHT, seed=6), tokenizer)
    assert not any(map(same, first(pipeline, 3), first(other, 3)))
    assert all(map(same, pipeline.evaluation, other.evaluation))


def test_fingerprint_is_kept_by_a_restart_and_changed_by_what_changes_batches(every, tmp_path):
    data, pipeline, tokenizer = every
    tokenizer.save(tmp_path / "run")
    later = replace(EIGHT, steps=5, evaluate_batches=1, log_every=3)
    assert build_pipeline(data, later, load_tokenizer(tmp_path / "run")).fingerprint == pipeline.fingerprint
    paired = isinstance(data, PairData)
    length = "source_length" if paired else "context_length"
    other = build_tokenizer(TokenizerConfig("bpe", 300), [TEXT], {"mask": "M", "start": "S", "end": "E", "pad": "P"})
    changed = [
        (data, replace(EIGHT, seed=6), tokenizer),
        (data, replace(EIGHT, batch_size=16), tokenizer),
        (replace(data, held_out=0.2), EIGHT, tokenizer),
        (replace(data, **{length: getattr(data, length) + 1}), EIGHT, tokenizer),
        (replace(data, source_length=120, tokens_per_batch=None) if paired else data, EIGHT, other),
    ]
    fingerprints = {pipeline.fingerprint, *(build_pipeline(*each).fingerprint for each in changed)}
    assert [len(fingerprint) for fingerprint in fingerprints] == [64] * 6


def test_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path):
    def fingerprint(name, text):
        (path := tmp_path / f"{name}.bin").write_text(text)
        return build(TextData(path=str(path), context_length=16))[0].fingerprint

    assert fingerprint("a", TEXT) == fingerprint("b", TEXT) != fingerprint("a", TEXT.replace("7 bottles", "7 b0ttles"))


def test_fingerprint_is_that_of_earlier_versions():
    """Fields that came after 2026-11-24 leave it as it was, so that runs from then go on."""
    assert build(TextData("python-docs", context_length=16))[0].fingerprint.startswith("3ef3d210f7777c61")


def alone(batch, width=40):
    """Every row, or every document in a row, by itself, with padding behind it."""
    segments = batch.get("segments")
    for row in range(len(batch["labels"])):
        pieces = [...] if segments is None else [segments[row] == n + 1 for n in range(segments[row].max())]
        for piece in pieces:
            found = {name: rows[row][piece] for name, rows in batch.items() if name != "segments"}
            fills = dict.fromkeys(found, 0) | {"labels": IGNORED}
            yield {name: np.pad(x, (0, width - len(x)), constant_values=fills[name])[None] for name, x in found.items()}


@pytest.mark.parametrize("kind", ["concatenate", "best_fit", "crop", "tokens"])
def test_the_loss_of_a_batch_is_that_of_its_documents_or_pairs_alone(kind, place):
    (pipeline,), tokenizer = pipelines(kind, place)
    stack = StackConfig(1, 2, 16, positions="learned", max_positions=40)
    config = TransformerConfig(tokenizer.vocab_size, 8, encoder=stack if kind == "tokens" else None, decoder=stack)
    batch = pipeline.train[0]
    parts = [*alone(batch)]
    assert len(parts) > len(batch["labels"]) or kind == "tokens"
    with jax.enable_x64(True):
        net = transformer(config.with_dtype("float64"))
        params, loss = net.init(jax.random.key(0)), jax.jit(partial(batch_loss, net))
        total = loss(params, batch)
        np.testing.assert_allclose(total, np.sum([loss(params, part) for part in parts], axis=0), rtol=1e-12)
        if kind != "tokens":
            del batch["segments"]
            assert abs(loss(params, batch)[0] / total[0] - 1) > 1e-6


# The order


def test_evaluation_items_are_spread_over_all():
    def evaluated(*counts):
        counted = [Items(count, lambda numbers: {"item": numbers, "labels": numbers * 1}) for count in counts]
        shapes = [Shape(4, [Part(items, items)]) for items in counted]
        return [batch["item"].tolist() for batch in evaluation_batches(Source(shapes, []), TRAINING, np.arange(4))]

    assert evaluated(5) == [[0, 1, 2, 3], [4, 4, 4, 4]]
    assert evaluated(24) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]
    # Of two shapes, with 1 and 3 batches, three batches.
    assert evaluated(2, 12) == [[0, 1, 1, 1], [0, 1, 3, 4], [6, 7, 9, 10]]


def test_a_mixture_has_its_weights_and_each_source_its_own_epochs(place):
    """Of 10,000 rows each source has its share exactly; wherever they begin, about so many."""
    shares = (7000, 2500, 500)
    drawn = [choose(number, shares, seed=3) for number in range(20_000)]
    for source, share in enumerate(shares):
        assert sorted(number for of, number in drawn if of == source) == list(range(2 * share))
        for begin in (1, 4321, 9999):
            count = sum(of == source for of, _ in drawn[begin : begin + 10_000])
            assert abs(count - share) < 5 * (share * (1 - share / 10_000)) ** 0.5
    (pipeline,), _ = pipelines("mixed", place)
    # Windows of 16 tokens in 2,700 ids, and in a start token and the text.
    epochs = {"1": 5600 / (2700 - 16), "text.txt": 2400 / (round(len(TEXT) * 0.9) + 1 - 16)}
    assert pipeline.epochs(1000) == pytest.approx({f"epochs/{place}/{name}": x for name, x in epochs.items()}, rel=1e-3)
    for batches, rows, near in ((first(pipeline, 250), 1400, 60), (pipeline.evaluation, 16, 0)):
        assert abs(sum(min(row) >= 200 for row in rows_of(batches)) - rows) <= near
    assert pipeline.notes == [f"{place / '1'}: 2,700 ids to train on, 300 held out"]


def test_pairs_are_mixed_too(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{name} {n}\t{name} {n}\n" for n in range(50)))
    pipeline, tokenizer = build(PairData(path=f"{tmp_path}/a.tsv=1,{tmp_path}/b.tsv=3", source_length=8))
    read = Counter(text[0] for text in sources_of(first(pipeline, 100), tokenizer))
    assert read["b"] == pytest.approx(300, abs=20)
    assert {source[0] for source, _ in pipeline.examples[:2]} == {"a", "b"}


# Text


@pytest.mark.parametrize("tokenizer", [CHARACTERS, BYTES])
@pytest.mark.parametrize("stride", [1, 7])
def test_an_epoch_reads_every_window_once_with_the_next_tokens_as_labels(stride, tokenizer, place):
    """Both parts begin with the start token, if there is one."""
    pipeline, made = build(text_in(place, stride=stride, held_out=0.9, tokenizer=tokenizer))
    start = [] if made.start_id is None else [made.start_id]
    ids = [*start, *made.encode(TEXT[: int(len(TEXT) * (1 - 0.9))]).tolist()]
    expected = Counter((tuple(ids[i : i + 16]), tuple(ids[i + 1 : i + 17])) for i in range(0, len(ids) - 16, stride))
    count = expected.total()
    batches = first(pipeline, 2 * count // 4 + 1)
    read = [*zip(rows_of(batches), rows_of(batches, "labels"), strict=True)]
    assert Counter(read[:count]) == Counter(read[count : 2 * count]) == expected
    assert read[:count] != read[count : 2 * count]
    assert pipeline.evaluation[0]["tokens"][0, : len(start)].tolist() == start


def test_held_out_text_is_read_once(tmp_path):
    # A length that leaves a last batch of 2 rows.
    text = "".join(np.random.default_rng(0).choice(list("abcdefgh"), 3950))
    (tmp_path / "text.txt").write_text(text)
    data = text_in(tmp_path, context_length=15, tokenizer=CHARACTERS)
    pipeline, tokenizer = build(data, replace(TRAINING, evaluate_batches=100))
    end = text[int(len(text) * 0.9) :]
    rows = (len(end) - 1) // 15
    labels = np.concatenate([batch["labels"] for batch in pipeline.evaluation])
    assert tokenizer.decode(labels[:rows].ravel()) == end[1 : rows * 15 + 1]
    # The last batch is filled up with rows that do not count.
    assert len(labels) == -(-rows // 4) * 4 > rows
    assert (labels[rows:] == IGNORED).all()


def test_tokenizers_of_text_and_what_is_said_of_it(tmp_path, monkeypatch):
    # The end is found piece by piece, by characters.
    monkeypatch.setattr(tokenizers, "_PIECE_BYTES", 64)
    (tmp_path / "text.txt").write_text("é " * 100 + "a " * 80 + "€ " * 20, encoding="utf-8")
    pipeline, tokenizer = build(text_in(tmp_path, tokenizer=CHARACTERS))
    assert (tokenizer.vocab_size, tokenizer.start_id) == (4, None)
    assert (pipeline.bytes_per_token, pipeline.examples, pipeline.notes) == (2.0, (), [])
    assert build(text_in(tmp_path, tokenizer=BYTES))[0].bytes_per_token == 1.0
    (tmp_path / "table.CSV").write_text(TEXT)
    assert build(TextData(path=str(tmp_path / "ta*")))[0].notes == ["1 .csv files are read as plain text"]

    # A word is not halved where the held-out text begins.
    for space in " \u3000":
        (tmp_path / "words.txt").write_text(space.join(f"wörd{n}" for n in range(99)) + "\n")
        for held_out in (0.1, 0.11, 0.12, 0.13, 0.14, 0.5):
            data = TextData(path=str(tmp_path / "words.txt"), context_length=4, held_out=held_out)
            pipeline, _ = build(replace(data, tokenizer=TokenizerConfig("words", None)))
            assert len(rows_of(pipeline.evaluation)) > 1

    # BPE is trained on what is not held out.
    def bpe(end):
        (tmp_path / "text.txt").write_text("some words that come again and again " * 100 + end)
        return build_tokenizer_for(text_in(tmp_path, tokenizer=TokenizerConfig("bpe", 300), held_out=0.2)).as_json

    assert bpe("abcdefg " * 50) == bpe("tuvwxyz " * 50)


def test_masking_is_bert_s_and_labels_restore_the_text(place):
    """In another way in every epoch."""
    data = text_in(place, kind=MaskedTextData, context_length=100, tokenizer=BYTES)
    pipeline, tokenizer = build(data, replace(TRAINING, batch_size=400))
    tokens, labels = pipeline.train[0]["tokens"], pipeline.train[0]["labels"]
    chosen = labels != IGNORED
    assert (chosen.sum(axis=1) == 15).all()
    # Every position is equally likely to be chosen.
    assert 30 < chosen.sum(axis=0).min() <= chosen.sum(axis=0).max() < 95
    text = np.where(chosen, labels, tokens)
    ids = tokenizer.encode(TEXT[: int(len(TEXT) * 0.9)]).tolist()
    assert {*rows_of([{"tokens": text}])} <= {tuple(ids[i : i + 100]) for i in range(len(ids) - 99)}
    masked, kept = tokens == tokenizer.mask_id, tokens == text
    assert masked[chosen].mean() == pytest.approx(0.8, abs=0.02)
    assert kept[chosen].mean() == pytest.approx(0.1, abs=0.02)
    assert len({*tokens[~masked & ~kept].tolist()}) > 200
    (in_shards,), _ = pipelines("masked shards", place)
    assert ((in_shards.train[0]["labels"] != IGNORED).sum(axis=1) == 2).all()
    few = build(replace(data, context_length=40, stride=997, held_out=0.5))[0]
    # Three windows only, so that each comes 20 times.
    assert len(set(rows_of(first(few, 15), "labels"))) == 60
    one = build(replace(data, masked=0.001))[0]
    assert ((one.train[0]["labels"] != IGNORED).sum(axis=1) == 1).all(), "at least one"


# Pairs


def test_pair_batch_is_padded_masked_and_shifted(tmp_path):
    pipeline, tokenizer = build(pairs_in(tmp_path, PAIRS, source_length=12, target_length=8))
    start, end, pad = tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id
    assert len({start, end, pad, None}) == 4
    for batch in first(pipeline, 20):
        for row, text in enumerate(sources_of([batch], tokenizer)):
            ids, labels = (tokenizer.encode(side).tolist() for side in (text, dict(PAIRS)[text]))
            behind, left = 11 - len(ids), 7 - len(labels)
            assert {name: rows[row].tolist() for name, rows in batch.items()} == {
                "source": [*ids, end, *[pad] * behind],
                "source_mask": [True] * (len(ids) + 1) + [False] * behind,
                "labels": [*labels, end, *[IGNORED] * left],
                "target": [start, *labels, *[pad] * left],
                "target_mask": [True] * (len(labels) + 1) + [False] * left,
            }


def test_an_epoch_reads_every_training_pair_once_and_no_held_out_one(tmp_path):
    pipeline, tokenizer = build(pairs_in(tmp_path, PAIRS))
    read, held_out = sources_of(first(pipeline, 18), tokenizer), {source for source, _ in pipeline.examples}
    assert len(held_out) == 4
    assert sorted(read[:36]) == sorted(read[36:]) == sorted({source for source, _ in PAIRS} - held_out)
    assert set(sources_of(pipeline.evaluation, tokenizer)) == held_out
    assert set(pipeline.examples) <= set(PAIRS)
    assert (pipeline.bytes_per_token, pipeline.notes) == (None, [])
    # A source with two targets is on one side.
    twice = [(f"s {n}", f"{word} {n}") for n in range(40) for word in ("eins", "zwei")]
    pipeline, tokenizer = build(pairs_in(tmp_path, twice, held_out=0.5))
    trained = set(sources_of(first(pipeline, 10), tokenizer))
    assert len(trained) == 20
    assert not trained & set(sources_of(pipeline.evaluation, tokenizer))


def test_too_long_pairs_are_left_out_and_counted(tmp_path):
    """Many are a warning, with the lengths that would keep them."""
    # 11 characters and the end token fit 12; start token and 7 characters fit 8.
    long = [("s" * 12, "t"), ("s", "t" * 8), ("u" * 11, "t" * 7)]
    lengths = {"source_length": 12, "target_length": 8}
    pipeline, tokenizer = build(pairs_in(tmp_path, PAIRS + long, **lengths))
    told = "2 of 43 pairs (4.7%) are left out: 1 sources have more than 11 tokens and 1 targets have more than 7 tokens"
    assert pipeline.notes == [told]
    read = sources_of([*first(pipeline, 10), *pipeline.evaluation], tokenizer)
    assert "u" * 11 in read
    assert len(set(read)) == 41
    long = [("s" * (12 + n), "t") for n in range(197)] + [("s" * 900, "t")]
    data = pairs_in(tmp_path, PAIRS[:10] + long, **lengths)
    told = "warning: 198 of 208 pairs (95.2%) are left out: 198 sources have more than 11 tokens; --data.source-length "
    assert build(data)[0].notes == [told + "209 and --data.target-length 8 would keep 99% of them all"]
    assert build(replace(data, source_length=209))[0].notes[0].startswith("1 of 208 pairs (0.5%)")


def test_pairs_take_a_few_times_their_file_in_memory(tmp_path):
    build(pairs_in(tmp_path, PAIRS))  # imports what is imported at first use
    many = [(f"source with some more words {n}", f"ziel {n}") for n in range(15_000)]
    data = pairs_in(tmp_path, many, source_length=40, target_length=20)
    assert traced_peak(lambda: build(data)) < 8 * (tmp_path / "pairs.tsv").stat().st_size


def test_batches_by_tokens_read_every_pair_as_often(place, monkeypatch):
    """In so many epochs as the shapes have their shares of, to within one batch; and no held-out one."""
    monkeypatch.setattr(pairs, "_EPOCHS", 10)
    pipeline, tokenizer = build(data_of("tokens", place), EIGHT)
    told = pipeline.notes[0].split(" are ")[1].split(":")[0]
    shapes = [tuple(map(int, shape.split(" x "))) for shape in told.split(", ")]
    assert shapes == sorted(shapes, key=lambda shape: -shape[1]), "the longest first"
    assert all(400 - 8 * max(lengths) < rows * max(lengths) <= 400 for rows, *lengths in shapes)
    batches = first(pipeline, 57 + 25 + 3)
    assert {(*batch["source"].shape, batch["labels"].shape[1]) for batch in batches} == set(shapes)
    read = Counter(sources_of(batches, tokenizer))
    assert len(read) == 270
    assert not read.keys() & {source for source, _ in pipeline.examples}
    assert 10 <= min(read.values()) <= max(read.values()) <= 14


def test_dates_are_unlimited_and_held_out_days_stay_out():
    pipeline, tokenizer = build(DATES)
    trained = {*sources_of(first(pipeline, 300), tokenizer, "target")}
    assert len(trained) > 1100
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", day) for day in trained)
    assert len(pipeline.examples) == 512
    assert not trained & {*sources_of(pipeline.evaluation, tokenizer, "target"), *(day for _, day in pipeline.examples)}


def test_a_rare_date_that_is_too_long_is_drawn_again(monkeypatch):
    monkeypatch.setattr(generated, "longest_dates", lambda: ["x"])
    pipeline, tokenizer = build(PairData("dates", source_length=24, target_length=11, tokenizer=BYTES))
    sources = [source for source, _ in pipeline.examples]
    sources += sources_of([*first(pipeline, 20), *pipeline.evaluation], tokenizer)
    assert len(sources) == 512 + 80 + 12
    assert max(len(source.encode()) for source in sources) == 23


# What is refused

MIXED = "expected sources with weights, such as A=0.7,B=0.3"
PARTS = "give a .tsv or .jsonl file of each source, and no --data.target-path or --data.tokens-per-batch"


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        (TextData, {"path": "short.txt", "context_length": 18}, "held-out part of the text has 18 tok"),
        (TextData, {"path": "short.txt", "context_length": 180}, "has 162 tokens; expected at least 181"),
        *(
            (TextData, {"path": path}, MIXED)
            for path in ("A=0.7,B=", "A=0.7,A=0.3", "A=0,B=1", "A=1,B=0.00001", "=1,B=2", "A=1,B=2=x")
        ),
        (PairData, {"path": "a.tsv=1,b.tsv=3", "target_path": "x"}, PARTS),
        (PairData, {"path": "a.tsv=1,b.tsv=3", "tokens_per_batch": 4000}, PARTS),
        (
            PairData,
            {"source": "dates", "source_length": 20, "target_length": 10},
            "the dates need at least 44 and 11",
        ),
        (PairData, {"source": "dates", "tokens_per_batch": 4096}, "expected None with dates"),
    ],
)
def test_what_is_refused_in_one_line(kind, fields, message, place, monkeypatch):
    monkeypatch.chdir(place)
    with refused(re.escape(message)):
        check_files(data := kind(**fields, tokenizer=CHARACTERS))
        build(data)


@pytest.mark.parametrize("of", [[("s" * 20, "t")] * 3, [("a", "b")], [("a", "b"), ("a", "c")]])
def test_pairs_are_needed_on_both_sides(of, tmp_path):
    with refused("there are 0 training and"):
        build(pairs_in(tmp_path, of, source_length=8, target_length=8))


def test_a_tokenizer_that_lacks_what_the_data_needs(place):
    for data, of, message in (
        (text_in(place, "more"), text_in(place, tokenizer=CHARACTERS), "'€'"),
        (text_in(place, kind=MaskedTextData), text_in(place), "no mask token"),
        (pairs_in(place), text_in(place, tokenizer=CHARACTERS), "no start token"),
    ):
        with refused(message):
            build_pipeline(data, TRAINING, build_tokenizer_for(of))


@pytest.mark.parametrize("tokens, context", [(2047, 1), (2048, 2)])
def test_a_batch_of_tokens_has_room_for_every_pair(tokens, context):
    config = EXPERIMENTS["pairs"].config
    with refused("expected at least 2048, for batch_size rows of the longest pairs"):
        replace(config, data=replace(config.data, tokens_per_batch=tokens), mesh=MeshConfig(context=context))
