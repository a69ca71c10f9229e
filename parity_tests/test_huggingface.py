"""Gates 1 to 4 and 7 against Hugging Face's own models (see oracles.py)."""

from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from unittest.mock import patch

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional

from jax_tformer.hub.families import CONV1D, FAMILIES, MATRIX, Layout
from jax_tformer.hub.names import read
from parity.gates.bridge import Values
from parity.gates.measure import BFLOAT16_VALUES, FLOAT32, ParityError, Sample, compared, quality
from parity_tests.huggingface import Oracle, comparable, masked
from parity_tests.oracles import ENTRIES, VARIANTS
from parity_tests.pairs import gates_1_and_2
from parity_tests.test_models import DRAWS, norms, record_bfloat16
from torch_ref.layers import inject
from twin.cases import PADDINGS, REGIMES
from twin.dropout import drawn_masks
from twin.pair import known_zeros, parity_options

FIRST = [name for name, entry in ENTRIES.items() if entry.first]
FURTHER = [name for name in ENTRIES if name not in FIRST]
UNLIKE = ["gemma3", "gpt_neox"]
"""Decoders whose parts no other of them has."""
HEADS = ("roberta texts", "roberta tokens")
"""RoBERTa's own heads, which read what BERT's do not."""
DEEPER = {
    "test_gate_4": (["llama"], FIRST),
    "test_gates_3_and_4_of_the_forward_pass": ([*UNLIKE, *HEADS], FURTHER),
}
"""Test -> the models that it takes, and with --deep."""


def pytest_generate_tests(metafunc):
    if metafunc.function.__name__ in DEEPER:
        few, every = DEEPER[metafunc.function.__name__]
        metafunc.parametrize("name", few if metafunc.config.getoption("--deep") is None else every)


@lru_cache(maxsize=2)
def sides(name, dtype):
    """Ours and theirs of one model; the compiled function is kept while the parameters change."""
    oracle = Oracle(name, dtype)
    return oracle.pair(0.02, 0, dtype), oracle


def results(name, weights, batch, dtype):
    """(JAX, Hugging Face) on one case, where they are comparable; `weights` are theirs."""
    pair, oracle = sides(name, dtype)
    pair.load(oracle.load(weights))
    both = pair.run_jax(masked(batch)), oracle.run(batch)
    return [replace(side, outputs=comparable(oracle.config, batch, side.outputs)) for side in both]


def truth_of(name, weights, batch, record):
    """Gates 1 and 2 on one case; then what Hugging Face computes in float64, and what is zero in exact arithmetic."""
    ours, theirs = results(name, weights, batch, "float64")
    config = sides(name, "float64")[1].config
    for figure in gates_1_and_2(config, ours, theirs):
        record(f"huggingface {name}", figure)
    return theirs, known_zeros(config, theirs.gradients)


@pytest.mark.deep
@pytest.mark.parametrize("name", FURTHER)
def test_gates_1_and_2(name, record):
    oracle = sides(name, "float64")[1]
    for std, padding in product(REGIMES.values(), PADDINGS):
        truth_of(name, oracle.random_weights(std, 0), oracle.batch(padding, 0), record)


@pytest.mark.parametrize("name", FIRST)
def test_gates_1_2_and_3(name, record):
    oracle = sides(name, "float64")[1]
    for std in REGIMES.values():
        samples = []
        for padding, seed in product(PADDINGS, range(2)):
            weights, batch = oracle.random_weights(std, seed), oracle.batch(padding, seed)
            theirs, zeros = truth_of(name, weights, batch, record)
            truth = theirs.outputs | theirs.gradients
            narrow = (side.outputs | side.gradients for side in results(name, weights, batch, "float32"))
            samples.append(Sample(*narrow, truth, norms(truth) | zeros))
        record(f"huggingface {name}", quality("3 float32 / allowed", samples))


