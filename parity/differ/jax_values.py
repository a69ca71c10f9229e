"""Runs a function of JAX step by step: every value of its jaxpr, with inner programs and loops run in their places."""

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from parity.differ.values import (
    NOWHERE,
    ROW,
    STACK,
    Direction,
    Kind,
    Othersteps,
    Place,
    Step,
    Value,
    Values,
    as_chain,
    is_narrow,
    others_than,
    read_line,
    similar,
)
from parity.gates.pytrees import is_key

_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
"""Primitives that are nothing but the program inside; it is run in their place."""
_LARGEST = 1 << 22
"""Elements of a matrix that XLA multiplies."""
_OPAQUE = {"shard_map", "pallas_call", "custom_partitioning", "ffi_call", "xla_call", "custom_lin"}
_LIBRARIES = (
    f"{Path(jax.__file__).parent}/",
    f"{Path(__file__).parents[1]}/",
    *(f"site-packages/{name}/" for name in ("jaxlib", "flax", "equinox", "optax", "haiku", "einops", "jaxtyping")),
)
"""What comes between the line that somebody wrote and the primitive."""


_NUMBER = re.compile(r"\d*\.\d+(?:e[+-]?\d+)?|\d+\.?e[+-]?\d+", re.IGNORECASE)
_LARGEST_WHOLE = 1 << 14
_KNOWN_NUMBERS = np.array(
    [math.pi, 2 * math.pi, math.e, math.log(2), 1 / math.log(2)]
    + [math.sqrt(x) for x in (math.pi, 2 / math.pi, 4 / math.pi, 1 / (2 * math.pi))]
)


class Known(NamedTuple):
    """An array, and its number among the values (None for numbers that stand in the program)."""

    array: Any
    number: int | None


def values_of_jax(
    function: Callable[..., dict[str, Any]],
    arguments: Callable[[], Sequence[Any]],
    names: Sequence[tuple[Kind, str]],
    *,
    keep: frozenset[int] = frozenset(),
    widen: Collection[tuple[str, int]] | None = None,
    digits: Mapping[float, float] | None = None,
    sketched: bool = False,
    backward: bool = False,
) -> Values:
    """Every value that `function(*arguments())` computes; it returns a dict by name, whose values become the outputs.

    `names` are (kind, name) of the leaves of the arguments, in the order of the tree: "parameter" or "input". Those
    that nobody else holds are let go after their last use. With `widen`, computes in float64 what the program
    casts to fewer digits, but for the casts in these lines (file, number). A constant that was held in float32 becomes
    what stands for it in `digits`. `backward`: whether the function itself differentiates what it
    computes; what is differentiated within the program that somebody wrote belongs to the way forward.
    """
    order: list[str] = []

    def in_order(*args: Any) -> list[Any]:
        outputs = function(*args)
        order[:] = sorted(outputs)
        return [outputs[name] for name in order]

    args = arguments()
    closed = jax.make_jaxpr(in_order)(*jax.tree.map(_in_float64, args))
    leaves = jax.tree.leaves(args)[::-1]
    del args
    run = _Run(Values("ours", keep, {} if sketched else None), widen, digits or {}, backward)
    given = [Known(leaves[-1], run.values.add(Value(kind, kind, name=name), leaves.pop())) for kind, name in names]
    results = run.program(closed.jaxpr, run.constants(closed.consts), (given.pop(0) for _ in names))
    for name, known in zip(order, results, strict=True):
        number = run.constants([known.array])[0].number if known.number is None else known.number
        assert number is not None
        run.values.outputs[name] = number
        run.values.arrays[number] = np.asarray(known.array)
    return run.values


