"""What the name of a parameter says: which part of a model it is in, what it does there, in which layer.

Ports call one thing by many names (`q_proj`, `query`, `wq`; `ln_2`, `post_attention_layernorm`, `ffn_norm`). Here each
name becomes a set of common words, so that two names can be compared, and scored, whatever their style.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from parity.match.parameter_paths import Number, ParameterName, listed, ranks, spelled, split_path

_IN, _OUT = ("in", "proj"), ("out", "proj")
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
_PLACES = {"mlp": _MLP, "embedding": _EMBEDDING, "head": _HEAD}
_NORM_PLACES = {"input": "attention", "before": "attention", "post": "mlp", "after": "mlp"}
"""Names of Llama and ViT: the norm after attention stands before the feed-forward layer."""
_NORMS_OF_LAYER = {2: ("attention", "mlp"), 3: ("attention", "cross", "mlp")}
"""What norms stand before that are only numbered."""
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
_ROLES_IN_MLP = {"down": listed("down wo out output"), "up": listed("up wi ih in input intermediate fc")}
_SAID_BY_ROLE = {
    "norm": listed("input before post after pre layer output dense f"),
    "attention": listed("o out in output dense wo") | _PROJECTIONS.keys(),
    "mlp": listed("out output in input wi wo dense w b to intermediate hidden"),
    "embedding": listed("token tokens word words tok") | _TABLES.keys(),
}
"""Words that say no more than the role that is found there."""
_TOLD_BY_PLACE = _STOP | _ATTENTION | _CROSS | _MLP | _EMBEDDING | _HEAD | _NORM
_WEIGHTS = {
    **dict.fromkeys(listed("query key value output up down gate norm types positions tokens"), 3.0),
    **dict.fromkeys(listed("attention cross mlp embedding head encoder decoder final"), 2.5),
}
"""How much it says that two names share a word, or that one of them lacks it; other words count 1."""


def understand(paths: Mapping[str, str]) -> dict[str, ParameterName]:
    """Every path of one side -> what it says. `paths` has the kind of each: its module's class, or its rank."""
    split = [split_path(path, kind) for path, kind in paths.items()]
    numbers = ranks(split)
    return {one.path: _understood(one, numbers[one.path]) for one in split}


def _understood(one: ParameterName, known: Mapping[tuple[int, int], Number]) -> ParameterName:
    """Reads one name from left to right, then what it says of the place that it has come to."""
    place, found, in_layer = "", set[str](), False
    numbers: list[Number] = []
    ordinal: Number | None = None
    for index, part in enumerate(one.parts):
        words = {word for word in part if not word.isdigit()}
        for position in range(len(part)):
            if number := known.get((index, position)):
                if len(part) == 1 or words & _CONTAINERS or index < len(one.parts) - 1:
                    numbers.append(number)
                    in_layer = in_layer or (words <= _CONTAINERS | _SIDES.keys() if words else index > 0)
                else:
                    ordinal = number
        in_layer = in_layer or (len(words) == 1 and words <= _CONTAINERS)
        place = _place(words, place)
        if place == "cross":
            words -= _SIDES.keys()
        found |= {_SIDES.get(word) or _SYNONYMS.get(word, word) for word in words - _TOLD_BY_PLACE}
    every, last = {word for part in one.parts for word in part}, one.parts[-1] if one.parts else ()
    if one.said == "embedding" or one.kind.endswith("Embedding"):
        place = "embedding"
    if not place and (every & {*_PROJECTIONS, "wo", "o"} or last in (_IN, _OUT) or "Multihead" in one.kind):
        place = "attention"
    if "Norm" in one.kind or one.said in ("scale", "gamma", "g") or every & _NORM:
        found = {"norm"} | found - _SAID_BY_ROLE["norm"]
        if not place and in_layer:
            if not ordinal and len(numbers) > 1:
                ordinal = numbers.pop()
            if ordinal and ordinal.total in _NORMS_OF_LAYER:
                place, ordinal = _NORMS_OF_LAYER[ordinal.total][ordinal.rank], None
            elif every & {"final", "output"}:
                place = "mlp"
        if place:
            found.discard("final")
        elif not (in_layer or ordinal or "Batch" in one.kind):
            found.add("final")
    elif place in ("attention", "cross"):
        roles = {role for word in every for role in _PROJECTIONS.get(word, "").split()}
        # Names that say "attention" twice mean the projection to all three.
        if not roles and last in (("c", "attn"), _IN, ("in",)):
            roles = {"query", "key", "value"}
        found = found - _SAID_BY_ROLE["attention"] | (roles or {"output"})
    elif (
        place == "mlp"
        or (in_layer and not place and every & {"output", "dense", "fc", "w", "b"})
        or (in_layer and ordinal and every & {"linear", "lin"})
    ):
        if not ordinal and place and last[0].isdigit():
            ordinal = numbers.pop()
        place = "mlp"
        if role := _role_in_mlp(every, last, ordinal):
            ordinal = None
            found = found - _SAID_BY_ROLE["mlp"] | {*role.split()}
    elif place == "embedding":
        role = next((table for word, table in _TABLES.items() if word in every), "tokens")
        found = found - _SAID_BY_ROLE["embedding"] | {role}
    elif not place and every & {"output", "out"} and not in_layer:
        place = "head"
    if ordinal:
        numbers.append(ordinal)
    if "Conv" in one.kind and "Conv1D" not in one.kind:
        found.add("conv")
    return replace(one, words=frozenset({*found, place} - {""}), numbers=tuple(numbers))


