"""Which of a module's tensors each of our parameters most likely is, by names, shapes, order and numbers."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from parity.gates.layout import Layout
from parity.match.candidates import EQUAL, Candidate, Named, Parameter, Proposal, Tensor, with_families
from parity.match.layouts import Fusion, fusions, layouts, rotaries, same
from parity.match.parameter_names import Likeness

LEAST = -3.0
"""A pair whose names speak against each other as much as this is not proposed."""
CLEAR = 2.0
"""How far the best must be ahead of the next for the names to decide."""
FUSIONS = (("query", "key", "value"), ("key", "value"), ("gate", "up"), ("r", "z", "n"), ("reset", "update", "new"))
"""What modules keep as one matrix, in the order in which it is fused."""
Bonus = Mapping[tuple[object, ...], float]
"""(module of ours, module of theirs) or (module of theirs, role, style) -> what it adds to a score."""
ROTARY = "rotary"
"""The style of rows of heads in the other order of rotary embeddings."""
SAME_STYLE = 6.0
"""What it adds to a score that a parameter with equal numbers beside it is fused in the same style."""


class Matcher:
    """Finds for each of our parameters the tensor that it most likely is."""

    def __init__(
        self,
        ours: Sequence[Parameter],
        theirs: Sequence[Tensor],
        our_numbers: Mapping[str, np.ndarray],
        their_numbers: Mapping[str, np.ndarray],
        error: float | None = None,
    ) -> None:
        """Where the numbers are gradients, and no weights, `error` is how far apart equal ones may be."""
        self.likeness = Likeness(
            [one.meaning for one in ours],
            [name for tensor in theirs for name in (tensor.meaning, *tensor.aliases)],
        )
        self.ours, self.theirs = with_families(ours), with_families(theirs)
        self.their_numbers, self.error = their_numbers, error
        self.our_numbers = {
            one.name: np.stack([our_numbers[name] for name in one.members]) if one.layers else our_numbers[one.name]
            for one in self.ours
            if our_numbers.keys() >= {*one.members}
        }
        self.largest = {name: np.abs(array).max(initial=0.0) for name, array in self.our_numbers.items()}
        self.candidates: dict[str, list[Candidate]] = {one.name: [] for one in self.ours}
        for one in self.ours:
            for tensor in self.theirs:
                self._add_alone(one, tensor)
        self._add_fused()
        self._choose_orders()
        self._all_or_each()

    def proposals(self) -> list[Proposal]:
        """The best assignment, each tensor or part once; a parameter that fits nothing is left out."""
        bonus: Bonus = {}
        for _ in range(3):
            chosen = self._assigned(bonus)
            bonus = self._kinship(chosen)
        return [self._explained(one, chosen[one.name], bonus) for one in self.ours if one.name in chosen]

    def _add_alone(self, ours: Parameter, tensor: Tensor) -> None:
        """The layouts in which a tensor, of all layers, is one of ours."""
        shape = _of_one_layer(ours, tensor)
        if shape is None:
            return
        found = layouts(tensor.shape, shape) or _longer(tensor, shape)
        styled: list[tuple[tuple[object, ...], Layout]] = [((), layout) for layout in found]
        roles = ours.meaning.words & {"query", "key", "value"}
        if roles in ({"query"}, {"key"}):
            natural = [layout for layout in found if layout.natural and not layout.part]
            styled += [((ROTARY, *n), new) for layout in natural for n, new in rotaries(layout, tensor.heads)]
        named = max(self.likeness(ours.meaning, name) for name in (tensor.meaning, *tensor.aliases))
        for style, layout in styled:
            against = (1.0 if tensor.buffer else 0.0) + (1.0 if style else 0.0)
            # Of a longer table its first rows are rather those that a library keeps for padding.
            against += 0.1 * any(isinstance(cut, tuple) and cut[0] == 0 for _, cut in layout.part)
            if all(len(group) == 1 for group in layout.ours[: len(ours.layers)]):
                self._add(ours, Candidate(tensor, (layout,), named, named - against, style=style))

    def _add_fused(self) -> None:
        """Of what stands side by side (query, key and value), each may be a part of one array of the other side."""
        for roles, group in _side_by_side(self.ours):
            for tensor in self.theirs:
                shapes = [_of_one_layer(ours, tensor) for ours in group]
                for fusion in _fusions(tensor.shape, shapes, roles, tensor.heads):
                    for role, ours in enumerate(group):
                        self._add_fusion(ours, tensor, roles, fusion, (fusion.layouts[role],), role)
        for roles, several in _side_by_side(self.theirs):
            members = tuple(name for tensor in several for name in tensor.members)
            name = " + ".join(tensor.name for tensor in several)
            whole = replace(several[0], name=name, members=members, fused=tuple(several))
            for ours in self.ours:
                shape = _of_one_layer(ours, several[0])
                for fusion in _fusions(shape, [tensor.shape for tensor in several], roles, whole.heads):
                    self._add_fusion(ours, whole, roles, fusion, tuple(layout.turned for layout in fusion.layouts))

    def _add_fusion(
        self,
        ours: Parameter,
        tensor: Tensor,
        roles: tuple[str, ...],
        fusion: Fusion,
        layouts: tuple[Layout, ...],
        role: int | None = None,
    ) -> None:
        # A part is called like the whole, but for its role.
        words = (tensor.meaning.words - {*roles}) | {*(roles if role is None else roles[role : role + 1])}
        fused = ours if role is None else tensor
        named = self.likeness(ours.meaning, replace(tensor.meaning, words=words))
        named -= 0.0 if {*roles} <= fused.meaning.words else 2.0
        style = fusion.groups, fusion.order, fusion.rotary
        self._add(ours, Candidate(tensor, layouts, named, named - _unusual(fusion, fused.name), role, style))

    def _add(self, ours: Parameter, one: Candidate) -> None:
        # Trees of ours are often sorted by name, so that places far apart do not say much.
        against = 0.4 * abs(ours.place - one.tensor.place) + (0.0 if one.layout.natural else 1.5)
        score = one.score - against + EQUAL * self._equal(ours, one)
        self.candidates[ours.name].append(replace(one, score=score))

    def _equal(self, ours: Parameter, one: Candidate) -> bool:
        """Whether both sides hold the same numbers; weights that are all alike, and no gradient, say nothing."""
        if ours.name not in self.our_numbers:
            return False
        layers = self.our_numbers[ours.name].reshape(-1, *one.layout.shape)
        error = self.largest[ours.name] * (1e-5 if self.error is None else self.error)
        for tensor, layout in one.pieces:
            for layer, member in zip(layers, tensor.members, strict=True):
                here, there = layout.place(layer), layout.seen(self.their_numbers[member])
                if not here.any() or (self.error is None and here.max() == here.min()):
                    return False
                if any(np.abs(here.flat[few] - there.flat[few]).max() > error for few in (slice(4), slice(None))):
                    return False
        return True

    def _choose_orders(self) -> None:
        """Among layouts of the same shapes, prefers what parameters of that kind have where shapes leave no choice."""
        seen = self._seen_orders()
        for ours in self.ours:
            self.candidates[ours.name] = [
                replace(one, score=one.score - _against(one, ours.meaning.said, seen))
                for one in self.candidates[ours.name]
            ]

    def _seen_orders(self) -> Mapping[tuple[str, bool, int], Counter[tuple[int, ...]]]:
        """Orders of axes where shape and name leave no choice: how often, by word, kind and number of axes."""
        seen = defaultdict[tuple[str, bool, int], Counter[tuple[int, ...]]](Counter)
        for ours in self.ours:
            found = [one for one in self.candidates[ours.name] if one.layout.natural]
            best = max((one.score for one in found), default=0.0)
            top = [one for one in found if one.score > best - CLEAR]
            if len({one.layout.order for one in top}) != 1:
                continue
            tensor, order = top[0].tensor, top[0].layout.order
            whole = all(not one.layout.split for one in found if one.tensor.name == tensor.name)
            if len(order) > 1 and tensor.kind != "Embedding" and whole:
                seen[ours.meaning.said, tensor.kind == "Conv1D", len(order)][order] += 1
        return seen

    def _all_or_each(self) -> None:
        """Several of them as one, and each by itself, exclude each other: the better fit stays."""
        best = {name: max((one.score for one in found), default=LEAST) for name, found in self.candidates.items()}
        wanted: dict[Tensor, float] = {}
        for name, one in ((name, one) for name, found in self.candidates.items() for one in found):
            near = one.score if one.score > best[name] - CLEAR else LEAST
            wanted[one.tensor] = max(wanted.get(one.tensor, LEAST), near)
        # Of layers that fit alike, theirs are taken together, and ours each by itself.
        kept = _apart(sorted(wanted, key=lambda one: (-wanted[one], -len(one.members), one.name)))
        held = _apart(sorted(self.ours, key=lambda one: (-best[one.name], len(one.members), one.name)))
        self.ours = [one for one in self.ours if one.name in held]
        self.candidates = {
            ours.name: [one for one in self.candidates[ours.name] if one.tensor.name in kept] for ours in self.ours
        }

    def _assigned(self, bonus: Bonus) -> dict[str, Candidate]:
        columns = list(dict.fromkeys(one.column for found in self.candidates.values() for one in found))
        place = {column: index for index, column in enumerate(columns)}
        # A parameter may stay without one: a column of its own, which costs LEAST.
        scores = np.full((len(self.ours), len(columns) + len(self.ours)), -1e6)
        best: dict[tuple[int, int], Candidate] = {}
        for row, ours in enumerate(self.ours):
            scores[row, len(columns) + row] = LEAST
            for one in self.candidates[ours.name]:
                score, column = _weight(ours, one, bonus), place[one.column]
                if score > scores[row, column]:
                    scores[row, column], best[row, column] = score, one
        taken = zip(*(side.tolist() for side in linear_sum_assignment(-scores)), strict=True)
        chosen = {self.ours[row].name: best[row, column] for row, column in taken if column < len(columns)}
        # A tensor is taken whole or in parts.
        users: dict[str, Candidate] = {}
        for one in chosen.values():
            users[one.tensor.name] = max(users.get(one.tensor.name, one), one, key=lambda each: each.score)
        return {
            name: one
            for name, one in chosen.items()
            if bool(one.layout.part) == bool(users[one.tensor.name].layout.part)
        }

    def _kinship(self, chosen: Mapping[str, Candidate]) -> Bonus:
        """What is of one module of ours goes together with one of theirs, and is fused in one style."""
        matched = [(ours.meaning.parent, chosen[ours.name]) for ours in self.ours if ours.name in chosen]
        together = Counter((parent, one.tensor.meaning.parent) for parent, one in matched)
        styles = {(one.tensor.meaning.parent, one.role, one.style) for _, one in matched if one.equal}
        return {key: 1.5 for key, count in together.items() if count > 1} | dict.fromkeys(styles, SAME_STYLE)

    def _explained(self, ours: Parameter, one: Candidate, bonus: Bonus) -> Proposal:
        def weight(candidate: Candidate) -> float:
            return _weight(ours, candidate, bonus)

        others = [other for other in sorted(self.candidates[ours.name], key=weight, reverse=True) if other is not one]
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
        return Proposal(ours, one, tuple(others), f"unsure: {unsure}" if unsure else reason, not unsure)


def _weight(ours: Parameter, one: Candidate, bonus: Bonus) -> float:
    """The score of a candidate with what it gains where its module goes together with ours."""
    parent = one.tensor.meaning.parent
    return one.score + bonus.get((ours.meaning.parent, parent), 0.0) + bonus.get((parent, one.role, one.style), 0.0)


def _of_one_layer(ours: Parameter, tensor: Tensor) -> tuple[int, ...] | None:
    """Our shape without the axes of the tensor's layers; None where there are no such axes of these sizes."""
    shape, number = (*ours.layers, *ours.shape), len(tensor.layers)
    return None if shape[:number] != tensor.layers or (number and ours.layers) else shape[number:]


