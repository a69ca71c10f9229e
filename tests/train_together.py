"""A program of one or several processes: trains small models on several meshes, or decodes with them.

Its argument is JSON: "what", the function to call; "cases", its arguments; and "distributed", the fields of
DistributedConfig. It prints, as JSON, what the function returns.
"""

import json
import sys
from dataclasses import replace

import jax
import numpy as np

from jax_tformer import DecodingConfig, LoraConfig, transformer
from jax_tformer.config.experiment import DistributedConfig, MeshConfig, OptimizerConfig, TrainingConfig
from jax_tformer.decoding import generate
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.prepare import prepare
from jax_tformer.training.processes import joined
from jax_tformer.training.sharding import abstract_batch, local_rows, make_mesh, parameter_shardings, place_batch
from tests import small_models
from twin.cases import Lengths, batch_for

ROWS, STEPS = 16, 10
STACK = replace(small_models.STACK, num_heads=4)
BOTH = replace(small_models.GPT, vocab_size=24, encoder=STACK, decoder=STACK)
MODELS = {
    "encoder-decoder": BOTH,
    "decoder": replace(BOTH, encoder=None),
    "encoder": replace(BOTH, decoder=None),
    "adapters": replace(BOTH, encoder=None, lora=LoraConfig(rank=4, targets=("all",))),
    "long rows": replace(BOTH, decoder=replace(STACK, positions="relative")),
    "odd widths": replace(
        BOTH, d_model=18, decoder=replace(STACK, num_heads=3, feedforward_width=31), encoder=None, vocab_size=23
    ),
}


def draw_batch(config, seed, rows, length, source):
    """Draws a batch with padding, several texts in a row, and a prefix where the model takes one."""
    prefix = " prefix" if config.encoder is None and not config.decoder.window else ""
    lengths = Lengths(rows, source if config.encoder and config.decoder else length, length)
    return batch_for(config, f"right segments{prefix}", seed, lengths)


def losses(model, mesh, accumulation, steps=STEPS):
    """Returns the losses of the first of ten steps, and the share of the largest parameter that one device holds."""
    config = MODELS[model].with_dtype("float64")
    mesh = make_mesh(MeshConfig(**mesh), ROWS // accumulation)
    length, rows, found = 16 if model == "long rows" else 7, local_rows(mesh, ROWS), []
    drawn = (draw_batch(config, step, ROWS, length, length) for step in range(steps))
    batches = [{name: array[rows] for name, array in batch.items()} for batch in drawn]
    tx, training = optimizer(OptimizerConfig(), STEPS), TrainingConfig(batch_size=ROWS, accumulation=accumulation)
    prepared = prepare(transformer(config), tx, mesh, training, abstract_batch(mesh, batches[0]))
    step, state = prepared.step.compile(), prepared.first_state()
    assert "reduce-scatter" not in step.as_text(), "gloo's is wrong for large arrays (docs/known-issues.md)"
    with jax.set_mesh(mesh):
        for batch in batches:
            state, metrics = step(state, place_batch(mesh, batch))
            found.append(float(metrics.loss))
    largest = max(jax.tree.leaves(state.params), key=lambda leaf: leaf.size)
    return found, largest.addressable_shards[0].data.size / largest.size


def answers(model, mesh):
    """Returns what the model answers to four prompts in several ways, and the share of the cache on one device."""
    config = MODELS[model].with_dtype("float64")
    net = transformer(config)
    mesh = make_mesh(MeshConfig(**mesh))
    params = jax.jit(net.init, out_shardings=parameter_shardings(mesh, net.shapes))(jax.random.key(3))
    params = jax.tree.map(lambda leaf: 8 * leaf, params)
    prompts, shares, found = [[5, 6, 7], [1], [2, 3], [9] * 5], set(), []
    advance = generate.advance

    def watch(net, rules, params, state, *more):
        keys = state.cache.layers[0].self_attention.key
        shares.add(keys.addressable_shards[0].data.size / keys.size)
        return advance(net, rules, params, state, *more)

    generate.advance = watch
    ends = {"end_id": 4} | ({"start_id": 1} if config.encoder else {})
    for way in (
        {"repetition_penalty": 1.5},
        {"temperature": 1.0, "top_k": 9, "num_return_sequences": 2},
        {"num_beams": 3, "num_return_sequences": 2},
    ):
        found.append(generate.generate(net, params, prompts, DecodingConfig(5, **way), **ends))
    if config.encoder is None:
        found.append(generate.generate(net, params, prompts, DecodingConfig(6), context=8))
    return [[np.round(x, 9).tolist() for x in one if x is not None] for one in found], sorted(shares)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    jax.config.update("jax_enable_x64", True)
    with joined(DistributedConfig(**asked["distributed"])):
        run = {"losses": losses, "answers": answers}[asked["what"]]
        print(json.dumps([run(*case) for case in asked["cases"]]))
