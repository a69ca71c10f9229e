"""Where the faults that the suite plants are: those that one pass of a model, or one step of training, can see."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import jax.numpy as jnp
from torch import nn

from jax_tformer.config import DropoutConfig, StackConfig, TransformerConfig
from jax_tformer.config.experiment import LossConfig, OptimizerConfig
from jax_tformer.training import optimizer as our_optimizer
from jax_tformer.training.step import batch_loss
from parity import Difference
from parity.differ.first_difference import difference_of
from parity.gates.bridge import Bridge
from parity_tests import faults, library_faults, mask_faults, quiet_faults, random_faults
from parity_tests.pairs import random_pair
from parity_tests.small_configs import MASKED, TWO_STACKS, of_one_length
from torch_ref import training
from twin.cases import CONFIGS, VOCABULARY, Lengths, batch_for


class OwnFault(NamedTuple):
    """A fault of the suite, and the places that may be named for it, with blanks between them."""

    name: str
    pair: str
    """"our " with one of MODELS, or "our training"."""
    planted: str
    ask: Callable[[], Difference]
    """Asks where the two sides part while the fault is planted."""
    ours: str
    """Functions of the library, and the file of the fault where it is planted there."""
    theirs: str
    """Modules, functions, parameters; and the file of the fault."""
    kinds: str = ""
    """What may be said of its kind: pieces with " | " between them; else nothing may be said."""
    stage: str = ""
    """In which it has to show, where that is asked."""


_DROPS = replace(TWO_STACKS, dropout=DropoutConfig(0.1, 0.1, 0.1, 0.1))
_GROUPED = replace(CONFIGS["switches-decoder-only"], tied_head=True)
MODELS = {
    "two stacks": (TWO_STACKS, of_one_length),
    **MASKED,
    "long": (_GROUPED, lambda: batch_for(_GROUPED, "none", lengths=Lengths(batch=2, source=150))),
    "grouped heads": (_GROUPED, lambda: batch_for(_GROUPED, "none")),
    "dropout": (_DROPS, lambda: batch_for(_DROPS, "none")),
}


@cache
def model(name):
    """The pair without a fault, and its batch."""
    config, batch = MODELS[name]
    seed = 0 if name == "dropout" else None
    return random_pair(config, dropout_seed=seed), batch()


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


def _trained():
    """The model with the loss that is trained: smoothed, and over the labels that count."""
    pair = random_pair(_CONFIG)

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


_FIRST_STEP = "the first step divides each moment by 1 - beta, which leaves the gradient, whatever beta is"
_NO_CAP = "the model of these places caps no logits"
UNSEEN = {
    library_faults.COARSE_MOMENT.name: "optax rounds the moment that it keeps, and steps first with the exact one",
    "optax's default beta1": _FIRST_STEP,
    "optax's default beta2": _FIRST_STEP,
    "optax's default eps": "the optimizer of these places has optax's default",
    "padding among the tokens that were read": "the number of tokens is reported, and trains nothing",
    "logits not capped in the training loss": _NO_CAP,
    "logits capped without the cap's derivative": _NO_CAP,
}
"""Faults of training that the first step of this model cannot show, and why."""


def _ask(fault, kind):
    """Where one of our models parts from its reference, or their training, while the fault is planted."""
    if kind == "training":
        with fault.plant():
            return difference_of_training(fault.name)
    pair, batch = model(kind)
    with mask_faults.blocks_of_four() if kind in MASKED else nullcontext(), fault.plant(pair):
        pair.share_masks(batch)
        return difference_of(pair, batch, name=fault.name)


_NORM = "encoder.blocks.0.self_attention_norm"
_ENCODER, _DECODER = "encoder.blocks.0.self_attention", "decoder.blocks.0.self_attention"
_CROSS, _WEIGHTED = "decoder.blocks.0.cross_attention", "decoder.blocks.1.cross_attention"
_SCORES = "attend_in_rows attend"
_MASK = "Mask.boolean Mask.softmax masked_softmax"
_KEPT = (
    "drop Dropout.__call__ Dropout.keep keep_mask site_key layer_keys",
    "forward Dropout.forward",
    "in its place",
)
_ADAM, _DECAY, _RATE = "transform.py", "_adding.py", "scale_by_learning_rate scale_by_schedule"
_PLACES = {
    "GELU: tanh instead of erf": (
        "gelu activate",
        "encoder.blocks.0.feedforward encoder.blocks.0.feedforward.activation",
        "GELU (erf) in ours, GELU (tanh) in theirs",
    ),
    "LayerNorm: eps 1e-6 instead of 1e-5": ("Norm.__call__", _NORM, "1e-05 in ours, 1e-06 in theirs"),
    "LayerNorm: unbiased variance": ("Norm.__call__", _NORM, "theirs has 1 here; with 0, theirs goes on"),
    "attention scaled by model width": (_SCORES, _ENCODER, "ours is 2"),
    "causal mask leaks one token": (_MASK, f"visible faults.py {_DECODER}", "only ours masks key 1 from query 0"),
    "decoder ignores its padding mask": (
        _MASK,
        f"visible faults.py {_DECODER}",
        "the mask differs at 264 of 972 places: only ours",
    ),
    "positions off by one": ("position_ids angles sinusoidal", "faults.py position_ids", "in its place"),
    "rotary: interleaved instead of halves": ("rotate", "faults.py"),
    "cross-attention: query and memory swapped": (
        "Linear.__call__",
        f"faults.py {_CROSS} {_CROSS}.query {_CROSS}.key {_CROSS}.value",
    ),
    "tied head untied": (
        "Head.__call__ Table.__call__ multiply_new_tokens",
        "head faults.py",
        "ours hands a gradient back here, theirs does not",
    ),
    "post-norm instead of pre-norm": (
        "Norm.__call__ Block.__call__ Block._add",
        f"{_NORM} {_ENCODER} {_ENCODER}.query {_ENCODER}.key {_ENCODER}.value encoder.blocks.0",
        "high.mean(-1, keepdims=True)` to `high = high + self.bias[...].reshape(last).astype(high.dtype)` here",
    ),
    "residual from the normalised input": ("Block._add", "faults.py encoder.blocks.0", "in its place"),
    "padding_idx: one row gets no gradient": (
        "Table.__call__",
        "target_embedding target_embedding.tokens faults.py",
        "row 0 is zero in theirs only",
    ),
    "attention: later blocks see one key too many": (f"{_MASK} attend_in_rows", _DECODER),
    "attention: nothing hidden inside a block": (
        f"{_MASK} attend_in_rows",
        f"visible {_DECODER}",
        "only theirs masks here",
    ),
    "one layer's square matrix transposed": ("Linear.__call__", f"{_WEIGHTED}.output", "output.weight transposed"),
    "two heads swapped": ("Linear.__call__", f"{_WEIGHTED}.query", "the same numbers in another order"),
    "window: a place too many": (_MASK, "visible", "the mask differs at 24 of 1176 places: only theirs masks"),
    "window: blocks skip its furthest key": ("Mask.spanned attend_in_rows", _DECODER),
    "window: blocks skip what comes later": ("Mask.spanned attend_in_rows", _ENCODER),
    "segments: ignored": (
        _MASK,
        f"visible {_DECODER}",
        "the mask differs at 52 of 1176 places: only theirs masks",
    ),
    "segments: those before are seen": (
        f"{_MASK} mask_faults.py",
        f"visible {_DECODER} {_ENCODER}",
        "the mask differs at 66 of 1176 places: only theirs masks",
    ),
    "segments: positions go on": ("position_ids sinusoidal angles", "position_ids", "in its place"),
    "segments: ignored by cross-attention": (
        f"{_MASK} mask_faults.py",
        f"visible {_CROSS}",
        "only theirs masks here",
    ),
    "prefix: seen in one direction only": (
        _MASK,
        "visible",
        "the mask differs at 60 of 1176 places: only ours masks",
    ),
    "prefix: sees what is behind it": (_MASK, "visible", "the mask differs at 8 of 1176 places: only theirs masks"),
    "prefix: blocks skip its later keys": ("Mask.spanned attend_in_rows", _DECODER),
    "queries that see nothing see everything": (f"{_MASK} mask_faults.py", _DECODER, "only theirs masks"),
    mask_faults.REFERENCE.name: (
        _MASK,
        "visible mask_faults.py",
        "the mask differs at 24 of 1176 places: only ours",
    ),
    "grouped heads tiled: einsum": (f"{_SCORES} quiet_faults.py", _DECODER, "exchanged"),
    faults.DROPOUT.name: ("drop Dropout.__call__", "faults.py", "1.1111 | 0.9 | a dropout of 0.1"),
    "forward pass drops by one key in all layers": _KEPT,
    "forward pass drops one mask in both residual branches": _KEPT,
    "forward pass drops by one key in encoder and decoder": _KEPT,
    "forward pass drops the same in all rows": _KEPT,
    "forward pass drops the same in all heads": _KEPT,
    "AdamW: eps inside the root": (_ADAM, "faults.py", "", "optimizer"),
    "L2 in the gradient instead of decoupled decay": (_DECAY, "step", "", "optimizer"),
    "decay of biases and norms too": (_DECAY, "step", "another decay", "optimizer"),
    "schedule off by one": (_RATE, "step", "ours is 0.5 times theirs: another learning rate", "optimizer"),
    "clip: norm + 0 instead of norm + 1e-6": ("clip_by_global_norm.<locals>.clip", "faults.py", "", "optimizer"),
    "label smoothing eps / (V - 1)": ("linear_loss.py", "faults.py", "", "forward"),
    "loss over all tokens, not those that count": ("known_places.py", "known_places.py", "", "forward"),
    "learning rate rounded to float32": (f"{_RATE} library_faults.py", "step", "another learning rate", "optimizer"),
    "optax's default weight decay": (_DECAY, "step", "another decay", "optimizer"),
}
"""What may be named in ours and in theirs, what may be said of the kind, and, where that is asked, the stage."""
_FAULTS = [
    *(("two stacks", fault, "theirs") for fault in faults.MODEL),
    *(("two stacks", fault, "weights") for fault in faults.WEIGHTS),
    *((kind, fault, "ours") for kind, given in mask_faults.MASKS.items() for fault in given),
    (mask_faults.TEXT, mask_faults.REFERENCE, "theirs"),
    *(("long", fault, "ours") for fault in library_faults.BLOCKS),
    ("grouped heads", quiet_faults.GROUPED["einsum"], "ours"),
    ("dropout", faults.DROPOUT, "theirs"),
    *(("dropout", fault, "ours") for fault in random_faults.FORWARD_DRAWS),
    *(("training", fault, "theirs") for fault in faults.TRAINING),
    *(("training", fault, "ours") for fault in library_faults.LIBRARY_TRAINING if fault.name not in UNSEEN),
]
OWN = [
    OwnFault(fault.name, f"our {kind}", planted, partial(_ask, fault, kind), *_PLACES[fault.name])
    for kind, fault, planted in _FAULTS
]