def _place(words: Set[str], before: str) -> str:
    """The part of a model that a component with these words is in, or the one `before` it."""
    attends = words & _ATTENTION
    if words & _CROSS or (attends and words & {"encoder", "enc", "memory"}) or words == {"multihead", "attn"}:
        place = "cross"
    elif attends:
        place = "cross" if before == "cross" else "attention"
    elif words in ({"feed", "forward"}, {"dense", "relu"}):
        place = "mlp"
    else:
        place = next((each for each, said in _PLACES.items() if words & said), before)
    return next((_NORM_PLACES[word] for word in words & _NORM_PLACES.keys() if words & _NORM), place)


def _role_in_mlp(words: Set[str], last: Sequence[str], ordinal: Number | None) -> str:
    """What a matrix of a feed-forward layer is there, where its name says it."""
    if "gate" in words:
        return "up gate" if "up" in words else "gate"
    if ordinal and ordinal.total == 3 and words & {"w", "b"}:
        return ("gate", "down", "up")[ordinal.rank]
    if ordinal and ordinal.total == 2:
        return (("gate", "up") if "wi" in words else ("up", "down"))[ordinal.rank]
    if last == ("c", "proj"):
        return "down"
    return next((role for role, said in _ROLES_IN_MLP.items() if words & said), "")


class Likeness:
    """How well two names go together; words that all names of a side share, or that only one side uses, say nothing."""

    def __init__(self, ours: Iterable[ParameterName], theirs: Iterable[ParameterName]) -> None:
        ours, theirs = list(ours), list(theirs)
        sides = [[name.words for name in side] for side in (ours, theirs)]
        known = [frozenset().union(*words) for words in sides]
        everywhere = [frozenset.intersection(*words) if words else frozenset() for words in sides]
        self.telling = (known[0] & known[1]) - (everywhere[0] & everywhere[1])
        # Where both count alike a number is what it says; else (0, 2, 4 for 1, 2, 3) its rank counts.
        self._alike = dict(_used(ours).items() & _used(theirs).items())

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
                alike = (len(here), place) in self._alike
                if alike or one.total == other.total:
                    same = one.spoken == other.spoken if alike else one.rank == other.rank
                    score += 3.0 if same else -4.0
        return score


def _counting(name: ParameterName) -> list[Number]:
    """The numbers that tell it from others."""
    return [number for number in name.numbers if number.total > 1]


def _used(names: Iterable[ParameterName]) -> dict[tuple[int, int], frozenset[int]]:
    """The numbers that names use in each place."""
    used = defaultdict[tuple[int, int], frozenset[int]](frozenset)
    for numbers in map(_counting, names):
        for place, number in enumerate(numbers):
            used[len(numbers), place] |= {number.spoken}
    return used
