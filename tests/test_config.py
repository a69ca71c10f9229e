"""Configs are checked when they are made, and go through JSON unchanged."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jax_tformer.config import DropoutConfig, RotaryConfig, StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import ExperimentConfig, TrainingConfig
from jax_tformer.config.presets import ARCHITECTURES, EXPERIMENTS
from jax_tformer.files import differences, from_dict, to_dict

ROOT = Path(__file__).parents[1]

BAD_STACKS = [
    ({"num_layers": 0}, "num_layers is 0"),
    ({"num_heads": -2}, "num_heads is -2"),
    ({"feedforward_width": 1.5}, "feedforward_width is 1.5"),
    ({"num_heads": True}, "num_heads is True"),
    ({"key_value_heads": 3}, "key/value heads divide"),
    ({"activation": "gelu"}, "'relu', 'gelu_erf', 'gelu_tanh', 'silu'"),
    ({"norm": "batchnorm"}, "'layernorm', 'rmsnorm'"),
    ({"norm": "rmsnorm"}, "RMSNorm has no bias"),
    ({"norm_placement": "middle"}, "'pre', 'post'"),
    ({"positions": "learned"}, "expected max_positions with learned positions"),
    ({"max_positions": 0}, "max_positions is 0"),
    ({"position_offset": 2}, "only learned positions have a table"),
    ({"position_offset": -1}, "position_offset is -1"),
    ({"attention_scale": 0}, "attention_scale is 0"),
    ({"attention_scale": "width"}, "expected one of 'head_width'"),
    ({"score_cap": 0.0}, "score_cap is 0.0"),
    ({"rotary": RotaryConfig(width=4)}, "expected rotary positions"),
    ({"positions": "rotary", "rotary": RotaryConfig(window_base=10.0)}, "expected a window"),
    ({"parallel": True}, "norm_placement is 'post'; expected 'pre'"),
    ({"window_layers": (True, False)}, "window is None"),
    ({"window": 4, "window_layers": (True, True)}, "expected True and False"),
    ({"window": 4, "window_layers": (False,) * 6 + (True,)}, "for at most 6 layers"),
    ({"norm_eps": 0.0}, "norm_eps is 0.0"),
    ({"position_base": float("inf")}, "position_base is inf"),
    ({"token_types": -1}, "token_types is -1"),
    ({"relative_buckets": 0}, "relative_buckets is 0"),
]
BAD_MODELS = [
    ({}, "neither encoder nor decoder"),
    ({"decoder": StackConfig(), "vocab_size": 0}, "vocab_size is 0"),
    ({"decoder": StackConfig(num_heads=7)}, "divisible by the number of heads"),
    ({"decoder": StackConfig(num_heads=1), "d_model": 7}, "even width"),
    ({"decoder": StackConfig(positions="rotary", head_width=5)}, "rotary positions need an even one"),
    (
        {"encoder": StackConfig(positions="relative", relative_buckets=5)},
        "relative_buckets is 5; expected at least 4, and an even number, in an encoder",
    ),
    (
        {"decoder": StackConfig(positions="relative", relative_buckets=1)},
        "relative_buckets is 1; expected at least 2",
    ),
    (
        {"decoder": StackConfig(positions="relative", relative_max_distance=16)},
        "relative_max_distance is 16; expected more than 16",
    ),
    ({"decoder": StackConfig(positions="rotary", rotary=RotaryConfig(width=66))}, "rotary.width is 66"),
    ({"decoder": StackConfig(positions="rotary", rotary=RotaryConfig(width=3))}, "expected an even number"),
    ({"encoder": StackConfig(), "decoder": StackConfig(norm_placement="pre", parallel=True)}, "cross-attention"),
    ({"decoder": StackConfig(), "logit_cap": -1.0}, "logit_cap is -1.0"),
    ({"decoder": StackConfig(), "shared_embedding": True}, "only one stack"),
    ({"decoder": StackConfig(), "head": "none", "tied_head": True}, "head is 'none'"),
    ({"encoder": StackConfig(), "head": "classify_tokens"}, "expected a number of classes"),
    ({"encoder": StackConfig(), "classes": 3}, "None otherwise"),
    ({"encoder": StackConfig(), "head": "classify_tokens", "classes": 0}, "classes is 0"),
    ({"decoder": StackConfig(), "head": "classify_tokens", "classes": 3}, "expected an encoder alone"),
    ({"decoder": StackConfig(), "head": "none", "pooler": "tanh"}, "expected an encoder alone"),
    ({"encoder": StackConfig(), "head": "classify_text", "classes": 3}, "expected a pooler with head 'classify_text'"),
    ({"encoder": StackConfig(), "head": "linear", "pooler": "relu"}, "none with other heads"),
    ({"encoder": StackConfig(), "head": "none", "pooler": "gelu"}, "'none', 'tanh', 'relu'"),
    (
        {"encoder": StackConfig(), "head": "classify_tokens", "classes": 3, "head_bias": True},
        "head is 'classify_tokens'",
    ),
    ({"encoder": StackConfig(), "dropout": DropoutConfig(classifier=0.1)}, "dropout.classifier is 0.1"),
    (
        {
            "encoder": StackConfig(),
            "head": "classify_tokens",
            "classes": 3,
            "dropout": DropoutConfig(pooler=0.1),
        },
        "expected 0 for a part that the model does not have",
    ),
    ({"decoder": StackConfig(), "initializer_std": float("nan")}, "initializer_std is nan"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_STACKS)
def test_bad_stacks(fields, message):
    with pytest.raises(InputError) as error:
        StackConfig(**fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 0}, "width is 0"),
        ({"scaling": "yarn"}, "expected one of 'none', 'linear', 'llama3'"),
        ({"factor": 2.0}, "factor is 2.0, and scaling is 'none'; expected 1.0"),
        ({"scaling": "linear", "factor": 2.0, "original_positions": 10}, "original_positions is 10, and scaling is"),
        ({"scaling": "llama3", "low_frequency_factor": 4.0}, "expected the first to be lower"),
        ({"window_base": 0.0}, "window_base is 0.0"),
    ],
)
def test_bad_rotary(fields, message):
    with pytest.raises(InputError) as error:
        RotaryConfig(**fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("fields", "message"), BAD_MODELS)
def test_bad_models(fields, message):
    with pytest.raises(InputError) as error:
        TransformerConfig(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("head", ["none", "classify_tokens"])
def test_training_needs_a_head_that_predicts_tokens(head):
    config = EXPERIMENTS["masked-docs"].config
    classes = None if head == "none" else 3
    model = dataclasses.replace(config.model, head=head, classes=classes, tied_head=False, head_bias=False)
    with pytest.raises(InputError, match=f"head is '{head}'; training needs"):
        dataclasses.replace(config, model=model)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_go_through_json(name):
    config = ARCHITECTURES[name]
    assert from_dict(TransformerConfig, json.loads(json.dumps(to_dict(config))), where="here") == config


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_go_through_json(name):
    config = EXPERIMENTS[name].config
    back = from_dict(ExperimentConfig, json.loads(json.dumps(to_dict(config))), where="here")
    assert back == config
    assert type(back.data) is type(config.data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["training"].update(stepz=3), "stepz"),
        (lambda d: d["training"].update(steps="many"), "steps"),
        (lambda d: d.pop("model"), "model"),
        (lambda d: d["training"].update(steps=-1), "steps is -1"),
    ],
)
def test_damaged_json_is_refused_in_one_line(change, message):
    values = to_dict(EXPERIMENTS["dates"].config)
    change(values)
    with pytest.raises(InputError) as error:
        from_dict(ExperimentConfig, values, where="config.json")
    assert message in str(error.value)
    assert str(error.value).startswith("config.json is not a valid ExperimentConfig")
    assert "\n" not in str(error.value)


def test_differences_name_the_fields():
    old = EXPERIMENTS["dates"].config
    new = dataclasses.replace(old, training=TrainingConfig(steps=7))
    lines = differences(to_dict(old), to_dict(new))
    assert "training.steps: 1500 -> 7" in lines
    assert all(line.startswith("training.") for line in lines)
    assert not differences(to_dict(old), to_dict(old))


@pytest.mark.parametrize(
    "statement",
    [
        "import jax_tformer.config, jax_tformer.config.experiment, jax_tformer.config.presets",
        "import jax_tformer; jax_tformer.TransformerConfig",
        "import jax_tformer.terminal",
        "import train, generate",
    ],
)
def test_reading_a_config_imports_no_framework(statement):
    check = (
        f"{statement}; import sys; print([m for m in ('jax', 'flax', 'torch', 'grain', 'orbax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_library_never_imports_torch_nor_the_reference_jax():
    """Of the reference, torch_ref, only the config of ours may be known; of torch, ours knows nothing."""
    for folder, forbidden in (("jax_tformer", ("torch",)), ("torch_ref", ("jax", "flax", "optax"))):
        for path in (ROOT / folder).rglob("*.py"):
            for line in path.read_text().splitlines():
                words = line.split()
                if words[:1] in (["import"], ["from"]):
                    assert words[1].split(".")[0] not in forbidden, f"{path.name}: {line}"
                if folder == "torch_ref" and words[:1] == ["from"] and words[1].startswith("jax_tformer"):
                    assert words[1] in ("jax_tformer.config", "jax_tformer.config.experiment"), f"{path.name}: {line}"
