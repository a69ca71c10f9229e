"""Gate 9: weights go there and back bit for bit, and whatever does not fit is refused with both lists."""

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.functional import transformer
from jax_tformer.hub.names import (
    WeightsError,
    from_reference,
    load_weights,
    reference_shape,
    save_weights,
    slots,
    to_reference,
)
from parity.gates.bridge import from_torch
from parity_tests.huggingface import bytes_lost
from tests.refusals import refused
from torch_ref import reference
from twin.cases import CONFIGS

PAPER_MILLIONS = {"vaswani-base": 65, "vaswani-big": 213}


def noise(config):
    """Parameters in which no two numbers are alike in position and value."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), transformer(config).shapes)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(name, dtype, tmp_path, record):
    """Also through a file, which PyTorch reads: names, shapes and types are those of the reference's state dict."""
    config = CONFIGS[name].with_dtype(dtype)
    params = noise(config)
    record(name, bytes_lost(params, from_reference(to_reference(params), transformer(config).shapes)))
    save_weights(tmp_path / "w.safetensors", params, config)
    loaded, loaded_config = load_weights(tmp_path / "w.safetensors")
    assert loaded_config == config
    bytes_lost(params, loaded).require()
    model = reference(config)
    model.load_state_dict(load_file(tmp_path / "w.safetensors"), strict=True)
    back = {key: from_torch(tensor) for key, tensor in model.state_dict().items()}
    bytes_lost(params, from_reference(back, transformer(config).shapes)).require()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_full_size_shapes_agree(name):
    config = ARCHITECTURES[name]
    with torch.device("meta"):
        theirs = {key: tuple(value.shape) for key, value in reference(config).state_dict().items()}
    assert {key: reference_shape(slot) for key, slot in slots(transformer(config).shapes).items()} == theirs


@pytest.mark.parametrize("name", PAPER_MILLIONS)
def test_parameter_counts(name):
    """The paper rounds, and says neither which biases there are nor the exact vocabulary."""
    count = sum(leaf.size for leaf in jax.tree.leaves(transformer(ARCHITECTURES[name]).shapes))
    assert abs(count / 1e6 - PAPER_MILLIONS[name]) < 0.04 * PAPER_MILLIONS[name]


NAME = "decoder.blocks.1.self_attention.query.weight"


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda w: w | {"surplus": w.pop(NAME)}, rf"1 missing \({NAME}\).*1 unexpected \(surplus\)"),
        (lambda w: w | {NAME: w[NAME][:, :47]}, rf"{NAME} is \[48, 47\], expected \[48, 48\]"),
        (lambda w: w | {NAME: w[NAME].astype(np.float16)}, f"{NAME} is float16, expected float32"),
        (lambda w: [*w.items(), (NAME, w[NAME])], "1 given twice"),
    ],
    ids=["missing and unexpected", "misshaped", "mistyped", "doubled"],
)
def test_weights_that_do_not_fit(change, said):
    config = CONFIGS["gpt2"]
    with refused(said) as error:
        from_reference(change(to_reference(noise(config))), transformer(config).shapes)
    assert isinstance(error.value, WeightsError)


@pytest.mark.parametrize(
    "params, said",
    [
        ({"mystery": {"gamma": np.zeros(3)}}, "no rule"),
        ({"tokens": {"scale": np.zeros(3), "embedding": np.zeros((3, 3))}}, "would both be called"),
    ],
)
def test_leaves_without_a_name_of_their_own(params, said):
    with pytest.raises(WeightsError, match=said):
        to_reference(params)


def test_saving_other_weights_than_the_config_names(tmp_path):
    with pytest.raises(WeightsError, match="missing"):
        save_weights(tmp_path / "w.safetensors", noise(CONFIGS["gpt2"]), CONFIGS["bert-base"])
    assert not list(tmp_path.iterdir())


def test_files_that_are_not_ours(tmp_path):
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    save_file({"a": np.zeros(3)}, tmp_path / "foreign.safetensors")
    for name, said in (
        ("absent", "cannot read weights"),
        ("junk", "cannot read weights"),
        ("foreign", r"no jax_tformer\.config"),
    ):
        with refused(said):
            load_weights(tmp_path / f"{name}.safetensors")
