"""Gates 1 to 4 against Hugging Face's own models (see oracles/), and what their settings mean."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from jax_tformer.config import DropoutConfig, Dtype, TransformerConfig
from jax_tformer.hub.families import FAMILIES, from_huggingface
from jax_tformer.hub.tables import ACTIVATIONS, CONV1D, MATRIX, read_rows
from jax_tformer.model.layers import activate
from parity.gates.measure import (
    BFLOAT16,
    BFLOAT16_VALUES,
    FLOAT32,
    Measured,
    ParityError,
    Quality,
    Sample,
    compared,
    quality,
)
from parity.gates.pair import Result, Tensors
from parity_tests.huggingface import Narrowed, Oracle, comparable, masked
from parity_tests.oracles import ENTRIES, VARIANTS
from parity_tests.test_models import DRAWS_BFLOAT16
from twin.bridge import Pair, known_zeros, parity_options
from twin.cases import CONFIGS, PADDINGS, REGIMES

Record = Callable[[str, Measured], None]
FIRST = [name for name, entry in ENTRIES.items() if not entry.further]
FURTHER = [name for name, entry in ENTRIES.items() if entry.further]
UNLIKE = ["gemma3", "gpt_neox"]
"""Decoders whose parts no other of them has."""
HEADS = [pytest.param(name, marks=pytest.mark.deeper) for name in ("roberta texts", "roberta tokens")]
"""RoBERTa's own heads, which read what BERT's do not."""
DEEPER = {
    "test_gate_4": (["bert", "llama"], FIRST),
    "test_gates_3_and_4_of_the_forward_pass": ([*UNLIKE, *HEADS], FURTHER),
}
"""Test -> the models that it takes, and with --deep."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function.__name__ in DEEPER:
        few, every = DEEPER[metafunc.function.__name__]
        metafunc.parametrize("name", few if metafunc.config.getoption("--deep") is None else every)


@lru_cache(maxsize=2)
def sides(name: str, dtype: Dtype) -> tuple[Pair, Oracle]:
    """Ours and theirs of one model; the compiled function is kept while the parameters change."""
    oracle = Oracle(name, dtype)
    weights = from_huggingface(oracle.json, oracle.random_weights(0.02, 0))[1]
    return Pair(oracle.config, weights, dtype, optimised=dtype == "float32"), oracle


def results(name: str, weights: Tensors, batch: Tensors, dtype: Dtype) -> tuple[Result, Result]:
    """(JAX, Hugging Face) on one case, where they are comparable; `weights` are theirs."""
    pair, oracle = sides(name, dtype)
    oracle.load(weights)
    pair.load(from_huggingface(oracle.json, weights)[1])
    ours, theirs = pair.run_jax(masked(batch)), oracle.run(batch)
    return (
        Result(comparable(oracle.config, batch, ours.activations), ours.gradients),
        Result(comparable(oracle.config, batch, theirs.activations), theirs.gradients),
    )


def truth_of(name: str, weights: Tensors, batch: Tensors, record: Record) -> tuple[Result, dict[str, float]]:
    """Gates 1 and 2 on one case; then what Hugging Face computes in float64, and what is zero in exact arithmetic."""
    ours, theirs = results(name, weights, batch, "float64")
    zeros = known_zeros(sides(name, "float64")[1].config, theirs.gradients)
    record(f"huggingface {name}", compared("1 activations", ours.activations, theirs.activations))
    record(f"huggingface {name}", compared("2 gradients", ours.gradients, theirs.gradients, zero=zeros))
    return theirs, zeros


@pytest.mark.deep
@pytest.mark.parametrize("name", FURTHER)
def test_gates_1_and_2(name: str, record: Record) -> None:
    oracle = sides(name, "float64")[1]
    for std, padding in product(REGIMES.values(), PADDINGS):
        truth_of(name, oracle.random_weights(std, 0), oracle.batch(padding, 0), record)


