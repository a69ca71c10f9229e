"""A side that is judged by a capsule: the gates that need only what was recorded of the other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.capsule.files import CapsuleReader
from parity.capsule.followed import unpacked
from parity.capsule.record import About, from_float64, is_module, side_of
from parity.differ.answer import Difference
from parity.differ.explanation import explain_outputs
from parity.differ.weights import inverted
from parity.gates.measure import (
    NARROW,
    Measured,
    ParityError,
    compared,
    numbers_lost,
    quality_of_errors,
    refusal,
    require_gates,
    require_same_names,
    run_gates,
    searched,
    zero_scales,
)
from parity.gates.projection import Inputs, Values
from parity.gates.pytrees import Tensors, nested, replaced
from parity.gates.weight_map import WeightMap, Weights

if TYPE_CHECKING:
    from parity.capsule.record import Side


def judge(
    capsule: str | Path,
    side: Any,
    weights: WeightMap | None = None,
    *,
    params: Any = None,
    own_weights: bool = False,
    gates: Sequence[str] | None = None,
    explain: bool = True,
    name: str = "pair",
) -> list[Measured]:
    """Runs gates on a recorded side and on `side`, prints a line each, and returns the figures.

    `side` is what `parity.record` takes, of either framework. It is given the weights of the capsule: `weights` says
    which numbers of the module each of JAX's parameters holds, as for `check_parity`; of one framework against itself,
    which weight of the capsule each of the side's is (left out: that of the same name). `params` is an example of the
    parameters of a function that takes no nested dicts. With `own_weights` the side keeps its own (`params`, or the
    module's), and gate 9 says how many numbers differ; without, it says how many the mapping loses there and back.

    Gates are those that were recorded, unless some of them are asked for. Ours is JAX, or, of one framework, the side
    that is judged: in gates 3 and 4 its distance from float64 is held against the other's. Tensors have the names of
    the capsule, layers that it stacks count as one; weights that either side does not train are left out of gates 2
    to 4.

    Where gate 1 is red and `explain` is true, the values that were recorded say where the two part: the answer is
    the error's `difference`, and a note below its message. It is seldom "sure", since of the recorded side only small
    arrays are there, whose order can be checked, and it cannot be run again.

    Raises ParityError, in a line, for a capsule that is damaged, foreign or too new, and otherwise as `check_parity`
    does: for a red gate, and for what cannot be compared. ValueError for gates that were not recorded, TypeError for a
    side of another kind. Nothing in a capsule is unpickled or run.
    """
    reader = CapsuleReader(capsule)
    about = About.read(reader)
    wanted = about.gates if gates is None else tuple(gates)
    require_gates(gates if isinstance(gates, str) else wanted, about.gates)
    try:
        trial = Trial(reader, about, side, weights, params, own_weights)
    except ParityError as error:
        raise ParityError(f"{name}: {error}") from None
    with trial.side.exactly():
        return run_gates(
            name,
            wanted,
            trial.measured,
            lambda error: trial.parting(error, name) if explain and error.gate == "1" else None,
        )


class Trial:
    """The side that is judged, and what it is judged by; all tensors have the names of the capsule."""

    def __init__(
        self,
        reader: CapsuleReader,
        about: About,
        side: Any,
        weights: WeightMap | None,
        params: Any,
        own_weights: bool,
    ) -> None:
        """Raises ParityError where the side's weights are not those of the capsule."""
        self._reader, self._about, self._own = reader, about, own_weights
        self._held = reader.read("weights")
        inside = reader.read("inputs")
        given = _of(inside, "input ")
        self._known = _of(inside, "projection ")
        self._convert(side, weights, params, Inputs.read(given if about.by_name else list(given.values())))
        reached = self._back(self.side.weights)
        self._require_weights(reached, by_name=weights is None)
        self._weights = reached if own_weights else self._held
        self._judged_is_ours = self.side.framework == "jax" or about.framework == self.side.framework
        moving = {
            key: np.broadcast_to(key in self.side.trained, array.shape) for key, array in self.side.weights.items()
        }
        trained = self._back(moving)
        self._trained = [key for key in about.trained if trained[key].all()]
        self._zero = [key for key in about.zero_gradients if key in self._trained]
        if not self._trained:
            raise ParityError("there is no weight that both sides train, so that there is no gradient to compare")

    def _convert(self, side: Any, weights: WeightMap | None, params: Any, inputs: Inputs) -> None:
        """Finds the `side`, and how weights go `_there`, into its names and axes, and `_back` into the capsule's."""
        framework, here = "torch" if is_module(side) else "jax", self._about.framework
        if framework == "jax" and self._own and params is None:
            raise ParityError("own_weights needs params, which are the function's own weights")
        if weights is None and framework != here:
            raise ParityError(
                f"the capsule holds a side of {here}, and this one is of {framework}; "
                "weights has to say which of the module's numbers each of our parameters holds"
            )
        made = side_of(side, params, inputs) if framework == "torch" else None
        self._there: Callable[[Tensors], Tensors] = dict
        self._back: Callable[[Tensors], Tensors] = lambda tensors: {k: x for k, x in tensors.items() if k in self._held}
        self._held_by = inverted({key: [[key]] for key in self._held})
        if weights is not None:
            if made is not None and here == "jax":
                mapping = Weights(weights, made.weights, optional=made.buffers)
                self._there, self._back = mapping.tensors, mapping.flat
            else:
                mapping = Weights(weights, self._held, like=params, optional=self._about.buffers)
                self._there, self._back = mapping.flat, mapping.tensors
            self._held_by = inverted(mapping.ours_to_theirs)
        if made is None:
            flat = self._there(self._held)
            given = params if self._own else nested(flat) if params is None else replaced(params, flat)
            made = side_of(side, given, inputs)
        self.side: Side = made

    def measured(self, gate: str) -> Measured:
        """The figure of one gate."""
        if gate == "9":
            return numbers_lost(self._weights if self._own else self._back(self._there(self._held)), self._held)
        if gate in NARROW:
            self.__dict__.pop("_found", None)  # two copies of all weights that are not needed any more
            return self._quality(gate)
        recorded, found = self._recorded("float64"), self._found
        if gate == "1":
            figure = compared("1 activations", *self._in_order(found.outputs, recorded.outputs))
            return figure.without(self.side.left_out)
        zero = zero_scales(recorded.gradients, self._zero)
        return compared("2 gradients", *self._in_order(found.gradients, recorded.gradients), zero=zero)

    def parting(self, red: ParityError, name: str) -> Difference | str:
        """Where the two part, by the values that were recorded; a sentence where that is not found."""
        if "values" not in self._reader.tensors:
            return "where they part is not known: the capsule is older, or its side could not be run step by step"
        found: Any = searched(lambda: self._search(name))
        return found or replace(found, rounded=tuple(map(str, red.figures[-1:])))

    def _search(self, name: str) -> Difference:
        judged = self.side.followed(self._given(self._weights))
        ours, theirs = self._in_order(judged, unpacked(self._reader.read("values")))
        ours.side, theirs.side = "ours", "theirs"
        found = explain_outputs(ours, theirs, self._held_by, name)
        same = self.side.framework == self._about.framework
        return replace(found, sides=("this side", "the capsule")) if same else found

    def _given(self, weights: Tensors) -> Tensors:
        """Weights by the names of the capsule as those of the side."""
        return {key: array for key, array in self._there(weights).items() if key in self.side.weights}

    def _require_weights(self, reached: Tensors, *, by_name: bool) -> None:
        """That every trained weight of the capsule has its place in the side, and the same shape there."""
        there = self._there(self._held)
        missing = {key for key in self._about.trained if key not in reached}
        missing |= there.keys() - self.side.weights.keys() - {*self._about.buffers}
        unset = sorted(self.side.trained - there.keys()) if by_name else []
        if missing or unset:
            raise ParityError(
                f"the weights of the capsule do not fit: the side lacks {sorted(missing)}, and the capsule has nothing "
                f"for {unset}"
            )
        for key, array in reached.items():
            if array.shape != self._held[key].shape:
                found = f"{list(self._held[key].shape)} in the capsule, and {list(array.shape)} in the side"
                raise ParityError(f"the weights of the capsule do not fit: {key} is {found}")

    def _run(self, weights: Tensors, dtype: str, held_by: str, known: Tensors) -> Values:
        """The side on weights by the names of the capsule, with the gradients of what both train by those names."""
        values = self.side.run(self._given(weights), dtype, held_by, known).converted(self.side.weights, self._back)
        return replace(values, gradients={key: values.gradients[key] for key in self._trained})

    @cached_property
    def _found(self) -> Values:
        return self._run(self._weights, "float64", "float64", self._known)

    def _quality(self, gate: str) -> Measured:
        dtype, allowed = NARROW[gate]
        recorded, before = self._recorded(dtype).floating(), self._about.distances[dtype]
        first, errors = from_float64(self._run, self._weights, dtype, self._known, self._zero)
        found = first.floating()
        require_same_names(gate, *self._in_order(found, recorded))
        refused = {key: refusal(key, *self._in_order(found[key], recorded[key]), allowed) for key in recorded}
        pairs = {
            key: list(zip(*self._in_order(errors[key], before[key]), strict=True))
            for key, reason in refused.items()
            if key in errors and not reason
        }
        return quality_of_errors(f"{gate} {dtype} / allowed", pairs, allowed, refused)

    def _recorded(self, part: str) -> Values:
        tensors = self._reader.read(part)
        gradients = _of(tensors, "gradient ")
        return Values(_of(tensors, "output "), {key: gradients[key] for key in self._trained})

    def _in_order(self, judged: Any, recorded: Any) -> tuple[Any, Any]:
        """(ours, theirs)."""
        return (judged, recorded) if self._judged_is_ours else (recorded, judged)


def _of(tensors: Tensors, kind: str) -> Tensors:
    return {key.removeprefix(kind): array for key, array in tensors.items() if key.startswith(kind)}
