"""Two machines, or two releases: one side of a pair is recorded here, and the other is judged by it elsewhere.

    parity.record("port.capsule", ours, [x], params=params)                # where JAX is; no torch needed
    parity.judge("port.capsule", theirs, {"up.kernel": ("up.weight", "o i -> i o"), ...})  # where torch is; no JAX

A capsule is a folder of safetensors and one JSON file (see `parity.capsule.files`). It may as well hold a PyTorch
module for a JAX function to be judged by, or last year's release of the same side.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.capsule.files import CapsuleReader, DamageError, new_capsule
from parity.capsule.followed import packed
from parity.gates.measure import NARROW, SAMPLES, ParityError, relative_error, require_gates, zero_scales
from parity.gates.projection import RECIPE, Inputs, Values, projection, rounded, varied
from parity.gates.pytrees import Tensors, is_floating
from parity.machine import versions_of

if TYPE_CHECKING:
    from parity.gates.jax_side import JaxSide
    from parity.gates.torch_side import TorchSide

    Side = JaxSide | TorchSide

GATES = ("9", "1", "2", "3", "4")
"""Of a capsule; the others need both sides at once."""


@dataclass(frozen=True)
class About:
    """What `capsule.json` says of the side, beyond its tensors."""

    framework: str
    name: str
    gates: tuple[str, ...]
    by_name: bool
    """Whether inputs are keyword arguments."""
    trained: tuple[str, ...]
    """Weights with a gradient."""
    buffers: tuple[str, ...]
    zero_gradients: tuple[str, ...]
    distances: dict[str, dict[str, list[Any]]]
    """Type -> tensor -> how far from its own float64 it is, relative, for each of SAMPLES; JSON has no infinity."""

    @classmethod
    def read(cls, capsule: CapsuleReader) -> "About":
        """Raises ParityError for fields that are missing, of another type, or do not fit the tensors."""
        with capsule.reading():
            said: dict[str, Any] = capsule.about["side"]
            said = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
            about = cls(**said)
            if about.framework not in ("jax", "torch") or not set(about.gates) <= set(GATES):
                raise DamageError(f"its side is {about.framework!r}, for the gates {list(about.gates)}")
            if not {*about.trained, *about.buffers, *about.zero_gradients} <= capsule.tensors["weights"].keys():
                raise DamageError("capsule.json names weights that are not there")
            for part in ("float64", *(dtype for gate, (dtype, _) in NARROW.items() if gate in about.gates)):
                tensors = capsule.tensors[part]
                outputs = {name for name in tensors if name.startswith("output ")}
                if not outputs or tensors.keys() - outputs != {f"gradient {name}" for name in about.trained}:
                    raise DamageError(f"its {part} values are not outputs and the gradients of what is trained")
                for name, (kind, *shape) in tensors.items() if part != "float64" else ():
                    if "float" in kind and shape:
                        row = about.distances[part][name] = [float(error) for error in about.distances[part][name]]
                        if len(row) != SAMPLES:
                            raise DamageError(f"capsule.json has no {SAMPLES} distances of {name}")
        return about


def record(
    path: str | Path,
    side: Any,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    params: Any = None,
    gates: Sequence[str] = ("1", "2", "3"),
    zero_gradients: Sequence[str] = (),
    follow: bool = True,
    name: str = "side",
) -> Path:
    """Writes what one side computes to the capsule `path`, a new folder, by which `judge` judges the other.

    `side` is a function `side(params, *inputs)` of JAX, with `params` in any pytree, or a `torch.nn.Module`, which is
    copied, without dropout (`eval`). `inputs` are its arguments in order, or by name in a dict. Both return arrays by
    the same paths, as for `check_parity`. Recorded are weights and inputs as they are, outputs and the gradients of a
    fixed random projection of them in float64 (gates 1 and 2), and as `gates` ask in float32 (3) and bfloat16 (4), with
    how far these are from float64 for nine weights nearby; and, so that `judge` can say where the two part, each value
    on the way forward in float64 as a fingerprint with its line, and the smaller ones whole, unless `follow` is false.
    `zero_gradients` names weights whose gradient is zero in exact arithmetic (a key bias).

    Returns the path. Raises ParityError for a path that exists, a side that fails or returns something else, and a
    folder that cannot be written; nothing is left behind then. ValueError for gates that a capsule does not have,
    TypeError for a side of another kind.
    """
    require_gates(gates, GATES)
    given = Inputs.read(inputs)
    if rest := [key for key in given.given if key not in given.arrays]:
        raise ParityError(f"input {rest[0]} is no array; a capsule holds arrays alone: bind it within the side")
    distances: dict[str, dict[str, list[Any]]] = {}
    one = side_of(side, params, given)
    with new_capsule(path) as writer, one.exactly():
        writer.add("weights", one.weights)
        exact = one.run(one.weights)
        if one.left_out:
            raise ParityError(
                f"the side returned {sorted(one.left_out)}, which are no arrays; a capsule holds arrays alone"
            )
        # Kept, and not made again: the streams of NumPy's generators may change from one version to the next.
        known = {key: projection(key, array.shape) for key, array in exact.outputs.items() if is_floating(array)}
        zero_scales(exact.gradients, zero_gradients)
        inside = {f"input {key}": array for key, array in given.arrays.items()}
        writer.add("inputs", inside | {f"projection {key}": array for key, array in known.items()})
        writer.add("float64", exact.named())
        del exact
        for gate, (dtype, _) in NARROW.items():
            if gate in gates:
                first, errors = from_float64(one.run, one.weights, dtype, known, zero_gradients)
                writer.add(dtype, first.named())
                distances[dtype] = {
                    key: [float(error) if np.isfinite(error) else str(error) for error in row]
                    for key, row in errors.items()
                }
        # What judges needs no values; where the side cannot be run step by step, `judge` says that there are none.
        with suppress(Exception):
            if follow:
                writer.add("values", packed(one.followed(one.weights)))
        about = About(
            framework=one.framework,
            name=name,
            gates=tuple(dict.fromkeys(("9", *gates))),
            by_name=given.by_name,
            trained=tuple(key for key in one.weights if key in one.trained),
            buffers=one.buffers,
            zero_gradients=tuple(zero_gradients),
            distances=distances,
        )
        date = datetime.now(UTC).isoformat(timespec="seconds")
        writer.describe(
            {
                "date": date,
                "versions": versions_of(("jax", "jaxlib", "torch", "numpy", "safetensors")),
                "projection": RECIPE,
                "side": asdict(about),
            }
        )
    return Path(path)


def side_of(side: Any, params: Any, inputs: Inputs) -> "Side":
    """A JAX function with its parameters, or a module; raises TypeError for anything else."""
    if is_module(side):
        if params is not None:
            raise TypeError("params are given beside a torch.nn.Module, which holds its own")
        from parity.gates.torch_side import TorchSide

        return TorchSide(getattr(side, "_orig_mod", side), inputs)  # of a compiled module, the module
    if not callable(side):
        raise TypeError(f"the side is a {type(side).__name__}; expected a function of JAX or a torch.nn.Module")
    if params is None:
        raise TypeError("params are missing; a function of JAX takes them as its first argument")
    from parity.gates.jax_side import JaxSide

    return JaxSide(side, params, inputs)


def is_module(side: Any) -> bool:
    """Whether this is a `torch.nn.Module`, asked without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(side, torch.nn.Module)


def from_float64(
    run: Callable[[Tensors, str, str, Tensors], Values],
    weights: Tensors,
    dtype: str,
    known: Tensors,
    zero_gradients: Sequence[str],
) -> tuple[Values, dict[str, list[float]]]:
    """What a side gives in `dtype`, and how far each tensor is from the float64 of the same rounded numbers.

    The distances are relative to the norm of the tensor, or of all gradients for those that are said to be zero; one
    for each of SAMPLES, of which the last has these weights and the others have some nearby. Scalars have none.
    """
    errors: dict[str, list[float]] = {}
    for seed in reversed(range(SAMPLES)):
        narrow = rounded(varied(weights, seed), dtype, dtype)
        values, exact = (run(narrow, kind, dtype, known) for kind in (dtype, "float64"))
        zero = zero_scales(exact.gradients, zero_gradients)
        truth = exact.floating()
        for key, array in values.floating().items():
            if array.shape:
                scale = zero.get(key.removeprefix("gradient "), float(np.linalg.norm(truth[key])))
                errors.setdefault(key, []).append(relative_error(array, truth[key], scale))
    return values, errors
