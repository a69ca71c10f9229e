"""What one side computes: its values in the order of execution, each with its place, its inputs and its fingerprint."""

import ctypes
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from parity.differ.fingerprints import BAR, Index, as_numpy, fingerprint, sketch

Kind = Literal["parameter", "input", "constant", "operation"]
Direction = Literal["forward", "derived", "backward"]
"""Of a computation: `derived` is what the program itself differentiates on the way forward."""
_ADDS = re.compile(
    r"^(aten\.|prims\.)?(add|sub|rsub|reduce_sum|dot_general|conv|sum|mm|bmm|addmm|mean|cumsum|scatter.add)"
)
_MULTIPLIES = re.compile(r"(dot_general|conv|mm)")
_COPIES = re.compile(
    r"reshape|transpose|\.to$|view|squeeze|slice|expand|permute|broadcast|copy|detach|convert|clone|alias|flatten"
    r"|\bt\b|select(?!_)|split|unbind|chunk|layer row|contiguous"
)
STACK, ROW = "stack of layers", "layer row"
"""The operation that puts together what the iterations of a scan return."""
GRADIENT = "the gradient of "
"""With the name of a weight: the output that is its gradient."""
Othersteps = Iterator[tuple[str, Callable[[Sequence[Any]], Any]]]
"""(what is said of it, how it is computed from its inputs)"""
_SIMILAR = """
    lt le, gt ge, lt gt, le ge, eq ne, and or, bitwise_and bitwise_or, logical_and logical_or, max min, maximum minimum,
    argmax argmin, reduce_max reduce_min reduce_sum, amax amin mean sum, sin cos, add sub, mul div, exp expm1,
    log log1p, floor ceil round, triu tril"""
_NOISE = 1e-12
"""A sum that is this small beside what it adds is zero in exact arithmetic: its digits are rounding errors."""
_SMALL, _ROOM = 4 << 20, 96 << 20
"""Bytes of an array that is kept unasked, and of all of them."""
_SKETCHED = 1 << 24
"""Elements of an array of which there is a sketch: larger ones are tables."""
_MANY = 1 << 29
"""Bytes of arrays that were looked at, after which memory is handed back."""


class Place(NamedTuple):
    """A line of a program."""

    file: str = ""
    line: int = 0
    function: str = ""
    chain: tuple[str, ...] = ()
    """The functions on the way to it, the outermost first, each but the last with the line of the call: `block:12`."""
    source: str = ""
    """The line itself, where the file may be on another machine; otherwise it is read there."""

    @property
    def functions(self) -> list[str]:
        """Those of the chain, without lines."""
        return [name.partition(":")[0] for name in self.chain]

    def called(self) -> tuple[str, ...]:
        """The chain of what is called on this line."""
        return (*self.chain[:-1], *(f"{name}:{self.line}" for name in self.chain[-1:]))


