"""Folders in the format of Hugging Face: those that cannot be loaded, or not be written, are refused in one line; what
loading and saving take, and what comes along; and what a name on the hub stands for."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jax_tformer import TransformerConfig, load_pretrained, save_pretrained, transformer
from jax_tformer.cli import tokenize
from jax_tformer.config.experiment import TokenizerConfig
from jax_tformer.data.tokenizers import Tokenizer, build_tokenizer
from jax_tformer.files import new_folder, read_json
from jax_tformer.hub import pretrained
from tests.damages import cut, every, link, say, swap, write
from tests.pretrained_folders import CONFIG, STACK, save_small, words
from tests.refusals import refused
from tests.several_processes import finish, run_alone, start
from tests.small_models import assert_same_bits
from tests.small_runs import contents, succeed

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


@pytest.mark.parametrize("change", [cut(WEIGHTS, 900), lambda folder: (folder / WEIGHTS).touch()])
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


# What comes along from folder to folder.


def test_what_a_killed_export_left_is_cleared_away(tmp_path):
    out = tmp_path / "out"
    code = "import os, pathlib, sys; from jax_tformer.files import new_folder"
    code += "\nwith new_folder(pathlib.Path(sys.argv[1])) as whole: (whole / 'half').touch(); os._exit(9)"
    assert finish([start(["-c", code, out], 1)])[0][0] == 9
    assert len([*tmp_path.rglob("half")]) == 1
    with new_folder(out) as whole:
        assert not list(whole.iterdir())
        with refused("another process is writing"), new_folder(out):
            pass
    assert list(tmp_path.rglob("*")) == [out]
    # What somebody else has put there is not touched.
    (tmp_path / ".more.partial" / "more").mkdir(parents=True)
    (tmp_path / ".link.partial").symlink_to(out)
    before = sorted(tmp_path.rglob("*"))
    for name in ("more", "link"):
        with refused(rf"\.{name}\.partial is in the way"), new_folder(tmp_path / name):
            pass
    assert sorted(tmp_path.rglob("*")) == before


def test_what_config_json_says_beyond_our_config_stays(tmp_path):
    net, params = save_small(tmp_path / "model")
    say("config.json", hidden_size=16, told=[1])(tmp_path / "model")
    again, loaded, tokenizer = load_pretrained(tmp_path / "model")
    # The origin is no part of the net's identity: compiled functions are shared.
    assert (again, hash(again), tokenizer.end_id) == (net, hash(net), 0)
    assert_same_bits(loaded, params)
    positions = loaded["embedding"]["positions"]
    positions["embedding"] = jnp.concatenate([positions["embedding"]] * 2)
    grown = type(again)(replace(again.config, decoder=replace(STACK, max_positions=40)))
    grown.origin = again.origin
    save_pretrained(tmp_path / "grown", grown, loaded, tokenizer)
    said = read_json(tmp_path / "grown/config.json")
    assert (said["n_positions"], said["n_embd"], said["told"]) == (40, 16, [1])
    assert "hidden_size" not in said  # as n_embd says it
    assert load_pretrained(tmp_path / "grown")[0].config == grown.config


PROGRAM = """
import sys
from pathlib import Path

import jax
import numpy as np

from jax_tformer import load_pretrained, save_pretrained
from jax_tformer.config.experiment import MeshConfig
from jax_tformer.hub import pretrained
from jax_tformer.training.sharding import make_mesh

folder = Path(sys.argv[1])

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

def more(work):
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    result = work()
    return peak() - before, result

# Peak memory, of a program that has loaded and saved something before.
small = load_pretrained(folder / "small")
save_pretrained(folder / "warm", *small)
taken, (net, params, tokenizer) = more(lambda: load_pretrained(folder / "large"))
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
assert size > 150e6
assert size <= taken <= 1.2 * size, (taken, size)
taken, _ = more(lambda: save_pretrained(folder / "copy", net, params, tokenizer, max_shard_size="60MB"))
assert taken < 1.2 * 60e6, taken

# Eight devices.
mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), rows=4)
read, plain = [], pretrained.read
def counted(*given):
    part = plain(*given)
    read.append(part.nbytes)
    return part
pretrained.read = counted
net, params, tokenizer = load_pretrained(folder / "small", mesh=mesh)
for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(small[1]), strict=True):
    assert np.array_equal(one, other)
kernel = params["decoder"]["blocks"]["feedforward"]["up"]["kernel"]
assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 8, 24)}
# What several devices hold is read once.
assert sum(read) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
save_pretrained(folder / "again", net, params, tokenizer)
for path in (folder / "small").iterdir():
    assert (folder / "again" / path.name).read_bytes() == path.read_bytes()