@pytest.mark.parametrize("name", FIRST)
def test_gates_1_2_and_3(name: str, record: Record) -> None:
    label, (_, oracle) = f"huggingface {name}", sides(name, "float64")
    for std in REGIMES.values():
        samples = []
        for padding, seed in product(PADDINGS, range(2)):
            weights, batch = oracle.random_weights(std, seed), oracle.batch(padding, seed)
            theirs, zeros = truth_of(name, weights, batch, record)
            ours32, theirs32 = results(name, weights, batch, "float32")
            truth = theirs.activations | theirs.gradients
            scales = {tensor: float(np.linalg.norm(array)) for tensor, array in truth.items()} | zeros
            samples.append(
                Sample(ours32.activations | ours32.gradients, theirs32.activations | theirs32.gradients, truth, scales)
            )
        record(label, quality("3 float32 / allowed", samples))


@pytest.mark.deep
def test_gate_4(name: str, record: Record) -> None:
    """bfloat16, with weights that it holds, beside Hugging Face's own; with --deep, of all first entries."""
    exact, narrow = Oracle(name), Oracle(name, "bfloat16")
    start = from_huggingface(exact.json, exact.random_weights(0.02, 0))[1]
    pair = Pair(exact.config, start, "bfloat16", optimised=False)
    for std, padding in ((0.02, "left"), (0.2, "right")):
        samples = []
        for seed in range(DRAWS_BFLOAT16):
            weights = {
                key: array.astype(pair.dtype).astype(np.float64)
                for key, array in exact.random_weights(std, seed).items()
            }
            batch = exact.batch(padding, seed)
            exact.load(weights)
            narrow.load(weights)
            pair.load(from_huggingface(exact.json, weights)[1])
            truth, theirs, ours = exact.run(batch), narrow.run(batch), pair.run_jax(masked(batch))
            samples.append(sampled(exact.config, batch, ours, theirs, truth))
        record(f"huggingface {name}", quality("4 bfloat16 / allowed", samples, BFLOAT16))
        values = [sample.without(start) for sample in samples]
        record(f"huggingface {name}", quality("4 bfloat16 / allowed", values, BFLOAT16_VALUES))


@pytest.mark.deep
def test_gates_3_and_4_of_the_forward_pass(name: str, record: Record) -> None:
    """Half of what there is to compile: what narrow types do to gradients, the first entries show.

    With --deep, of all entries that are not among the first.
    """
    exact, start = Oracle(name), Oracle(name).random_weights(0.02, 0)
    start = from_huggingface(exact.json, start)[1]
    cases: tuple[tuple[Dtype, int, str, Quality], ...] = (
        ("float32", 5, "3 float32 / allowed", FLOAT32),
        ("bfloat16", 11, "4 bfloat16 / allowed", BFLOAT16_VALUES),
    )
    for dtype, draws, gate, allowed in cases:
        narrow, pair = Oracle(name, dtype), Pair(exact.config, start, dtype, optimised=dtype == "float32")
        options = parity_options(dtype, optimised=dtype == "float32")
        # Bound now: the loop goes on to another pair.
        forward = jax.jit(partial(lambda ours, *given: ours(*given)[1], pair.ours), compiler_options=options)
        for std, padding in ((0.02, "left"), (0.2, "right")):
            samples = []
            for seed in range(draws):
                raw, batch = exact.random_weights(std, seed), exact.batch(padding, seed)
                weights = {key: array.astype(pair.dtype).astype(np.float64) for key, array in raw.items()}
                exact.load(weights)
                narrow.load(weights)
                pair.load(from_huggingface(exact.json, weights)[1])
                ours = {key: np.asarray(x) for key, x in forward(pair.params, jax.device_put(masked(batch))).items()}
                others = (Result(side.run(batch).activations) for side in (narrow, exact))
                samples.append(sampled(exact.config, batch, Result(ours), *others))
            record(f"huggingface {name}", quality(gate, samples, allowed))


