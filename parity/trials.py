"""Runs a JAX function and a torch module with a proposed weight map: are they the same, and if not, which row is wrong?

Ties are decided one by one, without a search. First every weight that could stand for another gets the same numbers,
which look alike in every layout in question: then no tie matters, and both sides must agree. Then the weights get other
numbers again, one at a time: where both sides still agree, the row is right, and where they do not, another candidate is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from itertools import permutations
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from parity.islands import Float64
from parity.jax_side import called, exact_options
from parity.measure import FLOAT64_BAR, ParityError, compared, relative_error
from parity.projection import Inputs, Tensors
from parity.proposals import Candidate, Proposal
from parity.torch_side import from_torch, to_torch
from parity.trees import paths, replaced

SMALL = 1e-4
"""Below this an error is one of rounding: a wrong row changes outputs by far more."""
SHOWN = 1e-9
"""A weight that changes the outputs by less than this, relative to them, is one that they do not depend on."""
AGREED = 1e-6
"""How near both sides come, relative to what a weight changed, where its row is right."""


class Runs:
    """Both sides in float64, to be run on any weights; neither is changed."""

    def __init__(
        self,
        ours: Callable[..., Any],
        params: Any,
        module: nn.Module,
        inputs: Sequence[Any] | Mapping[str, Any],
        arrays: Tensors,
    ) -> None:
        self.arrays = arrays
        self._inputs = Inputs.read(inputs).rounded("float64", "float64")
        self._module = deepcopy(module).double().eval()
        self._held = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        self._loaded: Tensors = {}
        self._params, self._ours = params, ours
        self._jitted = jax.jit(self._call, compiler_options=exact_options("float64"))
        self.wide = False
        """Whether casts to float32 within the module are taken out."""

    def theirs(self, weights: Tensors) -> Tensors:
        """What the module returns with these weights; those that are not named stay its own."""
        with torch.no_grad(), Float64() if self.wide else nullcontext():
            for name, array in (self.arrays | weights).items():
                if self._loaded.get(name) is not array:
                    self._held[name].copy_(to_torch(array))
                    self._loaded[name] = array
            given = {name: to_torch(array) for name, array in self._inputs.arrays.items()}
            return _arrays(self._inputs.call(self._module, arrays=given))

    def ours(self, flat: Tensors) -> Tensors:
        """What our function returns with these parameters."""
        made = self._jitted(jax.device_put(flat), jax.device_put(self._inputs.arrays))
        return {name: np.asarray(array) for name, array in made.items()}

    def _call(self, flat: dict[str, jax.Array], arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        in_order = {name: arrays[name] for name in self._inputs.arrays}
        output = called(self._ours, replaced(self._params, flat), self._inputs, in_order)
        return dict(_named(output, jax.Array))

    def both(self, flat: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
        """The outputs that both sides have."""
        return paired(self.ours(flat), self.theirs(weights))

    def moved_by(self, name: str, weights: Tensors) -> bool:
        """Whether their outputs depend on this tensor."""
        before, rng = self.theirs(weights), np.random.default_rng(7)
        array = weights[name]
        after = self.theirs(weights | {name: array + 0.1 * np.abs(array).max() * rng.random(array.shape)})
        return any(relative_error(after[key], before[key]) > SHOWN for key in before)


def paired(ours: Tensors, theirs: Tensors) -> tuple[Tensors, Tensors]:
    """Outputs by the same names; one array of ours is the first of theirs that has its shape."""
    if len(ours) == 1 and ours.keys() != theirs.keys():
        ((name, array),) = ours.items()
        fits = [key for key, other in theirs.items() if other.shape == array.shape]
        if not fits:
            shapes = {key: list(other.shape) for key, other in theirs.items()}
            raise ParityError(f"ours returns {list(array.shape)}, theirs {shapes}; expected an array of the same shape")
        return ours, {name: theirs[fits[0]]}
    return ours, {name: theirs[name] for name in ours if name in theirs}


def _arrays(output: Any) -> Tensors:
    return {name: from_torch(tensor).copy() for name, tensor in _named(output, torch.Tensor).items()}


def _named(output: Any, kind: type) -> dict[str, Any]:
    if isinstance(output, kind):
        return {"output": output}
    if isinstance(output, Mapping):
        items = output.items()
    elif isinstance(output, tuple | list):
        items = {str(index): value for index, value in enumerate(output)}.items()
    else:
        raise ParityError(f"a side returned a {type(output).__name__}; expected an array, or a dict of arrays by name")
    return {name: value for name, value in items if isinstance(value, kind)}


def converted(proposals: Sequence[Proposal], weights: Tensors) -> Tensors:
    """Our parameters by path, made of the module's by these rows."""
    return {one.leaf.path: _moved(one.chosen, weights) for one in proposals}


def _moved(candidate: Candidate, weights: Tensors) -> np.ndarray:
    each = [candidate.layout.apply(weights[name]) for name in candidate.tensor.members]
    return np.ascontiguousarray(each[0] if candidate.tensor.layers is None else np.stack(each))


