"""Which of a module's tensors each of our parameters most likely is, by names, shapes, order and numbers."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from parity.gates.layout import Layout
from parity.gates.pytrees import Tensors
from parity.match.candidates import EQUAL, Candidate, Named, Parameter, Proposal, Tensor, with_families
from parity.match.layouts import Fusion, fusions, layouts, rotaries, same
from parity.match.parameter_names import Likeness

LEAST = -3.0
"""A pair whose names speak against each other as much as this is not proposed."""
CLEAR = 2.0
"""How far the best must be ahead of the next for the names to decide."""
FUSIONS = (("query", "key", "value"), ("key", "value"), ("gate", "up"), ("r", "z", "n"), ("reset", "update", "new"))
"""What modules keep as one matrix, in the order in which it is fused."""
Found = dict[str, list[Candidate]]
"""Our parameter -> what it may be."""
Bonus = Mapping[tuple[object, ...], float]
"""(module of ours, module of theirs) or (module of theirs, role, style) -> what it adds to a score."""
ROTARY = "rotary"
"""The style of rows of heads in the other order of rotary embeddings."""
SAME_STYLE = 6.0
"""What it adds to a score that a parameter with equal numbers beside it is fused in the same style."""


def proposed(
    ours: Sequence[Parameter],
    theirs: Sequence[Tensor],
    our_numbers: Tensors,
    their_numbers: Tensors,
    error: float | None = None,
) -> list[Proposal]:
    """For each of our parameters the tensor that it most likely is: the best assignment, each tensor or part once.

    A parameter that fits nothing is left out. Where the numbers are gradients, and no weights, `error` is how far apart
    equal ones may be.
    """
    likeness = Likeness(
        [one.meaning for one in ours],
        [name for tensor in theirs for name in (tensor.meaning, *tensor.aliases)],
    )
    ours, theirs = with_families(ours), with_families(theirs)
    largest = {path: np.abs(array).max(initial=0.0) for path, array in our_numbers.items()}
    found: Found = {one.name: [] for one in ours}
    for one in chain(_alone(ours, theirs, likeness), _fused(ours, theirs, likeness)):
        # What ours has of several layers, each by itself, has its layers on whole axes.
        if all(len(axis) == 1 for layout in one.layouts for axis in layout.ours[: len(one.ours.layers)]):
            equal = _equal(one, our_numbers, their_numbers, largest, error)
            found[one.ours.name].append(replace(one, score=one.score + EQUAL * equal))
    found = _all_or_each(_in_usual_orders(found))
    bonus: Bonus = {}
    for _ in range(3):
        chosen = _assigned(found, bonus)
        bonus = _kinship(chosen)
    return [_explained(one, found[one.ours.name], bonus) for one in chosen]


def _candidate(
    ours: Parameter,
    tensor: Tensor,
    layouts: tuple[Layout, ...],
    named: float,
    against: float,
    role: int | None,
    style: tuple[Any, ...],
) -> Candidate:
    # Trees of ours are often sorted by name, so that places far apart do not say much.
    against += 0.4 * abs(ours.place - tensor.place) + (0.0 if layouts[0].natural else 1.5)
    return Candidate(ours, tensor, layouts, named, named - against, role, style)


def _alone(ours: Sequence[Parameter], theirs: Sequence[Tensor], likeness: Likeness) -> Iterator[Candidate]:
    """The layouts in which a tensor, of all layers, is one of ours."""
    for one, tensor in product(ours, theirs):
        shape = _of_one_layer(one, tensor)
        if shape is None:
            continue
        found = layouts(tensor.shape, shape) or _longer(tensor, shape)
        styled: list[tuple[tuple[object, ...], Layout]] = [((), layout) for layout in found]
        if one.meaning.words & {"query", "key", "value"} in ({"query"}, {"key"}):
            natural = [layout for layout in found if layout.natural and not layout.part]
            styled += [((ROTARY, *n), new) for layout in natural for n, new in rotaries(layout, tensor.heads)]
        named = max(likeness(one.meaning, name) for name in (tensor.meaning, *tensor.aliases))
        for style, layout in styled:
            # Of a longer table its first rows are rather those that a library keeps for padding.
            first = any(isinstance(cut, tuple) and cut[0] == 0 for _, cut in layout.part)
            yield _candidate(one, tensor, (layout,), named, tensor.buffer + bool(style) + 0.1 * first, None, style)


def _fused(ours: Sequence[Parameter], theirs: Sequence[Tensor], likeness: Likeness) -> Iterator[Candidate]:
    """Of what stands side by side (query, key and value), each may be a part of one array of the other side."""

    def candidate(
        ours: Parameter, tensor: Tensor, layouts: tuple[Layout, ...], fusion: Fusion, role: int | None = None
    ) -> Candidate:
        # A part is called like the whole, but for its role.
        words = (tensor.meaning.words - {*roles}) | {*(roles if role is None else roles[role : role + 1])}
        fused = ours if role is None else tensor
        named = likeness(ours.meaning, replace(tensor.meaning, words=words))
        named -= 0.0 if {*roles} <= fused.meaning.words else 2.0
        style = fusion.groups, fusion.order, fusion.rotary
        return _candidate(ours, tensor, layouts, named, _unusual(fusion, fused.name), role, style)

    for roles, group in _side_by_side(ours):
        for tensor in theirs:
            shapes = [_of_one_layer(one, tensor) for one in group]
            for fusion in _fusions(tensor.shape, shapes, roles, tensor.heads):
                for role, one in enumerate(group):
                    yield candidate(one, tensor, (fusion.layouts[role],), fusion, role)
    for roles, several in _side_by_side(theirs):
        members = tuple(name for tensor in several for name in tensor.members)
        name = " + ".join(tensor.name for tensor in several)
        whole = replace(several[0], name=name, members=members, fused=tuple(several))
        for one in ours:
            shape = _of_one_layer(one, several[0])
            for fusion in _fusions(shape, [tensor.shape for tensor in several], roles, whole.heads):
                yield candidate(one, whole, tuple(layout.turned for layout in fusion.layouts), fusion)


def _equal(
    one: Candidate,
    our_numbers: Tensors,
    their_numbers: Tensors,
    largest: Mapping[str, float],
    error: float | None,
) -> bool:
    """Whether both sides hold the same numbers; weights that are all alike, and no gradient, say nothing."""
    if not our_numbers.keys() >= {*one.ours.members}:
        return False
    for path, layers in one.ours.each_layer():
        bar = largest[path] * (1e-5 if error is None else error)
        for tensor, whole in one.pieces:
            layout = whole.of_one(layers)
            for array, member in zip(our_numbers[path].reshape(-1, *layout.shape), tensor.members, strict=True):
                here, there = layout.place(array), layout.seen(their_numbers[member])
                if not here.any() or (error is None and here.max() == here.min()):
                    return False
                if any(np.abs(here.flat[few] - there.flat[few]).max() > bar for few in (slice(4), slice(None))):
                    return False
    return True


def _in_usual_orders(found: Found) -> Found:
    """Among layouts of the same shapes, prefers what parameters of that kind have where shapes leave no choice."""
    # Orders of axes where shape and name leave no choice: how often, by word, kind and number of axes.
    seen = defaultdict[tuple[str, bool, int], Counter[tuple[int, ...]]](Counter)
    for several in found.values():
        natural = [one for one in several if one.layout.natural]
        best = max((one.score for one in natural), default=0.0)
        top = [one for one in natural if one.score > best - CLEAR]
        if len({one.layout.order for one in top}) != 1:
            continue
        tensor, order = top[0].tensor, top[0].layout.order
        whole = all(not one.layout.split for one in natural if one.tensor.name == tensor.name)
        if len(order) > 1 and tensor.meaning.kind != "Embedding" and whole:
            seen[top[0].ours.meaning.said, tensor.meaning.kind == "Conv1D", len(order)][order] += 1
    return {
        name: [replace(one, score=one.score - _against(one, seen)) for one in several]
        for name, several in found.items()
    }


def _all_or_each(found: Found) -> Found:
    """Several of them as one, and each by itself, exclude each other: the better fit stays."""
    best: dict[Parameter, float] = {}
    wanted: dict[Tensor, float] = {}
    for several in found.values():
        top = max((one.score for one in several), default=LEAST)
        for one in several:
            best[one.ours] = top
            near = one.score if top - one.score < CLEAR else LEAST
            wanted[one.tensor] = max(wanted.get(one.tensor, LEAST), near)
    # Of layers that fit alike, theirs are taken together, and ours each by itself.
    kept = _apart(sorted(wanted, key=lambda one: (-wanted[one], -len(one.members), one.name)))
    held = _apart(sorted(best, key=lambda one: (-best[one], len(one.members), one.name)))
    return {name: [one for one in found[name] if one.tensor.name in kept] for name in found if name in held}


def _assigned(found: Found, bonus: Bonus) -> list[Candidate]:
    """The best of all choices: each of ours has one, or costs LEAST; each tensor or part is taken once."""
    columns = list(dict.fromkeys(one.column for several in found.values() for one in several))
    place = {column: index for index, column in enumerate(columns)}
    scores = np.full((len(found), len(columns) + len(found)), LEAST)
    best: dict[tuple[int, int], Candidate] = {}
    for row, several in enumerate(found.values()):
        for one in several:
            where = row, place[one.column]
            if (score := _weight(one, bonus)) > scores[where]:
                scores[where], best[where] = score, one
    taken = zip(*(side.tolist() for side in linear_sum_assignment(-scores)), strict=True)
    chosen = [best[where] for where in taken if where in best]
    # A tensor is taken whole or in parts.
    users: dict[str, Candidate] = {}
    for one in chosen:
        users[one.tensor.name] = max(users.get(one.tensor.name, one), one, key=lambda each: each.score)
    return [one for one in chosen if bool(one.layout.part) == bool(users[one.tensor.name].layout.part)]


def _kinship(chosen: Sequence[Candidate]) -> Bonus:
    """What is of one module of ours goes together with one of theirs, and is fused in one style."""
    together = Counter((one.ours.meaning.parent, one.tensor.meaning.parent) for one in chosen)
    styles = {(one.tensor.meaning.parent, one.role, one.style) for one in chosen if one.equal}
    return {key: 1.5 for key, count in together.items() if count > 1} | dict.fromkeys(styles, SAME_STYLE)


def _explained(one: Candidate, every: Sequence[Candidate], bonus: Bonus) -> Proposal:
    """A candidate beside all `every` of the same parameter of ours."""
    weight = partial(_weight, bonus=bonus)
    others = [other for other in sorted(every, key=weight, reverse=True) if other is not one]
    near = [other for other in others if other.layout.natural]
    rivals = {other.column for other in near if weight(other) > weight(one) - CLEAR} - {one.column}
    turned = [other for other in near if other.column == one.column and other.score > one.score - 0.4]
    unsure = ""
    if one.equal:
        reason = "equal numbers"
    elif turned:
        unsure = f"{len(turned) + 1} ways to lay its axes"
    elif rivals:
        unsure = f"{len(rivals) + 1} candidates"
    elif one.named >= 4.0:
        reason = "name and shape"
    elif all(other.column == one.column for other in others):
        reason = "the only one of its shape"
    else:
        reason = "shape, and what is beside it"
    return Proposal(one, tuple(others), f"unsure: {unsure}" if unsure else reason, not unsure)


def _weight(one: Candidate, bonus: Bonus) -> float:
    """The score of a candidate with what it gains where its module goes together with ours."""
    parent = one.tensor.meaning.parent
    return one.score + bonus.get((one.ours.meaning.parent, parent), 0.0) + bonus.get((parent, one.role, one.style), 0.0)


def _of_one_layer(ours: Parameter, tensor: Tensor) -> tuple[int, ...] | None:
    """Our shape without the axes of the tensor's layers; None where there are no such axes of these sizes."""
    shape, number = (*ours.layers, *ours.shape), len(tensor.layers)
    return None if shape[:number] != tensor.layers or (number and ours.layers) else shape[number:]


