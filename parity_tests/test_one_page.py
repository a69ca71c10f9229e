"""docs/one_page.py computes what the library computes, and docs/one-page.md shows it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from docs import one_page
from jax_tformer import StackConfig, TransformerConfig, transformer
from parity.gates.measure import compared

PAPER = StackConfig(
    num_layers=2, num_heads=4, feedforward_width=24, embedding_scale=True, positions="sinusoidal_interleaved"
)
GPT2 = StackConfig(
    num_layers=3,
    num_heads=2,
    feedforward_width=24,
    activation="gelu_tanh",
    norm_placement="pre",
    final_norm=True,
    positions="learned",
    max_positions=16,
)
RNG = np.random.default_rng(0)
SOURCE, TARGET = (jnp.asarray(RNG.integers(0, 11, (3, length))) for length in (9, 7))
MASK = jnp.arange(9)[None, :] < jnp.array([9, 5, 2])[:, None]


@pytest.mark.parametrize(
    "config, page, inputs, masks",
    [
        (TransformerConfig(11, 16, PAPER, PAPER), one_page.encoder_decoder, (SOURCE, TARGET), {"source_mask": MASK}),
        (TransformerConfig(11, 16, None, GPT2, tied_head=True), one_page.decoder_alone, (SOURCE,), {}),
        (TransformerConfig(11, 16, PAPER), one_page.encoder_alone, (SOURCE,), {"mask": MASK}),
    ],
    ids=["encoder-decoder", "decoder alone", "encoder alone"],
)
def test_logits_and_gradients_are_the_library_s(config, page, inputs, masks):
    net = transformer(config.with_dtype("float64"))
    params = jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(0, 0.3, leaf.shape)), net.shapes)
    # What stands at padding is nobody's concern.
    weights = RNG.normal(size=(3, inputs[-1].shape[1], 11)) * masks.get("mask", np.ones((1, 1)))[..., None]

    def values(logits, *given):
        def weighed(params):
            found = logits(params, *given) * weights
            return found.sum(), found

        (_, found), gradients = jax.jit(jax.value_and_grad(weighed, has_aux=True))(params)
        return {"logits": found} | traverse_util.flatten_dict(gradients, sep=".")

    ours = values(lambda params, *inputs: net.apply(params, *inputs, **masks), *inputs)
    with jax.numpy_rank_promotion("allow"):
        theirs = values(page, *inputs, *masks.values())
    # A key's bias adds the same to all scores of a query, which the softmax takes out again.
    size = max(float(jnp.abs(value).max()) for value in ours.values())
    compared("2 gradients", theirs, ours, zero={name: size for name in ours if name.endswith("key.bias")}).require()


def test_the_page_shows_the_file():
    file = Path(one_page.__file__)
    page = file.with_name("one-page.md").read_text("utf-8")
    assert f"```python\n{file.read_text('utf-8')}```\n" in page
