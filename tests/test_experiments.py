"""The experiments that no other test trains, from the command to the files."""

import re
import time

import pytest

from jax_tformer import EXPERIMENTS
from jax_tformer.cli import train
from jax_tformer.files import read_json
from jax_tformer.runs import metrics
from jax_tformer.runs.evaluation import Evaluator
from jax_tformer.runs.metrics import read_metrics
from jax_tformer.training import prepare
from tests.refusals import refused
from tests.small_runs import succeed

SHORT = "--model.d-model 16 --training.steps 4 --training.batch-size 4 --training.evaluate-batches 2"


def trained(name, run, flags):
    """Trains a small model for a few steps; returns what the summary says."""
    small = ("num-layers 1", "feedforward-width 16", "num-heads 2")
    narrow = [f"--model.{side}.{what}" for side in EXPERIMENTS[name].config.model.stacks for what in small]
    succeed(train, f"{name} --run {run} {' '.join(narrow)} {SHORT} {flags}")
    assert (run / "loss.png").stat().st_size > 1000
    return read_json(run / "summary.json")


@pytest.mark.parametrize(
    "name, flags, figures, sampled",
    [
        ("scan", "--training.evaluate-examples 6", {"exact_match", "bleu"}, "held-out examples, 0 of 6 exact"),
        ("grokking", "", {"train_accuracy", "val_accuracy"}, "0 + 1 = "),
        ("masked-chain", "", {"val_perplexity"}, "held-out masked words"),
        ("masked-docs", "--data.context-length 32", {"val_perplexity"}, "held-out masked words"),
    ],
)
def test_what_is_measured_and_shown(name, flags, figures, sampled, tmp_path, capsys):
    found = trained(name, tmp_path / "run", flags)
    assert figures <= found.keys()
    assert "val_bits_per_byte" not in found
    assert 1 < found["val_loss"] < 8  # ln 1024 = 6.9
    assert sampled in capsys.readouterr().out


def test_utilization_is_work_over_time_and_measured_rate(tmp_path, monkeypatch):
    """6 operations for each parameter of a matrix and token, and 12 L D T T / 2 of causal attention in a row."""
    monkeypatch.setattr(metrics, "product_rate", lambda dtype: 1e9)
    monkeypatch.setattr(metrics, "count", lambda: 2)
    run = tmp_path / "run"
    flags = "--data.context-length 32 --training.steps 5 --training.log-every 1 --training.log-utilization"
    figures, rows = trained("python-docs", run, flags), read_metrics(run / "metrics.jsonl")
    work = 6 * (4 * 16 * 16 + 2 * 16 * 16 + 1024 * 16) + 6 * 16 * 32
    measured = [(row["utilization"], row["tokens_per_second"]) for row in rows if "utilization" in row]
    assert len(measured) == 4, "the first step compiles"
    for utilization, tokens_per_second in measured:
        assert utilization == pytest.approx(work * tokens_per_second / 2e9, rel=1e-3), "of two processes"
    assert figures["utilization"] > 0
    with refused("with adapters"):
        train.train_options(["python-docs", "--lora.rank", "2", "--training.log-utilization"])


def test_the_time_of_an_evaluation_counts_as_that_of_no_step(tmp_path, monkeypatch):
    """Every evaluation takes a second more than it needs, and no step of 128 tokens so long."""
    evaluate = Evaluator.of_state
    monkeypatch.setattr(Evaluator, "of_state", lambda *given: time.sleep(1) or evaluate(*given))
    flags = "--data.context-length 32 --training.steps 5 --training.log-every 1 --training.evaluate-every 2"
    trained("python-docs", tmp_path / "run", flags)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    speeds = {row["step"]: row["tokens_per_second"] for row in rows if "tokens_per_second" in row}
    assert min(speeds[step] for step in (2, 4)) > 128


def test_a_product_has_a_rate():
    assert 1e8 < prepare.product_rate("float32") < 1e15


def test_pairs(tmp_path, capsys):
    run, pairs = tmp_path / "run", tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"the number {n}\tle nombre {n}\n" for n in range(300)) + "long " * 80 + "\tlong\n")
    flags = "--data.tokenizer.vocab-size 400 --data.source-length 24 --data.target-length 24"
    figures = trained("pairs", run, f"--data.path {pairs} {flags}")
    assert 0 <= figures["exact_match"] <= 1
    assert "bleu" not in figures, "three words have no run of four: it would be 0.00 of perfect answers too"
    assert re.fullmatch(r"(\d+) of \1 references have fewer than 4 tokens, .*", figures["no_bleu"])
    said = capsys.readouterr().out
    for told in (
        r"1 of 301 pairs \(0.3%\) are left out",
        r"step 4  val_loss .*  exact_match 0\.\d+  no_bleu \(\d+ of \d+ references",
        r"4 steps  .*  exact_match 0\.\d+  no_bleu \(",
        r"held-out examples, 0 of \d+ exact",
    ):
        assert re.search(told, said)
