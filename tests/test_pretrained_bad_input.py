"""Folders that cannot be loaded, or not be written: one line each, and nothing is half done."""

import json
import os
import shutil
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_tformer import InputError, load_pretrained, save_pretrained, transformer
from jax_tformer.config import DropoutConfig
from tests.pretrained_folders import CONFIG, save_small, words
from tests.small_runs import contents

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
SHARD = "model-00001-of-00003.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "model"
    save_small(folder)
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "model"
    save_small(folder, max_shard_size="10KB")
    assert (folder / SHARD).exists()
    return folder


def tensors(**more):
    """Changes arrays; None removes one."""

    def damage(folder):
        weights = load_file(folder / WEIGHTS)
        weights |= {name: change(weights) for name, change in more.items()}
        save_file({name: array for name, array in weights.items() if array is not None}, folder / WEIGHTS)

    return damage


def config(**values):
    """Changes fields of config.json; None removes one."""

    def damage(folder):
        fields = json.loads((folder / CONFIG_FILE).read_text()) | values
        (folder / CONFIG_FILE).write_text(json.dumps({k: value for k, value in fields.items() if value is not None}))

    return damage


def index(**values):
    """Changes where the index says that arrays are; None removes one."""

    def damage(folder):
        content = json.loads((folder / INDEX).read_text())
        files = content["weight_map"] | {name.replace("norm", NORM): value for name, value in values.items()}
        content["weight_map"] = {name: file for name, file in files.items() if file is not None}
        (folder / INDEX).write_text(json.dumps(content))

    return damage


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def shortened(name, by=7):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - by)


def removed(name):
    return lambda folder: (folder / name).unlink()


def moved_out(name):
    def damage(folder):
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return damage


def pickled(name):
    def damage(folder):
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(b"PK\x03\x04 and so on")

    return damage


def other_tokenizer(count):
    return lambda folder: words(count).save(folder)


def header(**values):
    """Changes what a header says of an array: sizes and places are from a stranger."""

    def damage(folder):
        data = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        said = json.loads(data[8 : 8 + length])
        told = json.dumps(said | {NORM: said[NORM] | values}).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(told)) + told + data[8 + length :])

    return damage


NORM, CONFIG_FILE = "transformer.ln_f.weight", "config.json"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
OUTSIDE = "expected a file of this folder"
DAMAGES = [
    (config(quantization_config={"bits": 4}), "quantization_config is set"),
    (config(auto_map={"AutoModel": "x.py"}), r"code of its own \(auto_map\), which is not run"),
    (config(n_layer=10**9), "n_layer is 1000000000 .* expected at most 1000"),
    (config(n_inner=2**31), r"c_fc.weight is \[16, 48\], expected \[16, 2147483648\]"),
    (config(n_embd=2**66), r"expected \[73786976294838206464"),
    (config(n_positions=21), r"wpe.weight is \[20, 16\], expected \[21, 16\]"),
    (text(CONFIG_FILE, "[" * 10**5), "nested more than 64 deep"),
    (text(CONFIG_FILE, "{"), "config.json is damaged: it is not JSON"),
    (text(CONFIG_FILE, "[]"), "holds list; expected a JSON object"),
    (removed(CONFIG_FILE), "has no config.json"),
    (moved_out(CONFIG_FILE), "is a link out of the folder"),
    (text(GENERATION, "[]"), "holds list"),
    (text(GENERATION, '{"temperature": -1}'), "temperature is -1 in .*generation_config.json; expected a number of at"),
    (text(TOKENIZER, '{"model":' * 10**5), "tokenizer.json is not a tokenizer .*recursion limit"),
    (text(TOKENIZER, "{}"), "tokenizer.json is not a tokenizer"),
    (other_tokenizer(41), "tokenizer of 41 ids and a model of 40"),
    (lambda folder: (other_tokenizer(30)(folder), config(bos_token_id=39)(folder)), "bos_token_id is 39"),
    (tensors(**{"x" * 2**20: lambda weights: weights[NORM]}), r"unexpected \(xxx"),
    (tensors(**{NORM: lambda weights: None}), r"1 missing \(transformer.ln_f.weight\)"),
    (tensors(**{"ln_f.weight": lambda weights: weights[NORM]}), r"1 given twice \((transformer\.)?ln_f.weight\)"),
    (tensors(**{NORM: lambda weights: np.ones(16, np.int8)}), "ln_f.weight as I8"),
    (shortened(WEIGHTS), "model.safetensors is truncated or damaged"),
    (lambda folder: os.truncate(folder / WEIGHTS, 5), "truncated or damaged"),
    (header(data_offsets=[0, 1 << 50]), "truncated or damaged"),
    (header(shape=[1 << 40, 1 << 40]), "truncated or damaged"),
    (header(dtype="F128"), "truncated or damaged"),
    (pickled("pytorch_model.bin"), r"holds pytorch_model.bin .* run code; .*save_pretrained"),
    (pickled("model.pt"), "holds model.pt"),
    (pickled(WEIGHTS), "is a pickle by another name"),
    (pickled("flax_model.msgpack"), "jax-tformer from-flax"),
    (pickled("m.gguf"), r"holds m.gguf, .* expected safetensors; .*gguf_file='m.gguf'\)\.save_pretrained"),
    (lambda folder: (pickled("m.gguf")(folder), removed(CONFIG_FILE)(folder)), "holds m.gguf, .* expected safetensors"),
    (removed(WEIGHTS), "has neither model.safetensors nor"),
    (lambda folder: (removed(WEIGHTS)(folder), (folder / WEIGHTS).mkdir()), "model.safetensors is a folder"),
    (moved_out(WEIGHTS), "is a link out of the folder"),
    (
        lambda folder: (removed(WEIGHTS)(folder), (folder / WEIGHTS).symlink_to("nowhere")),
        "model.safetensors does not exist",
    ),
]
SHARD_DAMAGES = [
    (removed(SHARD), f"{SHARD} does not exist"),
    (shortened(SHARD), f"{SHARD} is truncated or damaged"),
    (moved_out(SHARD), "is a link out of the folder"),
    (index(norm="../model.safetensors"), OUTSIDE),
    (index(norm="/etc/x.safetensors"), OUTSIDE),
    (index(norm=".."), OUTSIDE),
    (index(norm=3), r"is in 3; expected"),
    (index(norm="x.bin"), "names x.bin; expected .*safetensors"),
    (index(more=SHARD), "lacks more, which the index promises"),
    (index(norm=None), "which the index does not list"),
    (text(INDEX, '{"weight_map": {}}'), "has no weight_map"),
    (text(INDEX, "[]"), "has no weight_map"),
]


@pytest.mark.parametrize(
    ("original", "damage", "message"),
    [(name, *row) for name, rows in (("whole", DAMAGES), ("shards", SHARD_DAMAGES)) for row in rows],
)
def test_damaged_folders(original, damage, message, request, tmp_path):
    folder = Path(shutil.copytree(request.getfixturevalue(original), tmp_path / "model"))
    damage(folder)
    with pytest.raises(InputError, match=message) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 5000


def test_a_file_that_shrinks_while_it_is_read(whole, tmp_path, monkeypatch):
    from jax_tformer.hub import pretrained

    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    placed = pretrained._placed

    def shrink(*arguments):
        shortened(WEIGHTS, 900)(folder)
        return placed(*arguments)

    monkeypatch.setattr(pretrained, "_placed", shrink)
    with pytest.raises(InputError, match="changed while it was read"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("{whole}/config.json", {}, "is a file; expected its folder"),
        ("{whole}", {"revision": "1234"}, "is a folder, which has no revision"),
        ("{whole}", {"dtype": "float16"}, "dtype is 'float16'; expected one of float64, float32, bfloat16, or None"),
        ("{whole}", {"dtype": "float64"}, "float64 needs .* or load with dtype='float32'"),
        ("~nobody-here/x", {}, "unknown user"),
    ],
)
def test_bad_arguments(name, options, message, whole):
    with pytest.raises(InputError, match=message):
        load_pretrained(name.format(whole=whole), **options)