class _Run:
    def __init__(
        self, values: Values, widen: Collection[tuple[str, int]] | None, digits: Mapping[float, float], backward: bool
    ) -> None:
        self.values, self._widen, self._digits, self._differentiates = values, widen, digits, backward
        self._places: dict[tuple[int, Any], Place] = {}
        self._layer: tuple[int, ...] = ()
        """The iteration of each scan or loop that is being run, the outermost first."""
        self._outer: list[tuple[Place, str, Direction]] = []
        """Of the programs that are run, the outermost first: the line that called it, its name where a library wrote
        it, and the way that it is run on."""
        self._forward: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
        """(the traceback that a value and its derivative share, or its lines; layer) -> values of the forward pass."""
        self._reached = math.inf
        """The value of the forward pass that the way back has come to."""

    def constants(self, arrays: Sequence[Any]) -> list[Known]:
        return [Known(array, self.values.add(Value("constant", "constant"), array)) for array in arrays]

    def program(self, jaxpr: Jaxpr, consts: Sequence[Known], given: Iterable[Known]) -> list[Known]:
        """Runs a program; each array is let go after its last use."""
        environment = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, given, strict=True))
        last = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, Literal)}
        kept = {v for v in jaxpr.outvars if not isinstance(v, Literal)}

        def read(variable: Any, eqn: JaxprEqn | None = None) -> Known:
            if not isinstance(variable, Literal):
                return environment[variable]
            dtype = _dtype(variable)
            if self._widen is None or not is_narrow(dtype):
                return Known(variable.val, None)
            place = NOWHERE if eqn is None else self._place(eqn)
            return Known(unrounded(variable.val, dtype, read_line(place.file, place.line)), None)

        for n, eqn in enumerate(jaxpr.eqns):
            outputs = self._step(eqn, [read(v, eqn) for v in eqn.invars])
            environment.update(zip(eqn.outvars, outputs, strict=True))
            for v in {v for v in eqn.invars if not isinstance(v, Literal)}:
                if last[v] == n and v not in kept:
                    environment.pop(v, None)
        return [read(v) for v in jaxpr.outvars]

    def _step(self, eqn: JaxprEqn, ins: list[Known]) -> list[Known]:
        name = eqn.primitive.name
        if name in ("scan", "while", "cond") or name in _CALLS:
            self._outer.append((self._place(eqn), _library_function(eqn), self._way(eqn)))
            try:
                return self._called(eqn, ins)
            finally:
                self._outer.pop()
        if name in _OPAQUE:
            self.values.opaque.append(f"{name} in JAX")
        return self._operation(eqn, ins)

    def _called(self, eqn: JaxprEqn, ins: list[Known]) -> list[Known]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(eqn, ins)
        if name == "while":
            return self._while(eqn, ins)
        if name == "cond":
            return self._inner(params["branches"][: int(ins[0].array) + 1][-1], ins[1:])
        inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
        return self._operation(eqn, ins) if inner is None else self._inner(inner, ins)

    def _inner(self, inner: ClosedJaxpr | Jaxpr, ins: Sequence[Known]) -> list[Known]:
        if isinstance(inner, ClosedJaxpr):
            return self.program(inner.jaxpr, self.constants(inner.consts), ins)
        return self.program(inner, (), ins)

    def _operation(self, eqn: JaxprEqn, ins: list[Known]) -> list[Known]:
        place, arrays = self._place(eqn), [known.array for known in ins]
        if eqn.primitive.name not in _TAKES:
            # A large model has weights of fewer digits, until here.
            arrays = [_wide(x) if _is_wide(v) else x for x, v in zip(arrays, eqn.invars, strict=True)]
        make = _made if self._widen is None else _made_in_float64
        if self._widen is not None and eqn.primitive.name == "convert_element_type" and place[:2] in self._widen:
            make, arrays = _made, list(map(_wide, arrays))
        # The derivative of whole numbers, as of a parameter that is a list of places, has a type without numbers.
        made = [np.zeros(np.shape(x), bool) if x.dtype == jax.dtypes.float0 else x for x in make(eqn, arrays)]
        if self._digits and eqn.primitive.name == "convert_element_type":
            made = [self._in_full(made[0], ins)]
        literals = [known.array if known.number is None else None for known in ins]
        written = (x for x in literals if x is not None and np.size(x) == 1 and _is_real(x))
        numbers = tuple(float(np.asarray(x)) for x in written)
        way = self._way(eqn)
        inputs = tuple(known.number for known in ins if known.number is not None)
        traceback = eqn.source_info.traceback
        beside = (id(traceback), self._layer) in self._forward or _is_of_rule(traceback)
        outputs = []
        in_library = bool(self._outer and self._outer[-1][1])
        # What a library's function stops, as the order of rows in a solution, nobody asked for.
        stops = in_library and eqn.primitive.name == "stop_gradient" and place == self._outer[-1][0]
        for n, array in enumerate(made):
            row = Value(
                "operation",
                "copy" if stops else eqn.primitive.name,
                inputs,
                place=place,
                layer=self._layer,
                literals=numbers,
                backward=way == "backward",
                derived=way == "derived",
                forward=self._forward_of(eqn, place, inputs) if way == "backward" else None,
            )
            row.again = partial(_made_again, make, eqn, literals, n)
            row.otherwise = partial(_otherwise, make, eqn, literals, n)
            number = self.values.add(row, array)
            self.values.beside |= {number} if beside and not row.derived else set()
            self.values.note_island(number, array, _asks_for_type(eqn) and not in_library)
            if not row.backward and row.data:
                for key in (id(traceback), place):
                    self._forward.setdefault((key, self._layer), []).append(number)
            outputs.append(Known(array, number))
        return outputs

    def _in_full(self, array: Any, ins: Sequence[Known]) -> Any:
        """A constant with the digits that it had before it was rounded to float32, where these are known."""
        number = ins[0].number
        if np.size(array) != 1 or not np.isrealobj(array) or (number is not None and self.values.rows[number].data):
            return array
        held = np.asarray(array).item()
        full = self._digits.get(abs(held))
        return array if full is None else np.full(np.shape(array), math.copysign(full, held))

    def _forward_of(self, eqn: JaxprEqn, place: Place, inputs: Collection[int]) -> int | None:
        """The value whose derivative this is. A line that runs for one layer after another has several: those that the
        way back, in the reverse order, has not passed; of these one that reads the same."""
        same = self._forward.get((id(eqn.source_info.traceback), self._layer))
        same = same or self._forward.get((place, self._layer), [])
        ahead = [number for number in same if number <= self._reached] or same
        reading = [number for number in ahead if not set(inputs).isdisjoint(self.values.rows[number].inputs)] or ahead
        self._reached = reading[-1] if reading else self._reached
        return reading[-1] if reading else None

    def _way(self, eqn: JaxprEqn) -> Direction:
        """On which way an operation is run: what the program differentiates itself belongs to the way forward."""
        stack, outer = str(eqn.source_info.name_stack), self._outer[-1][2] if self._outer else None
        if outer == "backward" or (outer is None and self._differentiates and stack.startswith("transpose(")):
            return "backward"
        return "derived" if outer == "derived" or "transpose(" in stack else "forward"

    def _scan(self, eqn: JaxprEqn, ins: list[Known]) -> list[Known]:
        params = eqn.params
        inner, length, backwards = params["jaxpr"], params["length"], params["reverse"]
        # What is stacked has an axis more outside. The parameters' names differ between versions of JAX.
        state = sum(map(operator.eq, map(_axes, eqn.outvars), map(_axes, inner.jaxpr.outvars)))
        last = sum(map(operator.eq, map(_axes, eqn.invars), map(_axes, inner.jaxpr.invars)))
        first = last - state
        shared, carry, stacked = ins[:first], ins[first:last], ins[last:]
        consts = self.constants(inner.consts)
        # What the iterations put out lies in one array that is filled row by row: a model may lie in it.
        wholes: list[Any] = [variable.aval for variable in eqn.outvars[state:]]
        types = [np.dtype(np.float64) if self._widen is not None and is_narrow(x.dtype) else x.dtype for x in wholes]
        made: list[Any] = [
            [None] * length if is_key(x) else np.empty(x.shape, dtype) for x, dtype in zip(wholes, types, strict=True)
        ]
        rows: list[list[int]] = [[] for _ in made]
        turns = range(length)[:: -1 if backwards else 1]
        outside = self._layer
        weights = (known.number is not None and self.values.parameter(known.number) for known in stacked)
        counted: type[int] = int if any(weights) else Step
        for i in turns:
            self._layer = (*outside, counted(i))
            xs = [self._row(known, i) for known in stacked]
            results = self.program(inner.jaxpr, consts, [*shared, *carry, *xs])
            carry = results[:state]
            for whole, numbers, known in zip(made, rows, results[state:], strict=True):
                whole[i] = known.array
                numbers += [] if known.number is None else [known.number]
        self._layer = outside
        outputs = []
        for whole, numbers in zip(made, rows, strict=True):
            array = jnp.stack(whole) if isinstance(whole, list) else whole
            row = Value("operation", STACK, tuple(numbers[:: turns.step]), place=self._place(eqn), layer=self._layer)
            row.backward = self._way(eqn) == "backward"
            row.again = np.stack if len(numbers) == length and not isinstance(whole, list) else None
            # The rows say it all; the whole is looked at where somebody compares it by name.
            number = self.values.add(row, array if len(self.values.rows) in self.values.keep else None)
            self.values.rows[number].shape, self.values.rows[number].dtype = array.shape, str(array.dtype)
            outputs.append(Known(array, number))
        return [*carry, *outputs]

    def _row(self, known: Known, i: int) -> Known:
        # NumPy's row of an array is no copy.
        array = (known.array if is_key(known.array) else np.asarray(known.array))[i]
        if known.number is None:
            return Known(array, None)
        before = self.values.rows[known.number]
        if before.operation == STACK and len(before.inputs) == before.shape[0]:
            return Known(array, before.inputs[i])
        place = self._outer[-1][0] if self._outer else NOWHERE
        row = Value("operation", ROW, (known.number,), before.name, "", place, self._layer, backward=before.backward)
        row.again = lambda arrays: arrays[0][i]
        return Known(array, self.values.add(row, array))

    def _while(self, eqn: JaxprEqn, ins: list[Known]) -> list[Known]:
        params = eqn.params
        split, state = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_test, of_body, carry = ins[:split], ins[split:state], ins[state:]
        outside = self._layer
        for turn in count():
            self._layer = (*outside, Step(turn))
            if not self._inner(params["cond_jaxpr"], [*of_test, *carry])[0].array:
                break
            carry = self._inner(params["body_jaxpr"], [*of_body, *carry])
        self._layer = outside
        return list(carry)

    def _place(self, eqn: JaxprEqn) -> Place:
        """The innermost line that is not a library's; in a function of a library, the line that calls that.

        Such a function may be known from an earlier call, and name the lines of that one.
        """
        outer, function = self._outer[-1][:2] if self._outer else (Place(), "")
        traceback = eqn.source_info.traceback
        if traceback is None:
            return outer
        key = id(traceback), self._outer[-1] if self._outer else None
        if key not in self._places:
            frames, fallback, ours = [], None, None
            for frame in traceback.frames:
                library = any(part in frame.file_name for part in _LIBRARIES)
                if function and library and frame.function_name.split(".")[-1] == function:
                    break
                if not library and not frame.file_name.startswith("<"):
                    frames.append(frame)
                elif fallback is None and "site-packages/optax/" in frame.file_name:
                    fallback = frame  # the optimizer is what is asked about, where nobody wrote anything around it
                if ours is None and frame.file_name.startswith(_LIBRARIES[1]):
                    ours = len(frames)  # what lies outside of it called us
            calls = [(frame.function_name.split("<locals>.")[-1], frame.line_num) for frame in reversed(frames[:ours])]
            # Of what is traced within a loop, the frames outside are those of the loop.
            before = outer.called() if ours is None else ()
            chain = as_chain(before, [(name, line) for name, line in calls if not name.startswith("<")])
            first = frames[0] if frames else None if outer.file else fallback
            self._places[key] = (
                outer if first is None else Place(first.file_name, first.line_num, first.function_name, chain)
            )
        return self._places[key]