def sampled(config: TransformerConfig, batch: Tensors, ours: Result, theirs: Result, truth: Result) -> Sample:
    """The three of one batch, where they are comparable, and how large each tensor is.

    Ours are rounded to the type of theirs: attention weights and logits are float32 here, and bfloat16 there.
    """
    mine, other, exact = (
        comparable(config, batch, side.activations) | side.gradients for side in (ours, theirs, truth)
    )
    mine = {name: array.astype(other[name].dtype) for name, array in mine.items()}
    scales = {tensor: float(np.linalg.norm(array)) for tensor, array in exact.items()}
    return Sample(mine, other, exact, scales | known_zeros(config, truth.gradients))


def test_which_positions_are_compared() -> None:
    batch = {
        "tokens": np.arange(16).reshape(4, 4),
        "mask": np.array([[0, 0, 1, 1], [1, 1, 0, 0], [1] * 4, [0] * 4]) > 0,
    }
    decoder = comparable(CONFIGS["gpt2"], batch, {"position": batch["tokens"]})["position"]
    assert decoder.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    encoder = comparable(CONFIGS["bert-base"], batch, {"position": batch["tokens"]})["position"]
    assert encoder.tolist() == list(range(12))
    batch = {name: batch["tokens"] for name in ("source", "target")} | {
        "source_mask": batch["mask"][[0, 3, 2, 1]],
        "target_mask": batch["mask"],
    }
    places = {name: batch["source"] for name in ("encoder.0.hidden", "decoder.0.hidden", "logits")}
    found = {name: array.tolist() for name, array in comparable(CONFIGS["vaswani-base"], batch, places).items()}
    assert found["encoder.0.hidden"] == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15]
    assert found["decoder.0.hidden"] == found["logits"] == [2, 3, 8, 9, 10, 11]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(
    ("name", "side"), [("gpt2", "decoder"), ("bert masked", "encoder"), ("bart", "encoder"), ("bart", "decoder")]
)
def test_nothing_is_left_out_but_what_differs(name: str, side: str, padding: str) -> None:
    """Hidden states of the first layer differ at every position that is not compared, and at no other."""
    pair, oracle = sides(name, "float64")
    weights, batch = oracle.random_weights(0.2, 0), oracle.batch(padding, 0)
    oracle.load(weights)
    pair.load(from_huggingface(oracle.json, weights)[1])
    layer = f"{side}.0.hidden"
    ours, theirs = pair.run_jax(batch).activations[layer], oracle.run(batch).activations[layer]
    equal = np.abs(ours - theirs).max(axis=-1) < 1e-6
    places = np.arange(equal.size).reshape(equal.shape)
    assert places[equal].tolist() == comparable(oracle.config, batch, {layer: places})[layer].tolist()
    assert not equal.all()


FUSED = tuple(f"decoder.blocks.*.self_attention.{name}.weight" for name in ("key", "query", "value"))
FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
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
def test_a_fault_in_the_table_turns_gate_1_red(fault: str) -> None:
    """All shapes agree; only the numbers tell."""
    name, theirs, change = FAULTS[fault]
    pair, oracle = sides(name, "float64")
    weights, batch = oracle.random_weights(0.02, 0), oracle.batch("right", 0)
    rows = FAMILIES[oracle.json["architectures"][0]].rows(oracle.config)
    assert theirs in {row.theirs for row in rows}
    faulty = tuple(row._replace(**change) if row.theirs == theirs else row for row in rows)
    oracle.load(weights)
    pair.load(read_rows(faulty, oracle.config, weights))
    ours, reference = (
        comparable(oracle.config, batch, result.activations) for result in (pair.run_jax(batch), oracle.run(batch))
    )
    with pytest.raises(ParityError):
        compared("1 activations", ours, reference).require()


