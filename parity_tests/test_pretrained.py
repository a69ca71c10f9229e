"""Folders that Hugging Face wrote open with `load_pretrained`, and those of `save_pretrained` open there."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from jax_tformer import InputError, load_pretrained, save_pretrained
from jax_tformer.cli import export, train
from jax_tformer.config import Dtype
from jax_tformer.hub.tensor_files import open_tensors
from jax_tformer.hub.views import read
from jax_tformer.runs.folder import RunFolder, load_trained
from parity.gates.pair import Tensors
from parity_tests.huggingface import Oracle
from parity_tests.oracles import ENTRIES
from twin.cases import VOCABULARY

NAMES = [
    name if name in ("gpt2", "bert masked", "bart") else pytest.param(name, marks=pytest.mark.deep) for name in ENTRIES
]
TOKENS = np.arange(2 * 7).reshape(2, 7) + 10
"""None of them means padding, of which RoBERTa makes no positions."""


def saved(name: str, folder: Path, dtype: str = "float64", shard: str = "5GB", **settings: Any) -> Oracle:
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


def stored(folder: Path) -> Tensors:
    with open_tensors(folder) as tensors:
        return {name: read(tensor) for name, tensor in tensors.items()}


def same(first: Path, second: Path, *settings: str) -> None:
    """Both folders hold the same arrays, bit for bit, and files that say the same."""
    ours, theirs = stored(first), stored(second)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].tobytes()) == (array.dtype, array.tobytes()), name
    names = {path.name for path in second.iterdir() if "safetensors" not in path.name}
    assert names == {path.name for path in first.iterdir() if "safetensors" not in path.name}
    wanted = settings or ("config.json", "chat_template.jinja")
    assert {"tokenizer.json", "tokenizer_config.json", *wanted} <= names
    for name in names - {"config.json"}:
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert json.loads((first / "config.json").read_text()) == json.loads((second / "config.json").read_text())


def opened(oracle: Oracle, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model that transformers makes of a folder, and which arrays it missed or did not expect."""
    with oracle.whole():
        model, told = type(oracle.model).from_pretrained(
            folder, dtype="auto", attn_implementation="eager", output_loading_info=True
        )
        oracle.entry.prepare(model)
    return model.eval(), told


def logits(oracle: Oracle, model: Any, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    more = {"decoder_input_ids": torch.from_numpy(inputs[1])} if len(inputs) == 2 else {}
    with torch.no_grad(), oracle.whole():
        output = model(torch.from_numpy(inputs[0]), **more)[0]
        return np.asarray(oracle.entry.to_logits(model, output))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name: str, tied: bool, tmp_path: Path) -> None:
    oracle = saved(name, tmp_path / "theirs", tie_word_embeddings=tied)
    net, params, tokenizer = load_pretrained(tmp_path / "theirs")
    assert tokenizer is not None
    assert (tokenizer.vocab_size, tokenizer.end_id) == (VOCABULARY, 1)
    inputs = (TOKENS, TOKENS + 5) if net.config.encoder and net.config.decoder else (TOKENS,)
    theirs = logits(oracle, oracle.model, inputs)
    np.testing.assert_allclose(net.apply(params, *map(jnp.asarray, inputs)), theirs, atol=1e-12, rtol=0)
    save_pretrained(tmp_path / "ours", net, params, tokenizer)
    if tied:
        same(tmp_path / "ours", tmp_path / "theirs")
    again, told = opened(oracle, tmp_path / "ours")
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    np.testing.assert_allclose(logits(oracle, again, inputs), theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types_are_kept_or_converted(dtype: Any, tmp_path: Path) -> None:
    oracle = saved("gpt2", tmp_path / "theirs", dtype)
    net, params, tokenizer = load_pretrained(tmp_path / "theirs")
    assert net.config.compute.parameter_dtype == {"float16": "float32"}.get(dtype, dtype)
    save_pretrained(tmp_path / "kept", net, params, tokenizer)
    same(tmp_path / "kept", tmp_path / "theirs")
    converted: Dtype = "bfloat16" if dtype == "float32" else "float32"
    net, params, tokenizer = load_pretrained(tmp_path / "theirs", dtype=converted)
    save_pretrained(tmp_path / "converted", net, params, tokenizer)
    theirs, _ = opened(oracle, tmp_path / "converted")
    assert str(theirs.dtype) == f"torch.{converted}"
    wanted = oracle.model.to(theirs.dtype).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in theirs.state_dict().items())
    save_pretrained(tmp_path / "float16", net, params, dtype="float16")
    assert {array.dtype.name for array in stored(tmp_path / "float16").values()} == {"float16"}


