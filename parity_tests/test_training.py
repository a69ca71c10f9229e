"""Gates 5, 6 and 7: the optimizer, long trajectories, and training with dropout on."""

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch

from jax_tformer.config import DropoutConfig, LoraConfig
from jax_tformer.config.experiment import LossConfig, OptimizerConfig, RatesConfig, TrainingConfig
from jax_tformer.functional import transformer
from jax_tformer.hub.names import slots
from jax_tformer.model.parameters import kind_of as our_kind
from parity.gates.measure import compared, trajectory
from parity_tests.depth import deep
from parity_tests.pairs import random_pair
from parity_tests.training_pair import TrainingPair, same_path
from torch_ref import reference
from torch_ref.layers import Dropout, inject
from torch_ref.training import kind_of as their_kind
from twin.cases import CONFIGS, PADDINGS, REGIMES, Lengths, batch_for, weights_for
from twin.pair import known_zeros

LIKE_OTHERS = ("article-encoder-decoder", "lecture-seq2seq", "vaswani-big")
"""Their steps are those of vaswani-base and switches-encoder-decoder, so that fewer of them will do in every run."""
TRAINABLE = {name: config for name, config in CONFIGS.items() if config.predicts_tokens}
"""Without a head there is nothing to train against."""
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=10, clip_norm=0.5, weight_decay=0.1)
TRAINING = TrainingConfig(steps=50, batch_size=4, accumulation=2, loss=LossConfig(label_smoothing=0.1, z_loss=1e-2))
DROPOUT = DropoutConfig(embedding=0.1, attention=0.2, residual=0.15, feedforward=0.25, final=0.3)


def batches(config, steps):
    """One batch a step, of four that take turns: rows of even number, padded on the right or on the left."""
    kept = [batch_for(config, ("right", "left")[seed % 2], seed, Lengths(batch=4)) for seed in range(4)]
    return [kept[step % 4] for step in range(steps)]


def without_dropout(name):
    return replace(TRAINABLE[name], dropout=DropoutConfig())


def map_stacks(config, **fields):
    return replace(config, **{side: replace(stack, **fields) for side, stack in config.stacks.items()})


@pytest.mark.parametrize("name", TRAINABLE)
def test_gate_5_optimizer(name, record):
    """50 steps of AdamW with warm-up, cosine, clipping, decay mask, accumulation and label smoothing."""
    config = without_dropout(name)
    pair = TrainingPair(config, 0.02, OPTIMIZER, TRAINING)
    steps = batches(config, TRAINING.steps)
    for std in REGIMES.values():
        pair.weights = weights_for(config, std)
        ours, figure = pair.follow("5 optimizer", steps)
        assert (ours.gradient_norms > 0.5).sum() > 10, "the clip must fire"
        record(name, figure)


RATES = RatesConfig(matrices=0.5, tables=2.0, head=0.7, vectors=0.3)
OTHERS = [
    {"name": name, "schedule": schedule}
    for name, schedule in product(("lion", "adafactor", "muon", "sgd"), ("warmup_stable_decay", "linear"))
]