def _is_of_rule(traceback: Any) -> bool:
    """Whether it is a rule of derivation that calls an operation."""
    files = [] if traceback is None else [frame.file_name for frame in traceback.frames]
    inner = [*takewhile(lambda file: not file.endswith("interpreters/ad.py"), files)]
    return inner != files and any("jax/_src/lax/" in file for file in inner)


def _is_real(literal: Any) -> bool:
    return np.isrealobj(literal) and np.asarray(literal).dtype != jax.dtypes.float0


def _library_function(eqn: JaxprEqn) -> str:
    """The name of the function that a call runs, where a library wrote it; else nothing."""
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    about = getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
    source = getattr(about, "func_src_info", None) or ""
    return source.split(" at ")[0] if any(part in source for part in _LIBRARIES) else ""


def _made(eqn: JaxprEqn, arrays: Sequence[Any]) -> Sequence[Any]:
    """The results of an operation.

    NumPy does what has one right result to the last bit: numbers that are only moved, and single roundings in float64.
    JAX would compile each of these for each shape.
    """
    name = eqn.primitive.name
    if name in _MOVES and len(arrays) == 1 and not is_key(arrays[0]):
        return [_MOVES[name](np.asarray(arrays[0]), eqn.params)]
    if name in _ROUNDED_ONCE and all(_type(array) in ("float64", "float", "bool") for array in arrays):
        with np.errstate(all="ignore"):
            return [np.asarray(_ROUNDED_ONCE[name](*map(np.asarray, arrays)))]
    if name == "dot_general" and max(array.size for array in arrays) > _LARGEST:
        left, right = map(np.asarray, arrays)
        if left.dtype == right.dtype == np.float64:
            return [_product(left, right, eqn.params["dimension_numbers"])]
    made = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    return made if eqn.primitive.multiple_results else [made]


