"""What the name of a parameter says: which part of a model it is in, what it does there, in which layer.

Ports call one thing by many names (`q_proj`, `query`, `wq`; `ln_2`, `post_attention_layernorm`, `ffn_norm`). Here each
name becomes a set of common words, so that two names can be compared, and scored, whatever their style.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parity.match.parameter_paths import Leaf, Ranks, SplitPath, listed, ranks, spelled, split_path

_IN, _OUT = (("in", "proj"),), (("out", "proj"),)
"""The fused projection of PyTorch's attention, and the one after it."""
_STOP = listed(
    "model transformer module modules params param batch stats layer layers block blocks h net self to the lm proj lin"
    " projection linear c w b multihead multi head encoderblock decoderblock running resblocks core base root main"
)
_CONTAINERS = listed("layers layer blocks block h resblocks encoderblock decoderblock")
_ATTENTION = listed("attn attention mha sa selfattention selfattn multiheadattn mhsa")
_CROSS = listed("cross xattn crossattention crossattn")
_MLP = listed("mlp ffn ff feedforward intermediate densereludense")
_EMBEDDING = listed("embed embeds embedding embeddings embedder wte wpe shared emb")
_HEAD = listed("head predictions cls classifier logits unembed unembedding generator")
_NORM = listed("norm ln layernorm rmsnorm rms bn batchnorm groupnorm gn")
_NORM_PLACES = {"input": "attention", "before": "attention", "post": "mlp", "after": "mlp"}
"""Names of Llama and ViT: the norm after attention stands before the feed-forward layer."""
_SIDES = spelled({"encoder": "encoder source src enc", "decoder": "decoder target tgt trg dec"})
_PROJECTIONS = spelled(
    {
        "query": "q query queries",
        "key": "k key keys",
        "value": "v value values",
        "query key value": "qkv",
        "key value": "kv",
    }
)
_TABLES = spelled({"types": "type types segment segments", "positions": "wpe pos position positions positional"})
_SYNONYMS = spelled(
    {"input": "ih", "hidden": "hh recurrent", "conv": "convolution", "norm": "bn", "dense": "fc", "": "mean var"}
)
_PLACES_IN_MLP = listed("out output in input wi wo dense w b to intermediate hidden")
_WEIGHTS = {
    **dict.fromkeys(listed("query key value output up down gate norm types positions tokens"), 3.0),
    **dict.fromkeys(listed("attention cross mlp embedding head encoder decoder final"), 2.5),
}
"""How much it says that two names share a word, or that one of them lacks it; other words count 1."""


@dataclass(frozen=True)
class ParameterName:
    """What one name says."""

    leaf: Leaf
    said: str
    """The word for the leaf as it stands there: kernel, weight, scale ..."""
    words: frozenset[str]
    numbers: tuple[tuple[int, int, int], ...]
    """The layer numbers in it, each with its rank among the numbers that stand in that place, and how many do."""
    parent: str
    """The path of the module."""


def understand(paths: Mapping[str, str]) -> dict[str, ParameterName]:
    """Every path of one side -> what it says. `paths` has the kind of each: its module's class, or its rank."""
    split = [split_path(path, kind) for path, kind in paths.items()]
    ordinals = ranks(split)
    found = {}
    for one in split:
        reader = _Reader(one, ordinals)
        words = reader.meaning()
        found[one.path] = ParameterName(one.leaf, one.said, words, reader.numbers, one.parent)
    return found


