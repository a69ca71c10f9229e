"""How well two names of parameters go together."""

from collections.abc import Iterable

from parity.parameter_names import ParameterName

WEIGHTS = {
    **dict.fromkeys(
        ("query", "key", "value", "output", "up", "down", "gate", "norm", "types", "positions", "tokens"), 3.0
    ),
    **dict.fromkeys(("attention", "cross", "mlp", "embedding", "head", "encoder", "decoder", "final"), 2.5),
}
"""How much it says that two names share a word, or that one of them lacks it; other words count 1."""


class Likeness:
    """How well two names go together; words that all names of a side share, or that only one side uses, say nothing."""

    def __init__(self, ours: Iterable[ParameterName], theirs: Iterable[ParameterName]) -> None:
        sides = [[name.words for name in side] for side in (ours, theirs)]
        known = [frozenset().union(*words) for words in sides]
        everywhere = [frozenset.intersection(*words) if words else frozenset() for words in sides]
        self.telling = (known[0] & known[1]) - (everywhere[0] & everywhere[1])

    def __call__(self, ours: ParameterName, theirs: ParameterName) -> float:
        """Above 0: they seem to mean the same; below: something speaks against it."""
        score = 2.0 if ours.leaf == theirs.leaf else -6.0
        shared, apart = ours.words & theirs.words & self.telling, (ours.words ^ theirs.words) & self.telling
        score += sum(WEIGHTS.get(word, 1.0) for word in shared) - 0.75 * sum(WEIGHTS.get(word, 1.0) for word in apart)
        if len(ours.numbers) == len(theirs.numbers):
            for (number, rank), (number_there, rank_there) in zip(ours.numbers, theirs.numbers, strict=True):
                score += 3.0 if number == number_there else 2.5 if rank == rank_there else -4.0
        return score
