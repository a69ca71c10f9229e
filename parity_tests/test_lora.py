"""Low-rank adapters against those of PEFT: forward passes, folders both ways, training, and what must be refused."""

import copy
import re
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jax_tformer.config import DropoutConfig, LoraConfig
from jax_tformer.config.experiment import OptimizerConfig, TrainingConfig
from jax_tformer.files import read_json, write_json
from jax_tformer.functional import AnyTransformer, Params
from jax_tformer.hub.adapters import load_adapters, save_adapters
from jax_tformer.lora import add_lora, is_adapter, join_adapters, merge_lora, split_adapters
from parity.gates.measure import compared
from parity_tests.depth import deep
from parity_tests.faults import call_fault
from parity_tests.huggingface import Oracle, bytes_lost
from parity_tests.initialisation import gate
from parity_tests.pairs import random_pair
from parity_tests.test_decoding import model_of as decoding_model
from parity_tests.test_initialisation import drawn
from parity_tests.training_pair import TrainingPair, same_path
from tests.refusals import refused
from torch_ref import layers, training
from twin.cases import SWITCHES, Lengths, batch_for, weights_for
from twin.pair import identity

pytestmark = pytest.mark.usefixtures("own_folder")
ALL = LoraConfig(3, 6.0, ("all",))
SOME = LoraConfig(2, 3.0, ("query", "value", "down"), rank_stabilized=True)


class Model(NamedTuple):
    """A model of `transformers` with random weights, and ours with the same."""

    oracle: Oracle
    net: AnyTransformer
    params: Params

    @property
    def architecture(self):
        return str(self.oracle.json["architectures"][0])

    def adapted(self, lora):
        """Ours with random adapters."""
        rng = np.random.default_rng(1)
        net, params = add_lora(self.net, self.params, lora, jax.random.key(0))
        adapters, rest = split_adapters(params)
        return net, join_adapters(jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape)), adapters), rest)

    def opened(self, folder):
        """Theirs with the adapters of a folder; a key that is missing or unexpected there is an error."""
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model = copy.deepcopy(self.oracle.model)
            return peft.PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)

    def save(self, folder, net, params):
        save_adapters(folder, net, params, architecture=self.architecture)

    def load(self, folder):
        """Ours with the adapters of a folder."""
        return load_adapters(folder, self.net, self.params, architecture=self.architecture)

    def logits(self, net, params):
        return np.asarray(net.apply(params, *map(jnp.asarray, self.ids)))

    def their_logits(self, model):
        return self.oracle.logits(*self.ids, model=model)

    @property
    def ids(self):
        batch = self.oracle.batch("none", 1)
        return [batch[name].astype(np.int64) for name in ("source", "target", "tokens") if name in batch]


@cache
def model_of(name):
    oracle = Oracle(name)
    return Model(oracle, *decoding_model(oracle.config, oracle.load(oracle.random_weights(0.1, 0))))


def same_logits(model, ours, expected):
    return compared("1 activations", {"logits": model.logits(*ours)}, {"logits": expected})


CASES = {
    # One A of several projections there, and one each here: c_attn.
    "gpt2": "some all",
    "bart": "some all",
    # The end of one module's name is that of another's, too: output.dense.
    "bert masked": "some all",
    "distilbert masked": "some",
    # Queries, keys and values fused head by head.
    "gpt_neox": "some",
    "llama": "all",
    "t5": "all",
    # Those whose modules have names of their own.
    "opt": "all",
    "starcoder2": "all",
    "marian": "some",
    "roberta masked": "some",
    # Llama's descendants: biases, norms of queries and keys, windows, norms behind the branches.
    "qwen3": "all",
    "gemma2": "all",
    "gemma3": "some",
}
"""Models, and which adapters they get."""


@pytest.mark.parametrize(
    "name, adapters",
    [
        (name, adapters) if name == "gpt2" else deep(name, adapters)
        for name, given in CASES.items()
        for adapters in given.split()
    ],
)
def test_peft_computes_the_same(name, adapters, record):
    model, lora = model_of(name), {"all": ALL, "some": SOME}[adapters]
    net, params = model.adapted(lora)
    model.save("ours", net, params)
    theirs = model.opened("ours")
    expected = model.their_logits(theirs)
    record("LoRA", same_logits(model, (net, params), expected))
    record("LoRA", same_logits(model, merge_lora(net, params), expected))
    assert np.abs(expected - model.logits(model.net, model.params)).max() > 0.01

    again, more = model.load("ours")
    assert again.config.lora == lora
    bytes_lost(more, params).require()

    # What PEFT writes is laid out otherwise where modules are fused, and computes the same.
    theirs.save_pretrained("theirs")
    written = read_json(Path("theirs/adapter_config.json"))
    if not written["rank_pattern"]:
        other = model.load("theirs")
        record("LoRA", same_logits(model, other, expected))


