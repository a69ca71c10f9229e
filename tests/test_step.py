"""One training step: accumulation, ignored labels, dropout keys, memory options and precision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer import ComputeConfig, DropoutConfig, transformer
from jax_tformer.config import IGNORED
from jax_tformer.config.experiment import OptimizerConfig
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import average_of, forward, init_state, train_step
from tests import small_models
from twin.reference_loss import mean_cross_entropy

STACK = dataclasses.replace(small_models.STACK, num_layers=3)
CONFIG = dataclasses.replace(small_models.GPT, decoder=STACK)
TX = optimizer(OptimizerConfig(warmup_steps=0, schedule="constant"), 10)


def batch():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 23, (4, 9))
    labels[0, 2:] = IGNORED  # rows with different numbers of counting labels, so that means of means show
    return {"tokens": jnp.asarray(rng.integers(0, 23, (4, 9)), jnp.int32), "labels": jnp.asarray(labels, jnp.int32)}


def largest_difference(first, second):
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), first, second)))


def mean_gradients(net, params, batch):
    def loss(params):
        return mean_cross_entropy(forward(net, params, batch).logits, batch["labels"])

    return jax.device_get(jax.jit(jax.grad(loss))(params))


@pytest.mark.parametrize("decay", [0.5, 0.999999])
def test_the_average_is_that_of_the_weights_after_each_step(decay):
    """In float64, and for a decay near 1 the plain mean but for that."""
    with jax.enable_x64(True):
        net = transformer(CONFIG.with_dtype("float64"))
        state, step = init_state(net, TX, jax.random.key(0), averages=True), jax.jit(train_step(net, TX, average=decay))
        seen = []
        for _ in range(6):
            state, _ = step(state, batch())
            seen.append(jax.device_get(state.params))
        weights = decay ** np.arange(len(seen))[::-1]
        expected = jax.tree.map(lambda *each: np.average(each, axis=0, weights=weights), *seen)
        assert largest_difference(average_of(state), expected) < 1e-12
        broken = jax.tree.map(lambda p: p.at[0].set(jnp.inf), state.params["embedding"])
        after, _ = step(state._replace(params={**state.params, "embedding": broken}), batch())
        assert not after.finite
        assert largest_difference(after.average["decoder"], state.average["decoder"]) == 0


def test_norms_of_each_layer_and_the_noise_scale():
    """Against NumPy in float64: the gradients of each part by themselves, and Adam's first update."""
    with jax.enable_x64(True):
        net = transformer(CONFIG.with_dtype("float64"))
        state = init_state(net, TX, jax.random.key(0))
        after, metrics = jax.jit(train_step(net, TX, accumulation=2, norms=True, noise=True))(state, batch())
        parts = [{name: x[rows] for name, x in batch().items()} for rows in (slice(2), slice(2, 4), slice(4))]
        first, second, whole = (mean_gradients(net, state.params, part) for part in parts)
        update = jax.device_get(jax.tree.map(jnp.subtract, after.params, state.params))

    def squares(tree, layer=...):
        """The sum of all, or of one of the stacked layers."""
        return sum(np.square(x[layer]).sum() for x in jax.tree.leaves(tree))

    for name, tree in {"gradient_norm": whole, "update_norm": update}.items():
        layers = [squares(tree["decoder"]["blocks"], layer) ** 0.5 for layer in range(3)]
        np.testing.assert_allclose(metrics.norms[f"{name}/decoder.blocks"], layers, rtol=1e-12)
        all_together = [x for key, x in metrics.norms.items() if key.startswith(name)]
        np.testing.assert_allclose(squares(all_together), squares(tree), rtol=1e-12)
    # |G|^2 and the variance, of batches of 2 and 4 rows.
    small, large = (squares(first) + squares(second)) / 2, squares(whole)
    expected = (4 * large - 2 * small) / (4 - 2), (small - large) / (1 / 2 - 1 / 4)
    np.testing.assert_allclose(metrics.noise, expected, rtol=1e-12)


@pytest.mark.parametrize("compute", [*(ComputeConfig(remat=r) for r in ("dots", "full")), ComputeConfig(unroll=3)])
def test_remat_and_unroll_change_the_order_and_nothing_else(compute):
    nets = transformer(CONFIG), transformer(dataclasses.replace(CONFIG, compute=compute))
    params = nets[0].init(jax.random.key(0))
    assert largest_difference(*(mean_gradients(net, params, batch()) for net in nets)) < 1e-6


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_keeps_less(remat):
    """The compiled gradient of a deep stack needs less memory the more is computed again."""
    sizes = {}
    for kind in ("none", remat):
        stack = dataclasses.replace(STACK, num_layers=12, feedforward_width=256)
        config = dataclasses.replace(CONFIG, decoder=stack, compute=ComputeConfig(remat=kind))
        net = transformer(config)
        tokens = jax.ShapeDtypeStruct((16, 64), jnp.int32)
        compiled = jax.jit(jax.grad(lambda p, t, net=net: net.apply(p, t).sum())).lower(net.shapes, tokens).compile()
        sizes[kind] = compiled.memory_analysis().temp_size_in_bytes
    assert sizes[remat] < 0.7 * sizes["none"]


def test_dropout_follows_from_key_and_step():
    config = dataclasses.replace(CONFIG, dropout=DropoutConfig(0.1, 0.1, 0.1, 0.1, 0.1))
    net = transformer(config)
    step = jax.jit(train_step(net, TX))
    state = init_state(net, TX, jax.random.key(0))
    losses = [float(step(state._replace(step=jnp.asarray(n, jnp.int32)), batch())[1].loss) for n in (0, 0, 1)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_bfloat16_keeps_norms_softmax_and_logits_in_float32():
    config = dataclasses.replace(CONFIG, compute=ComputeConfig(dtype="bfloat16"))
    net = transformer(config)
    params = net.init(jax.random.key(0))
    outputs = net.bind(params)(batch()["tokens"], capture=True)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    assert outputs.logits.dtype == jnp.float32
    assert outputs.decoder.self_attention.dtype == jnp.float32
    assert outputs.decoder.hidden.dtype == jnp.bfloat16
    sums = outputs.decoder.self_attention.sum(-1)
    assert float(jnp.abs(sums - 1).max()) < 1e-5


def test_parameters_kept_in_bfloat16_are_widened_before_anything_is_computed():
    """To the bit what the same numbers give that are kept in float32; 1 + scale, say, would be rounded in bfloat16."""
    stack = dataclasses.replace(STACK, norm_unit_offset=True, norm_bias=True, positions="relative")
    config = dataclasses.replace(CONFIG, decoder=stack, head_bias=True, tied_head=False)
    narrow = transformer(dataclasses.replace(config, compute=ComputeConfig(parameter_dtype="bfloat16")))
    params = jax.tree.map(
        lambda x: jnp.sin(jnp.arange(1.0, x.size + 1)).reshape(x.shape).astype(x.dtype), narrow.shapes
    )
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    tokens = batch()["tokens"]
    np.testing.assert_array_equal(narrow.apply(params, tokens), transformer(config).apply(wide, tokens))


def test_float64_needs_x64():
    with pytest.raises(ValueError, match="jax_enable_x64"):
        transformer(CONFIG.with_dtype("float64"))
