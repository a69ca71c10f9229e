"""The weights of Flax models become what PyTorch has for them, bit for bit; the page that says so is true."""

from pathlib import Path

import flax.serialization
import msgpack
import numpy as np
import pytest
import torch
from flax import traverse_util
from transformers.pytorch_utils import Conv1D

from jax_tformer.cli import from_flax
from jax_tformer.files import read_json, write_json
from jax_tformer.hub.flax_weights import load_flax
from parity_tests.depth import deep
from parity_tests.huggingface import Oracle, bytes_lost, config_json
from parity_tests.oracles import ENTRIES
from parity_tests.test_pretrained import opened, saved, stored
from parity_tests.test_readme import blocks, run
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("own_folder")
FLAX, OUT = Path("flax"), Path("out")
WITH_FLAX = ("gpt2", "bert", "roberta", "distilbert", "bart", "marian", "t5", "opt", "llama", "mistral", "gemma")
"""The families that had Flax models, of those that we have, as the names of the entries begin."""
NAMES = [name for name in ENTRIES if name.split()[0] in WITH_FLAX]
FIRST = ("gpt2", "bert masked", "bart")

WEIGHTS = {(torch.nn.Linear, Conv1D): "kernel", torch.nn.Embedding: "embedding", torch.nn.LayerNorm: "scale"}
"""What Flax calls the weight of modules of these classes."""


def flax_tree(oracle):
    """The model's parameters as they were in Flax: by module, kernels transposed, tied arrays once."""
    modules = dict(oracle.model.named_modules())
    flat = {}
    for name, tensor in oracle.kept().items():
        module, _, leaf = name.rpartition(".")
        array = tensor.detach().numpy()
        if leaf == "weight":
            leaf = next((name for kinds, name in WEIGHTS.items() if isinstance(modules[module], kinds)), leaf)
        if leaf == "kernel":
            array = np.ascontiguousarray(array.T)
        flat[(*module.split("."), leaf) if module else (leaf,)] = array
    return traverse_util.unflatten_dict(flat)


def save_flax(oracle, folder):
    """Writes config.json and flax_model.msgpack."""
    folder = Path(folder)
    folder.mkdir()
    write_json(folder / "config.json", config_json(oracle.model))
    (folder / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(flax_tree(oracle)))


@pytest.mark.parametrize("name", [name if name in FIRST else deep(name) for name in NAMES])
def test_the_weights_are_those_of_pytorch(name, capsys):
    oracle = Oracle(name, "float32")
    oracle.load(oracle.random_weights(0.2, 3))
    save_flax(oracle, FLAX)
    assert from_flax.main(["flax", "out"]) == 0
    assert f"{type(oracle.model).__name__} of " in capsys.readouterr().out
    theirs, ours = oracle.model.state_dict(), opened(oracle, OUT).state_dict()
    # What the file holds; Marian computes its position tables.
    for key in stored(OUT):
        np.testing.assert_array_equal(ours[key].numpy(), theirs[key].numpy(), err_msg=key)


def test_what_older_folders_hold(monkeypatch):
    """Shards with slashes in the names, arrays in pieces, a class called Flax..., the tokenizer beside them."""
    oracle = saved("gpt2", FLAX, dtype="float32")
    config = read_json(FLAX / "config.json") | {"architectures": ["FlaxGPT2LMHeadModel"]}
    write_json(FLAX / "config.json", config)
    (FLAX / "model.safetensors").unlink()
    flat = {"/".join(key): array for key, array in traverse_util.flatten_dict(flax_tree(oracle)).items()}
    names = sorted(flat)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 1000)
    files = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"flax_model-{number:05}-of-00002.msgpack"
        data = flax.serialization.to_bytes({name: flat[name] for name in part})
        assert b"__msgpack_chunked_array__" in data
        (FLAX / file).write_bytes(data)
        files |= dict.fromkeys(part, file)
    write_json(FLAX / "flax_model.msgpack.index.json", {"weight_map": files})
    assert from_flax.main(["flax", "out", "--max-shard-size", "60KB"]) == 0
    assert len(list(OUT.glob("model-*.safetensors"))) > 1
    oracle.model.save_pretrained("torch")
    bytes_lost(stored(OUT), stored("torch")).require()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (OUT / name).read_bytes() == (FLAX / name).read_bytes()


def packed(length, dtype="float32", kind=1):
    """msgpack of one array as Flax writes it, of 12 bytes."""
    array = msgpack.ExtType(kind, msgpack.packb(([length], dtype, bytes(12)), use_bin_type=True))
    return bytes(msgpack.packb({"transformer": {"x": array}}))


@pytest.mark.parametrize(
    "content, message",
    [
        (packed(3)[:-4], "truncated or damaged"),
        (packed(3) + b"more", "truncated or damaged .*extra data"),
        (packed(4), "truncated or damaged .*reshape"),
        (packed(1 << 62), "truncated or damaged"),
        (packed(-3), "do not fit"),
        (packed(3, "object"), "truncated or damaged .*OBJECT"),
        (packed(3, kind=7), "holds ExtType where an array"),
        (packed(3), r"missing .* unexpected \(transformer\.x\)"),
        (msgpack.packb({"x": {"y": 3}}), r"holds int where an array of floats should be \(x/y\)"),
        (msgpack.packb([1]), "holds list where an array"),
        (b"\x81" * 5000, "truncated or damaged"),
        (b"", "truncated or damaged"),
        (b"\x80\x04\x95 a pickle", "truncated or damaged"),
        (None, "has neither flax_model.msgpack nor"),
    ],
)
def test_damaged_files(content, message):
    config = {"architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11}
    FLAX.mkdir()
    write_json(FLAX / "config.json", config)
    if content is not None:
        (FLAX / "flax_model.msgpack").write_bytes(content)
    with refused(message):
        from_flax.main(["flax", "out"])
    assert not OUT.exists()


def test_bad_folders():
    with refused("is no folder"):
        load_flax(Path("nowhere"))
    with refused("is there already"):
        from_flax.main([".", str(Path(__file__).parent)])
    Path("config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    for files, message in (
        ({"x": "x.bin"}, "names x.bin"),
        ({"x": "x.msgpack"}, "x.msgpack does not exist"),
    ):
        write_json(Path("flax_model.msgpack.index.json"), {"weight_map": files})
        with refused(message):
            load_flax(Path())


def test_the_code_of_the_page_runs():
    saved("gpt2", "gpt2", dtype="float32")
    save_flax(Oracle("gpt2", "float32"), "gpt2-flax")
    page = "docs/from-flax.md"
    assert len(blocks(page)) == 2
    for block in blocks(page):
        assert "assert" in block
        run(block, page)
