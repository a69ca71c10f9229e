"""Configs are checked when they are made, and go through JSON unchanged."""

import dataclasses
import json
import math
import re
from dataclasses import asdict
from functools import partial

import pytest

from jax_tformer import (
    ARCHITECTURES,
    EXPERIMENTS,
    DecodingConfig,
    DropoutConfig,
    LoraConfig,
    StackConfig,
    TransformerConfig,
)
from jax_tformer.config import RotaryConfig
from jax_tformer.config.experiment import ExperimentConfig, OptimizerConfig, RatesConfig
from jax_tformer.files import from_dict
from tests.refusals import refused
from tests.several_processes import run_alone

ENCODER, DECODER = {"encoder": StackConfig()}, {"decoder": StackConfig()}
RELATIVE, ROTARY = {"positions": "relative"}, {"positions": "rotary"}
TAGGER = ENCODER | {"head": "classify_tokens", "classes": 3}
OUT_OF_BOUNDS = {
    StackConfig: {
        "num_layers": 0,
        "feedforward_width": 1.5,
        "num_heads": True,
        "activation": "gelu",
        "norm": "batchnorm",
        "norm_placement": "middle",
        "max_positions": 0,
        "position_offset": -1,
        "position_base": math.inf,
        "attention_scale": "width",
        "score_cap": 0.0,
        "norm_eps": 0.0,
        "token_types": -1,
        "relative_buckets": 0,
    },
    RotaryConfig: {"width": 0, "scaling": "yarn", "window_base": 0.0},
    LoraConfig: {"rank": 0, "alpha": math.inf, "dropout": 1.0, "targets": ("query", "query")},
    partial(TransformerConfig, **TAGGER): {
        "vocab_size": 0,
        "logit_cap": -1.0,
        "pooler": "gelu",
        "classes": 0,
        "initializer_std": math.nan,
    },
    partial(DecodingConfig, temperature=1.0): {
        "top_p": 1.5,
        "min_p": -0.1,
        "no_repeat_ngram_size": -1,
        "encoder_no_repeat_ngram_size": -1,
        "begin_suppress_tokens": (3, -1),
        "bad_words_ids": ((1, -2),),
        "early_stopping": "ever",
    },
    RatesConfig: {"matrices": -1.0},
}
CONTRADICTIONS = {
    StackConfig: [
        ({"key_value_heads": 3}, "key/value heads divide"),
        ({"norm": "rmsnorm"}, "RMSNorm has no bias"),
        ({"positions": "learned"}, "expected max_positions with learned positions"),
        ({"position_offset": 2}, "only learned positions have a table"),
        ({"rotary": RotaryConfig(width=4)}, "expected rotary positions"),
        (ROTARY | {"rotary": RotaryConfig(window_base=10.0)}, "expected a window"),
        ({"parallel": True}, "norm_placement is 'post'; expected 'pre'"),
        ({"window_layers": (True, False)}, "window is None"),
        ({"window": 4, "window_layers": (True, True)}, "expected True and False"),
        ({"window": 4, "window_layers": (False,) * 6 + (True,)}, "for at most 6 layers"),
    ],
    RotaryConfig: [
        ({"factor": 2.0}, "factor is 2.0, and scaling is 'none'; expected 1.0"),
        ({"scaling": "linear", "factor": 2.0, "original_positions": 10}, "original_positions is 10, and scaling is"),
        ({"scaling": "llama3", "low_frequency_factor": 4.0}, "expected the first to be lower"),
    ],
    OptimizerConfig: [
        *(({"learning_rate": rate}, f"learning_rate is {rate}") for rate in (math.nan, math.inf, 0.0, -1.0)),
        ({"momentum": 0.5}, "expected muon or sgd, which have one"),
    ],
    DecodingConfig: [
        ({"suppress_tokens": (3,), "forced_eos_token_id": 3}, "forced_eos_token_id is 3, which suppress_tokens forbid"),
        ({"suppress_tokens": (3, 4), "forced_bos_token_id": 4}, "forced_bos_token_id is 4, which suppress_tokens"),
    ],
    LoraConfig: [
        ({"targets": ("c_attn",)}, "targets is ('c_attn',); expected all, or some of query, key, value, output, gate"),
        ({"targets": ()}, "targets is (); expected all, or some"),
    ],
    TransformerConfig: [
        ({}, "neither encoder nor decoder"),
        ({"decoder": StackConfig(num_heads=7)}, "divisible by the number of heads"),
        ({"decoder": StackConfig(num_heads=1), "d_model": 7}, "even width"),
        ({"decoder": StackConfig(**ROTARY, head_width=5)}, "rotary positions need an even one"),
        ({"encoder": StackConfig(**RELATIVE, relative_buckets=5)}, "expected at least 4, and an even number"),
        ({"decoder": StackConfig(**RELATIVE, relative_buckets=1)}, "relative_buckets is 1; expected at least 2"),
        ({"decoder": StackConfig(**RELATIVE, relative_max_distance=16)}, "is 16; expected more than 16"),
        ({"decoder": StackConfig(**ROTARY, rotary=RotaryConfig(width=66))}, "rotary.width is 66"),
        ({"decoder": StackConfig(**ROTARY, rotary=RotaryConfig(width=3))}, "expected an even number"),
        (ENCODER | {"decoder": StackConfig(norm_placement="pre", parallel=True)}, "cross-attention"),
        (DECODER | {"shared_embedding": True}, "only one stack"),
        (DECODER | {"head": "none", "tied_head": True}, "head is 'none'"),
        (TAGGER | {"classes": None}, "expected a number of classes"),
        (ENCODER | {"classes": 3}, "None otherwise"),
        (TAGGER | DECODER, "expected an encoder alone"),
        (DECODER | {"head": "none", "pooler": "tanh"}, "expected an encoder alone"),
        (TAGGER | {"head": "classify_text"}, "expected a pooler with head 'classify_text'"),
        (ENCODER | {"pooler": "relu"}, "none with other heads"),
        (TAGGER | {"head_bias": True}, "head is 'classify_tokens'"),
        (ENCODER | {"dropout": DropoutConfig(classifier=0.1)}, "dropout.classifier is 0.1"),
        (TAGGER | {"dropout": DropoutConfig(pooler=0.1)}, "expected 0 for a part that the model does not have"),
        (DECODER | {"lora": LoraConfig(rank=513)}, "lora.rank is 513, and query has a matrix of 512 x 512; expected"),
        (DECODER | {"lora": LoraConfig(targets=("gate",))}, "no stack is gated; expected other targets, or all"),
    ],
}


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        *(
            (kind, {name: x}, f"{name} is {x!r}; expect")
            for kind, row in OUT_OF_BOUNDS.items()
            for name, x in row.items()
        ),
        *((kind, *row) for kind, rows in CONTRADICTIONS.items() for row in rows),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(kind, fields, message):
    with refused(re.escape(message)):
        kind(**fields)


