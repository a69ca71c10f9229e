"""Where the faults of training are: those that the loss, or one step of the optimizer, can show."""

from functools import cache, partial

import jax.numpy as jnp
from torch import nn

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.config.experiment import LossConfig, OptimizerConfig
from jax_tformer.training import optimizer as our_optimizer
from jax_tformer.training.step import batch_loss
from parity.differ.first_difference import difference_of
from parity.gates.bridge import Bridge
from parity_tests.faults import TRAINING
from parity_tests.known_places import OwnFault
from parity_tests.library_faults import COARSE_MOMENT, LIBRARY_TRAINING
from parity_tests.pairs import random_pair
from torch_ref import training
from twin.cases import VOCABULARY, batch_for

_STACK = StackConfig(num_layers=1, num_heads=2, feedforward_width=12, positions="sinusoidal_interleaved")
_CONFIG = TransformerConfig(vocab_size=VOCABULARY, d_model=8, decoder=_STACK)
_OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=10, clip_norm=0.05, weight_decay=0.1)
_STEPS, _LOSS = 50, LossConfig(label_smoothing=0.1)


class _Trainer:
    """What stands for an optimizer of PyTorch: clips, sets the rate and steps, as `torch_ref.training.Trainer` does."""

    def __init__(self, parameters):
        self._parameters = list(parameters)
        self._optimizer = training.adamw(nn.ParameterList(self._parameters), _OPTIMIZER)
        self.param_groups = self._optimizer.param_groups

    def step(self):
        """The first update of a training."""
        training.clip_grad_norm_(self._parameters, _OPTIMIZER.clip_norm)
        for group in self.param_groups:
            group["lr"] = training.learning_rate(_OPTIMIZER, 0, _STEPS)
        self._optimizer.step()


@cache
def _pair():
    return random_pair(_CONFIG)


def _trained():
    """The model with the loss that is trained: smoothed, and over the labels that count."""
    pair = _pair()

    def ours(params, batch):
        total, count = batch_loss(pair.net, params, batch, _LOSS)
        loss = total / jnp.maximum(count, 1)
        return loss, {"loss": loss}

    def theirs(model, batch):
        logits = training.apply_to_batch(model, batch).logits
        total = training.summed_loss(logits, batch["labels"], _LOSS)
        loss = total / training.counted(batch["labels"]).clamp(min=1)
        return loss, {"loss": loss}

    bridge = Bridge(ours, theirs, pair.module, into=pair.into, back=pair.back, dtype="float64", holds=pair.holds)
    bridge.params = pair.params
    return bridge


def difference_of_training(name):
    """Of the loss forward and backward, and of the first update, as they are now."""
    both = our_optimizer.optimizer(_OPTIMIZER, _STEPS), _Trainer
    return difference_of(_trained(), batch_for(_CONFIG, "right"), optimizer=both, name=name)


_ADAM, _DECAY, _RATE = "transform.py", "_adding.py", "scale_by_learning_rate scale_by_schedule"
_PLACES = {
    "AdamW: eps inside the root": (_ADAM, "faults.py", ""),
    "L2 in the gradient instead of decoupled decay": (_DECAY, "step", ""),
    "decay of biases and norms too": (_DECAY, "step", "another decay"),
    "schedule off by one": (_RATE, "step", "ours is 0.5 times theirs: another learning rate"),
    "clip: norm + 0 instead of norm + 1e-6": ("clip_by_global_norm.<locals>.clip", "faults.py", ""),
    "label smoothing eps / (V - 1)": ("linear_loss.py", "faults.py", "", "forward"),
    "loss over all tokens, not those that count": ("training_places.py", "training_places.py", "", "forward"),
    "learning rate rounded to float32": (f"{_RATE} library_faults.py", "step", "another learning rate"),
    "optax's default weight decay": (_DECAY, "step", "another decay"),
}
"""What may be named in ours and in theirs, files and functions; the kind; the stage, if it is not the optimizer's."""
_FIRST_STEP = "the first step divides each moment by 1 - beta, which leaves the gradient, whatever beta is"
_NO_CAP = "the model of these places caps no logits"
UNSEEN = {
    COARSE_MOMENT.name: "optax rounds the moment that it keeps, and takes the first step with the exact one",
    "optax's default beta1": _FIRST_STEP,
    "optax's default beta2": _FIRST_STEP,
    "optax's default eps": "the optimizer of these places has optax's default",
    "padding among the tokens that were read": "the number of tokens is reported, and trains nothing",
    "logits not capped in the training loss": _NO_CAP,
    "logits capped without the cap's derivative": _NO_CAP,
}
"""Faults of training that the first step of this model cannot show, and why."""


def _ask(fault):
    with fault.plant():
        return difference_of_training(fault.name)


TRAINED = [
    OwnFault(fault.name, "our training", planted, partial(_ask, fault), *(*_PLACES[fault.name], "optimizer")[:4])
    for planted, given in (("theirs", TRAINING), ("ours", (*LIBRARY_TRAINING, COARSE_MOMENT)))
    for fault in given
    if fault.name not in UNSEEN
]
