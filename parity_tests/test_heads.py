"""Poolers and classification heads: gates 1, 2, 7 and 10, and faults of theirs."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.functional import transformer
from parity_tests.depth import deep
from parity_tests.faults import call_fault
from parity_tests.initialisation import gate as start_gate
from parity_tests.pairs import random_pair
from parity_tests.test_draws import CLASSIFYING
from parity_tests.test_draws import drawn as drawn_masks
from parity_tests.test_draws import gate as draws_gate
from parity_tests.test_initialisation import drawn
from torch_ref import heads
from twin.cases import PADDINGS, VOCABULARY, batch_for

STACK = StackConfig(num_layers=2, num_heads=4, feedforward_width=48, activation="gelu_erf", token_types=2)
HEADLESS = TransformerConfig(vocab_size=VOCABULARY, d_model=32, encoder=STACK, head="none")
CONFIGS = {
    "pooled": replace(HEADLESS, pooler="tanh"),
    "text classified": replace(HEADLESS, head="classify_text", pooler="relu", classes=3),
    "text classified, with dropout": replace(
        HEADLESS, head="classify_text", pooler="tanh", classes=3, dropout=CLASSIFYING
    ),
    "tokens classified": replace(HEADLESS, head="classify_tokens", classes=5),
}


@cache
def pair(name):
    config = CONFIGS[name]
    seed = 0 if config.dropout.drops else None
    return random_pair(config, dropout_seed=seed)


@pytest.mark.parametrize(
    "name",
    # The oracles have the others: BERT without a head, and of tokens.
    [name if "text" in name else deep(name) for name in CONFIGS],
)
def test_gates_1_and_2(name, hold):
    for padding in PADDINGS:
        hold(name, pair(name), batch_for(CONFIGS[name], padding))


POOLER = (heads.Pooler, "forward")
FAULTS = {
    "text classified": (
        call_fault("pooler takes the last position", *POOLER, lambda right, self, x: right(self, x.flip(1))),
        call_fault("pooler takes the mean", *POOLER, lambda right, self, x: right(self, x.mean(1, keepdim=True))),
        call_fault("pooler: tanh instead of relu", torch.nn.ReLU, "forward", lambda right, self, x: x.tanh()),
        call_fault(
            "classifier without its bias",
            heads.Classifier,
            "forward",
            lambda right, self, x: right(self, x) - self.bias,
        ),
    ),
    "text classified, with dropout": (
        call_fault(
            "pooler drops after its dense layer",
            *POOLER,
            lambda right, self, x: self.activation(self.dropout(self.dense(x[:, 0]))),
        ),
    ),
}
"""Gates 1 and 2, in test_faults.py."""


def test_their_parameters_start_as_the_config_says(record):
    for start in ("normal", "xavier_uniform"):
        config = replace(CONFIGS["text classified"], initializer=start, encoder=replace(STACK, num_layers=1))
        record("text classified", start_gate(config, drawn(config)))


def test_their_masks_are_drawn_independently(record):
    masks = drawn_masks(CONFIGS["text classified, with dropout"])
    assert {"pooler.dropout", "classifier.dropout"} <= masks.keys()
    record("text classified", draws_gate(masks))


def test_the_number_of_classes_is_shown():
    assert "3 classes" in repr(transformer(CONFIGS["text classified"]))
