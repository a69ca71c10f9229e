"""Folders that cannot be loaded, or not be written: one line each, and nothing is half done."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jax_tformer import load_pretrained, save_pretrained, transformer
from jax_tformer.hub import pretrained
from tests.damages import cut, every, link, say, swap, write
from tests.pretrained_folders import CONFIG, STACK, save_small, words
from tests.refusals import refused
from tests.small_runs import contents

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
SHARD = "model-00001-of-00003.safetensors"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The folders whole, and shards, of the same model."""
    folder = tmp_path_factory.mktemp("originals")
    save_small(folder / "whole")
    save_small(folder / "shards", max_shard_size="10KB")
    assert (folder / "shards" / SHARD).exists()
    return folder


@pytest.fixture
def whole(originals):
    return originals / "whole"


def tensor(name, change):
    """Puts an array made of the norm's scales under a name; None takes it away."""

    def damage(folder):
        weights = load_file(folder / WEIGHTS)
        weights[name] = change and change(weights[NORM])
        save_file({name: array for name, array in weights.items() if array is not None}, folder / WEIGHTS)

    return damage


def pickled(name):
    return every(write(WEIGHTS, None), write(name, b"PK\x03\x04 and so on"))


def other_tokenizer(count):
    return lambda folder: words(count).save(folder)


def index(name, file):
    """Says that this array alone is somewhere, in this file."""
    return write(INDEX, json.dumps({"weight_map": {name: file}}))


NORM, CONFIG_FILE = "transformer.ln_f.weight", "config.json"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
OUTSIDE = "expected a file of this folder"
BROKEN = "model.safetensors is truncated or damaged"
DAMAGES = [
    (say(CONFIG_FILE, quantization_config={"bits": 4}), "quantization_config is set"),
    (say(CONFIG_FILE, auto_map={"AutoModel": "x.py"}), r"code of its own \(auto_map\), which is not run"),
    (say(CONFIG_FILE, n_layer=10**9), "n_layer is 1000000000 .* expected at most 1000"),
    (say(CONFIG_FILE, n_inner=2**66), r"c_fc.weight is \[16, 48\], expected \[16, 73786976294838206464\]"),
    (write(CONFIG_FILE, "[" * 10**5), "nested more than 64 deep"),
    (write(CONFIG_FILE, "[]"), "holds list; expected a JSON object"),
    (write(CONFIG_FILE, None), "has no config.json"),
    (link(CONFIG_FILE, "/etc/hostname"), "is a link out of the folder"),
    (write(GENERATION, "[]"), "holds list"),
    (
        write(GENERATION, '{"temperature": -1}'),
        "temperature is -1 in .*generation_config.json; expected a number of at",
    ),
    (write(TOKENIZER, '{"model":' * 10**5), "tokenizer.json is not a tokenizer .*recursion limit"),
    (other_tokenizer(41), "tokenizer of 41 ids and a model of 40"),
    (every(other_tokenizer(30), say(CONFIG_FILE, bos_token_id=39)), "bos_token_id is 39"),
    (tensor("x" * 2**20, np.copy), r"unexpected \(xxx"),
    (tensor(NORM, None), r"1 missing \(transformer.ln_f.weight\)"),
    (tensor("ln_f.weight", np.copy), r"1 given twice \((transformer\.)?ln_f.weight\)"),
    (tensor(NORM, lambda norm: norm.astype(np.int8)), "ln_f.weight as I8"),
    (cut(WEIGHTS), BROKEN),
    (write(WEIGHTS, "{"), BROKEN),
    (swap(WEIGHTS, b'"data_offsets":[0,', b'"data_offsets":[9,'), BROKEN),
    (swap(WEIGHTS, b'"shape":[16]', b'"shape":[99]'), BROKEN),
    (swap(WEIGHTS, b'"F32"', b'"F99"'), BROKEN),
    (pickled("pytorch_model.bin"), r"holds pytorch_model.bin .* run code; .*save_pretrained"),
    (pickled(WEIGHTS), "is a pickle by another name"),
    (pickled("flax_model.msgpack"), "jax-tformer from-flax"),
    (pickled("m.gguf"), r"holds m.gguf, .* expected safetensors; .*gguf_file='m.gguf'\)\.save_pretrained"),
    (every(pickled("m.gguf"), write(CONFIG_FILE, None)), "holds m.gguf, .* expected safetensors"),
    (write(WEIGHTS, None), "has neither model.safetensors nor"),
    (every(write(WEIGHTS, None), lambda folder: (folder / WEIGHTS).mkdir()), "model.safetensors is a folder"),
    (link(WEIGHTS, "/etc/hostname"), "is a link out of the folder"),
    (link(WEIGHTS, "nowhere"), "model.safetensors does not exist"),
]
SHARD_DAMAGES = [
    (write(SHARD, None), f"{SHARD} does not exist"),
    (cut(SHARD), f"{SHARD} is truncated or damaged"),
    (link(SHARD, "/etc/hostname"), "is a link out of the folder"),
    *((index(NORM, place), OUTSIDE) for place in ("../model.safetensors", "/etc/x.safetensors", "..")),
    (index(NORM, 3), r"is in 3; expected"),
    (index(NORM, "x.bin"), "names x.bin; expected .*safetensors"),
    (index("more", SHARD), "lacks more, which the index promises"),
    (index(NORM, SHARD), "which the index does not list"),
    (write(INDEX, "[]"), "has no weight_map"),
]


