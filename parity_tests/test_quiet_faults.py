"""What the gates did not look at: attention with groups of heads, accumulation in narrow types, held-out losses."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import traverse_util
from torch.nn import functional as F

from jax_tformer.cache import KeyValue
from jax_tformer.config import ComputeConfig, StackConfig, TransformerConfig
from jax_tformer.config.experiment import MeshConfig
from jax_tformer.data.pipeline import Pipeline
from jax_tformer.functional import transformer
from jax_tformer.model.attention import attend_by
from jax_tformer.model.masks import Mask
from jax_tformer.runs.evaluation import Evaluator
from jax_tformer.training.sharding import make_mesh
from jax_tformer.training.step import TrainState, train_step
from parity.gates.measure import BFLOAT16, FLOAT64_BAR, Sample, compared, quality
from parity_tests import quiet_faults
from twin.bridge import Pair
from twin.cases import CONFIGS, Lengths, batch_for, weights_for

HEADS = 6


def grouped(implementation, key_value_heads):
    """`attend` with six query heads against PyTorch's own attention with grouped heads."""
    rng, is_kernel = np.random.default_rng(0), implementation in ("cudnn", "pallas")
    length, slots = (128, 256) if is_kernel else (5, 7)
    shapes = (2, length, HEADS, 4), (2, slots, key_value_heads, 4), (2, slots, key_value_heads, 4)
    query, key, value = (rng.standard_normal(shape) for shape in shapes)
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    if implementation == "cache":
        empty = KeyValue(*(jnp.zeros((x.shape[0] * x.shape[2], x.shape[1], x.shape[3])) for x in arrays[1:]))
        arrays[1:], implementation = empty.write(*arrays[1:], first=0).read(key_value_heads), "blocks"
    with quiet_faults.kernels_on_a_cpu():
        ours = attend_by(implementation, *arrays, Mask(), 0.5)[0]
    tensors = (torch.from_numpy(x).transpose(1, 2) for x in (query, key, value))
    theirs = F.scaled_dot_product_attention(*tensors, scale=0.5, enable_gqa=True).transpose(1, 2)
    bar = quiet_faults.KERNELS_BAR if is_kernel else FLOAT64_BAR
    return compared("1 activations", {"attention": ours}, {"attention": theirs}, bar=bar)


@pytest.mark.parametrize("key_value_heads", [2, 3])
@pytest.mark.parametrize("implementation", quiet_faults.GROUPED)
def test_grouped_heads(implementation, key_value_heads, report):
    grouped(implementation, key_value_heads).require()
    fault = quiet_faults.GROUPED[implementation]
    with fault.plant():
        wrong = grouped(implementation, key_value_heads)
    report(f"{fault.name}, {key_value_heads} groups of {HEADS // key_value_heads}", "library", [wrong])


PARTS = 128


def gradients(net, params, batch, parts):
    """As the optimizer is given them."""
    still = lambda grads, *_: (jax.tree.map(jnp.zeros_like, grads), grads)  # noqa: E731
    kept = optax.GradientTransformation(lambda params: params, still)
    state = TrainState(params, kept.init(params), jnp.zeros((), jnp.int32), jax.random.key_data(jax.random.key(0)))
    state, _ = jax.jit(train_step(net, kept, accumulation=parts))(state, batch)
    return {path: np.asarray(leaf) for path, leaf in traverse_util.flatten_dict(state.opt_state, sep=".").items()}


def test_accumulation_in_a_narrow_type(report):
    """Gradients of bfloat16 parameters, in many parts and in one; all else is computed in float32."""
    stack = StackConfig(num_layers=1, num_heads=2, feedforward_width=16, key_bias=False)
    compute = ComputeConfig(parameter_dtype="bfloat16", dtype="float32")
    config = TransformerConfig(vocab_size=23, d_model=16, decoder=stack, compute=compute)
    batch = jax.device_put(batch_for(config, "none", lengths=Lengths(batch=PARTS, source=8)))
    net, exact = transformer(config), transformer(config.with_dtype("float64"))
    params = jax.tree.map(lambda x: x * 10, net.init(jax.random.key(0)))
    truth = gradients(exact, jax.tree.map(lambda x: x.astype(jnp.float64), params), batch, 1)
    whole = gradients(net, params, batch, 1)

    def measured():
        scales = {path: float(np.linalg.norm(array)) for path, array in truth.items()}
        sample = Sample(gradients(net, params, batch, PARTS), whole, truth, scales)
        return quality("4 bfloat16 / allowed", [sample], BFLOAT16)

    measured().require()
    with quiet_faults.ACCUMULATED.plant():
        wrong = measured()
    report(quiet_faults.ACCUMULATED.name, "library", [wrong])


def test_the_held_out_loss_counts_every_token_once(report):
    """Batches of very different numbers of labels, and capped logits, against PyTorch's loss of every token."""
    config = replace(CONFIGS["gpt2"], logit_cap=2.0)
    pair = Pair(config, weights_for(config, 0.2), "float64", optimised=False)
    batches = [batch_for(config, "right", seed) for seed in (1, 2)]
    batches[1]["labels"][:, 1:] = -100
    batches[0]["labels"][0, 0] = batches[1]["labels"][0, 0] = 3
    losses = [pair.run_torch(batch).activations["loss of each token"][batch["labels"] != -100] for batch in batches]
    truth = np.concatenate(losses).mean()

    def measured():
        pipeline = Pipeline(train=None, evaluation=batches, fingerprint="")
        evaluator = Evaluator(pair.net, None, pipeline, None, make_mesh(MeshConfig(), 1))
        loss = np.asarray(evaluator(pair.params)["val_loss"])
        return compared("1 activations", {"held-out loss": loss}, {"held-out loss": truth})

    measured().require()
    for fault in quiet_faults.HELD_OUT:
        with fault.plant():
            wrong = measured()
        report(fault.name, "library", [wrong])