def as_chain(before: tuple[str, ...], frames: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """The chain of a place from (name, line) of the functions around it, the outermost first."""
    return (*before, *(f"{name}:{line}" for name, line in frames[:-1]), *(name for name, _ in frames[-1:]))


NOWHERE = Place()


class EnoughError(BaseException):
    """A side that runs once more has come to the last value that is asked for; `args` holds the Values until there.

    It is no Exception, so that a program that runs step by step does not catch it as one of its own.
    """


class Step(int):
    """The iteration of a loop that goes over no stack of weights: a step in time."""


@dataclass(frozen=True)
class Site:
    """Where one side computes a value."""

    operation: str
    """The primitive of JAX or the operation of PyTorch."""
    module: str = ""
    """Path of the PyTorch module; empty where there is none."""
    file: str = ""
    line: int = 0
    source: str = ""
    """The line itself."""
    function: str = ""
    layer: tuple[int, ...] = ()
    """The iteration of each scan or loop around it, the outermost first; or the numbers in the module's path."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    backward: bool = False
    """Whether it is computed on the way back; the line is that of the forward pass."""
    chain: tuple[str, ...] = ()
    """The functions on the way to it, the outermost first."""

    def __str__(self) -> str:
        """`file:line  source  (operation, module, layer)`."""
        where = f"{short(self.file)}:{self.line}  {self.source}" if self.file else self.source
        return f"{where}  ({self.about})" if where else f"({self.about})"

    @property
    def about(self) -> str:
        """`operation, module, layer`."""
        return self._told([f"in {self.function}"] if self.function and not self.module else [])

    @property
    def way(self) -> str:
        """`operation, block:12 -> attention:40 -> linear, layer`; in a module, what its forward called."""
        forward = [n for n, name in enumerate(self.chain[:-1]) if name.startswith("forward:")]
        chain = self.chain[forward[-1] if forward else len(self.chain) :] if self.module else self.chain
        return self._told([" -> ".join(chain)] if chain else [])

    def _told(self, functions: list[str]) -> str:
        loops = [f"{'step' if isinstance(n, Step) else 'layer'} {n}" for n in self.layer]
        about = [self.operation, *["backward"] * self.backward]
        return ", ".join([*about, self.module, *functions] if self.module else [*about, *functions, *loops])


def read_line(file: str, line: int) -> str:
    """A line of a source file as it is now, without indentation: a file may change while a notebook runs."""
    linecache.checkcache(file)
    return linecache.getline(file, line).strip()


def short(path: str) -> str:
    """A path that fits a line: from the installed package, or from the working folder on."""
    if "site-packages/" in path:
        return path.split("site-packages/")[-1]
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


@dataclass(slots=True)
class Value:
    """One array of one side."""

    kind: Kind
    operation: str
    inputs: tuple[int, ...] = ()
    name: str = ""
    """Of a parameter or an input."""
    module: str = ""
    place: Place = NOWHERE
    layer: tuple[int, ...] = ()
    literals: tuple[float, ...] = ()
    """The numbers that stand in the program itself."""
    backward: bool = False
    derived: bool = False
    """Whether the program itself differentiates there, as a penalty of gradients does on the way forward."""
    forward: int | None = None
    """Of a value on the way back: the value of the forward pass whose derivative it belongs to, where known."""
    features: np.ndarray | None = None
    largest: float = 0.0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    data: bool = False
    """Whether it depends on a weight or a floating input."""
    noise: bool = False
    """Whether it is zero in exact arithmetic."""
    _: KW_ONLY
    again: Callable[[Sequence[Any]], Any] | None = None
    """Computes it from other arrays in the place of its inputs, where that is known."""
    otherwise: "Callable[[Sequence[float]], Othersteps] | None" = None
    """It with one of these numbers in the place of one of its own, another argument or another operation."""


@dataclass
class Values:
    """All values of one side."""

    side: str
    """ours or theirs."""
    keep: frozenset[int] = frozenset()
    """Values whose numbers are asked for, whatever their size."""
    sketches: dict[int, np.ndarray] | None = None
    """Where they are asked for: of what is computed in floating point."""
    rows: list[Value] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    """Name -> the value that is returned by it."""
    arrays: dict[int, np.ndarray] = field(default_factory=dict)
    """The numbers of the values that were asked for."""
    again: Callable[[frozenset[int]], "Values"] | None = None
    """Runs this side once more, and keeps the numbers of these values."""
    equal: dict[int, list[int]] = field(default_factory=dict)
    """A value -> those of the other side with the same fingerprint, in the order of execution."""
    reordered: dict[int, list[int]] = field(default_factory=dict)
    """Whole numbers -> those of the other side that are the same in another order."""
    partly: set[int] = field(default_factory=set)
    """Those of which only some rows are known to be equal: what the other side has of it is these."""
    bar: float = BAR
    """How far apart such fingerprints are at most."""
    islands: dict[int, bool] = field(default_factory=dict)
    """Where fewer digits than those of float64 begin; whether the program that somebody wrote asks for them there."""
    _whole: set[int] = field(default_factory=set)
    """Whole numbers with fewer digits."""
    stopped: set[int] = field(default_factory=set)
    """What is computed where no gradients are asked for."""
    beside: set[int] = field(default_factory=set)
    """What is computed after another value by the same call, or by a rule of derivation."""
    opaque: list[str] = field(default_factory=list)
    """Operations that count as one value, although there is a program inside."""
    _spent: int = 0
    _seen: int = 0
    _readers: list[list[int]] = field(default_factory=list)

    def add(self, value: Value, array: Any) -> int:
        """The number of a new value; `array` (None: not known) is looked at and let go.

        Raises EnoughError after the last one of those that are asked for.
        """
        known = [self.rows[i] for i in value.inputs]
        leaf = value.kind in ("parameter", "input")
        value.data = value.backward or any(row.data for row in known)
        numbers = None if array is None else as_numpy(array)
        if numbers is not None:
            value.shape, value.dtype = tuple(numbers.shape), str(getattr(array, "dtype", numbers.dtype))
            if any("complex" in row.dtype for row in (value, *known)):
                value.again = None  # of complex numbers the absolute values are kept
            value.data |= leaf and (numbers.dtype.kind in "fV" or "float" in value.dtype)
            if not self.keep:  # else this run is for some numbers, and no other
                value.features, value.largest = fingerprint(numbers, depends_on_data=value.data)
            if self.sketches is not None and value.data and not leaf and 0 < numbers.size <= _SKETCHED:
                self.sketches[len(self.rows)] = sketch(numbers)
            value.noise = not leaf and _is_noise(value, known)
            if value.noise:
                value.features = None
            # Small arrays are kept as long as there is room: a second run is then seldom needed.
            small = numbers.nbytes <= _SMALL and self._spent + numbers.nbytes <= _ROOM
            if len(self.rows) in self.keep or small:
                self.arrays[len(self.rows)] = numbers.copy(order="K")
                self._spent += numbers.nbytes
            self._seen += numbers.nbytes
            if self._seen > _MANY:
                self._seen = 0
                hand_back()
        self.rows.append(value)
        if self.keep and len(self.rows) > max(self.keep):
            raise EnoughError(self)
        return len(self.rows) - 1

    def site(self, number: int) -> Site:
        """Where a value is computed."""
        row = self.rows[number]
        if row.kind != "operation":
            return Site(row.kind, row.name, shape=row.shape, dtype=row.dtype, source=row.name)
        # What PyTorch does of itself on the way back has no line; what reads it, or it reads, has.
        around = (self.rows[k].place for k in (*self.readers(number), *row.inputs))
        place = row.place if row.place.file else next((each for each in around if each.file), row.place)
        file, line, function, chain, source = place
        source = source or read_line(file, line)
        about = row.layer, row.shape, row.dtype, row.backward, chain
        return Site(row.operation, row.module, file, line, source, function, *about)

    def want(self, numbers: Iterable[int]) -> None:
        """Sees to it that the numbers of these values are there: where they were let go, the side runs again."""
        missing = frozenset(numbers) - self.arrays.keys()
        if missing and self.again is not None:
            try:
                again = self.again(missing)
            except EnoughError as enough:
                again = enough.args[0]
            self.arrays |= {n: array for n, array in again.arrays.items() if n in missing}

    def array(self, number: int) -> np.ndarray | None:
        """The numbers of a value; None for what has none. Those of bfloat16 lie as they are until they are read."""
        self.want([number])
        array = self.arrays.get(number)
        return array.astype(np.float64) if array is not None and "bfloat16" in self.rows[number].dtype else array

    def output(self, name: str) -> np.ndarray:
        """The numbers of what is returned by this name."""
        self.want(self.outputs.values())
        return self.arrays[self.outputs[name]]

    def equals(self, numbers: Iterable[int]) -> set[int]:
        """All values of the other side that equal one of these."""
        return {j for i in numbers for j in self.equal.get(i, ())}

    def readers(self, number: int) -> list[int]:
        """The values that are made from a value directly."""
        if len(self._readers) != len(self.rows):
            self._readers = [[] for _ in self.rows]
            for k, row in enumerate(self.rows):
                for i in row.inputs:
                    self._readers[i].append(k)
        return self._readers[number]

    def used(self, number: int) -> list[int]:
        """The operations that read a value, in one shape or another."""
        found, todo = list[int](), [number]
        while todo:
            for k in self.readers(todo.pop()):
                (todo if self.copies(k) else found).append(k)
        return found

    def made(self, number: int) -> Site:
        """The place of a value; of one that was given, where it is read first."""
        while self.rows[number].kind != "operation" and (after := self.readers(number)):
            number = after[0]
        return self.site(number)

    def shown(self, number: int) -> Site:
        """The place of a value; a slice or a view shows nothing: what is made of it."""
        while self.copies(number) and (after := [k for k in self.readers(number) if self.rows[k].place.file]):
            number = after[0]
        return self.site(number)

    def live(self) -> set[int]:
        """The values that an output was made from; what nobody reads says nothing."""
        found: set[int] = set()
        todo = list(self.outputs.values())
        while todo:
            i = todo.pop()
            if i not in found:
                found.add(i)
                todo += self.rows[i].inputs
        return found

    def factors(self) -> set[int]:
        """What is computed `beside` a value for derivatives alone that the program itself takes."""
        found: set[int] = set()
        for i in sorted(self.beside, reverse=True):
            if (readers := self.readers(i)) and all(k in found or self.rows[k].derived for k in readers):
                found.add(i)
        return found

    def index(self, among: Iterable[int] | None = None) -> Index:
        """Finds live values, or those `among` these, by their fingerprints."""
        chosen = self.live() if among is None else set(among)
        return Index([row.features if i in chosen else None for i, row in enumerate(self.rows)], self.bar)

    def note_island(self, number: int, array: Any, asks: bool) -> None:
        """Notes that a value has fewer digits than those of float64, and what it is made of has not; whole numbers need
        no more."""
        reads = [i for i in self.rows[number].inputs if is_narrow(self.rows[i].dtype)]
        if is_narrow(array.dtype) and self._whole.issuperset(reads) and (numbers := as_numpy(array)) is not None:
            if bool((np.rint(numbers.astype(np.float64)) != numbers).any()):
                self.islands[number] = asks and not reads
            else:
                self._whole.add(number)

    def only_rounds(self, number: int) -> bool:
        """Whether nothing is computed in float32 from a value of that type before it is widened again, and whatever is
        from one with still fewer digits."""
        todo = [number] if "float32" in self.rows[number].dtype else []
        while todo:
            for i in self.readers(todo.pop()):
                if self.rows[i].dtype.endswith("float32"):
                    if not _COPIES.search(self.rows[i].operation):
                        return False
                    todo.append(i)
        return True

    def copies(self, number: int) -> bool:
        """Whether a value is nothing but another one in another shape."""
        row = self.rows[number]
        same_type = all(self.rows[i].dtype == row.dtype for i in row.inputs if self.rows[i].data)
        return bool(row.inputs) and same_type and self._is_copied(row)

    def _is_copied(self, row: Value) -> bool:
        """Whether an operation copies; what is written into a part of a buffer does not make it."""
        written = row.operation.endswith("copy_") and self.rows[row.inputs[-1]].shape != row.shape
        return not written and bool(_COPIES.search(row.operation))

    def reads_complex(self, number: int) -> bool:
        """Whether a value is made of complex numbers directly."""
        return any("complex" in self.rows[i].dtype for i in self.rows[number].inputs)

    def copied(self, number: int) -> int:
        """The value that this one is a copy of; itself, where it is none."""
        while self.copies(number):
            number = self.rows[number].inputs[-1]
        return number

    def is_made_of(self, number: int, other: int) -> bool:
        """Whether a value was made of another one."""
        seen, todo = {number}, [number]
        for i in todo:
            todo += [k for k in dict.fromkeys(self.rows[i].inputs) if k >= other and k not in seen]
            seen.update(self.rows[i].inputs)
        return other in seen

    def unscaled(self, number: int) -> int:
        """A value before it is multiplied by constants, as each side does elsewhere, back to one that has an equal."""
        while number not in self.equal:
            row = self.rows[number]
            before = [i for i in row.inputs if self.rows[i].data]
            if len(before) != 1 or not (self.copies(number) or re.fullmatch(r"(aten\.)?(mul|div)", row.operation)):
                break
            [number] = before
        return number

    def leaf(self, number: int) -> int | None:
        """The parameter or input of which a value is a copy: a transpose, a slice, a reshaped one, one times 1."""
        while (row := self.rows[number]).kind == "operation":
            before = [i for i in row.inputs if self.rows[i].data]
            if len(before) != 1 or not (self._is_copied(row) or _same(row, self.rows[before[0]])):
                return None
            number = before[0]
        return number if row.kind in ("parameter", "input") else None

    def parameter(self, number: int) -> str | None:
        """The name of the parameter of which a value is a copy."""
        leaf = self.leaf(number)
        return self.rows[leaf].name if leaf is not None and self.rows[leaf].kind == "parameter" else None


def similar(operation: str) -> list[str]:
    """The operations that are easily taken for this one."""
    return [
        name
        for names in map(str.split, _SIMILAR.split(","))
        if operation in names
        for name in names
        if name != operation
    ]


def others_than(held: float, numbers: Sequence[float]) -> list[Any]:
    """What may stand in the place of a number or an argument: one of the numbers, or a neighbour of a whole one."""
    if isinstance(held, bool | int):
        return [not held] if isinstance(held, bool) else [held + 1, held - 1, *[-held] * bool(held)]
    return [number for number in dict.fromkeys((*numbers, -held)) if number != held]


def is_narrow(dtype: Any) -> bool:
    """Whether a type is floating, with fewer digits than float64."""
    return "float" in str(dtype) and "64" not in str(dtype)


def _same(row: Value, other: Value) -> bool:
    if row.features is None or other.features is None:
        return False
    return float(np.abs(row.features - other.features).max()) < 1e-14


def _is_noise(value: Value, inputs: Sequence[Value]) -> bool:
    """Whether nothing but rounding errors is left of a sum, or was handed on."""
    floats = [row for row in inputs if row.largest > 0 and "int" not in row.dtype and "bool" not in row.dtype]
    if not floats or not value.data or value.largest == 0:
        return False
    if _ADDS.match(value.operation):
        sizes = [row.largest for row in floats]
        natural = float(np.prod(sizes)) if _MULTIPLIES.search(value.operation) else max(sizes)
        return value.largest < _NOISE * natural or all(row.noise for row in floats if row.data)
    # A product or a quotient of a rounding error is one, as large as it may have become.
    first = next((row for row in floats if row.data), None)
    return first is not None and first.noise


def hand_back() -> None:
    """The C library would keep what was let go, in pieces: gigabytes, where arrays of many sizes come and go."""
    with suppress(OSError, TypeError, AttributeError):  # Where there is another C library, nothing is done.
        ctypes.CDLL(None).malloc_trim(0)