def narrow_samples(name, dtype, draws, *, backward, **settings):
    """Samples in a narrow type beside Hugging Face's own, with weights that it holds, for two regimes."""
    exact, narrow = Oracle(name, **settings), Oracle(name, dtype, **settings)
    pair = exact.pair(0.02, 0, dtype)
    options = parity_options(dtype, optimised=dtype == "float32")
    # Half of what there is to compile.
    forward = jax.jit(partial(lambda ours, *given: ours(*given)[1], pair.ours), compiler_options=options)
    for std, padding in ((0.02, "left"), (0.2, "right")):
        samples = []
        for seed in range(draws):
            raw, batch = exact.random_weights(std, seed), exact.batch(padding, seed)
            weights = {key: array.astype(pair.dtype).astype(np.float64) for key, array in raw.items()}
            narrow.load(weights)
            pair.load(exact.load(weights))
            truth, theirs = (oracle.run(batch, backward=backward) for oracle in (exact, narrow))
            whole = jax.device_put(masked(batch))
            ours = pair.run_jax(whole) if backward else Values(jax.device_get(forward(pair.params, whole)), {})
            mine, other, true = (
                comparable(exact.config, batch, side.outputs) | side.gradients for side in (ours, theirs, truth)
            )
            # Rounded to the type of theirs: attention weights and logits are float32 here, and bfloat16 there.
            mine = {key: array.astype(other[key].dtype) for key, array in mine.items()}
            samples.append(Sample(mine, other, true, norms(true) | known_zeros(exact.config, truth.gradients)))
        yield samples


@pytest.mark.deep
def test_gate_4(name, record):
    """With --deep, of all first entries."""
    start = Oracle(name)
    start = start.load(start.random_weights(0.02, 0))
    for samples in narrow_samples(name, "bfloat16", DRAWS, backward=True):
        record_bfloat16(f"huggingface {name}", samples, start, record)


@pytest.mark.deep
def test_gates_3_and_4_of_the_forward_pass(name, record):
    """What narrow types do to gradients, the first entries show; with --deep, of all that are not among them."""
    for dtype, draws, gate, allowed in (
        ("float32", 5, "3 float32 / allowed", FLOAT32),
        ("bfloat16", 11, "4 bfloat16 / allowed", BFLOAT16_VALUES),
    ):
        for samples in narrow_samples(name, dtype, draws, backward=False):
            record(f"huggingface {name}", quality(gate, samples, allowed))


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(
    "name, side", [("gpt2", "decoder"), ("bert masked", "encoder"), ("bart", "encoder"), ("bart", "decoder")]
)
def test_nothing_is_left_out_but_what_differs(name, side, padding):
    """Hidden states of the first layer differ at every position that is not compared, and at no other."""
    pair, oracle = sides(name, "float64")
    batch, layer = oracle.batch(padding, 0), f"{side}.0.hidden"
    pair.load(oracle.load(oracle.random_weights(0.2, 0)))
    ours, theirs = pair.run_jax(batch).outputs[layer], oracle.run(batch).outputs[layer]
    equal = np.abs(ours - theirs).max(axis=-1) < 1e-6
    places = np.arange(equal.size).reshape(equal.shape)
    assert places[equal].tolist() == comparable(oracle.config, batch, {layer: places})[layer].tolist()
    assert not equal.all()


