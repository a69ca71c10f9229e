"""The parts of a transformer one by one in bfloat16, each on inputs that bfloat16 holds exactly.

In a whole model a rounding too many hides among those of all layers before it. Alone, a part that should round once, or
not at all, stands out where it rounds again. The compiler may leave no rounding out.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch.func import functional_call
from torch.nn import functional as F

from jax_tformer.config import NormKind, StackConfig, TransformerConfig
from jax_tformer.model.attention import attend, attend_by
from jax_tformer.model.embedding import Table
from jax_tformer.model.heads import Head
from jax_tformer.model.layers import Norm, activate
from jax_tformer.model.masks import Mask
from jax_tformer.training.linear_loss import linear_cross_entropy
from parity.gates.bridge import from_torch
from parity.gates.measure import Quality, Sample, quality
from torch_ref import heads, layers
from torch_ref.attention import Attention
from twin.pair import EVERY_ROUNDING

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 2, 24, 64, 4, 61
STACK = StackConfig(num_layers=1, num_heads=HEADS)
CONFIG = TransformerConfig(vocab_size=VOCABULARY, d_model=WIDTH, decoder=STACK, tied_head=True, head_bias=True)
NORMS = {kind: replace(STACK, norm=kind, norm_bias=kind != "rmsnorm") for kind in get_args(NormKind)}
ACTIVATIONS = ("relu", "relu_squared", "gelu_erf", "gelu_tanh", "silu")
ATTENTION = ("einsum", "blocks")
SCALE = (WIDTH // HEADS) ** -0.5
DRAWS = 5
GATE = "4 parts, bfloat16 / allowed"
VALUES = Quality(("bfloat16", "float32"), 1.1, 2.0**-23)
"""Every part rounds as often as the reference's: the ratio of their errors is 1.00 on an AMD EPYC."""
SAME = Quality(("bfloat16",), 0.0, 2.0**-12)
"""From the reference in bfloat16, not from the truth, for what both round in the same places: a seventh of the error of
one rounding. 0.00 on an AMD EPYC; a rounding too many makes it 11 or more, where the others are at 1.3 to 1.7."""
ROUNDED_ALIKE = {*NORMS, *ACTIVATIONS, *ATTENTION}
GRADIENTS = Quality(("bfloat16",), 1.5, 2.0**-23)
"""Ours are rounded to bfloat16 before they are multiplied on: 1.24 there for queries."""


def drawn(seed):
    """What the parts compute from, in float64, but numbers that bfloat16 holds."""
    rng = np.random.default_rng(seed)
    sequence, table = (BATCH, LENGTH, WIDTH), (VOCABULARY, WIDTH)
    shapes = {f"{name}.x": sequence for name in (*NORMS, *ACTIVATIONS, "logits", "loss")}
    shapes |= {"query": sequence, "memory": sequence, "layernorm.bias": (WIDTH,)}
    shapes |= {f"{name}.weight": (WIDTH,) for name in NORMS}
    for name in ("logits", "loss"):
        shapes |= {f"{name}.table": table, f"{name}.bias": (VOCABULARY,)}
    # Scores of deviation 4 and logits of deviation 24: sharp, as after training, so that 8 bits are off by much.
    sizes = {"query": 2.0, "memory": 2.0, "logits.x": 3.0, "loss.x": 3.0}
    arrays = {name: sizes.get(name, 1.0) * rng.standard_normal(shape) for name, shape in shapes.items()}
    return {name: array.astype(jnp.bfloat16).astype(np.float64) for name, array in arrays.items()}


def labels_for(seed):
    """`[B, T]`, some of them ignored."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, VOCABULARY, (BATCH, LENGTH))
    labels[rng.random(labels.shape) < 0.2] = -100
    return labels


def projected(seed):
    """What each output is multiplied with before all are added, so that there is a gradient; bfloat16 holds it."""
    rng = np.random.default_rng([seed, 1])
    shapes = dict.fromkeys((*NORMS, *ACTIVATIONS, *ATTENTION), (BATCH, LENGTH, WIDTH))
    shapes |= {"attention weights": (BATCH, HEADS, LENGTH, LENGTH), "logits": (BATCH, LENGTH, VOCABULARY)}
    return {name: rng.standard_normal(shape).astype(jnp.bfloat16).astype(np.float32) for name, shape in shapes.items()}


def ours(p, labels, dtype):
    """The outputs of the library's parts, by name."""
    config, outputs = CONFIG.with_dtype(dtype), {}
    for name, stack in NORMS.items():
        norm = Norm(config, stack)
        norm.scale = nnx.Param(p[f"{name}.weight"])
        if norm.bias is not None:
            norm.bias = nnx.Param(p[f"{name}.bias"])
        outputs[name] = norm(p[f"{name}.x"])
    for activation in ACTIVATIONS:
        outputs[activation] = activate(p[f"{activation}.x"], activation)
    query, memory = (p[name].reshape(BATCH, LENGTH, HEADS, -1) for name in ("query", "memory"))
    causal = Mask(causal=True)
    for name in ATTENTION:
        output = attend_by(name, query, memory, memory, causal, SCALE)[0]
        outputs[name] = output.reshape(p["query"].shape)
    outputs["attention weights"] = attend(query, memory, memory, causal, SCALE)[1]
    head, table = Head(config), Table(VOCABULARY, config, std=1.0)
    table.embedding, head.bias = nnx.Param(p["logits.table"]), nnx.Param(p["logits.bias"])
    outputs["logits"] = head(p["logits.x"], table)
    weights = p["loss.table"], p["loss.bias"]
    total = linear_cross_entropy(p["loss.x"], *weights, labels)[0]
    each = jax.vmap(jax.vmap(lambda x, label: linear_cross_entropy(x[None, None], *weights, label[None, None])[0]))
    # The sum is what training differentiates; the terms are what can be judged.
    return outputs | {"training loss": total, "loss of each token": jax.lax.stop_gradient(each(p["loss.x"], labels))}