def _longer(tensor: Tensor, shape: tuple[int, ...]) -> list[Layout]:
    """A table of which ours lacks the first rows (those that a library keeps for padding), or the last."""
    table = len(shape) == 2 and shape[1:] == tensor.shape[1:] and "embedding" in tensor.meaning.words
    if not table or shape[0] >= tensor.shape[0]:
        return []
    starts = tensor.shape[0] - shape[0], 0
    return [replace(same(shape), sizes=tensor.shape, part=((0, (start, start + shape[0])),)) for start in starts]


def _against(one: Candidate, seen: Mapping[tuple[str, bool, int], Counter[tuple[int, ...]]]) -> float:
    """What speaks against a layout: the order of axes that was seen, or that the word says, is another."""
    order, turned, said = one.layout.order, one.tensor.meaning.kind == "Conv1D", one.ours.meaning.said
    usual, weight = tuple(range(len(order))), 1.0
    if voted := seen.get((said, turned, len(order))):
        [(usual, _)] = voted.most_common(1)
    elif not (one.tensor.meaning.kind == "Embedding" or said == "embedding" or (said == "weight" and not turned)):
        weight = 1.0 if said == "kernel" else 0.3
        # Axes of space, then inputs, then outputs.
        usual = usual if turned else (*usual[2:], *usual[1::-1])
    return weight * (order != usual)