FUSED = " ".join(f"decoder.blocks.*.self_attention.{name}.weight" for name in ("key", "query", "value"))
FAULTS = {
    "query and key swapped": ("gpt2", "transformer.h.*.attn.c_attn.weight", {"ours": FUSED}),
    "a square matrix transposed": ("gpt2", "transformer.h.*.attn.c_proj.weight", {"axes": MATRIX}),
    "heads before query, key and value": ("gpt2", "transformer.h.*.attn.c_attn.weight", {"axes": "i (o n) -> n o i"}),
    "query, key and value before heads": (
        "gpt_neox",
        "gpt_neox.layers.*.attention.query_key_value.weight",
        {"axes": "(n h c) i -> n (h c) i"},
    ),
    "cross-attention transposed": ("bart", "model.decoder.layers.*.encoder_attn.q_proj.weight", {"axes": CONV1D}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_table_turns_gate_1_red(fault):
    """All shapes agree; only the numbers tell."""
    name, theirs, change = FAULTS[fault]
    pair, oracle = sides(name, "float64")
    weights, batch = oracle.random_weights(0.02, 0), oracle.batch("right", 0)
    rows = FAMILIES[oracle.json["architectures"][0]].rows(oracle.config)
    assert theirs in {row.theirs for row in rows}
    faulty = tuple(row._replace(**change) if row.theirs == theirs else row for row in rows)
    oracle.load(weights)
    views = Layout(faulty, oracle.config).ours(weights)
    pair.load({name: read(view) for name, view in views.items()})
    both = pair.run_jax(batch), oracle.run(batch)
    with pytest.raises(ParityError):
        compared("1 activations", *(comparable(oracle.config, batch, side.outputs) for side in both)).require()


def test_an_island_of_float32_turns_gates_1_and_2_red():
    plain, island = Oracle("gpt2"), Oracle("gpt2")
    island.model.base_model.h[1].ln_2.register_forward_hook(lambda module, inputs, output: output.float().double())
    weights, batch = plain.random_weights(0.2, 0), plain.batch("right", 0)
    for oracle in (plain, island):
        oracle.load(weights)
    for measured in gates_1_and_2(plain.config, island.run(batch), plain.run(batch)):
        assert measured.bar < 1e-9 < measured.worst < 1e-3


SIDES = [*product(["roberta masked", "roberta tokens"], ["right", "left"]), ("roberta texts", "right")]


@pytest.mark.parametrize("padding_token", [1, 0, 5])
@pytest.mark.parametrize("name, padding", SIDES)
def test_roberta_counts_positions_from_its_padding_token(name, padding, padding_token, record):
    """Told nothing but the mask, it leaves out the padding token, on either side, and so do we by the mask.

    A text's class is read from the first position, which padding on the left takes: there it has a position in theirs
    that no token has.
    """
    oracle = Oracle(name, pad_token_id=padding_token)
    assert oracle.config.encoder.position_offset == padding_token + 1
    model, batch = oracle.pair(0.2, 0).module, oracle.batch(padding, 0)
    mask = torch.from_numpy(batch["mask"][:-1])
    tokens = torch.from_numpy(batch["tokens"][:-1]).where(mask, padding_token)
    assert not (tokens == padding_token)[mask].any()
    shown = ... if name == "roberta texts" else mask
    with torch.no_grad():
        both = [
            {"logits": of(tokens, given).logits[shown]} for of, given in ((model, mask), (oracle.model, mask.long()))
        ]
    record(f"huggingface {name}", compared("1 activations", *both))


@pytest.mark.parametrize("name, variant", VARIANTS)
def test_settings_are_honoured(name, variant, record):
    """By the JAX model, forward, and by the reference, whose gradients need no compilation."""
    oracle = Oracle(name, **ENTRIES[name].variants[variant])
    assert oracle.config != Oracle(name).config
    pair = oracle.pair(0.2, 0)
    for padding in ("right", "left"):
        batch = oracle.batch(padding, 0)
        ours, theirs = (
            replace(side, outputs=comparable(oracle.config, batch, side.outputs))
            for side in (pair.run_torch(batch), oracle.run(batch))
        )
        for figure in gates_1_and_2(oracle.config, ours, theirs):
            record(f"huggingface {name}", figure)
    found = comparable(oracle.config, batch, pair.forward(batch))
    record(f"huggingface {name}", compared("1 activations", found, theirs.outputs))


def told_masks(masks):
    """While this is on, torch drops by these masks, one after another."""

    def dropout(x, p, training=True, inplace=False):
        if not training or p == 0:
            return x
        # OPT has the tokens of all rows along one axis.
        return x * masks.pop(0).view(x.shape) / (1 - p)

    return patch.object(functional, "dropout", dropout)


@pytest.mark.parametrize("name", ENTRIES)
def test_they_drop_where_we_do(name, record):
    """Logits of training agree, where theirs takes our masks in their order, and every setting is another rate."""
    settings = FAMILIES[ENTRIES[name].kind.__name__].settings
    rates = [setting.theirs for setting in settings if "dropout." in setting.ours]
    oracle = Oracle(name, **{field: 0.25 + number / 16 for number, field in enumerate(rates)})
    ours, batch = oracle.pair(0.2, 0).module, oracle.batch("none", 0)
    batch = {side: batch[side] for side in ("tokens", "source", "target") if side in batch}
    drawn = drawn_masks(oracle.config, jax.random.key(0), batch)
    masks = {site: torch.from_numpy(np.array(mask)) for site, mask in drawn.items()}
    inject(ours, masks)
    left = list(masks.values())
    oracle.model.train()
    with told_masks(left):
        theirs = oracle.logits(*batch.values())
    assert not left
    with torch.no_grad():
        logits = ours(*map(torch.from_numpy, batch.values())).logits
    record(f"huggingface {name}", compared("7 dropout", {"logits": logits.numpy()}, {"logits": theirs}))