def theirs(p, labels):
    """The outputs of the reference's parts."""
    outputs = {}
    for name, stack in NORMS.items():
        weights = {kind: p[f"{name}.{kind}"] for kind in ("weight", "bias") if f"{name}.{kind}" in p}
        outputs[name] = functional_call(layers.Norm(CONFIG, stack), weights, (p[f"{name}.x"],))
    for name in ACTIVATIONS:
        outputs[name] = layers.activation(name)(p[f"{name}.x"])
    attention, same = Attention(CONFIG, STACK), torch.eye(WIDTH, dtype=p["query"].dtype)
    # Projections that change nothing leave attention itself.
    weights = {name: same if name.endswith("weight") else 0 * same[0] for name, _ in attention.named_parameters()}
    seen = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    output, outputs["attention weights"] = functional_call(attention, weights, (p["query"], p["memory"], seen))
    outputs |= dict.fromkeys(ATTENTION, output)
    logits = {}
    for name in ("logits", "loss"):
        table = SimpleNamespace(weight=p[f"{name}.table"])
        logits[name] = functional_call(heads.Head(CONFIG), {"bias": p[f"{name}.bias"]}, (p[f"{name}.x"], table))
    losses = F.cross_entropy(logits["loss"].flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return outputs | {"logits": logits["logits"], "training loss": losses.sum(), "loss of each token": losses.detach()}


def compiled_ours():
    """The function (arrays, labels, projections) -> (outputs, gradients by all arrays) in bfloat16.

    Its program rounds wherever the library says so, and is made at the first call, with whatever fault is planted then.
    """

    def total(p, labels, projections):
        outputs = ours(p, labels, "bfloat16")
        terms = [(outputs[name].astype(jnp.float32) * times).sum() for name, times in projections.items()]
        return jnp.stack([*terms, outputs["training loss"]]).sum(), outputs

    program = jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=EVERY_ROUNDING)

    def run(arrays, labels, projections):
        narrow = {name: array.astype(jnp.bfloat16) for name, array in arrays.items()}
        (_, outputs), gradients = program(*jax.device_put((narrow, labels, projections)))
        return {name: np.asarray(x) for name, x in outputs.items()}, {k: np.asarray(x) for k, x in gradients.items()}

    return run


def run_theirs(arrays, labels, projections, dtype):
    """The same of the reference in `dtype`."""
    p = {name: torch.from_numpy(array).to(dtype).requires_grad_() for name, array in arrays.items()}
    outputs = theirs(p, torch.from_numpy(labels))
    terms = [(layers.high(outputs[name]) * torch.from_numpy(times)).sum() for name, times in projections.items()]
    torch.stack([*terms, outputs["training loss"]]).sum().backward()
    return (
        {name: from_torch(tensor) for name, tensor in outputs.items()},
        {name: from_torch(tensor.grad) for name, tensor in p.items()},
    )


def judged(draws=DRAWS):
    """The worst output of all parts, the worst of those that are rounded alike, and the worst gradient."""
    run, values, slopes = compiled_ours(), [], []
    for seed in range(draws):
        given = drawn(seed), labels_for(seed), projected(seed)
        truth = run_theirs(*given, torch.float64)
        for samples, *sides in zip(
            (values, slopes), run(*given), run_theirs(*given, torch.bfloat16), truth, strict=True
        ):
            samples.append(Sample(*sides, {name: float(np.linalg.norm(array)) for name, array in sides[2].items()}))
    alike = [sample.without(sample.ours.keys() - ROUNDED_ALIKE) for sample in values]
    return [
        quality(GATE, values, VALUES),
        quality(GATE, [sample._replace(truth=sample.theirs) for sample in alike], SAME),
        quality(GATE, slopes, GRADIENTS),
    ]