@pytest.mark.parametrize("name", ENTRIES)
def test_no_float32_is_left_in_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts are rewritten in the models that have islands of float32, and in no others."""
    oracle = Oracle(name)
    with Narrowed() as narrowed:
        oracle.run(oracle.batch("left", 0))
    assert not narrowed.found
    monkeypatch.setattr(oracle, "whole", nullcontext)
    with Narrowed() as narrowed:
        oracle.run(oracle.batch("left", 0))
    assert bool(narrowed.found) == ENTRIES[name].islands


def test_an_island_of_float32_turns_gates_1_and_2_red() -> None:
    plain, island = Oracle("gpt2"), Oracle("gpt2")
    island.model.base_model.h[1].ln_2.register_forward_hook(lambda module, inputs, output: output.float().double())
    weights, batch = plain.random_weights(0.2, 0), plain.batch("right", 0)
    plain.load(weights)
    island.load(weights)
    with Narrowed() as narrowed:
        theirs = island.run(batch)
    assert narrowed.found
    truth = plain.run(batch)
    zeros = known_zeros(plain.config, truth.gradients)
    for measured in (
        compared("1 activations", theirs.activations, truth.activations),
        compared("2 gradients", theirs.gradients, truth.gradients, zero=zeros),
    ):
        assert measured.bar < 1e-9 < measured.worst < 1e-3


def test_a_padding_token_changes_the_gradient_of_its_row_alone() -> None:
    """Why the gates run without one: PyTorch's padding_idx keeps the lookups of that row from training it."""
    plain, padded = Oracle("bert masked"), Oracle("bert masked", pad_token_id=7)
    assert plain.config == padded.config
    weights, batch = plain.random_weights(0.02, 0), plain.batch("none", 0)
    batch["tokens"][:, 3] = 7
    for oracle in (plain, padded):
        oracle.load(weights)
    ours, theirs = plain.run(batch), padded.run(batch)
    table = "embedding.tokens.weight"
    assert np.abs(ours.gradients[table][7] - theirs.gradients[table][7]).max() > 1e-6
    for result in (ours, theirs):
        result.gradients[table] = np.delete(result.gradients[table], 7, axis=0)
    assert compared("1 activations", ours.activations, theirs.activations).worst == 0
    assert compared("2 gradients", ours.gradients, theirs.gradients).worst == 0


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_settings_are_honoured(name: str, variant: str, record: Record) -> None:
    """By the JAX model, forward, and by the reference, whose gradients need no compilation."""
    oracle = Oracle(name, **ENTRIES[name].variants[variant])
    assert oracle.config != Oracle(name).config
    raw = oracle.random_weights(0.2, 0)
    oracle.load(raw)
    pair = Pair(oracle.config, from_huggingface(oracle.json, raw)[1], "float64", optimised=False)
    for padding in ("right", "left"):
        batch = oracle.batch(padding, 0)
        ours, theirs = pair.run_torch(batch), oracle.run(batch)
        expected = comparable(oracle.config, batch, theirs.activations)
        for activations in (ours.activations, *((pair.forward(batch),) if padding == "left" else ())):
            found = comparable(oracle.config, batch, activations)
            record(f"huggingface {name}", compared("1 activations", found, expected))
        zeros = known_zeros(oracle.config, theirs.gradients)
        record(f"huggingface {name}", compared("2 gradients", ours.gradients, theirs.gradients, zero=zeros))


def test_activations_are_the_functions_of_these_names() -> None:
    x = np.linspace(-6, 6, 101)
    ours = {name: np.asarray(activate(jnp.asarray(x), kind)) for name, kind in ACTIVATIONS.items()}
    compared("1 activations", ours, {name: ACT2FN[name](torch.from_numpy(x)).numpy() for name in ACTIVATIONS}).require()


def test_dropout_rates() -> None:
    rates: dict[str, Any] = {"embd_pdrop": 0.2, "attn_pdrop": 0.3, "resid_pdrop": 0.4}
    assert Oracle("gpt2", **rates).config.dropout == DropoutConfig(embedding=0.2, attention=0.3, residual=0.4)
    rates = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}
    assert Oracle("bert", **rates).config.dropout == DropoutConfig(embedding=0.2, attention=0.3, residual=0.2)
    rates = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.4}
    expected = DropoutConfig(embedding=0.2, attention=0.3, residual=0.2, feedforward=0.4)
    assert Oracle("bart", **rates).config.dropout == expected