def shaken(proposals: Sequence[Proposal], arrays: Tensors) -> Tensors:
    """The tensors that the rows take, each moved off its value, so that no two of them are the same by chance."""
    weights = {}
    for name in _taken(proposals):
        array, rng = arrays[name], np.random.default_rng([len(name), *name.encode()])
        noise, fan = rng.standard_normal(array.shape), array.size / max(array.shape, default=1)
        positive = name.endswith("var")
        weights[name] = np.abs(array) * np.exp(0.2 * noise) if positive else array + noise * min(0.2, fan**-0.5)
    return weights


def _taken(proposals: Sequence[Proposal]) -> list[str]:
    return list(dict.fromkeys(name for one in proposals for name in one.chosen.tensor.members))


class Ties:
    """Decides, for rows that could be exchanged, which is right."""

    def __init__(self, runs: Runs, proposals: Sequence[Proposal]) -> None:
        self.runs, self.proposals = runs, list(proposals)
        self.base = {name: value for one in proposals for name, value in self._alike(one)}
        self.flat = converted(proposals, self.base)
        self.before = runs.theirs(self.base)

    def base_error(self) -> float:
        """How far the two sides are apart where no tie matters."""
        return worst(*paired(self.runs.ours(self.flat), self.before))

    def decide(self) -> tuple[list[Proposal], list[str]]:
        """The rows as running both shows them, and the names of tensors for which nothing fits."""
        fixed: dict[str, Candidate] = {}
        free: set[str] = set()
        lost: list[str] = []
        users: dict[str, list[Proposal]] = {}
        for one in self.proposals:
            users.setdefault(one.chosen.tensor.name, []).append(one)
        wrong: list[list[Proposal]] = []
        for group in users.values():
            changed = self._changed(group[0].chosen)
            after = self.runs.theirs(self.base | changed)
            effect = max(float(np.abs(after[key] - self.before[key]).max()) for key in after)
            scale = max(float(np.abs(array).max()) for array in after.values())
            if effect < SHOWN * scale:
                free |= {one.leaf.path for one in group}
            elif self._agrees({one.leaf.path: one.chosen for one in group}, changed, after, effect):
                fixed |= {one.leaf.path: one.chosen for one in group}
            else:
                wrong.append(group)
        for group in wrong:
            changed = self._changed(group[0].chosen)
            after = self.runs.theirs(self.base | changed)
            effect = max(float(np.abs(after[key] - self.before[key]).max()) for key in after)
            for chosen in self._alternatives(group, fixed):
                if self._agrees(chosen, changed, after, effect):
                    fixed |= chosen
                    break
            else:
                lost.append(group[0].chosen.tensor.name)
        return self._settled(fixed, free), lost

    def _agrees(self, chosen: Mapping[str, Candidate], changed: Tensors, after: Tensors, effect: float) -> bool:
        flat = self.flat | {path: _moved(one, self.base | changed) for path, one in chosen.items()}
        ours, theirs = paired(self.runs.ours(flat), after)
        return all(float(np.abs(ours[key] - theirs[key]).max()) < AGREED * effect for key in theirs)

    def _changed(self, candidate: Candidate) -> Tensors:
        changed = {}
        for name in candidate.tensor.members:
            array, rng = self.base[name], np.random.default_rng([1, len(name), *name.encode()])
            noise = rng.random(array.shape) if candidate.tensor.meaning.leaf == "variance" else rng.standard_normal(array.shape)
            changed[name] = array + 0.3 * float(np.abs(array).max()) * noise
        return changed

    def _alternatives(self, group: list[Proposal], fixed: Mapping[str, Candidate]) -> Iterator[dict[str, Candidate]]:
        """What else a tensor could be: another layout of the same leaves, or what other leaves of the shape hold."""
        name = group[0].chosen.tensor.name
        if group[0].chosen.layout.part is None or len(group) == 1:
            found = [
                (candidate.score, one.leaf.path, candidate)
                for one in self.proposals
                if one.leaf.path not in fixed
                for candidate in (one.chosen, *one.others)
                if candidate.tensor.name == name and candidate is not group[0].chosen
            ]
            for _, path, candidate in sorted(found, key=lambda each: -each[0]):
                yield {path: candidate}
            return
        ways: dict[object, dict[tuple[str, object], Candidate]] = {}
        for one in group:
            for candidate in (one.chosen, *one.others):
                layout = candidate.layout
                if candidate.tensor.name == name and layout.part is not None:
                    style = layout.fused, layout.theirs, layout.ours
                    ways.setdefault(style, {})[one.leaf.path, layout.part] = candidate
        places = [one.leaf.path for one in group]
        for way in ways.values():
            kinds = list(dict.fromkeys(part for _, part in way))
            for order in permutations(kinds, len(places)):
                chosen = {path: way.get((path, part)) for path, part in zip(places, order, strict=True)}
                if all(chosen.values()):
                    yield {path: one for path, one in chosen.items() if one is not None}

    def _alike(self, one: Proposal) -> Iterator[tuple[str, np.ndarray]]:
        """Numbers for a tensor that are the same for all that could stand in its place, and in all its layouts."""
        shape, layout = one.chosen.tensor.shape, one.chosen.layout
        wide = sorted(shape)
        rng = np.random.default_rng([len(shape), *wide])
        if len(shape) < 2:
            array = 0.8 + 0.4 * rng.random(shape)
        elif len(shape) == 2:
            array = rng.standard_normal(wide) / np.sqrt(wide[0])
            if wide[0] == wide[1]:
                array = (array + array.T) / np.sqrt(2)
            array = array if list(shape) == wide else array.T
        else:
            array = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
            if shape[0] == shape[1]:
                array = (array + array.swapaxes(0, 1)) / np.sqrt(2)
        if layout.part is not None:
            # Every row alike: then it does not matter which rows are whose.
            axis = layout.fused[0] if layout.fused else next(a for a, g in enumerate(layout.theirs) if layout.rows in g)
            array = np.broadcast_to(np.take(array, [0], axis), shape)
        for name in one.chosen.tensor.members:
            yield name, np.ascontiguousarray(array)

    def _settled(self, fixed: Mapping[str, Candidate], free: set[str]) -> list[Proposal]:
        """All rows with what was found; leaves that nothing decides take what is left, by their module."""
        taken = {one.column for one in fixed.values()}
        modules = {
            one.leaf.meaning.parent: fixed[one.leaf.path].tensor.meaning.parent
            for one in self.proposals
            if one.leaf.path in fixed
        }
        settled = []
        for one in self.proposals:
            path, chosen = one.leaf.path, fixed.get(one.leaf.path)
            if chosen is None:
                rest = [each for each in (one.chosen, *one.others) if each.column not in taken and each.layout.natural]
                home = modules.get(one.leaf.meaning.parent)
                near = [each for each in rest if each.tensor.meaning.parent == home]
                same = [each for each in near if each.tensor.meaning.leaf == one.leaf.meaning.leaf]
                chosen = (same or near or rest or [one.chosen])[0]
                taken.add(chosen.column)
            new = Proposal(one.leaf, chosen, one.others, one.reason, one.sure, path in free)
            if chosen is not one.chosen:
                named = one.chosen.tensor.name if one.chosen.tensor.name != chosen.tensor.name else "another layout"
                how = "tie broken by running both" if path in fixed else "what is left beside the rows decided by running"
                new.reason, new.sure = f"{how}; by name it would be {named}", path in fixed
            elif path in fixed and not one.sure:
                new.reason, new.sure = "tie broken by running both", True
            elif path not in free and path not in fixed:
                new.reason, new.sure = "unsure: running both with it differs", False
            settled.append(new)
        return settled