def test_names_without_a_network(monkeypatch):
    import huggingface_hub

    def offline(*arguments, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "model_info", offline)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    for options in ({}, {"revision": "1234"}):
        with pytest.raises(InputError, match=r"'some/gpt2' is no folder here and the .* hub did not give it \(Conn"):
            load_pretrained("some/gpt2", **options)  # type: ignore[arg-type]


def test_names_on_the_hub(whole, tmp_path, monkeypatch):
    """In the hub's cache the files of a commit are links to blobs beside it."""
    import huggingface_hub

    blobs, snapshot = tmp_path / "models--some/blobs", tmp_path / "models--some/snapshots/1234"
    shutil.copytree(whole, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    asked = []

    def download(name, *, repo_type, revision, allow_patterns):
        asked.append((repo_type, name, revision))
        assert {"config.json", "tokenizer.json", "model*.safetensors", INDEX} <= set(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "model_info", lambda name: type("Info", (), {"sha": "1234"}))
    with pytest.raises(InputError, match="expected the commit to use; the newest is revision 1234"):
        load_pretrained("some/gpt2")
    net, _, tokenizer = load_pretrained("some/gpt2", revision="1234")
    assert asked == [("model", "some/gpt2", "1234")]
    assert tokenizer is not None
    assert net == transformer(net.config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "BertModel"}, "do not both have an encoder"),
        ({"architecture": "T5Stack"}, "architecture is 'T5Stack'; expected one of .*GPT2LMHeadModel"),
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of float64"),
        ({"max_shard_size": "5 gigs"}, "max_shard_size is '5 gigs'"),
        ({"max_shard_size": 0}, "max_shard_size is 0"),
        ({"tokenizer": words(41)}, "41 ids and the model's table 40 rows"),
        ({"params": {}}, "missing"),
        ({"dtype": "float16", "scale": 1e9}, r"holds numbers that F16 cannot; save with dtype='float32'"),
    ],
)
def test_what_cannot_be_saved(options, message, tmp_path):
    net = transformer(CONFIG)
    params = jax.tree.map(lambda leaf: leaf + options.get("scale", 0), net.init(jax.random.key(0)))
    more = {name: value for name, value in options.items() if name not in ("params", "scale")}
    with pytest.raises(InputError, match=message) as error:
        save_pretrained(tmp_path / "new", net, options.get("params", params), **more)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(whole, tmp_path):
    net, params, tokenizer = load_pretrained(whole)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = contents(tmp_path)
    for name in ("full", "file"):
        with pytest.raises(InputError, match="is there already"):
            save_pretrained(tmp_path / name, net, params, tokenizer)
    assert contents(tmp_path) == before


def test_a_config_that_no_class_expresses(tmp_path):
    from dataclasses import replace

    odd = replace(CONFIG, decoder=replace(CONFIG.output_stack, positions="sinusoidal_half", max_positions=None))
    net = transformer(odd)
    with pytest.raises(InputError, match=r"no class .* GPT2LMHeadModel.*; the nearest: .*decoder\.positions"):
        save_pretrained(tmp_path / "new", net, net.init(jax.random.key(0)))
    # What only training uses is left out where the class has no place for it.
    net = transformer(replace(CONFIG, initializer="xavier_uniform", dropout=DropoutConfig(feedforward=0.1)))
    params = net.init(jax.random.key(0))
    save_pretrained(tmp_path / "trained", net, params)
    again, loaded, tokenizer = load_pretrained(tmp_path / "trained")
    assert tokenizer is None
    assert again.config.dropout == DropoutConfig()
    tokens = jnp.ones((1, 5), int)
    assert jnp.array_equal(again.apply(loaded, tokens), net.apply(params, tokens))