"""


def test_peak_memory_and_devices(tmp_path):
    """Loading takes at most 1.2 times the parameters, saving about a shard; each device reads its part."""
    save_small(tmp_path / "small")
    stack = replace(STACK, num_layers=10, num_heads=8, feedforward_width=2048)
    net = transformer(TransformerConfig(vocab_size=20000, d_model=512, decoder=stack, tied_head=True))
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.1, np.float32), net.shapes)
    save_pretrained(tmp_path / "large", net, params, max_shard_size="60MB")
    run_alone(["-c", PROGRAM, tmp_path], 8)


def test_a_special_token_behind_the_table(tmp_path):
    """As Gemma 3 of 1B has one for images; without a role it is in no text of the model's own."""
    net, params = save_small(tmp_path / "model")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    backend.add_special_tokens(["<image>"])
    backend.save(str(tmp_path / "model/tokenizer.json"))
    _, _, tokenizer = load_pretrained(tmp_path / "model")
    assert (tokenizer.vocab_size, tokenizer.table_rows, tokenizer.encode("<image>").tolist()) == (41, 40, [40])
    save_pretrained(tmp_path / "again", net, params, tokenizer)
    say("tokenizer_config.json", pad_token="<image>")(tmp_path / "model")
    with refused("tokenizer of 41 ids and a model of 40"):
        load_pretrained(tmp_path / "model")


def test_another_tokenizer_brings_its_special_ids(tmp_path):
    save_small(tmp_path / "model")
    net, params, loaded = load_pretrained(tmp_path / "model")
    other = Tokenizer(words(40)._backend, {"end": "w7"})
    for name, tokenizer, end in (("same", loaded, 0), ("other", other, 7)):
        save_pretrained(tmp_path / name, net, params, tokenizer)
        for file in ("config.json", "generation_config.json"):
            said = read_json(tmp_path / name / file)
            assert (said["eos_token_id"], said["pad_token_id"], said["bos_token_id"]) == (end, end, None)


# Names on the Hugging Face hub.

NAME, COMMIT = "someone/something", "0123456789abcdef" * 2 + "01234567"


def open_tokenizer(revision):
    return build_tokenizer(TokenizerConfig("huggingface", name=NAME, revision=revision), [], {})


def open_texts(revision):
    succeed(tokenize, f"{NAME} --out shards --workers 1", *(["--revision", revision] if revision else []))


def open_model(revision):
    return load_pretrained(NAME, revision=revision)


KINDS = {
    "tokenizer": ("model", open_tokenizer, "--data.tokenizer.revision", {"tokenizer.json", "tokenizer_config.json"}),
    "data set": ("dataset", open_texts, "--revision", {"*.jsonl", "*.parquet"}),
    "model": ("model", open_model, "revision", {"config.json", "tokenizer.json", "model*.safetensors"}),
}
"""What the hub calls it, how it is opened, the option that names the commit, and some of the files that it needs."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_is_that_of_one_commit(kind, folder, monkeypatch):
    """In the hub's cache, the files of a commit are links to blobs beside it."""
    blobs, snapshot = folder / "models--someone" / "blobs", folder / "models--someone" / "snapshots" / COMMIT
    blobs.parent.mkdir()
    save_small(blobs)
    (blobs / "a.jsonl").write_text('{"text": "It was a bright cold day"}\n' * 30)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    repo_type, opens, option, files = KINDS[kind]

    def download(name, **asked):
        assert (name, asked["repo_type"], asked["revision"]) == (NAME, repo_type, COMMIT)
        assert files <= set(asked["allow_patterns"])
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    commits = {(NAME, repo_type): SimpleNamespace(sha=COMMIT)}
    monkeypatch.setattr(huggingface_hub, "repo_info", lambda name, repo_type: commits[name, repo_type])
    with refused(rf"the {kind} '{NAME}' .* expected the commit to use; the newest is {option} {COMMIT}$"):
        opens(None)
    opens(COMMIT)


@pytest.mark.parametrize("revision", [COMMIT, None])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hub_that_does_not_answer_is_said_in_one_line(kind, revision, folder, monkeypatch):
    def silent(*_, **__):
        raise ConnectionError("first line\nsecond line")

    for function in ("snapshot_download", "repo_info"):
        monkeypatch.setattr(huggingface_hub, function, silent)
    with refused(rf"the {kind} '{NAME}' is no folder here and the .* hub did not give it \(ConnectionError\)"):
        KINDS[kind][1](revision)