def worst(ours: Tensors, theirs: Tensors) -> float:
    """Gate 1's figure: the largest relative error of any output; raises ParityError for what cannot be compared."""
    if not theirs:
        raise ParityError("the two sides return nothing by the same name; expected an array, or dicts with the same names")
    return float(compared("1 activations", ours, theirs).value)


def verified(runs: Runs, proposals: Sequence[Proposal]) -> tuple[list[Proposal], bool, str]:
    """(the rows as running both leaves them, whether gate 1 is green with them, what was seen)."""
    found = list(proposals)
    error = _gate(runs, found)
    tried = ""
    if error > SMALL:
        ties = Ties(runs, found)
        apart = ties.base_error()
        if apart > SMALL:
            return (
                found,
                False,
                f"gate 1 is red, {error:.1e}; and {apart:.1e} where no tie matters, so that the functions differ, "
                "or rows of unlike shapes are wrong: first_difference tells where",
            )
        found, lost = ties.decide()
        error = _gate(runs, found)
        tried = f" after running both on each row; nothing fits {', '.join(lost)}" if lost else " after running both on each row"
    if error <= FLOAT64_BAR:
        return _with_dependence(runs, found), True, f"gate 1 is green, {error:.1e}{tried}"
    if error <= SMALL:
        return found, False, f"gate 1 is red, {error:.1e}{tried}: no wrong row, but something is rounded, or an eps differs"
    return found, False, f"gate 1 is red, {error:.1e}{tried}"


def _gate(runs: Runs, proposals: Sequence[Proposal]) -> float:
    weights = shaken(proposals, runs.arrays)
    flat = converted(proposals, weights)
    error = worst(*runs.both(flat, weights))
    if FLOAT64_BAR < error <= SMALL and not runs.wide:
        runs.wide = True
        error = worst(*runs.both(flat, weights))
    return error


def _with_dependence(runs: Runs, proposals: Sequence[Proposal]) -> list[Proposal]:
    """Marks the rows that gate 1 says nothing of, since the outputs do not depend on them."""
    weights = shaken(proposals, runs.arrays)
    for one in proposals:
        one.free = not any(runs.moved_by(name, weights) for name in one.chosen.tensor.members)
    return list(proposals)


@contextmanager
def float64() -> Iterator[None]:
    """What gate 1 is run in."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield
