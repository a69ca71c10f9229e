"""The generated tasks: SCAN is the published one, pair for pair in number; equations and chain obey their rules."""

from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise, product
from runpy import run_path

import numpy as np
import pytest

from jax_tformer import EXPERIMENTS
from jax_tformer.config import IGNORED
from jax_tformer.config.experiment import TokenizerConfig, TrainingConfig
from jax_tformer.data import generated
from jax_tformer.data.sources import held_out_pairs, load_pairs
from tests.refusals import refused
from tests.several_processes import ROOT
from tests.test_pipelines import build

# Of the paper's figure 1, with the names that actions have in its data.
LEFT, RIGHT = "I_TURN_LEFT", "I_TURN_RIGHT"
EXAMPLES = {
    "jump": "I_JUMP",
    "jump left": f"{LEFT} I_JUMP",
    "jump around right": " ".join([f"{RIGHT} I_JUMP"] * 4),
    "turn left twice": f"{LEFT} {LEFT}",
    "jump thrice": "I_JUMP I_JUMP I_JUMP",
    "jump opposite left and walk thrice": f"{LEFT} {LEFT} I_JUMP I_WALK I_WALK I_WALK",
    "jump opposite left after walk around left": " ".join([f"{LEFT} I_WALK"] * 4 + [LEFT, LEFT, "I_JUMP"]),
    "turn around right": " ".join([RIGHT] * 4),
}


def test_scan_is_that_of_the_paper():
    """Held against the published files once, all pairs of all three splits; here, against what is printed of them."""
    made = {command: " ".join(actions) for command, actions in generated.scan_commands().items()}
    assert len(made) == 20910
    assert {command: made[command] for command in EXAMPLES} == EXAMPLES


@pytest.mark.parametrize(
    "split, trained, held_out",
    [("scan-simple", 16728, 4182), ("scan-length", 16990, 3920), ("scan-jump", 14670, 7706)],
)
def test_scan_is_split_as_published(split, trained, held_out):
    experiment = EXPERIMENTS["scan"].config
    data = replace(experiment.data, source=split)
    texts = load_pairs(data)
    chosen = held_out_pairs(data, texts, range(len(texts) // 2))
    assert (int((~chosen).sum()), int(chosen.sum())) == (trained, held_out)
    pipeline, _ = build(data, experiment.training)
    assert len(pipeline.examples) == held_out, "all are decoded"
    assert not any("left out" in note for note in pipeline.notes), "all fit"
    pairs = Counter((texts[2 * n], texts[2 * n + 1]) for n in np.flatnonzero(~chosen))
    assert not pairs.keys() & set(pipeline.examples)
    if split == "scan-jump":
        assert pairs.pop(("jump", "I_JUMP")) == 1467
        assert not any("jump" in command for command, _ in pairs)


def test_equations_are_right_and_each_is_on_one_side():
    data = EXPERIMENTS["grokking"].config.data
    pipeline, tokenizer = build(data, TrainingConfig(batch_size=512))
    assert tokenizer.vocab_size == generated.PRIME + 2

    def lines_of(batches):
        for batch in batches:
            answers = batch["labels"][:, -1]
            assert (batch["labels"][:, :-1] == IGNORED).all(), "the answer alone is a label"
            yield from map(tokenizer.decode, np.column_stack([batch["tokens"], answers])[answers >= 0])

    trained, held_out = set(lines_of(pipeline.seen)), set(lines_of(pipeline.evaluation))
    for line in trained | held_out:
        a, _, b, _, answer = line.split()
        assert int(answer) == (int(a) + int(b)) % 97
    assert len(trained) + len(held_out) == len(trained | held_out) == 9409
    assert len(held_out) == round(data.held_out * 9409)
    assert set(lines_of(pipeline.train[number] for number in range(8))) <= trained


@pytest.mark.parametrize("change", [{"context_length": 5}, {"tokenizer": TokenizerConfig("bytes")}])
def test_equations_have_one_length(change):
    data = replace(EXPERIMENTS["grokking"].config.data, **change)
    with refused("expected 4 and 'words'"):
        build(data)


def test_the_chain_moves_by_its_odds():
    letters = [generated.LETTERS.index(letter) for letter in generated.markov_chain()]
    steps = np.array([(after - 3 * before) % 16 for before, after in pairwise(letters)])
    assert steps.max() == 3
    for k, odds in enumerate(generated.ODDS):
        assert abs((steps == k).mean() - odds) < 5 * np.sqrt(odds / len(steps))
    assert abs(np.bincount(letters) / len(letters) - 1 / 16).max() < 0.002


def test_the_least_loss_of_masked_letters():
    """Against the sum over all rows of letters and all choices of which to restore, as `mask_tokens` makes them."""
    least_losses = run_path(str(ROOT / "docs" / "markov_bound.py"))["least_losses"]
    moves = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.5, 0.25, 0.25]])
    mask = 4
    # [row, place]: a masked letter, one that may have been replaced, one that was and cannot be told.
    tokens = np.array([[0, 4, 1, 2], [2, 0, 0, 1], [4, 4, 0, 1]])
    labels = np.array([[-100, 1, -100, 2], [-100, -100, 1, 1], [2, 0, -100, -100]])

    def weight(row, hidden, chosen):
        total = np.prod([moves[pair] for pair in pairwise(hidden)])
        for place, (seen, letter) in enumerate(zip(row, hidden, strict=True)):
            as_chosen = 0.8 if seen == mask else 0.1 / 3 + 0.1 * (seen == letter)
            total *= as_chosen if place in chosen else seen == letter
        return total

    expected = []
    for row, own in zip(tokens, labels, strict=True):
        for place in np.flatnonzero(own != -100):
            likely = np.zeros(3)
            for hidden, chosen in product(product(range(3), repeat=4), combinations(range(4), 2)):
                if place in chosen:
                    likely[hidden[place]] += weight(row, hidden, chosen)
            expected.append(-np.log(likely[own[place]] / likely.sum()))
    np.testing.assert_allclose(least_losses(moves, tokens, labels, mask), expected, rtol=1e-12)


@pytest.mark.parametrize(
    "row, recipe, figure, digits",
    [
        ("SCAN, simple split", "scan-simple", "exact_match", 3),
        ("SCAN, by length", "scan-length", "exact_match", 3),
        ("SCAN, add jump", "scan-jump", "exact_match", 4),
        ("addition modulo 97 that groks", "grokking", "val_accuracy", 3),
        ("masked letters of a Markov chain", "masked-chain", "val_loss", 4),
        ("tinyshakespeare, CPU", "shakespeare-char", "val_loss", 3),
        ("tinyshakespeare, CPU", "nanogpt-rate", "val_loss", 3),
    ],
)
def test_the_table_of_recipes_says_what_the_logs_say(row, recipe, figure, digits):
    drawn = run_path(str(ROOT / "docs" / "draw_recipes.py"))
    lines = (ROOT / "docs" / "recipes.md").read_text().splitlines()
    [said] = [line for line in lines if line.startswith(f"| {row} |")]
    assert drawn["in_words"](drawn["reached"](recipe, figure), digits) in said


def test_the_lowest_loss_on_a_gpu_is_that_of_its_log():
    drawn = run_path(str(ROOT / "docs" / "draw_recipes.py"))
    [rows] = drawn["read_logs"]("shakespeare-gpu")
    loss, step = min((row["val_loss"], row["step"]) for row in rows if "val_loss" in row)
    assert f"| {loss:.4f} at step {step:,}, the lowest" in (ROOT / "docs" / "recipes.md").read_text()
