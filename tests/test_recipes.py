"""The large recipes, which nobody has run here: small ones from corpus to score, and the full step, compiled."""

import re

import jax
import pytest

from benchmarks.compiled import largest_batch
from jax_tformer import EXPERIMENTS, transformer
from jax_tformer.cli import generate, tokenize, train
from jax_tformer.config.experiment import MeshConfig
from jax_tformer.files import read_json
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.prepare import fit_to_devices, prepare
from jax_tformer.training.sharding import make_mesh
from tests.small_runs import succeed
from tests.test_tokenizing import write_lines

pytestmark = pytest.mark.deep
WORDS = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]


@pytest.mark.parametrize("name", ["gpt2-124m", "modded-nanogpt"])
def test_from_documents_to_a_model(name, folder, capsys):
    """llm.c's shards, with a file that is held out, in rows of 1,024 tokens."""
    texts = [f"Document {n} has {n * n} lines, and {n % 7} more. " * 40 for n in range(300)]
    write_lines(folder / "corpus.jsonl", texts)
    bpe = "--data.tokenizer.kind bpe --data.tokenizer.vocab-size 300"
    succeed(tokenize, f"corpus.jsonl --out shards {bpe} --data.held-out 0.2 --workers 1")
    assert sorted(path.name.split("_")[0] for path in (folder / "shards").glob("*.bin")) == ["train", "val"]
    narrow = "--model.decoder.num-layers 2 --model.decoder.num-heads 2 --model.decoder.feedforward-width 32"
    if name == "modded-nanogpt":
        narrow += " --model.decoder.rotary.width 4 --model.vocab-size 304"
    short = "--training.batch-size 2 --training.accumulation 2 --training.steps 6 --training.evaluate-batches 1"
    short += " --training.evaluate-every 6"
    succeed(train, f"{name} --data.path shards --run run --model.d-model 16 {narrow} {short}")
    assert 4 < read_json(folder / "run" / "summary.json")["val_loss"] < 6  # ln 304 = 5.7
    succeed(generate, "run --prompt Document --max-new-tokens 8")
    assert capsys.readouterr().out.rpartition("\n")[0]


@pytest.mark.parametrize("name", ["wmt14-en-de", "iwslt14-de-en"])
def test_from_pairs_to_a_score(name, folder, capsys):
    """Shared BPE, label smoothing, the mean of five checkpoints, four beams, both kinds of BLEU."""
    numbers = [f"{n:03d}" for n in range(1000)]
    spelled = ["-".join(WORDS[int(digit)] for digit in number) + " , bitte sehr ." for number in numbers]
    for side, lines in (("source", [" ".join(f"{number} , please .") for number in numbers]), ("target", spelled)):
        (folder / f"{side}.txt").write_text("\n".join(lines) + "\n")
    layers = "num-layers 2", "num-heads 2", "feedforward-width 128"
    narrow = " ".join(f"--model.{side}.{what}" for side in ("encoder", "decoder") for what in layers)
    narrow += " --model.dropout.residual 0 --model.dropout.embedding 0 --model.d-model 64 --data.held-out 0.1"
    narrow += " --data.tokenizer.vocab-size 320 --data.tokens-per-batch 1024 --data.path source.txt"
    narrow += " --data.source-length 32 --data.target-length 32 --data.target-path target.txt"
    short = "--optimizer.warmup-steps 50 --lr 4e-3 --steps 250 --training.checkpoint-every 20"
    succeed(train, f"{name} --run run {narrow} {short} --training.evaluate-every 250")
    capsys.readouterr()
    score = "run --file source.txt --reference target.txt --beam 4 --batch-size 250 --length-penalty 0.6"
    found = []
    for split in ("", "--split-compounds"):
        succeed(generate, f"{score} --checkpoint last-5 {split}")
        said = "".join(capsys.readouterr())
        found.append(float(re.search(r"BLEU\S* = ([\d.]+)", said)[1]))
        assert ("tok:none|smooth:none" if split else "tok:13a|smooth:exp") in said
    assert all(60 < bleu <= 100 for bleu in found), found


@pytest.mark.parametrize(
    "name, parameters, temporary",
    [
        ("gpt2-124m", 124_439_808, 33),
        ("modded-nanogpt", 162_354_816, 31),
        ("wmt14-en-de", 63_045_632, 11),
        ("iwslt14-de-en", 36_626_432, 1.7),
    ],
)
def test_the_full_step_is_compiled_and_its_memory_known(name, parameters, temporary):
    """GiB beside the state, on one processor: of 64 rows of 1,024 tokens, or a batch of the longest pairs."""
    experiment = EXPERIMENTS[name].config
    training, batch = experiment.training, largest_batch(experiment)
    mesh = make_mesh(MeshConfig(), training.batch_size // training.accumulation)
    vocabulary = {"gpt2-124m": 50257, "iwslt14-de-en": 10_000}.get(name, 37_000)
    config = experiment.model.with_vocab_size(vocabulary)
    net = transformer(fit_to_devices(config, batch, mesh, training.accumulation))
    prepared = prepare(net, optimizer(experiment.optimizer, training.steps), mesh, training, batch)
    needs = prepared.step.compile().memory_analysis()
    assert sum(leaf.size for leaf in jax.tree.leaves(prepared.abstract.params)) == parameters
    # AdamW has two moments of each parameter; Muon has one of those in the layers.
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(prepared.abstract))
    assert (2 if name == "modded-nanogpt" else 3) * 4 * parameters <= state <= 3 * 4 * parameters + 100
    assert needs.temp_size_in_bytes < temporary * 2**30
