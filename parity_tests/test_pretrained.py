"""Folders that Hugging Face wrote open with `load_pretrained`, and those of `save_pretrained` open there. Gate 9."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from jax_tformer import load_pretrained, save_pretrained
from jax_tformer.cli import export, train
from jax_tformer.config import DropoutConfig
from jax_tformer.files import read_json
from jax_tformer.functional import transformer
from jax_tformer.runs.folder import RunFolder, load_trained
from parity.gates.measure import compared
from parity_tests.depth import deep
from parity_tests.huggingface import Oracle, bytes_lost
from parity_tests.oracles import ENTRIES
from tests.refusals import refused
from twin.cases import VOCABULARY

pytestmark = pytest.mark.usefixtures("own_folder")
THEIRS, OURS = Path("theirs"), Path("ours")
TOKENS = np.arange(2 * 7).reshape(2, 7) + 10
"""None of them means padding, of which RoBERTa makes no positions."""


def saved(name, folder, dtype="float64", shard="5GB", **settings):
    """A folder as Hugging Face writes it: weights, config, generation config, tokenizer with a chat template."""
    oracle = Oracle(name, "float64", **settings)
    oracle.load(oracle.random_weights(0.2, 3))
    oracle.model.to(getattr(torch, dtype))
    oracle.model.config.task_specific_params = {"told": 1}
    oracle.model.save_pretrained(folder, max_shard_size=shard)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Backend(models.WordLevel({f"w{id}": id for id in range(VOCABULARY)}, "w0")),
        eos_token="w1",
        pad_token="w2",
    )
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    return oracle


def stored(folder):
    """The arrays of a folder, of all its files."""
    return {name: array for path in Path(folder).glob("*.safetensors") for name, array in load_file(path).items()}


def settings_of(folder):
    return read_json(Path(folder) / "config.json")


def require_same(first, second, *settings):
    """Both folders hold the same arrays, bit for bit, and files that say the same."""
    bytes_lost(stored(first), stored(second)).require()
    names, ours = ({path.name for path in of.iterdir() if "safetensors" not in path.name} for of in (second, first))
    assert names == ours
    wanted = settings or ("config.json", "chat_template.jinja")
    assert {"tokenizer.json", "tokenizer_config.json", *wanted} <= names
    for name in names - {"config.json"}:
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert settings_of(first) == settings_of(second)


def opened(oracle, folder, kind=None):
    """The model that transformers makes of a folder, in which no array is missing, unexpected or of another shape."""
    with oracle.whole():
        model, told = (kind or oracle.entry.auto).from_pretrained(
            folder, dtype="auto", attn_implementation="eager", output_loading_info=True
        )
        oracle.entry.prepare(model)
    assert not any(told[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def inputs_of(config):
    return (TOKENS, TOKENS + 5) if config.encoder and config.decoder else (TOKENS,)


def require_same_logits(net, params, theirs):
    ours = jax.jit(net.apply)(params, *map(jnp.asarray, inputs_of(net.config)))
    compared("1 activations", {"logits": ours}, {"logits": theirs}).require()


@pytest.mark.parametrize("tied, dtype", [(True, "float64"), (False, "float64"), (True, "bfloat16")])
@pytest.mark.parametrize("name", ENTRIES)
def test_there_and_back(name, tied, dtype, record):
    """Bit for bit through our parameters, into a folder that the AutoModel opens; also by a net of no folder."""
    label, entry = f"huggingface {name}", ENTRIES[name]
    oracle = saved(name, THEIRS, dtype, tie_word_embeddings=tied)
    net, params, tokenizer = load_pretrained(THEIRS)
    assert (tokenizer.vocab_size, tokenizer.end_id) == (VOCABULARY, 1)
    assert net.config == Oracle(name, tie_word_embeddings=tied).config.with_dtype(dtype)
    save_pretrained(OURS, net, params, tokenizer)
    save_pretrained("fresh", type(net)(net.config), params, tokenizer, architecture=entry.kind.__name__)
    if tied:
        require_same(OURS, THEIRS)
    # The installed version knows one value of some settings only, and no longer writes them.
    fresh, known = settings_of("fresh"), settings_of(THEIRS)
    kept = {
        key for key in fresh.keys() - entry.no_longer_written if not key.endswith(("_token_id", "dtype", "_version"))
    }
    assert {key: fresh[key] for key in kept} == {key: known[key] for key in kept}
    # What only ties use has other numbers.
    idle = () if tied else entry.unused_untied
    given, theirs = inputs_of(net.config), stored(THEIRS)
    for folder in ("ours", "fresh"):
        both = ({key: x for key, x in of.items() if key not in idle} for of in (stored(folder), theirs))
        record(label, bytes_lost(*both))
        if dtype == "float64":
            model = opened(oracle, folder)
            assert type(model) is entry.kind
            # Not to the bit: where an array lies in memory decides how it is multiplied.
            both = ({"logits": oracle.logits(*given, model=one)} for one in (model, oracle.model))
            record(label, compared("1 activations", *both))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types_are_kept_or_converted(dtype):
    oracle = saved("gpt2", THEIRS, dtype)
    net, params, tokenizer = load_pretrained(THEIRS)
    assert net.config.compute.parameter_dtype == {"float16": "float32"}.get(dtype, dtype)
    save_pretrained("kept", net, params, tokenizer)
    require_same(Path("kept"), THEIRS)
    converted = "bfloat16" if dtype == "float32" else "float32"
    net, params, tokenizer = load_pretrained(THEIRS, dtype=converted)
    save_pretrained("converted", net, params, tokenizer)
    theirs = opened(oracle, "converted")
    assert str(theirs.dtype) == f"torch.{converted}"
    wanted = oracle.model.to(theirs.dtype).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in theirs.state_dict().items())
    save_pretrained("float16", net, params, dtype="float16")
    assert {array.dtype.name for array in stored("float16").values()} == {"float16"}


def test_shards():
    oracle = saved("gpt2", THEIRS, shard="60KB")
    shards = list(THEIRS.glob("model-*.safetensors"))
    assert len(shards) > 2
    net, params, tokenizer = load_pretrained(THEIRS)
    save_pretrained(OURS, net, params, tokenizer, max_shard_size="40KB")
    assert len(list(OURS.glob("model-*.safetensors"))) > len(shards)
    require_same(OURS, THEIRS)
    opened(oracle, OURS)
    # In one file, the bytes are those that the library itself writes.
    save_pretrained("whole", net, params, tokenizer)
    save_file(stored(THEIRS), Path("library"), metadata={"format": "pt"})
    assert Path("whole/model.safetensors").read_bytes() == Path("library").read_bytes()


def greek(name):
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


@pytest.mark.parametrize(
    "name, older", [("gpt2", lambda name: name.removeprefix("transformer.")), ("bert masked", greek)]
)
def test_names_of_bare_models_and_of_old_norms_stay(name, older):
    """As the first checkpoints on the hub have them: GPT-2 without its first part, BERT with gamma and beta."""
    oracle, path = saved(name, THEIRS), THEIRS / "model.safetensors"
    weights = load_file(path)
    renamed = {older(key): array for key, array in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, path, metadata={"format": "pt"})
    net, params, tokenizer = load_pretrained(THEIRS)
    require_same_logits(net, params, oracle.logits(TOKENS))
    save_pretrained(OURS, net, params, tokenizer)
    require_same(OURS, THEIRS)


def test_special_ids_of_a_net_without_origin():
    oracle = saved("gpt2", THEIRS)
    net, params, tokenizer = load_pretrained(THEIRS)
    save_pretrained("fresh", type(net)(net.config), params, tokenizer)
    again = opened(oracle, "fresh")
    assert (again.config.eos_token_id, again.generation_config.eos_token_id) == (1, 1)
    assert PreTrainedTokenizerFast.from_pretrained("fresh").pad_token_id == 2


def test_a_bare_model_predicts_with_its_token_table():
    """As AutoModelForSeq2SeqLM makes of facebook/bart-base; it is saved as the class that it was."""
    oracle = saved("bart bare", THEIRS)
    net, params, _ = load_pretrained(THEIRS)
    model = opened(oracle, THEIRS, AutoModelForSeq2SeqLM)
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS), decoder_input_ids=torch.from_numpy(TOKENS + 5)).logits
    require_same_logits(net, params, expected)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_model_without_its_pooler(name):
    """config.json does not tell of it, the arrays do; there and back bit for bit, and transformers opens it."""
    entry = ENTRIES[name]
    theirs = entry.kind(entry.kind.config_class(**entry.settings), add_pooling_layer=False)
    theirs.save_pretrained(THEIRS)
    net, params, _ = load_pretrained(THEIRS)
    assert net.config.pooler == "none"
    assert "pooler" not in params
    save_pretrained(OURS, net, params, None)
    bytes_lost(stored(OURS), stored(THEIRS)).require()
    _, told = entry.kind.from_pretrained(OURS, add_pooling_layer=False, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


def test_names_of_classes_survive():
    """They change no number, so that they are no part of our config; a change of another setting leaves them be."""
    oracle = Oracle("bert texts", id2label={0: "no", 1: "maybe", 2: "yes"}, problem_type="multi_label_classification")
    oracle.model.save_pretrained(THEIRS)
    net, params, _ = load_pretrained(THEIRS)
    other = transformer(replace(net.config, dropout=replace(net.config.dropout, attention=0.3)))
    other.origin, theirs = net.origin, settings_of(THEIRS)
    more = {"attention_probs_dropout_prob": 0.3, "position_embedding_type": "absolute"}
    for name, of, expected in (("same", net, {}), ("changed", other, more)):
        save_pretrained(name, of, params, None)
        assert settings_of(name) == theirs | expected


@pytest.mark.parametrize("name", [deep("roberta tokens"), "distilbert texts"])
def test_a_net_of_our_own_is_written(name):
    """What only training uses is left out where the class does not have it: it changes nothing that is computed."""
    oracle, dropout = Oracle(name), DropoutConfig(residual=0.2, feedforward=0.3)
    config = replace(oracle.config, initializer="xavier_uniform", dropout=dropout)
    net = transformer(config.with_dtype("float64"))
    params = net.init(jax.random.key(0))
    save_pretrained(OURS, net, params, None)
    require_same_logits(net, params, oracle.logits(TOKENS, model=opened(oracle, OURS)))


SMALL = (
    "--model.d-model 16 --model.initializer normal --model.initializer-std 0.3 --model.compute.parameter-dtype float64 "
    "--model.compute.dtype float64 --data.tokenizer.kind characters --data.tokenizer.vocab-size None --steps 2 "
    "--batch-size 2 --training.evaluate-batches 1 --sample.count 1 --sample.max-new-tokens 4 --run run --export out"
)
LAYER = "--model.{0}.num-layers 1 --model.{0}.num-heads 2 --model.{0}.feedforward-width 24"


@pytest.mark.parametrize(
    "preset, stacks",
    [
        ("text", ["decoder"]),
        ("masked", ["encoder"]),
        ("shakespeare-char", ["decoder"]),
        ("pairs", ["encoder", "decoder"]),
        deep("python-docs", ["decoder"]),
        deep("dates", ["encoder", "decoder"]),
    ],
)
def test_a_run_is_exported(preset, stacks):
    """Where no class has the model of a preset, one has that which the message asks for."""
    lines = [f"{number} plus {chr(40 + number % 80)}\tis {2 * number}" for number in range(400)]
    Path("lines.tsv").write_text("\n".join(lines))
    layers = " ".join(LAYER.format(side) for side in stacks)
    data = "" if preset in ("dates", "python-docs") else "--data.path lines.tsv"
    command = f"{preset} {data} {SMALL} {layers}"
    if preset in ("shakespeare-char", "dates", "pairs"):
        with refused(r"no class of transformers can express this model; .* with --model") as told:
            train.main(command.split())
        assert [path.name for path in Path().iterdir()] == ["lines.tsv"]
        command += " " + str(told.value).split(" is trained with ")[1].split("; begin a run")[0]
    assert train.main(command.split()) == 0
    assert export.main(["run", "again", "--huggingface"]) == 0
    require_same(Path("again"), Path("out"), "config.json")
    [named] = settings_of("out")["architectures"]
    oracle = Oracle(next(name for name, entry in ENTRIES.items() if entry.kind.__name__ == named))
    trained = load_trained(RunFolder(Path("run")))
    theirs = oracle.logits(*inputs_of(trained.net.config), model=opened(oracle, "out"))
    require_same_logits(trained.net, trained.params, theirs)
