"""Folders that cannot be loaded, or not be written: one line each, and nothing is half done."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def changed(path: Path, **values: Any) -> None:
    """Changes fields of a JSON file; None removes one."""
    fields = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return damage


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: changed(folder / "config.json", **values)


def index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return damage


def shortened(name: str, by: int = 7) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - by)


def moved_out(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return damage


def pickled(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(b"PK\x03\x04 and so on")

    return damage


def other_tokenizer(count: int) -> Callable[[Path], None]:
    return lambda folder: words(count).save(folder)


NORM = "transformer.ln_f.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an unsupported family": (config(architectures=["T5Stack"]), r"'T5Stack' is not a known .* GPT2LMHeadModel"),
    "no family": (config(architectures=None), "architectures is None"),
    "a setting of another function": (config(add_cross_attention=True), "add_cross_attention is True"),
    "an activation": (config(activation_function="quick_gelu"), "activation_function is 'quick_gelu'"),
    "quantised": (config(quantization_config={"bits": 4}), "quantization_config is set"),
    "remote code": (config(auto_map={"AutoModel": "x.py"}), r"code of its own \(auto_map\), which is not run"),
    "a wrong type": (config(n_layer="two"), "n_layer"),
    "layers without end": (config(n_layer=10**9), "n_layer is 1000000000 .* expected at most 1000"),
    "columns without end": (config(n_inner=2**31), r"c_fc.weight is \[16, 48\], expected \[16, 2147483648\]"),
    "sizes beyond numbers": (config(n_embd=2**66), r"expected \[73786976294838206464"),
    "a name of 1 MB": (tensors(lambda weights: weights.update({"x" * 2**20: weights[NORM]})), r"unexpected \(xxx"),
    "brackets": (lambda folder: (folder / "config.json").write_text("[" * 10**5), "nested more than 64 deep"),
    "brackets in a tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text('{"model":' * 10**5),
        "tokenizer.json is not a tokenizer .*recursion limit",
    ),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged: it is not JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "holds list; expected a JSON object"),
    "a list of defaults": (lambda folder: (folder / "generation_config.json").write_text("[]"), "holds list"),
    "a temperature": (
        lambda folder: (folder / "generation_config.json").write_text('{"temperature": -1}'),
        "temperature is -1 in .*generation_config.json; expected a number of at least 0",
    ),
    "truncated": (shortened(WEIGHTS), "model.safetensors is truncated or damaged"),
    "all but empty": (lambda folder: os.truncate(folder / WEIGHTS, 5), "truncated or damaged"),
    "too few": (tensors(lambda weights: weights.pop(NORM)), r"1 missing \(transformer.ln_f.weight\)"),
    "too many": (tensors(lambda weights: weights.update(x=weights[NORM])), r"1 unexpected \(x\)"),
    "doubled": (
        tensors(lambda weights: weights.update({"ln_f.weight": weights[NORM]})),
        r"1 given twice \((transformer\.)?ln_f.weight\)",
    ),
    "unlike its tie": (
        tensors(lambda weights: weights.update({"lm_head.weight": weights["transformer.wte.weight"] + 1})),
        "lm_head.weight should repeat",
    ),
    "other shapes": (config(n_positions=21), r"wpe.weight is \[20, 16\], expected \[21, 16\]"),
    "whole numbers": (tensors(lambda weights: weights.update({NORM: np.ones(16, np.int8)})), "ln_f.weight as I8"),
    "a pickle": (pickled("pytorch_model.bin"), r"holds pytorch_model.bin .* run code; .*save_pretrained"),
    "a checkpoint": (pickled("model.pt"), "holds model.pt"),
    "a pickle by another name": (pickled(WEIGHTS), "is a pickle by another name"),
    "Flax weights": (pickled("flax_model.msgpack"), "jax-tformer from-flax"),
    "GGUF": (pickled("m.gguf"), r"holds m.gguf, .* expected safetensors; .*gguf_file='m.gguf'\)\.save_pretrained"),
    "GGUF alone": (
        lambda folder: (pickled("m.gguf")(folder), (folder / "config.json").unlink()),
        "holds m.gguf, .* expected safetensors",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has neither model.safetensors nor"),
    "a folder of weights": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()),
        "model.safetensors is a folder",
    ),
    "a link out": (moved_out(WEIGHTS), "is a link out of the folder"),
    "a config elsewhere": (moved_out("config.json"), "is a link out of the folder"),
    "a broken link": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).symlink_to("nowhere")),
        "model.safetensors does not exist",
    ),
    "more ids than rows": (other_tokenizer(41), "tokenizer of 41 ids and a model of 40"),
    "an id without a word": (
        lambda folder: (other_tokenizer(30)(folder), changed(folder / "config.json", bos_token_id=39)),
        "bos_token_id is 39",
    ),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "tokenizer.json is not a tokenizer",
    ),
}
SHARD_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing shard": (lambda folder: (folder / SHARD).unlink(), f"{SHARD} does not exist"),
    "a truncated shard": (shortened(SHARD), f"{SHARD} is truncated or damaged"),
    "upwards": (index(lambda files: files.update({NORM: "../model.safetensors"})), "expected a file of this folder"),
    "absolute": (index(lambda files: files.update({NORM: "/etc/x.safetensors"})), "expected a file of this folder"),
    "the folder": (index(lambda files: files.update({NORM: ".."})), "expected a file of this folder"),
    "no name": (index(lambda files: files.update({NORM: 3})), r"is in 3; expected"),
    "a link out": (moved_out(SHARD), "is a link out of the folder"),
    "a pickle": (index(lambda files: files.update({NORM: "x.bin"})), "names x.bin; expected .*safetensors"),
    "a promise": (index(lambda files: files.update(more=SHARD)), "lacks more, which the index promises"),
    "a stowaway": (index(lambda files: files.pop(NORM)), "which the index does not list"),
    "an empty index": (index(lambda files: files.clear()), "has no weight_map"),
    "no index": (lambda folder: (folder / INDEX).write_text("[]"), "has no weight_map"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_folders(case, whole, tmp_path):
    refused(whole, tmp_path, *DAMAGES[case])


@pytest.mark.parametrize("case", SHARD_DAMAGES)
def test_damaged_shards(case, shards, tmp_path):
    refused(shards, tmp_path, *SHARD_DAMAGES[case])


def refused(original: Path, tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    damage(folder)
    with pytest.raises(InputError, match=message) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 5000


def test_a_file_that_shrinks_while_it_is_read(whole, tmp_path, monkeypatch):
    from jax_tformer.hub import loading

    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    placed = loading._placed

    def shrink(*arguments: Any) -> Any:
        shortened(WEIGHTS, 900)(folder)
        return placed(*arguments)

    monkeypatch.setattr(loading, "_placed", shrink)
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

    def offline(*arguments: Any, **options: Any) -> Any:
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
    asked: list[Any] = []

    def download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert {"config.json", "tokenizer.json", "model*.safetensors", INDEX} <= set(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "model_info", lambda name: type("Info", (), {"sha": "1234"}))
    with pytest.raises(InputError, match="expected the commit to use; the newest is revision 1234"):
        load_pretrained("some/gpt2")
    net, _, tokenizer = load_pretrained("some/gpt2", revision="1234")
    assert asked == [("some/gpt2", "1234")]
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


def test_headers_that_lie(whole, tmp_path):
    """The sizes and places in a header are from a stranger."""
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    data = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for field, value in (("data_offsets", [0, 1 << 50]), ("shape", [1 << 40, 1 << 40]), ("dtype", "F128")):
        said = json.dumps(header | {NORM: header[NORM] | {field: value}}).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(said)) + said + data[8 + length :])
        with pytest.raises(InputError, match="truncated or damaged"):
            load_pretrained(folder)
