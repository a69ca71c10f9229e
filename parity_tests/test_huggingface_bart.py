"""What BART alone has: position tables with an offset, four copies of the token table, two unlike stacks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from jax_tformer import load_pretrained, save_pretrained
from jax_tformer.config.errors import InputError
from jax_tformer.hub.families import from_huggingface, to_huggingface
from jax_tformer.hub.names import WeightsError
from parity.gates.measure import compared
from parity_tests.huggingface import Oracle
from parity_tests.test_huggingface_weights import bytes_lost
from twin.cases import PADDINGS, weights_for


@pytest.mark.parametrize("padding", PADDINGS)
def test_nothing_reads_the_rows_before_the_positions(padding: str) -> None:
    """The first two of BART's position tables: any values leave all else as it is, and get no gradient."""
    oracle = Oracle("bart")
    weights, batch = oracle.random_weights(0.2, 0), oracle.batch(padding, 0)
    results, tables = [], [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    for value in (0.0, 1e3):
        for table in tables:
            weights[table][:2] = value
        oracle.load(weights)
        results.append(oracle.run(batch))
        for table in tables:
            gradient = oracle.model.get_parameter(table).grad
            assert gradient is not None
            assert not gradient[:2].any()
            assert gradient[2:].any()
    first, second = results
    assert compared("1 activations", first.activations, second.activations).worst == 0
    assert compared("2 gradients", first.gradients, second.gradients).worst == 0


def test_a_table_without_the_rows_before_the_positions() -> None:
    oracle = Oracle("bart")
    weights = oracle.random_weights(0.02, 0)
    table = "model.decoder.embed_positions.weight"
    weights[table] = weights[table][2:]
    with pytest.raises(WeightsError, match=rf"{table} is \[40, 32\], expected \[42, 32\]"):
        from_huggingface(oracle.json, weights)


def test_the_copies_of_tied_tables() -> None:
    """Older versions saved all four of BART's."""
    oracle = Oracle("bart")
    weights = oracle.random_weights(0.02, 0)
    table = weights["model.shared.weight"]
    copies = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    whole = weights | {name: table.copy() for name in copies}
    assert bytes_lost(from_huggingface(oracle.json, whole)[1], from_huggingface(oracle.json, weights)[1]).passed
    for name in copies:
        with pytest.raises(WeightsError, match=f"{name} should repeat"):
            from_huggingface(oracle.json, whole | {name: table + 1})


def test_a_bare_model_predicts_with_its_token_table(tmp_path: Path) -> None:
    """As AutoModelForSeq2SeqLM makes of facebook/bart-base; it is saved as the class that it was."""
    oracle = Oracle("bart bare")
    oracle.load(oracle.random_weights(0.2, 0))
    oracle.model.save_pretrained(tmp_path / "theirs")
    net, params, _ = load_pretrained(tmp_path / "theirs")
    save_pretrained(tmp_path / "ours", net, params)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    model, told = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    source, target = np.arange(14).reshape(2, 7) + 10, np.arange(8).reshape(2, 4) + 5
    with torch.no_grad():
        expected = model(torch.from_numpy(source), decoder_input_ids=torch.from_numpy(target)).logits.numpy()
    found = jax.jit(net.apply)(params, source, target)
    compared("1 activations", {"logits": np.asarray(found)}, {"logits": expected}).require()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared_embedding": False}, "shared_embedding: true -> false"),
        ({"head_bias": False}, "head_bias: true -> false"),
        ({"decoder": {"max_positions": 39}}, "decoder.max_positions: 40 -> 39"),
        ({"decoder": {"position_offset": 0}}, "decoder.position_offset: 2 -> 0"),
        ({"decoder": {"embedding_scale": True}}, "decoder.embedding_scale: false -> true"),
        ({"encoder": {"final_norm": True}}, "encoder.final_norm: false -> true"),
        ({"encoder": {"norm_eps": 1e-6}}, "encoder.norm_eps: 1e-05 -> 1e-06"),
        ({"encoder": {"norm_placement": "pre"}}, 'encoder.norm_placement: "post" -> "pre"'),
    ],
)
def test_configs_that_bart_cannot_express(change: dict[str, Any], message: str) -> None:
    config = Oracle("bart").config
    changes = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in change.items()
    }
    config = replace(config, **changes)
    with pytest.raises(InputError, match=message):
        to_huggingface("BartForConditionalGeneration", config, weights_for(config, 0.02))