@pytest.mark.parametrize(
    "model, settings",
    [
        *product(("gpt2", "switches-encoder-decoder"), OTHERS),
        deep("post-decoder-only", {"schedule": "inverse_sqrt", "clip_norm": None}),
        deep("post-decoder-only", {"schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0}),
        deep("post-decoder-only", {"beta1": 0.0, "eps": 1e-3}),
    ],
    ids=str,
)
def test_gate_5_other_optimizers_and_settings(model, settings, record):
    """All in float64, where PyTorch's Muon has bfloat16. A key bias, whose gradient is nothing but rounding errors,
    would move by their signs, so there is none."""
    config = map_stacks(without_dropout(model), key_bias=False)
    optimizer = replace(OPTIMIZER, rates=RATES, **settings)
    pair = TrainingPair(config, 0.2, optimizer, TrainingConfig(steps=50, batch_size=4))
    with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        record(settings.get("name", model), pair.follow("5 optimizer", batches(config, 50))[1])


def test_gate_5_a_batch_without_labels():
    """The moments decay, the weights move on by momentum, and nothing becomes NaN."""
    config = without_dropout("post-decoder-only")
    steps = batches(config, 3)
    steps[1] = steps[1] | {"labels": np.full_like(steps[1]["labels"], -100)}
    pair = TrainingPair(config, 0.02, OPTIMIZER, TrainingConfig(steps=3))
    ours, figure = pair.follow("5 optimizer", steps)
    assert ours.losses[1] == ours.gradient_norms[1] == 0
    figure.require()


@pytest.mark.parametrize("length", [100, deep(300)])
@pytest.mark.parametrize("name", [deep(name) if name in LIKE_OTHERS else name for name in TRAINABLE])
def test_gate_6_trajectory(name, length, record):
    """100 steps, or 300: in float64 the same to 1e-12, parameters too; in float32 as near to that as PyTorch stays.

    float32 follows three paths: on one alone, either side may be thrown off by a ReLU that rounding pushes over its
    kink. The learning rate is small enough for a difference not to grow by itself. One layer a stack: what layers do
    to each other, gates 1 to 5 have seen.
    """
    config, training = map_stacks(without_dropout(name), num_layers=1), TrainingConfig(steps=length, batch_size=4)
    steps, optimizer = batches(config, training.steps), replace(OPTIMIZER, learning_rate=3e-4)
    exact = TrainingPair(config, 0.02, optimizer, training)
    single = TrainingPair(config, 0.02, optimizer, training, "float32", optimised=True)
    losses = []
    for seed in range(3):
        for pair in (exact, single):
            pair.weights = weights_for(config, 0.02, seed)
        truth = exact.follow_jax(steps)[0]
        if seed == 0:
            record(name, same_path("6 trajectory, float64", config, truth, exact.follow_torch(steps, [])))
        learned = 1 - truth.losses[-4:].mean() / truth.losses[:4].mean()
        assert learned > 0.02 * length / 300, "it must have learned something"
        losses.append((single.follow_jax(steps)[0].losses, single.follow_torch(steps, []).losses, truth.losses))
    record(name, trajectory("6 trajectory / allowed", *map(np.stack, zip(*losses, strict=True))))


@pytest.mark.parametrize("name", ["vaswani-base", "gpt2", deep("bert-base"), deep("switches-encoder-decoder")])
def test_gate_7_dropout(name, record):
    """All rates on; PyTorch drops what JAX dropped: gates 1, 2 and 5 hold as they do without."""
    config = replace(TRAINABLE[name], dropout=DROPOUT)
    models = random_pair(config, 0.02, dropout_seed=7)
    for padding, std in product(PADDINGS, REGIMES.values()):
        models.load(weights_for(config, std))
        batch = batch_for(config, padding)
        ours, theirs = models.run_jax(batch), models.run_torch(batch)
        record(name, compared("7 dropout", ours.outputs, theirs.outputs))
        zeros = known_zeros(config, theirs.gradients)
        record(name, compared("7 dropout", ours.gradients, theirs.gradients, zero=zeros))

    pair = TrainingPair(config, 0.02, OPTIMIZER, replace(TRAINING, steps=20))
    steps = batches(config, 20)
    path, masks = pair.follow_jax(steps)
    record(name, same_path("7 dropout", config, path, pair.follow_torch(steps, masks)))

    # That they are drawn as the config says, and anew for every step and part, is gate 10 (test_draws.py).
    sites = {site for site, module in reference(config).named_modules() if isinstance(module, Dropout)}
    assert masks[0][0].keys() == sites, "every site has a mask"


def test_masks_that_do_not_fit_are_refused_with_both_lists():
    model = reference(replace(TRAINABLE["post-decoder-only"], dropout=DROPOUT))
    lists = r"without a mask .*'decoder\.blocks\.1\.feedforward\.dropout'.*without a site .*'surplus'"
    with pytest.raises(ValueError, match=lists):
        inject(model, {"surplus": torch.ones(1, dtype=torch.bool)})


CLASSIFIER = replace(CONFIGS["bert-base"], head="classify_tokens", classes=3, tied_head=False, head_bias=False)


@pytest.mark.parametrize("config", [*CONFIGS.values(), CLASSIFIER], ids=[*CONFIGS, "a classifier"])
def test_both_sides_call_parameters_of_one_kind(config):
    config = replace(config, lora=LoraConfig(rank=2, targets=("all",)))
    model, held = reference(config), slots(transformer(config).shapes)
    kinds = {name: our_kind(slot.path) for name, slot in held.items()}
    assert kinds == {name: their_kind(model, parameter) for name, parameter in model.named_parameters()}