def _apart(named: Iterable[Named]) -> set[str]:
    """The names, best first, of which none holds what another does."""
    kept, taken = set(), set[str]()
    for one in named:
        if taken.isdisjoint(one.members):
            kept.add(one.name)
            taken |= {*one.members}
    return kept


def _side_by_side(named: Sequence[Named]) -> list[tuple[tuple[str, ...], list[Named]]]:
    """Groups of those that differ only in their role, in the order of FUSIONS."""
    families: dict[object, dict[str, Named]] = {}
    known = {role for roles in FUSIONS for role in roles}
    for one in named:
        words = one.meaning.words & known
        if len(words) == 1:
            around = one.meaning.parent.rpartition(".")[0]
            key = around, one.meaning.leaf, one.meaning.numbers, one.meaning.words - known, one.layers
            families.setdefault(key, {})[next(iter(words))] = one
    return [
        (roles, [family[role] for role in roles])
        for family in families.values()
        for roles in FUSIONS
        if family.keys() >= {*roles}
    ]


def _fusions(
    whole: tuple[int, ...] | None,
    shapes: Sequence[tuple[int, ...] | None],
    roles: tuple[str, ...],
    heads: tuple[int, ...],
) -> tuple[Fusion, ...]:
    if whole is None or None in shapes:
        return ()
    turning = tuple(place for place, role in enumerate(roles) if role in ("query", "key"))
    return fusions(whole, tuple(shapes), turning, (heads or (1,)) if turning else ())


def _unusual(fusion: Fusion, name: str) -> float:
    """What speaks against a way to fuse, where names alone decide."""
    by_heads = fusion.groups > 1
    if re.search(r"c_attn|in_proj|_[ih]h", name):
        against = 0.5 * by_heads
    else:
        # Two ways are in use: a tie.
        against = 0.3 * (by_heads != ("query_key_value" in name))
    return against + 2.5 * (fusion.order != tuple(sorted(fusion.order))) + 2.5 * bool(fusion.rotary)