def test_shards(tmp_path: Path) -> None:
    oracle = saved("gpt2", tmp_path / "theirs", shard="60KB")
    shards = [path.name for path in (tmp_path / "theirs").glob("model-*.safetensors")]
    assert len(shards) > 2
    net, params, tokenizer = load_pretrained(tmp_path / "theirs")
    save_pretrained(tmp_path / "ours", net, params, tokenizer, max_shard_size="40KB")
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > len(shards)
    same(tmp_path / "ours", tmp_path / "theirs")
    _, told = opened(oracle, tmp_path / "ours")
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    # In one file, the bytes are those that the library itself writes.
    save_pretrained(tmp_path / "whole", net, params, tokenizer)
    save_file(stored(tmp_path / "theirs"), tmp_path / "library", metadata={"format": "pt"})
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "library").read_bytes()


def test_names_of_bare_models_and_of_old_norms_stay(tmp_path: Path) -> None:
    """As the first checkpoints on the hub have them: GPT-2 without its first part, BERT with gamma and beta."""
    for name, old in (("gpt2", _bare), ("bert masked", _greek)):
        oracle = saved(name, tmp_path / name)
        weights = load_file(tmp_path / name / "model.safetensors")
        renamed = {old(key): array for key, array in weights.items()}
        assert renamed.keys() != weights.keys()
        save_file(renamed, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        net, params, tokenizer = load_pretrained(tmp_path / name)
        theirs = logits(oracle, oracle.model, (TOKENS,))
        np.testing.assert_allclose(net.apply(params, jnp.asarray(TOKENS)), theirs, atol=1e-12, rtol=0)
        save_pretrained(tmp_path / f"{name} again", net, params, tokenizer)
        same(tmp_path / f"{name} again", tmp_path / name)


def _bare(name: str) -> str:
    return name.removeprefix("transformer.")


def _greek(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def test_a_net_without_origin_and_a_changed_one(tmp_path: Path) -> None:
    oracle = saved("gpt2", tmp_path / "theirs")
    net, params, tokenizer = load_pretrained(tmp_path / "theirs")
    fresh = type(net)(net.config)
    save_pretrained(tmp_path / "fresh", fresh, params, tokenizer)
    again, _ = opened(oracle, tmp_path / "fresh")
    np.testing.assert_allclose(
        logits(oracle, again, (TOKENS,)), logits(oracle, oracle.model, (TOKENS,)), atol=1e-12, rtol=0
    )
    assert (again.config.eos_token_id, again.generation_config.eos_token_id) == (1, 1)
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "fresh").pad_token_id == 2


SMALL = [
    *("--model.d-model", "16", "--model.initializer", "normal", "--model.initializer-std", "0.3"),
    *("--model.compute.parameter-dtype", "float64", "--model.compute.dtype", "float64"),
    *(
        "--data.tokenizer.kind",
        "characters",
        "--data.tokenizer.vocab-size",
        "None",
        "--steps",
        "2",
        "--batch-size",
        "2",
    ),
    *("--training.evaluate-batches", "1", "--sample.count", "1", "--sample.max-new-tokens", "4", "--run", "run"),
]
LAYER = ("--model.{}.num-layers", "1", "--model.{}.num-heads", "2", "--model.{}.feedforward-width", "24")


@pytest.mark.parametrize(
    "preset",
    [
        *("text", "masked", "shakespeare-char", "pairs"),
        *(pytest.param(name, marks=pytest.mark.deep) for name in ("python-docs", "dates")),
    ],
)
def test_a_run_is_exported(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no class has the model of a preset, one has that which the message asks for."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{number} plus {chr(40 + number % 80)}\tis {2 * number}" for number in range(400)]
    Path("lines.tsv").write_text("\n".join(lines))
    stacks = {"dates": ("encoder", "decoder"), "pairs": ("encoder", "decoder"), "masked": ("encoder",)}
    data = [] if preset in ("dates", "python-docs") else ["--data.path", "lines.tsv"]
    arguments = [preset, *data, *SMALL, "--export", "out"]
    arguments += [flag.format(side) for side in stacks.get(preset, ("decoder",)) for flag in LAYER]
    if preset in ("shakespeare-char", "dates", "pairs"):
        with pytest.raises(
            InputError, match=r"no class of transformers can express this model; .* with --model"
        ) as told:
            train.main(arguments)
        assert [path.name for path in tmp_path.iterdir()] == ["lines.tsv"]
        arguments += str(told.value).split(" is trained with ")[1].split("; begin a run")[0].split()
    assert train.main(arguments) == 0
    assert export.main(["run", "again", "--huggingface"]) == 0
    same(tmp_path / "again", tmp_path / "out", "config.json")
    named = json.loads(Path("out/config.json").read_text())["architectures"][0]
    oracle = Oracle(next(name for name, entry in ENTRIES.items() if entry.kind.__name__ == named))
    model, missed = opened(oracle, Path("out"))
    assert not missed["missing_keys"]
    trained = load_trained(RunFolder(Path("run")))
    inputs = (TOKENS, TOKENS + 5) if preset in ("dates", "pairs") else (TOKENS,)
    ours = trained.net.apply(trained.params, *map(jnp.asarray, inputs))
    np.testing.assert_allclose(ours, logits(oracle, model, inputs), atol=1e-12, rtol=0)