class _Reader:
    """Reads one name from left to right."""

    def __init__(self, one: SplitPath, ranks: Ranks) -> None:
        self.one, self.ranks = one, ranks
        self._all = {word for part in one.parts for word in part}
        self.place: str | None = None
        self.found: set[str] = set()
        self.norm = "Norm" in one.kind or one.said in ("scale", "gamma", "g")
        self.ordinal: tuple[int, int] | None = None
        self.spoken, self.depth = 0, 0
        self.in_layer = False
        self.numbers: tuple[tuple[int, int, int], ...] = ()

    def meaning(self) -> frozenset[str]:
        """The common words that the name comes to."""
        for index, part in enumerate(self.one.parts):
            self._component(index, part)
        if self.one.said == "embedding" or self.one.kind.endswith("Embedding"):
            self.place = "embedding"
        if self.place is None and (
            self._all & {*_PROJECTIONS, "wo", "o"} or self.one.parts[-1:] in (_IN, _OUT) or "Multihead" in self.one.kind
        ):
            self.place = "attention"
        if self.norm:
            self._norm()
        elif self.place in ("attention", "cross"):
            self._attention()
        elif (
            self.place == "mlp"
            or (self.place is None and self.in_layer and self._all & {"output", "dense", "fc", "w", "b"})
            or (self.in_layer and self.ordinal and self._all & {"linear", "lin"})
        ):
            self._mlp()
        elif self.place == "embedding":
            self._embedding()
        elif self.place is None and self._all & {"output", "out"} and not self.in_layer:
            self.place = "head"
        if self.ordinal is not None:
            self.numbers += ((self.spoken, *self.ordinal),)
        if "Conv" in self.one.kind and "Conv1D" not in self.one.kind:
            self.found.add("conv")
        if self.place:
            self.found.add(self.place)
        return frozenset(self.found - {""})

    def _component(self, index: int, part: tuple[str, ...]) -> None:
        words = {word for word in part if not word.isdigit()}
        for position, word in enumerate(part):
            if word.isdigit():
                found = self.ranks[self.one.path, (index, position)]
                if part == (word,) or words & _CONTAINERS or index < len(self.one.parts) - 1:
                    self.numbers += ((int(word), *found),)
                    contained = bool(words) and words <= _CONTAINERS | _SIDES.keys()
                    self.in_layer = self.in_layer or contained or (not words and index > 0)
                    self.depth += 1
                    self.sublayer = found
                else:
                    self.ordinal, self.spoken = found, int(word)
        self.in_layer = self.in_layer or bool(words & _CONTAINERS and len(words) == 1)
        attends = words & _ATTENTION
        if words & _CROSS or (attends and words & {"encoder", "enc", "memory"}) or words == {"multihead", "attn"}:
            self.place = "cross"
            words -= _SIDES.keys()
        elif attends or words == {"self", "attn"}:
            self.place = self.place if self.place == "cross" else "attention"
        elif words & _MLP or words in ({"feed", "forward"}, {"dense", "relu"}):
            self.place = "mlp"
        elif words & _EMBEDDING:
            self.place = "embedding"
        elif words & _HEAD:
            self.place = "head"
        self.norm = self.norm or bool(words & _NORM)
        for word in words & _NORM_PLACES.keys() if words & _NORM else ():
            self.place = _NORM_PLACES[word]
        for word in words:
            if word in _SIDES:
                self.found.add(_SIDES[word])
            elif word not in _STOP | _ATTENTION | _CROSS | _MLP | _EMBEDDING | _HEAD | _NORM:
                self.found.add(_SYNONYMS.get(word, word))

    def _norm(self) -> None:
        self.found -= {*_NORM_PLACES, "pre", "layer", "output", "dense", "f"}
        self.found.add("norm")
        if self.place is not None:
            self.found.discard("final")
            return
        words, ordinal = self._all, self.ordinal
        if self.in_layer and ordinal is None and self.depth > 1:
            ordinal = self.sublayer
            self.numbers = self.numbers[:-1]
        orders = {2: ("attention", "mlp"), 3: ("attention", "cross", "mlp")}
        if self.in_layer and ordinal is not None and ordinal[1] in orders:
            self.place, self.ordinal = orders[ordinal[1]][ordinal[0]], None
        elif self.in_layer and words & {"final", "output"}:
            self.place = "mlp"
            self.found.discard("final")
        elif not self.in_layer and ordinal is None and "Batch" not in self.one.kind:
            self.found.add("final")

    def _attention(self) -> None:
        words = self._all
        roles = {role for word in words for role in _PROJECTIONS.get(word, "").split()}
        # Names that say "attention" twice mean the projection to all three.
        if not roles and self.one.parts[-1] in (("c", "attn"), *_IN, ("in",)):
            roles = {"query", "key", "value"}
        self.found -= {*_PROJECTIONS, "o", "out", "in", "output", "dense", "wo", "attn"}
        self.found |= roles or {"output"}

    def _mlp(self) -> None:
        words, ordinal = self._all, self.ordinal
        if ordinal is None and self.place == "mlp" and self.one.parts[-1][0].isdigit():
            ordinal = self.sublayer
            self.numbers = self.numbers[:-1]
        self.place = "mlp"
        role = None
        if words & {"gate"}:
            role = "up gate" if words & {"up"} else "gate"
        elif ordinal is not None and ordinal[1] == 3 and words & {"w", "b"}:
            role = ("gate", "down", "up")[ordinal[0]]
        elif ordinal is not None and ordinal[1] == 2:
            role = (("gate", "up") if "wi" in words else ("up", "down"))[ordinal[0]]
        elif words & {"down", "wo", "out", "output"} or self.one.parts[-1] == ("c", "proj"):
            role = "down"
        elif words & {"up", "wi", "ih", "in", "input", "intermediate"} or "fc" in words:
            role = "up"
        if role is not None:
            self.ordinal = None
            self.found -= _PLACES_IN_MLP
            self.found |= set(role.split())

    def _embedding(self) -> None:
        words = self._all
        role = next((_TABLES[word] for word in _TABLES if word in words), "tokens")
        self.found -= {"token", "tokens", "word", "words", "tok", *_TABLES}
        self.found.add(role)


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
        told = [sum(_WEIGHTS.get(word, 1.0) for word in words) for words in (shared, apart)]
        score += told[0] - 0.75 * told[1]
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