@pytest.mark.parametrize("head", ["none", "classify_tokens"])
def test_training_needs_a_head_that_predicts_tokens(head):
    config = EXPERIMENTS["masked-docs"].config
    classes = None if head == "none" else 3
    model = dataclasses.replace(config.model, head=head, classes=classes, tied_head=False, head_bias=False)
    with refused(f"head is '{head}'; training needs"):
        dataclasses.replace(config, model=model)


CONFIGS = ARCHITECTURES | {name: experiment.config for name, experiment in EXPERIMENTS.items()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_presets_go_through_json(config):
    back = from_dict(type(config), json.loads(json.dumps(asdict(config))), where="here")
    assert back == config
    assert type(getattr(back, "data", None)) is type(getattr(config, "data", None))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d["training"].update(stepz=3), "stepz"),
        (lambda d: d["training"].update(steps="many"), "steps"),
        (lambda d: d.pop("model"), "model"),
        (lambda d: d["training"].update(steps=-1), "steps is -1"),
    ],
)
def test_damaged_json_is_refused_in_one_line(change, message):
    values = asdict(EXPERIMENTS["dates"].config)
    change(values)
    with refused(f"^config.json is not a valid ExperimentConfig.*{message}"):
        from_dict(ExperimentConfig, values, where="config.json")


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
    frameworks = "{'jax', 'flax', 'torch', 'grain', 'orbax'}"
    output, _ = run_alone(["-c", f"{statement}; import sys; print({frameworks} & set(sys.modules))"])
    assert output == "set()\n"