def _longer(tensor: Tensor, shape: tuple[int, ...]) -> list[Layout]:
    """A table of which ours lacks the first rows (those that a library keeps for padding), or the last."""
    table = len(shape) == len(tensor.shape) == 2 and shape[1] == tensor.shape[1]
    if not table or shape[0] >= tensor.shape[0] or "embedding" not in tensor.meaning.words:
        return []
    starts = tensor.shape[0] - shape[0], 0
    return [replace(same(shape), sizes=tensor.shape, part=((0, (start, start + shape[0])),)) for start in starts]


def _against(one: Candidate, said: str, seen: Mapping[tuple[str, bool, int], Counter[tuple[int, ...]]]) -> float:
    """What speaks against a layout: the order of axes that was seen, or that the word says, is another."""
    order, turned = one.layout.order, one.tensor.kind == "Conv1D"
    usual, weight = tuple(range(len(order))), 1.0
    if voted := seen.get((said, turned, len(order))):
        [(usual, _)] = voted.most_common(1)
    elif not (one.tensor.kind == "Embedding" or said == "embedding" or (said == "weight" and not turned)):
        weight = 1.0 if said == "kernel" else 0.3
        inputs_first = {2: (1, 0), 3: (2, 1, 0), 4: (2, 3, 1, 0), 5: (2, 3, 4, 1, 0)}
        usual = usual if turned else inputs_first.get(len(order), order)
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
