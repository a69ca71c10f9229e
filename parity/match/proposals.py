"""Which of a module's tensors each of our parameters most likely is, by names, shapes, order and numbers."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from scipy.optimize import linear_sum_assignment

from parity.gates.layout import Layout
from parity.match.candidates import EQUAL, Candidate, Leaf, Named, Proposal, Tensor, families
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
    """Finds for each of our leaves the tensor that it most likely is."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        tensors: Sequence[Tensor],
        arrays: Mapping[str, np.ndarray],
        error: float | None = None,
    ) -> None:
        """Where `leaves` and `arrays` hold gradients, and no weights, `error` is how far apart equal ones may be."""
        self.tensors, self.arrays, self.error = list(tensors), arrays, error
        self.likeness = Likeness(
            [leaf.meaning for leaf in leaves],
            [name for tensor in tensors for name in (tensor.meaning, *tensor.aliases)],
        )
        stacked = [
            Leaf(meaning.path, (*counts, *several[0].shape), meaning, None, several[0].place, several, counts)
            for meaning, several, counts in families({leaf.path: leaf for leaf in leaves})
        ]
        self.leaves = [*leaves, *stacked]
        self.candidates = {leaf.path: self._candidates(leaf) for leaf in self.leaves}
        self._add_fusions()
        self._choose_orders()
        self._all_or_each()

    def proposals(self) -> list[Proposal]:
        """The best assignment, each tensor or part once; a leaf that fits nothing is left out."""
        bonus: Bonus = {}
        chosen: dict[str, Candidate] = {}
        for _ in range(3):
            chosen = self._assigned(bonus)
            bonus = self._kinship(chosen)
        return [self._explained(leaf, chosen, bonus) for leaf in self.leaves if leaf.path in chosen]

    def _candidates(self, leaf: Leaf) -> list[Candidate]:
        found = []
        turns = leaf.meaning.words & {"query", "key", "value"} in ({"query"}, {"key"})
        for tensor in self.tensors:
            if (shape := _of_one_layer(leaf, tensor)) is None:
                continue
            ways = list(layouts(tensor.shape, shape))
            if not ways and len(shape) == len(tensor.shape):
                ways = self._longer(tensor, shape)
            if not ways:
                continue
            named = max(self.likeness(leaf.meaning, name) for name in (tensor.meaning, *tensor.aliases))
            score = named - self._away(leaf, tensor) - (1.0 if tensor.buffer else 0.0)
            styled: list[tuple[tuple[object, ...], Layout]] = [((), layout) for layout in ways]
            if turns and not ways[0].part:
                styled += [((ROTARY, *n), new) for one in ways if one.natural for n, new in rotaries(one, tensor.heads)]
            found += [
                self._weighed(leaf, Candidate(tensor, (layout,), named, score, style=style)) for style, layout in styled
            ]
        return [one for one in found if all(len(group) == 1 for group in one.layout.ours[: len(leaf.layers)])]

    def _longer(self, tensor: Tensor, shape: tuple[int, ...]) -> list[Layout]:
        """A table of which ours lacks the first rows (those that a library keeps for padding), or the last."""
        if len(shape) != 2 or shape[1] != tensor.shape[1] or "embedding" not in tensor.meaning.words:
            return []
        idle = max(0, tensor.shape[0] - shape[0])
        ways = [(first, first + shape[0]) for first in dict.fromkeys((idle, 0))]
        return [replace(same(shape), sizes=tensor.shape, part=((0, rows),)) for rows in ways if idle]

    def _away(self, leaf: Leaf, tensor: Tensor) -> float:
        """What places far apart speak against each other; trees of ours are often sorted by name, so not much."""
        return 0.4 * abs(leaf.place - tensor.place)

    def _weighed(self, leaf: Leaf, one: Candidate) -> Candidate:
        score = one.score - (0.0 if one.layout.natural else 1.5) - (1.0 if ROTARY in one.style else 0.0)
        [(_, cut)] = one.layout.part or ((0, None),)
        if isinstance(cut, tuple) and one.role is None and cut[0] == 0:
            score -= 0.1
        return replace(one, score=score + EQUAL * self._equal(leaf, one))

    def _equal(self, leaf: Leaf, one: Candidate) -> bool:
        """Whether both sides hold the same numbers; weights that are all alike, and no gradient, say nothing."""
        if leaf.numbers is None:
            return False
        ours = leaf.numbers.reshape(-1, *one.layout.shape)
        error = (1e-5 if self.error is None else self.error) * leaf.largest
        for tensor, layout in one.pieces:
            for whole, member in zip(ours, tensor.members, strict=True):
                here, there = layout.place(whole), layout.seen(self.arrays[member])
                if not here.any() or (self.error is None and here.max() == here.min()):
                    return False
                if any(np.abs(here.flat[few] - there.flat[few]).max() > error for few in (slice(4), slice(None))):
                    return False
        return True

    def _add_fusions(self) -> None:
        """Of what stands side by side (query, key and value), each may be a part of one array of the other side."""
        for roles, group in _sides(self.leaves):
            for tensor in self.tensors:
                shapes = [_of_one_layer(leaf, tensor) for leaf in group]
                for fusion in _fusions(tensor.shape, shapes, roles, tensor.heads):
                    for index, leaf in enumerate(group):
                        self._add_fusion(leaf, tensor, roles, fusion, fusion.layouts[index : index + 1], index)
        for roles, several in _sides(self.tensors):
            whole = replace(
                several[0],
                name=" + ".join(tensor.name for tensor in several),
                members=tuple(name for tensor in several for name in tensor.members),
                fused=tuple(several),
            )
            for leaf in self.leaves:
                shape = _of_one_layer(leaf, several[0])
                for fusion in _fusions(shape, [tensor.shape for tensor in several], roles, whole.heads):
                    self._add_fusion(leaf, whole, roles, fusion, tuple(each.turned for each in fusion.layouts))

    def _add_fusion(
        self,
        leaf: Leaf,
        tensor: Tensor,
        roles: tuple[str, ...],
        fusion: Fusion,
        layouts: tuple[Layout, ...],
        role: int | None = None,
    ) -> None:
        # A part is called like the whole, but for its role.
        words = (tensor.meaning.words - set(roles)) | set(roles if role is None else roles[role : role + 1])
        named = self.likeness(leaf.meaning, replace(tensor.meaning, words=words))
        fused = leaf if role is None else tensor
        named -= 0.0 if set(roles) <= fused.meaning.words else 2.0
        score = named - self._away(leaf, tensor) - _unusual(fusion, fused.meaning.path)
        one = Candidate(tensor, layouts, named, score, role, (fusion.groups, fusion.order, fusion.rotary))
        self.candidates[leaf.path].append(self._weighed(leaf, one))

    def _choose_orders(self) -> None:
        """Among layouts of the same shapes, prefers what parameters of that kind have where shapes leave no choice."""
        for leaf in self.leaves:
            found = self.candidates[leaf.path]
            self.candidates[leaf.path] = [
                replace(one, score=one.score - self._against(leaf.meaning.said, one)) for one in found
            ]

    def _against(self, said: str, one: Candidate) -> float:
        """What speaks against a layout: the order of axes that was seen, or that the word says, is another."""
        order, turned = one.layout.order, one.tensor.kind == "Conv1D"
        usual, weight = tuple(range(len(order))), 1.0
        if seen := self._seen.get((said, turned, len(order))):
            usual = max(seen, key=lambda order: seen[order])
        elif not (one.tensor.kind == "Embedding" or said == "embedding" or (said == "weight" and not turned)):
            weight = 1.0 if said == "kernel" else 0.3
            inputs_first = {2: (1, 0), 3: (2, 1, 0), 4: (2, 3, 1, 0), 5: (2, 3, 4, 1, 0)}
            usual = usual if turned else inputs_first.get(len(order), order)
        return weight * (order != usual)

    @cached_property
    def _seen(self) -> dict[tuple[str, bool, int], dict[tuple[int, ...], int]]:
        """Orders of axes where shape and name leave no choice."""
        votes: dict[tuple[str, bool, int], dict[tuple[int, ...], int]] = {}
        for leaf in self.leaves:
            found = [one for one in self.candidates[leaf.path] if one.layout.natural]
            best = max((one.score for one in found), default=0.0)
            top = [one for one in found if one.score > best - CLEAR]
            if len({one.layout.order for one in top}) != 1:
                continue
            tensor, order = top[0].tensor, top[0].layout.order
            whole = all(not one.layout.split for one in found if one.tensor.name == tensor.name)
            if len(order) > 1 and tensor.kind != "Embedding" and whole:
                key = leaf.meaning.said, tensor.kind == "Conv1D", len(order)
                voted = votes.setdefault(key, {})
                voted[order] = voted.get(order, 0) + 1
        return votes

    def _all_or_each(self) -> None:
        """Several of them as one, and each by itself, exclude each other: the better fit stays."""
        best = {path: max((one.score for one in found), default=LEAST) for path, found in self.candidates.items()}
        wanted: dict[Tensor, float] = {}
        for path, one in ((path, one) for path, found in self.candidates.items() for one in found):
            near = one.score if one.score > best[path] - CLEAR else LEAST
            wanted[one.tensor] = max(wanted.get(one.tensor, LEAST), near)
        # Of layers that fit alike, theirs are taken together, and ours each by itself.
        tensors = sorted(wanted, key=lambda one: (-wanted[one], -len(one.members), one.name))
        leaves = sorted(self.leaves, key=lambda one: (-best[one.path], len(one.paths), one.path))
        kept = _apart((one.name, one.members) for one in tensors)
        held = _apart((one.path, one.paths) for one in leaves)
        self.leaves = [leaf for leaf in self.leaves if leaf.path in held]
        self.candidates = {
            leaf.path: [one for one in self.candidates[leaf.path] if one.tensor.name in kept] for leaf in self.leaves
        }

    def _assigned(self, bonus: Bonus) -> dict[str, Candidate]:
        columns = list(dict.fromkeys(one.column for found in self.candidates.values() for one in found))
        place = {column: index for index, column in enumerate(columns)}
        # A leaf may stay without one: a column of its own, which costs LEAST.
        scores = np.full((len(self.leaves), len(columns) + len(self.leaves)), -1e6)
        best: dict[tuple[int, int], Candidate] = {}
        for row, leaf in enumerate(self.leaves):
            scores[row, len(columns) + row] = LEAST
            for one in self.candidates[leaf.path]:
                score, column = _weight(leaf, one, bonus), place[one.column]
                if score > scores[row, column]:
                    scores[row, column], best[row, column] = score, one
        taken = zip(*(side.tolist() for side in linear_sum_assignment(-scores)), strict=True)
        chosen = {self.leaves[row].path: best[row, column] for row, column in taken if column < len(columns)}
        # A tensor is taken whole or in parts.
        for name in {one.tensor.name for one in chosen.values()}:
            users = {path: one for path, one in chosen.items() if one.tensor.name == name}
            best_user = max(users.values(), key=lambda one: one.score)
            for path, one in users.items():
                if bool(one.layout.part) != bool(best_user.layout.part):
                    del chosen[path]
        return chosen

    def _kinship(self, chosen: Mapping[str, Candidate]) -> Bonus:
        """Leaves of one module of ours go together with those of one of theirs, and are fused in one style."""
        matched = [(leaf.meaning.parent, chosen[leaf.path]) for leaf in self.leaves if leaf.path in chosen]
        together = Counter((parent, one.tensor.meaning.parent) for parent, one in matched)
        styles = {(one.tensor.meaning.parent, one.role, one.style) for _, one in matched if one.equal}
        return {key: 1.5 for key, count in together.items() if count > 1} | dict.fromkeys(styles, SAME_STYLE)

    def _explained(self, leaf: Leaf, chosen: Mapping[str, Candidate], bonus: Bonus) -> Proposal:
        one = chosen[leaf.path]

        def weight(candidate: Candidate) -> float:
            return _weight(leaf, candidate, bonus)

        found = sorted(self.candidates[leaf.path], key=weight, reverse=True)
        others = tuple(other for other in found if other is not one)
        proposal = Proposal(leaf, one, others)
        elsewhere = [other for other in others if other.column != one.column]
        near = [other for other in others if other.layout.natural]
        rivals = {other.column for other in near if weight(other) > weight(one) - CLEAR} - {one.column}
        turned = [other for other in near if other.column == one.column and other.score > one.score - 0.4]
        if one.equal:
            proposal.reason, proposal.sure = "equal numbers", True
        elif turned:
            proposal.reason = f"unsure: {len(turned) + 1} ways to lay its axes"
        elif rivals:
            proposal.reason = f"unsure: {len(rivals) + 1} candidates"
        elif one.named >= 4.0:
            proposal.reason, proposal.sure = "name and shape", True
        elif not elsewhere:
            proposal.reason, proposal.sure = "the only one of its shape", True
        else:
            proposal.reason, proposal.sure = "shape, and what is beside it", True
        return proposal


def _weight(leaf: Leaf, one: Candidate, bonus: Bonus) -> float:
    """The score of a candidate with what it gains where its module goes together with ours."""
    parent = one.tensor.meaning.parent
    return one.score + bonus.get((leaf.meaning.parent, parent), 0.0) + bonus.get((parent, one.role, one.style), 0.0)


def _of_one_layer(leaf: Leaf, tensor: Tensor) -> tuple[int, ...] | None:
    """Our shape without the axes of the tensor's layers; None where there are no such axes of these sizes."""
    number = len(tensor.layers)
    if tensor.fused or leaf.shape[:number] != tensor.layers or (number and leaf.members):
        return None
    return leaf.shape[number:]


def _apart(named: Iterable[tuple[str, Sequence[str]]]) -> set[str]:
    """The names, best first, of which none holds what another does."""
    kept, taken = set(), set[str]()
    for name, members in named:
        if taken.isdisjoint(members):
            kept.add(name)
            taken |= {*members}
    return kept


def _sides(named: Sequence[Named]) -> list[tuple[tuple[str, ...], list[Named]]]:
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
        if family.keys() >= set(roles)
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