@pytest.fixture
def folder(own_folder):
    """A folder that PEFT wrote, with adapters of c_attn and both c_proj."""
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["c_attn", "c_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(copy.deepcopy(model_of("gpt2").oracle.model), config, autocast_adapter_dtype=False)
    theirs.save_pretrained("theirs")
    return Path("theirs")


def test_a_folder_of_peft_comes_back_the_same(folder, record):
    model = model_of("gpt2")
    net, params = model.load(folder)
    assert net.config.lora == LoraConfig(3, 6.0, ("query", "key", "value", "output", "down"))
    record("LoRA", same_logits(model, (net, params), model.their_logits(model.opened(folder))))
    model.save("ours", net, params)
    bytes_lost(*(load_file(path / "adapter_model.safetensors") for path in (folder, Path("ours")))).require()


A = "c_attn.lora_A.weight"
STRANGE = "base_model.model.lm_head.lora_A.weight"


@pytest.mark.parametrize(
    "changes, damage, said",
    [
        ({"peft_type": "IA3"}, None, "has peft_type 'IA3'; expected 'LORA'"),
        ({"use_dora": True}, None, "has use_dora True, which our adapters cannot express"),
        ({"init_lora_weights": "pissa"}, None, "has init_lora_weights 'pissa', which changes the model"),
        ({"r": 0}, None, "has r 0; expected a number above 0"),
        ({"r": 4}, None, "has 3 rows, and adapter_config.json says rank 4"),
        ({"alpha_pattern": {"c_attn": 12}}, None, "its alphas are 6.0, 12.0; expected the same"),
        ({}, lambda arrays: arrays.pop(next(iter(arrays))), "1 modules with one of lora_A and lora_B alone ("),
        (
            {},
            lambda arrays: arrays.update({STRANGE: next(iter(arrays.values()))}),
            f"1 not for a projection of this model ({STRANGE})",
        ),
        (
            {},
            lambda arrays: arrays.update({name: x[:, :5].copy() for name, x in arrays.items() if name.endswith(A)}),
            ".lora_A is [3, 5], expected [3, 32]",
        ),
        (
            {},
            lambda arrays: [arrays.pop(name) for name in [*arrays] if ".h.0.mlp" in name],
            "it leaves out decoder.blocks.0.feedforward.down.lora.a.weight",
        ),
    ],
)
def test_every_damaged_or_strange_folder_is_refused_in_one_line(changes, damage, said, folder):
    config, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    write_json(config, read_json(config) | changes)
    if damage is not None:
        arrays = load_file(file)
        damage(arrays)
        save_file(arrays, file, metadata={"format": "pt"})
    with refused(re.escape(said)):
        model_of("gpt2").load(folder)


def test_a_folder_for_another_model_or_without_its_files(folder):
    with refused("does not hold adapters for this model: "):
        model_of("bart").load(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with refused(r"holds adapter_model\.bin .* safe_serialization=True"):
        model_of("gpt2").load(folder)
    (folder / "adapter_config.json").unlink()
    with refused(r"has no adapter_config\.json"):
        model_of("gpt2").load(folder)


def test_adapters_that_are_not_there_are_not_saved():
    model = model_of("gpt2")
    with refused("has no adapters to save"):
        model.save("ours", model.net, model.params)
    net, params = model.adapted(SOME)
    with refused("architecture is None, .* expected one of"):
        save_adapters("ours", net, params)
    assert not list(Path().iterdir())


ADAPTED = replace(
    SWITCHES["switches-decoder-only"],
    lora=LoraConfig(3, 5.0, ("all",), dropout=0.1),
    dropout=DropoutConfig(0.1, 0.1, 0.1, 0.1),
)


def four_steps(*optimizer):
    """(what trains, batches)."""
    pair = TrainingPair(ADAPTED, 0.1, OptimizerConfig(*optimizer, warmup_steps=2), TrainingConfig(steps=4))
    return pair, [batch_for(ADAPTED, "right", seed, Lengths(4)) for seed in range(4)]


def test_training_takes_the_same_path(record, report):
    """Gate 7, and the fault that the reference trains everything."""
    weights = weights_for(ADAPTED, 0.1)
    pair, batches = four_steps()
    ours, masks = pair.follow_jax(batches)
    record("LoRA", same_path("7 dropout", ADAPTED, ours, pair.follow_torch(batches, masks)))
    changed = {name for name in weights if ours.parameters[name].tobytes() != weights[name].tobytes()}
    assert changed == {name for name in weights if ".lora." in name}
    fault = call_fault("everything trains beside adapters", training, "freeze", lambda right, model: None)
    with fault.plant():
        theirs = pair.follow_torch(batches, masks)
    report(fault.name, "reference", [same_path("7 dropout", ADAPTED, ours, theirs)])


def test_muon_trains_adapters_which_are_matrices_alone():
    pair, batches = four_steps("muon")
    # PyTorch's computes in bfloat16.
    with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        ours, masks = pair.follow_jax(batches)
        same_path("7 dropout", ADAPTED, ours, pair.follow_torch(batches, masks)).require()


def test_faults_of_adapters(report):
    config = replace(ADAPTED, dropout=DropoutConfig(), lora=replace(ADAPTED.lora, dropout=0.0))
    batch, pair = batch_for(config, "right"), random_pair(config, 0.1)
    fault = call_fault("LoRA: no alpha / rank", layers.Adapter, "forward", lambda right, self, x: self.b(self.a(x)))
    with fault.plant():
        report(fault.name, "reference", list(identity(pair, batch)))


def test_adapters_start_as_pefts_do(record):
    """Gate 10."""
    found = {path: array for path, array in drawn(ADAPTED).items() if is_adapter(path)}
    record("LoRA", gate(ADAPTED, found))
