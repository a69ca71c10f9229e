"""compare.py --init: fine-tuning a checkpoint in JAX, in torch_ref and in `transformers` is one and the same."""

import csv
import json
from pathlib import Path

import jax
import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartModel,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    MarianConfig,
    MarianMTModel,
)
from transformers import GPT2LMHeadModel as GPT2
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding as MarianPositions

from parity_tests.oracles import exact_table
from parity_tests.small_tokenizers import CORPUS, byte_level, word_pieces
from twin import compare

HEADS = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
WIDTHS = {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
TRANSLATOR = {
    **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 2},
    **HEADS,
    **WIDTHS,
}
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def around():
    """A tokenizer that adds a token before and behind."""
    return byte_level(adds="around")


MODELS = {
    "text": (GPT2, GPT2Config, byte_level, {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "masked": (BertForMaskedLM, BertConfig, word_pieces, {**BERT, "max_position_embeddings": 64}),
    "pairs": (BartForConditionalGeneration, BartConfig, around, TRANSLATOR),
    "pairs, no head": (BartModel, BartConfig, around, TRANSLATOR),
    # Begins with its padding token.
    "pairs, Marian": (MarianMTModel, MarianConfig, around, TRANSLATOR | {"decoder_start_token_id": 0}),
}
SHORT = ["--batch-size", "2", "--steps", "3", "--no-memory", "--out", "report"]


@pytest.fixture(autouse=True)
def single_precision():
    """float64 is on where a program asks for it: as in a new process."""
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize(
    ("kind", "dtype", "gates"),
    [
        ("text", "float64", ["5, loss", "5, parameters", "5, loss"]),
        pytest.param("text", "float32", ["6", "6"], marks=pytest.mark.deep),
        pytest.param("masked", "float64", ["5, loss", "5, parameters", "5, loss"], marks=pytest.mark.deep),
        *(
            pytest.param(kind, "float64", ["5, loss", "5, parameters", "5, loss"], marks=pytest.mark.deep)
            for kind in ("pairs", "pairs, no head", "pairs, Marian")
        ),
    ],
)
def test_three_sides(kind, dtype, gates, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The class rounds it to float32 whatever its type.
    monkeypatch.setattr(MarianPositions, "create_weight", lambda self: exact_table(*self.weight.shape))
    found = compared(kind, ["--dtype", dtype])
    assert [verdict["gate"] for verdict in found["verdicts"]] == gates
    assert found["speed"].keys() == {"jax", "torch", "transformers"}
    rows = list(csv.DictReader(Path("report/curves.csv").read_text().splitlines()))
    losses = {side: [float(row[f"loss_{side}"]) for row in rows] for side in ("jax", "torch", "transformers")}
    assert losses["transformers"] == pytest.approx(losses["jax"], rel=1e-12 if dtype == "float64" else 1e-5)
    assert len(set(losses["jax"])) == 3
    page = Path("report/report.html").read_text()
    assert "The loss of transformers itself is at most" in page


def test_adapters_of_a_checkpoint(tmp_path, monkeypatch, capsys):
    """Ours and torch_ref's; `transformers` has none of its own."""
    monkeypatch.chdir(tmp_path)
    found = compared("text", ["--dtype", "float64", "--lora.rank", "2", "--lora.targets", "query,up"])
    # Of 2 layers, queries 16 x 16 and projections 16 x 64.
    assert f"{2 * (2 * (16 + 16) + 2 * (16 + 64))} of them train: adapters of rank 2" in capsys.readouterr().out
    assert [verdict["gate"] for verdict in found["verdicts"]] == ["5, loss", "5, parameters"]
    assert found["speed"].keys() == {"jax", "torch"}
    losses = [float(row["loss_jax"]) for row in csv.DictReader(Path("report/curves.csv").read_text().splitlines())]
    assert len(set(losses)) == 3


def compared(kind, flags):
    """The report, within the bars, of compare.py on a small checkpoint of this kind in the current folder."""
    torch.manual_seed(0)
    model, config, make, sizes = MODELS[kind]
    tokenizer = make()
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model(config(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained("checkpoint")
    tokenizer.save_pretrained("checkpoint")
    data = ["--data.path", "text.txt", "--data.context-length", "12"]
    Path("text.txt").write_text("\n".join(CORPUS * 20))
    kind = kind.partition(",")[0]
    if kind == "pairs":
        Path("pairs.tsv").write_text("".join(f"{number} {CORPUS[0]}\t{number} is it\n" for number in range(40)))
        data = ["--data.path", "pairs.tsv", "--data.source-length", "90", "--data.target-length", "40"]
    assert compare.main([kind, "--init", "checkpoint", *data, *SHORT, *flags]) == 0
    found = json.loads(Path("report/report.json").read_text())
    assert found["passed"] is True
    return found
