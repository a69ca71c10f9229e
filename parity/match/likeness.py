"""How well two names of parameters go together."""

from collections.abc import Iterable

from parity.match.parameter_names import ParameterName

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
        ours, theirs = list(ours), list(theirs)
        sides = [[name.words for name in side] for side in (ours, theirs)]
        known = [frozenset().union(*words) for words in sides]
        everywhere = [frozenset.intersection(*words) if words else frozenset() for words in sides]
        self.telling = (known[0] & known[1]) - (everywhere[0] & everywhere[1])
        used = _used(ours), _used(theirs)
        # Where both count alike a number is what it says; else (0, 2, 4 for 1, 2, 3) its rank counts.
        self._alike = {place: used[0][place] == used[1].get(place) for place in used[0]}

    def __call__(self, ours: ParameterName, theirs: ParameterName) -> float:
        """Above 0: they seem to mean the same; below: something speaks against it."""
        if ours.said and theirs.said:
            score = 2.0 if ours.leaf == theirs.leaf else -6.0
        else:
            score = 0.5 if ours.leaf == theirs.leaf else -0.5
        shared, apart = ours.words & theirs.words & self.telling, (ours.words ^ theirs.words) & self.telling
        score += sum(WEIGHTS.get(word, 1.0) for word in shared) - 0.75 * sum(WEIGHTS.get(word, 1.0) for word in apart)
        here, there = _counting(ours), _counting(theirs)
        if len(here) == len(there):
            for place, (one, other) in enumerate(zip(here, there, strict=True)):
                alike = self._alike.get((len(here), place))
                if alike or one[2] == other[2]:
                    score += 3.0 if one[0 if alike else 1] == other[0 if alike else 1] else -4.0
        return score


def _counting(name: ParameterName) -> list[tuple[int, int, int]]:
    """The numbers that tell it from others."""
    return [number for number in name.numbers if number[2] > 1]


def _used(names: Iterable[ParameterName]) -> dict[tuple[int, int], set[int]]:
    """The numbers that names use in each place."""
    used: dict[tuple[int, int], set[int]] = {}
    for name in names:
        numbers = _counting(name)
        for place, number in enumerate(numbers):
            used.setdefault((len(numbers), place), set()).add(number[0])
    return used
