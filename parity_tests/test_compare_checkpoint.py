"""compare.py --init: fine-tuning a checkpoint in JAX, in torch_ref and in `transformers` is one and the same."""

from pathlib import Path

import pytest
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding as MarianPositions

from parity_tests.depth import deep
from parity_tests.huggingface import save_checkpoint
from parity_tests.oracles import exact_table
from parity_tests.small_tokenizers import CORPUS, byte_level, word_pieces
from parity_tests.test_compare import curves, gates_of, report
from twin import compare

pytestmark = pytest.mark.usefixtures("single_precision", "own_folder")
GATE_5 = ["5, loss", "5, parameters", "5, loss"]
SHORT = "--batch-size 2 --steps 3 --no-memory --out report"


@pytest.mark.parametrize(
    "name, dtype, gates",
    [
        ("gpt2", "float64", GATE_5),
        deep("gpt2", "float32", ["6", "6"]),
        *(deep(name, "float64", GATE_5) for name in ("bert masked", "bart", "bart bare", "marian")),
    ],
)
def test_three_sides(name, dtype, gates, monkeypatch):
    # The class rounds it to float32 whatever its type.
    monkeypatch.setattr(MarianPositions, "create_weight", lambda self: exact_table(*self.weight.shape))
    found = compared(name, f"--dtype {dtype}")
    assert gates_of(found) == gates
    assert found["speed"].keys() == {"jax", "torch", "transformers"}
    losses = {side: [float(row[f"loss_{side}"]) for row in curves()] for side in ("jax", "torch", "transformers")}
    assert losses["transformers"] == pytest.approx(losses["jax"], rel=1e-12 if dtype == "float64" else 1e-5)
    assert len(set(losses["jax"])) == 3
    page = Path("report/report.html").read_text()
    assert "The loss of transformers itself is at most" in page


def test_adapters_of_a_checkpoint(capsys):
    """Ours and torch_ref's; `transformers` has none of its own."""
    found = compared("gpt2", "--dtype float64 --lora.rank 2 --lora.targets query,up")
    # Of 3 layers, queries 32 x 32 and projections 32 x 80.
    assert f"{2 * 3 * (32 + 32 + 32 + 80):,} of them train: adapters of rank 2" in capsys.readouterr().out
    assert gates_of(found) == ["5, loss", "5, parameters"]
    assert found["speed"].keys() == {"jax", "torch"}
    assert len({row["loss_jax"] for row in curves()}) == 3


def compared(name, flags):
    """The report, within the bars, of compare.py on a small checkpoint in the current folder."""
    kind = {"gpt2": "text", "bert masked": "masked"}.get(name, "pairs")
    # Marian begins with its padding token.
    settings = {"decoder_start_token_id": 0 if name == "marian" else 2, "max_position_embeddings": 96}
    tokenizer = {"text": byte_level(), "masked": word_pieces(), "pairs": byte_level(adds="around")}[kind]
    save_checkpoint(name, "checkpoint", tokenizer, **settings if kind == "pairs" else {})
    data = "--data.path text.txt --data.context-length 12"
    Path("text.txt").write_text("\n".join(CORPUS * 20))
    if kind == "pairs":
        Path("pairs.tsv").write_text("".join(f"{number} {CORPUS[0]}\t{number} is it\n" for number in range(40)))
        data = "--data.path pairs.tsv --data.source-length 90 --data.target-length 40"
    assert compare.main(f"{kind} --init checkpoint {data} {SHORT} {flags}".split()) == 0
    found = report()
    assert found["passed"] is True
    return found
