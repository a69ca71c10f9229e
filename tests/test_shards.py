"""Shards of ids: those of others and ours are read as they are, in any split, without memory, and damage is named."""

import struct
from functools import partial

import numpy as np
import pytest

from jax_tformer import InputError
from jax_tformer.config.experiment import TextData, TokenizerConfig
from jax_tformer.data.order import permute
from jax_tformer.data.pipeline import build_tokenizer_for, check_batch_ids
from tests.damages import cut, swap, write
from tests.refusals import refused
from tests.test_pipelines import build

IDS = np.random.default_rng(0).integers(0, 256, 1000)
INDEX_TYPES = {np.uint8: 1, np.int32: 4, np.int64: 5, np.uint16: 8}


def write_llm_c(path, ids, kind=np.uint16):
    header = np.zeros(256, np.int32)
    header[:3] = *((20240520, 1) if kind is np.uint16 else (20240801, 7)), len(ids)
    path.write_bytes(header.tobytes() + ids.astype(kind).tobytes())


def write_nanogpt(path, ids):
    path.write_bytes(ids.astype(np.uint16).tobytes())


def write_megatron(path, ids, kind=np.int32):
    path.write_bytes(ids.astype(kind).tobytes())
    lengths = np.array([7, 0, len(ids) - 7], np.int32)
    begins = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(kind).itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, INDEX_TYPES[kind], len(lengths), 4)
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + begins.tobytes() + np.arange(4).tobytes())


def pipeline_of(path):
    return build(TextData(path=str(path), context_length=16))[0]


@pytest.mark.parametrize(
    "write",
    [
        write_llm_c,
        partial(write_llm_c, kind=np.uint32),
        write_nanogpt,
        *(partial(write_megatron, kind=kind) for kind in INDEX_TYPES),
    ],
)
def test_what_others_write_is_read_and_cut_into_windows(write, tmp_path):
    write(tmp_path / "train.bin", IDS[:900])
    write(tmp_path / "corpus_val_000000.bin", IDS[900:])
    pipeline = pipeline_of(tmp_path)
    starts = [permute(number, 900 - 16, 5)[1] for number in range(12, 16)]
    assert pipeline.train[3]["tokens"].tolist() == [IDS[start : start + 16].tolist() for start in starts]
    assert pipeline.train[3]["labels"].tolist() == [IDS[start + 1 : start + 17].tolist() for start in starts]
    assert pipeline.evaluation[0]["tokens"].tolist() == [IDS[at : at + 16].tolist() for at in (900, 916, 932, 948)]
    assert pipeline.bytes_per_token is None
    assert pipeline.notes == ["900 ids to train on, 100 held out"]


@pytest.mark.parametrize(
    "write_shard, damage, told",
    [
        (write_llm_c, cut("a.bin", 2), "a.bin is damaged: it has 3,022 bytes; expected 3,024"),
        (write_llm_c, swap("a.bin", b"\1\1\0", b"\1\2\0"), "a.bin is of version 2; expected 1"),
        (write_nanogpt, cut("a.bin", 1), "a.bin is damaged: it has 1,999 bytes; expected 2,000"),
        (write_nanogpt, write("a.bin", ""), "the training part of the text has 0 tokens"),
        (write_megatron, cut("a.bin", 4), "a.bin is damaged: it has 3,996 bytes; expected 4,000"),
        (write_megatron, cut("a.idx", 42), "a.idx is damaged: it has 60 bytes; expected 102"),
        (write_megatron, write("a.idx", ""), "a.idx is no index of Megatron"),
        (write_megatron, swap("a.idx", b"\4", b"\7"), "a.idx is no index of Megatron"),
    ],
)
def test_damage_is_named(write_shard, damage, told, tmp_path):
    write_shard(tmp_path / "a.bin", IDS)
    damage(tmp_path)
    with refused(told):
        pipeline_of(tmp_path)


def test_what_does_not_suit_is_said(tmp_path):
    with refused("does not exist"):
        pipeline_of(tmp_path / "a.bin")
    write_nanogpt(tmp_path / "val.bin", IDS)
    with refused("all shards are held out"):
        pipeline_of(tmp_path)
    write_nanogpt(tmp_path / "train.bin", IDS + 300)
    with refused("a token has the id"):
        check_batch_ids(pipeline_of(tmp_path).train[0], 257)
    for kind in (TokenizerConfig("characters"), TokenizerConfig("bpe", 300)):
        with refused("holds ids; expected the tokenizer that made them"):
            build_tokenizer_for(TextData(path=str(tmp_path), tokenizer=kind))


@pytest.mark.parametrize("content", ["", None])
def test_a_file_that_changes_under_a_run(content, tmp_path):
    write_nanogpt(tmp_path / "train.bin", IDS)
    batches = pipeline_of(tmp_path).train_iterator()
    next(batches)
    write("train.bin", content)(tmp_path)
    with pytest.raises((InputError, FileNotFoundError), match=r"train\.bin"):
        [next(batches) for _ in range(20)]