def _product(left: np.ndarray, right: np.ndarray, numbers: Any) -> np.ndarray:
    """What dot_general makes of two arrays: XLA would copy each, into its order, and a table of tokens is large."""
    contracted, batches = numbers
    shapes, matrices = [], []
    for array, over, batch, order in zip((left, right), contracted, batches, ("first", "last"), strict=True):
        free = [axis for axis in range(array.ndim) if axis not in (*over, *batch)]
        moved = array.transpose(*batch, *((*free, *over) if order == "first" else (*over, *free)))
        rows = math.prod(array.shape[axis] for axis in (free if order == "first" else over))
        same, shape = (tuple(array.shape[axis] for axis in axes) for axes in (batch, free))
        matrices.append(moved.reshape(*same, rows, math.prod(array.shape) // (math.prod(same) * rows)))
        shapes += [same, shape]
    product: np.ndarray = matrices[0] @ matrices[1]
    return product.reshape(shapes[0] + shapes[1] + shapes[3])


def _made_again(make: Any, eqn: JaxprEqn, literals: Sequence[Any], output: int, arrays: Sequence[Any]) -> Any:
    """One of the results of an operation on other arrays in the place of those that are no literals."""
    given = iter(arrays)
    return make(eqn, [next(given) if literal is None else literal for literal in literals])[output]


def _made_in_float64(eqn: JaxprEqn, arrays: Sequence[Any]) -> Sequence[Any]:
    """The results of an operation on floating numbers in float64, whatever type the program asks for."""
    name = eqn.primitive.name
    if name in _TAKES:
        return _made(eqn, arrays)
    wide = [_wide(array) for array in arrays]
    if name == "reduce_precision" or (name == "convert_element_type" and is_narrow(eqn.params["new_dtype"])):
        return [np.asarray(wide[0], np.float64)]
    if name != "bitcast_convert_type":
        params = {key: _wide_type(value) for key, value in eqn.params.items()}
        with suppress(TypeError, ValueError):
            return list(map(_wide, _made(eqn.replace(params=params), wide)))
    # Bits have a meaning only in their own type, and so have arrays for a program that nobody looks into.
    own = [
        np.asarray(array).astype(_dtype(variable)) if is_narrow(_dtype(variable)) else array
        for array, variable in zip(wide, eqn.invars, strict=True)
    ]
    return list(map(_wide, _made(eqn, own)))


def unrounded(number: Any, dtype: Any, source: str = "") -> np.float64:
    """The number that somebody wrote, of which a program keeps what `dtype` can hold: one that stands in the `source`
    of the line, or 0.1, 1/48, sqrt(2/pi).

    It rounds to the same number in that type; where no simple one does, it is this number itself.
    """
    kept = np.asarray(number, dtype)
    wholes = np.arange(1, _LARGEST_WHOLE, dtype=np.float64)
    sign, size = np.sign(kept.astype(np.float64)), np.abs(kept.astype(np.float64))
    written = np.array([float(f"{size:.{digits}g}") for digits in (1, 2, 3, 4, 5, 6)])
    simple = (
        np.array(_NUMBER.findall(source), float),
        written,
        1 / wholes,
        np.sqrt(wholes),
        1 / np.sqrt(wholes),
        _KNOWN_NUMBERS,
    )
    for candidates in simple if np.isfinite(size) else ():
        with np.errstate(over="ignore"):
            same = candidates[candidates.astype(kept.dtype) == np.abs(kept)]
        if len(same):
            return np.float64(sign * same[0])
    return np.float64(kept)


def _dtype(variable: Any) -> Any:
    return variable.aval.dtype


def _in_float64(array: Any) -> Any:
    """What is traced in the place of weights that are not in float64 yet."""
    return array if isinstance(array, jax.Array) else jax.ShapeDtypeStruct(array.shape, np.float64)


def _is_wide(variable: Any) -> bool:
    return str(_dtype(variable)) == "float64"


def _wide(array: Any) -> Any:
    dtype = getattr(array, "dtype", None)
    return np.asarray(array).astype(np.float64) if dtype is not None and is_narrow(dtype) else array


def _wide_type(value: Any) -> Any:
    """A parameter of an operation for float64: a type, or the program by which a scatter adds."""
    if isinstance(value, Jaxpr):
        given: list[Any] = [variable.aval for variable in value.invars]
        wide = [jax.ShapeDtypeStruct(x.shape, np.float64 if is_narrow(x.dtype) else x.dtype) for x in given]
        return jax.make_jaxpr(jaxpr_as_fun(ClosedJaxpr(value, ())))(*wide).jaxpr
    return np.dtype(np.float64) if isinstance(value, np.dtype) and is_narrow(value) else value


def _asks_for_type(eqn: JaxprEqn) -> bool:
    """Whether the line that somebody wrote asks for the type itself, and no layer of a library that it calls."""
    traceback: Any = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not any(part in frame.file_name for part in (*_LIBRARIES, "site-packages/")):
            return True
        if not frame.file_name.startswith(_LIBRARIES[0]) or "/nn/" in frame.file_name:
            return False
    return False


_ROUNDED_ONCE: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "square": np.square,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "select_n": lambda which, *cases: np.where(which, cases[-1], cases[0]),
}


def _broadcast(array: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    sizes = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], array.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(array.reshape(sizes), params["shape"])


def _slice(array: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    strides = params["strides"] or [1] * array.ndim
    return array[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


_MOVES: dict[str, Callable[[np.ndarray, Mapping[str, Any]], np.ndarray]] = {
    "reshape": lambda array, params: array.transpose(params["dimensions"] or range(array.ndim)).reshape(
        params["new_sizes"]
    ),
    "transpose": lambda array, params: array.transpose(params["permutation"]),
    "squeeze": lambda array, params: array.squeeze(tuple(params["dimensions"])),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
}
_TAKES = {*_MOVES, "gather", "dynamic_slice"}
"""Operations that compute nothing."""


def _type(array: Any) -> str:
    """The dtype of an array, or the type of a number that stands in the program."""
    return str(getattr(array, "dtype", type(array).__name__))


def _axes(variable: Any) -> int:
    return variable.aval.ndim


_ALONG = re.compile("cum|arg|reduce|iota|sort")
"""Operations along an axis that may be another one."""


def _otherwise(make: Any, eqn: JaxprEqn, literals: Sequence[Any], output: int, numbers: Sequence[float]) -> Othersteps:
    """An operation with another number, argument or name: what is said of it, and how it is computed."""
    for n, held in enumerate(literals):
        if held is not None and np.size(held) == 1 and _is_real(held):
            value = np.asarray(held).item()
            for number in others_than(value, numbers):
                given = [*literals[:n], jnp.full_like(held, number), *literals[n + 1 :]]
                yield f"has {value:g} here; with {number:g}", partial(_made_again, make, eqn, given, output)
    axes = range(len(getattr(eqn.outvars[output].aval, "shape", ()))) if _ALONG.match(eqn.primitive.name) else ()
    for key, value in eqn.params.items():
        held = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        # What is no axis is not checked, and may end the program.
        own = key == "reverse" or (key in ("axis", "axes", "dimension") and isinstance(held, int))
        for other in (each for each in others_than(held, ()) if key == "reverse" or each in axes) if own else ():
            params = {**eqn.params, key: (other,) if isinstance(value, tuple) else other}
            yield (
                f"has {key}={held} here; with {other}",
                partial(_made_again, make, eqn.replace(params=params), literals, output),
            )
    for name in similar(eqn.primitive.name):
        if (primitive := getattr(jax.lax, f"{name}_p", None)) is not None:
            again = partial(_made_again, make, eqn.replace(primitive=primitive), literals, output)
            yield f"applies {eqn.primitive.name} here; with {name}", again
