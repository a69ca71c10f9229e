"""The path of a parameter in words: components, the leaf at its end, and the numbers in it."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Leaf = Literal["weight", "bias", "mean", "variance"]


def listed(words: str) -> frozenset[str]:
    """Words with blanks between them."""
    return frozenset(words.split())


def spelled(spellings: Mapping[str, str]) -> dict[str, str]:
    """Each spelling -> its meaning; `spellings` has all of a meaning, with blanks between them."""
    return {word: meaning for meaning, words in spellings.items() for word in words.split()}


_LEAVES = spelled(
    {
        "weight": "weight kernel scale embedding w gamma g weights",
        "bias": "bias beta b biases",
        "mean": "mean",
        "variance": "var variance",
    }
)
_SHORT = re.compile(r"([wb])(qkv|kv|q|k|v|o|ih|hh|i|h)")
"""`wq`, `bq`, `wqkv`: leaf and role in one word."""


class Number(NamedTuple):
    """A number in a path, and its rank among the numbers that are found in this place, of which there are `total`."""

    spoken: int
    rank: int
    total: int


@dataclass(frozen=True)
class ParameterName:
    """What a path says: its words, and what these come to once all of its side are known."""

    path: str
    leaf: Leaf
    said: str
    """The word for the leaf as it stands there: kernel, weight, scale ..."""
    parts: tuple[tuple[str, ...], ...]
    """Its components, without the leaf."""
    parent: str
    """The path of the module."""
    kind: str
    """The class of the module around it, or the rank of the array."""
    words: frozenset[str] = frozenset()
    """Common ones, whatever the style of the path."""
    numbers: tuple[Number, ...] = ()
    """The layer numbers in it."""


def split_path(path: str, kind: str) -> ParameterName:
    """A dotted path in words."""
    components = path.split(".")
    found = (re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", component) for component in components)
    parts = [tuple(word.lower() for word in words) for words in found]
    last, leaf, said = parts[-1], "weight", ""
    for place in (-1, 0):
        if last and last[place] in _LEAVES:
            said, leaf = last[place], _LEAVES[last[place]]
            # `w1` stays two words, so that its number is none of a layer.
            if not (len(last) > 1 and all(word.isdigit() for word in last[1:])):
                last = last[:-1] if place else last[1:]
            break
    else:
        if last and (short := _SHORT.fullmatch(last[0])):
            said, leaf = short[1], _LEAVES[short[1]]
            last = ({"i": "ih", "h": "hh"}.get(short[2], short[2]), *last[1:])
    if not said and kind == "1":
        # In a list by itself, (matrix, vector): the vector is a bias.
        leaf = "bias"
    if not said and len(components) > 1 and components[-1].isdigit():
        last = ()
    rest = tuple(part for part in [*parts[:-1], last] if part)
    # `fc1_weight` and `w1` are modules of their own, though no dot says so.
    alone = not last or said == ""
    own = [] if alone else ["_".join(word for word in last if word not in ("w", "b"))]
    parent = ".".join([*components[:-1], *own])
    return ParameterName(path, leaf, said, rest, parent, kind)  # type: ignore[arg-type]


def ranks(split: Sequence[ParameterName]) -> dict[str, dict[tuple[int, int], Number]]:
    """Path -> (component, word) -> the number there, ranked among those of paths that differ in it alone."""
    families = defaultdict[object, dict[int, list[tuple[str, tuple[int, int]]]]](lambda: defaultdict(list))
    for one in split:
        for index, part in enumerate(one.parts):
            for position, word in enumerate(part):
                if word.isdigit():
                    around = one.parts[:index], part[:position], part[position + 1 :], one.parts[index + 1 :]
                    families[around, one.leaf, one.kind][int(word)].append((one.path, (index, position)))
    found = defaultdict[str, dict[tuple[int, int], Number]](dict)
    for numbers in families.values():
        for rank, spoken in enumerate(sorted(numbers)):
            for path, place in numbers[spoken]:
                found[path][place] = Number(spoken, rank, len(numbers))
    return found