@pytest.mark.parametrize(
    "original, damage, message",
    [(name, *row) for name, rows in (("whole", DAMAGES), ("shards", SHARD_DAMAGES)) for row in rows],
)
def test_damaged_folders(original, damage, message, originals, tmp_path):
    folder = shutil.copytree(originals / original, tmp_path / "model")
    damage(folder)
    with refused(message) as error:
        load_pretrained(folder)
    assert len(str(error.value)) < 5000


@pytest.mark.parametrize("change", [cut(WEIGHTS, 900), lambda folder: (folder / WEIGHTS).touch()], ids=["cut", "new"])
def test_a_file_that_changes_while_it_is_read(change, whole, tmp_path, monkeypatch):
    folder = shutil.copytree(whole, tmp_path / "model")
    placed = pretrained._placed

    def interrupted(*given):
        change(folder)
        return placed(*given)

    monkeypatch.setattr(pretrained, "_placed", interrupted)
    with refused("changed while it was read"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("{whole}/config.json", {}, "is a file; expected its folder"),
        ("{whole}", {"revision": "1234"}, "is a folder, which has no revision"),
        ("{whole}", {"dtype": "float16"}, "dtype is 'float16'; expected one of float64, float32, bfloat16, or None"),
        ("{whole}", {"dtype": "float64"}, "float64 needs .* or load with dtype='float32'"),
        ("~nobody-here/x", {}, "unknown user"),
    ],
)
def test_bad_arguments(name, options, message, whole):
    with refused(message):
        load_pretrained(name.format(whole=whole), **options)


SINUSOIDAL = replace(CONFIG, decoder=replace(STACK, positions="sinusoidal_half", max_positions=None))


@pytest.mark.parametrize(
    "config, options, message",
    [
        (CONFIG, {"architecture": "BertModel"}, "do not both have an encoder"),
        (
            CONFIG,
            {"architecture": "T5Stack"},
            "architecture is 'T5Stack', not a known .* expected one of .*GPT2LMHeadModel",
        ),
        (SINUSOIDAL, {}, r"no class .* GPT2LMHeadModel.*; the nearest: .*decoder\.positions"),
        (CONFIG, {"dtype": "int8"}, "dtype is 'int8'; expected one of float64"),
        (CONFIG, {"max_shard_size": "5 gigs"}, "max_shard_size is '5 gigs'"),
        (CONFIG, {"max_shard_size": 0}, "max_shard_size is 0"),
        (CONFIG, {"tokenizer": words(41)}, "41 ids and the model's table 40 rows"),
        (CONFIG, {"params": {}}, "missing"),
        (CONFIG, {"dtype": "float16"}, r"holds numbers that F16 cannot; save with dtype='float32'"),
    ],
)
def test_what_cannot_be_saved(config, options, message, tmp_path):
    net = transformer(config)
    large = {"params": jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1e9), net.shapes)}
    with refused(message):
        save_pretrained(tmp_path / "new", net, **(large | options))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(pretrained, "save_file", full)
    with refused("cannot write .*small: .*No space left on device; expected a place with room for it"):
        save_small(tmp_path / "small")
    assert not [*tmp_path.iterdir()]


def test_nothing_is_overwritten(whole, tmp_path):
    net, params, tokenizer = load_pretrained(whole)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = contents(tmp_path)
    for name in ("full", "file"):
        with refused("is there already"):
            save_pretrained(tmp_path / name, net, params, tokenizer)
    assert contents(tmp_path) == before
