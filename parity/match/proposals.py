"""Which of a module's tensors each of our parameters most likely is, by names, shapes, order and numbers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from scipy.optimize import linear_sum_assignment

from parity.match.candidates import Candidate, Leaf, Proposal, Tensor
from parity.match.layouts import Layout, layouts, parts, same
from parity.match.parameter_names import Likeness

EQUAL = 1000.0
"""What equal numbers add to a score: more than anything else can say."""
LEAST = -3.0
"""A pair whose names speak against each other as much as this is not proposed."""
CLEAR = 2.0
"""How far the best must be ahead of the next for the names to decide."""
FUSIONS = (("query", "key", "value"), ("key", "value"), ("gate", "up"), ("r", "z", "n"), ("reset", "update", "new"))
"""What modules keep as one matrix, in the order in which it is fused."""


class Matcher:
    """Finds for each of our leaves the tensor that it most likely is."""

    def __init__(self, leaves: Sequence[Leaf], tensors: Sequence[Tensor], arrays: Mapping[str, np.ndarray]) -> None:
        self.leaves, self.tensors, self.arrays = leaves, tensors, arrays
        self.likeness = Likeness(
            [leaf.meaning for leaf in leaves],
            [name for tensor in tensors for name in (tensor.meaning, *tensor.aliases)],
        )
        self.candidates = {leaf.path: self._candidates(leaf) for leaf in leaves}
        self._add_parts()
        self._choose_orders()
        self._stack_or_not()

    def proposals(self) -> list[Proposal]:
        """The best assignment, each tensor or part once; a leaf that fits nothing is left out."""
        bonus: dict[tuple[str, str], float] = {}
        chosen: dict[str, Candidate] = {}
        for _ in range(3):
            chosen = self._assigned(bonus)
            bonus = self._kinship(chosen)
        return [self._explained(leaf, chosen, bonus) for leaf in self.leaves if leaf.path in chosen]

    def _candidates(self, leaf: Leaf) -> list[Candidate]:
        found = []
        for tensor in self.tensors:
            if (shape := _of_one_layer(leaf.shape, tensor)) is None:
                continue
            ways = list(layouts(tensor.shape, shape))
            if not ways and len(shape) == len(tensor.shape):
                ways = self._longer(tensor, shape)
            if not ways:
                continue
            named = max(self.likeness(leaf.meaning, name) for name in (tensor.meaning, *tensor.aliases))
            score = named - self._away(leaf, tensor) - (1.0 if tensor.buffer else 0.0)
            found += [Candidate(tensor, layout, named, self._weighed(leaf, tensor, layout, score)) for layout in ways]
        return found

    def _longer(self, tensor: Tensor, shape: tuple[int, ...]) -> list[Layout]:
        """A table of which ours lacks the first rows (those that a library keeps for padding), or the last."""
        if len(shape) != 2 or shape[1] != tensor.shape[1] or "embedding" not in tensor.meaning.words:
            return []
        idle = max(0, tensor.shape[0] - shape[0])
        ways = [(first, first + shape[0]) for first in dict.fromkeys((idle, 0))]
        return [replace(same(shape), part=rows, rows=0) for rows in ways if idle]

    def _away(self, leaf: Leaf, tensor: Tensor) -> float:
        """What places far apart speak against each other; trees of ours are often sorted by name, so not much."""
        return 0.4 * abs(leaf.place - tensor.place)

    def _weighed(self, leaf: Leaf, tensor: Tensor, layout: Layout, score: float) -> float:
        score -= 0.0 if layout.natural else 1.5
        if isinstance(layout.part, tuple) and layout.fused is None and layout.part[0] == 0:
            score -= 0.1
        if self._equal(leaf, tensor, layout):
            score += EQUAL
        return score

    def _equal(self, leaf: Leaf, tensor: Tensor, layout: Layout) -> bool:
        """Whether both sides hold the same numbers; those that are all alike say nothing."""
        if leaf.numbers is None:
            return False
        ours = leaf.numbers
        for layer, member in enumerate(tensor.members):
            here, there = ours if tensor.layers is None else ours[layer], self.arrays[member]
            if not here.size or here.max() == here.min():
                return False
            moved = layout.apply(there)
            if abs(float(here.flat[0] - moved.flat[0])) > 1e-5 * (abs(float(here.flat[0])) + 1e-30) or (
                float(np.abs(here - moved).max()) > 1e-5 * float(np.abs(here).max())
            ):
                return False
        return True

    def _add_parts(self) -> None:
        """Of our leaves that stand side by side (query, key and value), each may be a part of one fused tensor."""
        for names, group in self._sides():
            for tensor in self.tensors:
                found = [_of_one_layer(leaf.shape, tensor) for leaf in group]
                shapes = tuple(shape for shape in found if shape is not None)
                if len(shapes) < len(group) or sum(map(math.prod, shapes)) != math.prod(tensor.shape):
                    continue
                for index, leaf in enumerate(group):
                    # A part is called like the whole, but for its role.
                    words = (tensor.meaning.words - set(names)) | {names[index]}
                    meaning = replace(tensor.meaning, words=words)
                    named = self.likeness(leaf.meaning, meaning)
                    if not set(names) <= tensor.meaning.words:
                        named -= 2.0
                    for layout in parts(tensor.shape, shapes, index, tensor.heads):
                        weight = self._weighed(leaf, tensor, layout, named - self._away(leaf, tensor))
                        by_heads = layout.fused is not None and layout.fused[1] > 0
                        said = bool(re.search(r"query_key_value$|query_key_value\.", tensor.name))
                        weight -= 0.5 if by_heads != said else 0.0
                        self.candidates[leaf.path].append(Candidate(tensor, layout, named, weight))

    def _sides(self) -> list[tuple[tuple[str, ...], list[Leaf]]]:
        """Groups of our leaves that differ only in their role, in the order of FUSIONS."""
        families: dict[object, dict[str, Leaf]] = {}
        roles = {role for names in FUSIONS for role in names}
        for leaf in self.leaves:
            words = leaf.meaning.words & roles
            if len(words) == 1:
                around = leaf.meaning.parent.rpartition(".")[0]
                key = (around, leaf.meaning.leaf, leaf.meaning.numbers, leaf.meaning.words - roles)
                families.setdefault(key, {})[next(iter(words))] = leaf
        return [
            (names, [family[name] for name in names])
            for family in families.values()
            for names in FUSIONS
            if family.keys() >= set(names)
        ]

    def _choose_orders(self) -> None:
        """Among layouts of the same shapes, prefers what parameters of that kind have where shapes leave no choice."""
        for leaf in self.leaves:
            found = self.candidates[leaf.path]
            self.candidates[leaf.path] = [replace(one, score=one.score - self._against(leaf, one)) for one in found]

    def _against(self, leaf: Leaf, candidate: Candidate) -> float:
        """What speaks against a layout that is one of several."""
        layout, tensor = candidate.layout, candidate.tensor
        if len(layout.order) < 2:
            return 0.0
        if len(layout.order) == 2:
            output = 1 if tensor.kind == "Conv1D" else 0
            axes = {axis for axis, group in enumerate(layout.theirs) if len(group) > 1}
            if layout.fused is not None:
                axes.add(layout.fused[0])
            elif layout.rows is not None and "embedding" not in tensor.meaning.words:
                axes |= {axis for axis, group in enumerate(layout.theirs) if layout.rows in group}
            if axes and leaf.meaning.words & {"query", "key", "value", "output", "gate", "up"}:
                # Heads and what is fused are outputs of a projection, heads the inputs of the one after attention.
                expected = 1 - output if "output" in leaf.meaning.words else output
                if axes != {expected}:
                    return 1.2
                if layout.split:
                    return 0.0
        usual, weight = self._convention(leaf.meaning.said, tensor.kind, len(layout.order))
        return 0.0 if usual is None or layout.order == usual else weight

    def _convention(self, said: str, kind: str, axes: int) -> tuple[tuple[int, ...] | None, float]:
        """The order of their axes on our side that is usual, by what was seen or by what the word says; how surely."""
        as_it_is = tuple(range(axes))
        if seen := self._seen.get((said, kind == "Conv1D", axes)):
            return max(seen, key=lambda order: seen[order]), 1.0
        if kind == "Embedding" or said == "embedding" or (said == "weight" and kind != "Conv1D"):
            return as_it_is, 1.0
        inputs_first = {2: (1, 0), 3: (2, 1, 0), 4: (2, 3, 1, 0), 5: (2, 3, 4, 1, 0)}.get(axes)
        usual = as_it_is if kind == "Conv1D" else inputs_first
        return usual, 1.0 if said == "kernel" else 0.3

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

    def _stack_or_not(self) -> None:
        """A tensor of several layers and those of single layers exclude each other: the better fit stays."""
        wanted: dict[str, float] = {}
        for one in (one for found in self.candidates.values() for one in found):
            wanted[one.tensor.name] = max(wanted.get(one.tensor.name, LEAST), one.score)
        stacked = {one.name: set(one.members) for one in self.tensors if one.layers is not None and one.name in wanted}
        out = set()
        for name, members in stacked.items():
            single = max(wanted.get(member, LEAST) for member in members)
            out |= {name} if single > wanted[name] else members
        # One that two stacks would hold belongs to the better.
        for name in sorted(stacked, key=lambda name: (-wanted[name], name)):
            if name not in out:
                out |= {other for other in stacked if other != name and stacked[name] & stacked[other]}
        self.candidates = {
            path: [one for one in found if one.tensor.name not in out] for path, found in self.candidates.items()
        }

    def _assigned(self, bonus: Mapping[tuple[str, str], float]) -> dict[str, Candidate]:
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
                if (one.layout.part is None) != (best_user.layout.part is None):
                    del chosen[path]
        return chosen

    def _kinship(self, chosen: Mapping[str, Candidate]) -> dict[tuple[str, str], float]:
        """Leaves of one module of ours go together with those of one of theirs."""
        together: dict[tuple[str, str], float] = {}
        for leaf in self.leaves:
            if leaf.path in chosen:
                key = leaf.meaning.parent, chosen[leaf.path].tensor.meaning.parent
                together[key] = together.get(key, -1.0) + 1.0
        return {key: min(1.5, 1.5 * count) for key, count in together.items() if count > 0}

    def _explained(
        self, leaf: Leaf, chosen: Mapping[str, Candidate], bonus: Mapping[tuple[str, str], float]
    ) -> Proposal:
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
        if one.score > EQUAL / 2:
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


def _weight(leaf: Leaf, one: Candidate, bonus: Mapping[tuple[str, str], float]) -> float:
    """The score of a candidate with what it gains where its module goes together with ours."""
    return one.score + bonus.get((leaf.meaning.parent, one.tensor.meaning.parent), 0.0)


def _of_one_layer(shape: tuple[int, ...], tensor: Tensor) -> tuple[int, ...] | None:
    """Our shape without the axis of the tensor's layers; None where there is no such axis of that size."""
    if tensor.layers is None:
        return shape
    return shape[1:] if shape[:1] == (tensor.layers,) else None
