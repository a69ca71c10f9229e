"""Computes the least loss that any model can have on the held-out letters of `train.py masked-chain`, exactly.

    python docs/markov_bound.py

No model knows more of a masked letter than its probabilities given all that it sees of the row: the letters, some of
them masked, some replaced by others. They follow from the chain by the forward-backward algorithm (Rabiner, 1989), over
pairs of a letter and of how many letters have been chosen to be restored, because exactly 15% of each row are.
"""

import math

import numpy as np

from jax_tformer.config import IGNORED
from jax_tformer.config.presets import EXPERIMENTS
from jax_tformer.data.generated import LETTERS, ODDS
from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for


def least_losses(moves: np.ndarray, tokens: np.ndarray, labels: np.ndarray, mask_id: int) -> np.ndarray:
    """Returns the loss in nats of the best prediction of each letter to restore, of all rows in order.

    `moves`, float[V, V], has the probabilities of each letter after each letter, and the first one is drawn evenly. Of
    the letters to restore (those with `labels`), the same number in every row, 80% are masked, 10% replaced by any
    letter and 10% left as they are.
    """
    rows, length = tokens.shape
    letters = np.arange(len(moves))
    same = letters == tokens[:, :, None]
    # Probability of what is seen in a place, given its letter, if it is not to be restored, and if it is.
    as_it_is = same.astype(float)
    to_restore = np.where(tokens[:, :, None] == mask_id, 0.8, 0.1 * same + 0.1 / len(letters))
    (count,) = set((labels != IGNORED).sum(1).tolist())

    def seen(place: int, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the weights [rows, letter, chosen so far] with this place not chosen, and with it chosen."""
        chosen = np.zeros_like(weights)
        chosen[:, :, 1:] = weights[:, :, :-1] * to_restore[:, place, :, None]
        return weights * as_it_is[:, place, :, None], chosen

    def scaled(weights: np.ndarray) -> np.ndarray:
        shares: np.ndarray = weights / weights.sum((1, 2), keepdims=True)
        return shares

    start = np.zeros((rows, len(letters), count + 1))
    start[:, :, 0] = 1 / len(letters)
    before, after = [start], [start * len(letters)]
    for place in range(length - 1):
        before.append(scaled(np.einsum("rxn,xy->ryn", sum(seen(place, before[-1])), moves)))
        after.append(scaled(np.einsum("ryn,xy->rxn", sum(seen(length - 1 - place, after[-1])), moves)))
    losses = np.zeros(labels.shape)
    for place, own in enumerate(labels.T):
        counts = own != IGNORED
        chosen = seen(place, before[place])[1]
        # As many chosen before and after as there are in all.
        likely = (chosen * after[length - 1 - place][:, :, ::-1]).sum(2)[counts]
        losses[counts, place] = np.log(likely.sum(1) / likely[np.arange(len(likely)), own[counts]])
    found: np.ndarray = losses[labels != IGNORED]
    return found


def main() -> None:
    """Prints the bound for the held-out batches of the experiment, and what no context at all would give."""
    experiment = EXPERIMENTS["masked-chain"].config
    tokenizer = build_tokenizer_for(experiment.data)
    moves = np.zeros((len(LETTERS),) * 2)
    for letter in range(len(LETTERS)):
        for k, odds in enumerate(ODDS):
            moves[letter, (3 * letter + k) % len(LETTERS)] += odds
    batches = build_pipeline(experiment.data, experiment.training, tokenizer).evaluation
    real = [(batch["labels"] != IGNORED).any(1) for batch in batches]
    tokens, labels = (
        np.concatenate([batch[name][rows] for batch, rows in zip(batches, real, strict=True)])
        for name in ("tokens", "labels")
    )
    losses = least_losses(moves, tokens, labels, tokenizer.require("mask", "to mask text with"))
    print(f"least possible loss: {losses.mean():.4f} nats, over {len(losses):,} letters of {len(tokens):,} rows")
    print(f"without any context: {math.log(len(LETTERS)):.4f}")


if __name__ == "__main__":
    main()
