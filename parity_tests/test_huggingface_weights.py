"""Whether arrays fit: ties and copies, what older versions saved, and one line for whatever does not."""

import numpy as np
import pytest

from jax_tformer.hub.families import CONV1D, FAMILIES, Layout, Row, from_huggingface, to_huggingface
from parity_tests.errors import parity_error
from parity_tests.huggingface import Oracle, bytes_lost
from tests.refusals import refused

NAME, TABLE = "transformer.h.1.attn.c_attn.weight", "transformer.wte.weight"
POSITIONS = "model.decoder.embed_positions.weight"
COPIES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")


def given(name):
    """config.json and random arrays of a model."""
    oracle = Oracle(name)
    return oracle.json, oracle.random_weights(0.02, 0)


def doubled(weights):
    return [*weights.items(), ("transformer.wpe.weight", weights["transformer.wpe.weight"])]


@pytest.mark.parametrize(
    "name, change, message",
    [
        # What is missing or unexpected is in test_weights.py.
        ("gpt2", lambda w: {**w, NAME: w[NAME][:, :95]}, rf"{NAME} is \[32, 95\], expected \[32, 96\]"),
        ("gpt2", doubled, r"1 given twice \(transformer\.wpe\.weight\)"),
        ("gpt2", lambda w: {**w, "lm_head.weight": w[TABLE] + 1}, "lm_head.weight should repeat"),
        ("gpt2", lambda w: {**w, "lm_head.weight": w[TABLE][:, 1:]}, r"lm_head.weight is \[61, 31\]"),
        ("bart", lambda w: {**w, POSITIONS: w[POSITIONS][2:]}, rf"{POSITIONS} is \[40, 32\], expected \[42, 32\]"),
        *(
            ("bart", lambda w, copy=copy: {**w, copy: w["model.shared.weight"] + 1}, f"{copy} should repeat")
            for copy in COPIES
        ),
    ],
)
def test_arrays_that_do_not_fit(name, change, message):
    config, weights = given(name)
    with refused(message):
        from_huggingface(config, change(weights))


@pytest.mark.parametrize(
    "name, more",
    [
        ("gpt2", lambda w: {"lm_head.weight": w[TABLE].copy()}),
        # Masks, which older versions saved.
        ("gpt2", lambda w: {f"transformer.h.{layer}.attn.bias": np.ones((1, 1, 40, 40), bool) for layer in range(3)}),
        ("bart", lambda w: {copy: w["model.shared.weight"].copy() for copy in COPIES}),
    ],
)
def test_what_older_versions_saved_beside_them(name, more):
    config, weights = given(name)
    assert bytes_lost(from_huggingface(config, weights | more(weights))[1], from_huggingface(config, weights)[1]).passed


def test_writing_weights_of_two_types():
    config, weights = from_huggingface(*given("gpt2"))
    bias = "decoder.blocks.0.self_attention.key.bias"
    with refused("one type"):
        to_huggingface("GPT2LMHeadModel", config, weights | {bias: weights[bias].astype(np.float32)})


def test_a_table_with_a_gap_or_a_row_too_many():
    ours = Oracle("gpt2").config
    rows = FAMILIES["GPT2LMHeadModel"].rows(ours)
    for table, message in (
        (tuple(row for row in rows if "wpe" not in row.theirs), r"nothing that becomes embedding\.positions\.weight"),
        ((*rows, Row("x", "mystery.weight", CONV1D)), r"becomes mystery\.weight, which a model of this config"),
    ):
        with refused(message):
            Layout(table, ours)


def test_a_lost_byte_shows():
    x = np.arange(3.0)
    assert bytes_lost({"x": x}, {"x": x + np.array([0, 0, 2**-51])}).worst == 1
    for other in ({"x": x.astype("f4")}, {"y": x}):
        with parity_error("dtypes differ|only ours"):
            bytes_lost({"x": x}, other)


@pytest.mark.parametrize("tie, scale", [(False, None), (True, False), (True, True)])
def test_the_arrays_of_a_t5_tell_whether_its_head_is_tied(tie, scale):
    """Older versions save whether it is, and newer ones always that it is."""
    config, weights = given("t5 1.1")
    config |= {"tie_word_embeddings": tie, "scale_decoder_outputs": scale}
    untied, ours = from_huggingface(config, weights)
    assert (untied.tied_head, untied.head_scale) == (False, bool(scale))
    np.testing.assert_array_equal(ours["head.weight"], weights["lm_head.weight"])
    copies = dict.fromkeys([copy.removeprefix("model.") for copy in COPIES], weights["shared.weight"])
    tied, ours = from_huggingface(config, weights | copies)
    assert tied.tied_head
    assert "head.weight" not in ours


def test_positions_in_the_file_of_a_marian():
    oracle = Oracle("marian")
    weights = oracle.random_weights(0.02, 0)
    stored = {name: tensor.detach().numpy() for name, tensor in oracle.model.named_parameters() if "positions" in name}
    without = oracle.load(weights)
    for dtype in (np.float64, np.float32, np.float16):
        kept = {name: table.astype(dtype) for name, table in stored.items()}
        assert bytes_lost(from_huggingface(oracle.json, weights | kept)[1], without).passed
    table = stored[POSITIONS]
    interleaved = np.stack(np.split(table, 2, axis=1), axis=-1).reshape(table.shape)
    for wrong in (interleaved, table[1:], np.roll(table, 2, axis=0), table * np.nan):
        with refused(r"model\.decoder\.embed_positions\.weight is not the table of sines"):
            from_huggingface(oracle.json, weights | {POSITIONS: wrong})


@pytest.mark.parametrize(
    "tie, share, tied, shared",
    [(True, True, True, True), (True, False, True, False), (False, True, False, False), (False, False, False, False)],
)
def test_the_tables_of_a_marian(tie, share, tied, shared):
    oracle = Oracle("marian", tie_word_embeddings=tie, share_encoder_decoder_embeddings=share)
    assert (oracle.config.tied_head, oracle.config.shared_embedding) == (tied, shared)
    raw = oracle.random_weights(0.2, 0)
    arrays = to_huggingface("MarianMTModel", *from_huggingface(oracle.json, raw))[1]
    # Untied, their file may have a third table, and ours has one; nothing uses it.
    unused = set() if tie else {"model.shared.weight"}
    assert unused <= arrays.keys()
    assert bytes_lost(*({key: x for key, x in side.items() if key not in unused} for side in (arrays, raw))).passed
