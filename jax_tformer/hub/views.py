"""Views of stored arrays: rearranged, stacked or split, and read part by part, only where somebody asks.

A view has a shape, a type and strides, and `view[slices]` returns an array. NumPy arrays are views, and so are arrays
in files. Conversions of weights are built from views, so one engine converts arrays in memory and arrays in files.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

Region = tuple[slice, ...]
"""A slice with start and stop for each axis."""
_BLOCK = 2**22
"""About as many bytes are copied at a time."""


class View(Protocol):
    """What can be read in part; `np.ndarray` is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""

    @property
    def strides(self) -> tuple[int, ...]:
        """How far apart neighbours along each axis are stored; only the order of these numbers matters."""

    def __getitem__(self, region: Region, /) -> np.ndarray:
        """Reads a part."""


def whole(view: View) -> Region:
    """Returns the region that is all of `view`."""
    return tuple(slice(0, size) for size in view.shape)


def read(view: View, dtype: np.dtype[Any] | None = None, region: Region | None = None) -> np.ndarray:
    """Reads a region (all, by default) into a new contiguous array, converted to `dtype`, block by block."""
    region = whole(view) if region is None else region
    out = _aligned(tuple(part.stop - part.start for part in region), view.dtype if dtype is None else dtype)
    # Numbers too large for the type become infinite, as in any conversion.
    with np.errstate(over="ignore"):
        _copy(view, region, out)
    return out


def blocks(view: View) -> list[Region]:
    """Returns the regions of `view` along its first axis that hold about 4 MB each, in order."""
    if not view.shape or not math.prod(view.shape):
        return [whole(view)]
    row = math.prod(view.shape[1:]) * view.dtype.itemsize
    step = max(1, _BLOCK // row)
    rest = whole(view)[1:]
    return [(slice(start, min(start + step, view.shape[0])), *rest) for start in range(0, view.shape[0], step)]


def same_bytes(first: View, second: View) -> bool:
    """Whether two views have one shape, type and content, bit for bit."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return all(first[region].tobytes() == second[region].tobytes() for region in blocks(first))


class Rearranged:
    """`source` with its axes rearranged as in einops, "(n o) i -> n o i"; `sizes` are what the shape leaves open."""

    def __init__(self, source: View, axes: str, sizes: Mapping[str, int] | None = None) -> None:
        self._source = source
        before, after = (_groups(side) for side in axes.split("->"))
        self._sizes = dict(sizes or {})
        if len(before) != len(source.shape):
            raise ValueError(f"{axes!r} asks for {len(before)} axes; got the shape {list(source.shape)}")
        for group, size in zip(before, source.shape, strict=True):
            open_ = [name for name in group if name not in self._sizes]
            known = math.prod(self._sizes[name] for name in group if name in self._sizes)
            if len(open_) > 1 or (size % known if open_ else size != known):
                raise ValueError(f"{axes!r} with {dict(sizes or {})} does not fit the shape {list(source.shape)}")
            self._sizes |= dict.fromkeys(open_, size // known)
        self._before, self._after = before, after
        self._names = [name for group in before for name in group]
        self._order = [self._names.index(name) for group in after for name in group]
        self.shape = tuple(math.prod(self._sizes[name] for name in group) for group in after)
        self.dtype = source.dtype
        inner = {
            name: stride * math.prod(self._sizes[later] for later in group[place + 1 :])
            for group, stride in zip(before, source.strides, strict=True)
            for place, name in enumerate(group)
        }
        self.strides = tuple(max((inner[name] for name in group), default=0) for group in after)

    def __getitem__(self, region: Region) -> np.ndarray:
        wanted: dict[str, slice] = {}
        cropped = []
        for group, part in zip(self._after, region, strict=True):
            ranges, crop = self._ranges(group, part)
            wanted |= ranges
            cropped.append(crop)
        outer, inside = [], []
        for group in self._before:
            read_, span = self._span(group, wanted)
            outer.append(span)
            inside += [(read_[name], wanted[name]) for name in group]
        block = self._source[tuple(outer)].reshape([read_.stop - read_.start for read_, _ in inside])
        block = block[tuple(slice(part.start - read_.start, part.stop - read_.start) for read_, part in inside)]
        shape = [math.prod(wanted[name].stop - wanted[name].start for name in group) for group in self._after]
        return block.transpose(self._order).reshape(shape)[tuple(cropped)]

    def _ranges(self, group: Sequence[str], part: slice) -> tuple[dict[str, slice], slice]:
        """Returns the ranges of a group's axes that cover `part` of them together, and where it lies in these."""
        ranges: dict[str, slice] = {}
        start, stop, begin = part.start, part.stop, 0
        for place, name in enumerate(group):
            inner = math.prod(self._sizes[later] for later in group[place + 1 :])
            first, last = (start - begin) // inner, max(stop - begin - 1, start - begin) // inner
            ranges[name] = slice(first, last + 1)
            begin += first * inner
            if last > first:
                ranges |= {later: slice(0, self._sizes[later]) for later in group[place + 1 :]}
                break
        return ranges, slice(start - begin, stop - begin)

    def _span(self, group: Sequence[str], wanted: Mapping[str, slice]) -> tuple[dict[str, slice], slice]:
        """Returns the ranges of a group's axes that are read, at least those wanted, and the one range they make."""
        ranges: dict[str, slice] = {}
        begin, ranged = 0, False
        extent = 1
        for place, name in enumerate(group):
            inner = math.prod(self._sizes[later] for later in group[place + 1 :])
            ranges[name] = slice(0, self._sizes[name]) if ranged else wanted[name]
            begin += ranges[name].start * inner
            length = ranges[name].stop - ranges[name].start
            extent *= length
            ranged = ranged or length != 1
        return ranges, slice(begin, begin + extent)


@lru_cache(maxsize=256)
def rearranged_shape(shape: tuple[int, ...], axes: str, sizes: tuple[tuple[str, int], ...] = ()) -> tuple[int, ...]:
    """Returns the shape of a view of `shape` once it is `Rearranged`, by arithmetic: no size takes memory."""
    nothing: Any = SimpleNamespace(shape=shape, dtype=None, strides=shape)
    return Rearranged(nothing, axes, dict(sizes)).shape


class Stacked:
    """Views of one shape and type along a new first axis."""

    def __init__(self, sources: Sequence[View]) -> None:
        first = sources[0]
        self.sources = sources
        self.shape = (len(sources), *first.shape)
        self.dtype = first.dtype
        self.strides = (max(first.strides, default=1) * max(first.shape, default=1), *first.strides)

    def __getitem__(self, region: Region) -> np.ndarray:
        if region[0].stop - region[0].start == 1:
            return self.sources[region[0].start][region[1:]][None]
        return np.stack([source[region[1:]] for source in self.sources[region[0]]])


class Part:
    """One entry along the first axis of a view."""

    def __init__(self, source: View, index: int) -> None:
        self._source, self._index = source, index
        self.shape, self.dtype, self.strides = source.shape[1:], source.dtype, source.strides[1:]

    def __getitem__(self, region: Region) -> np.ndarray:
        part: np.ndarray = self._source[(slice(self._index, self._index + 1), *region)][0]
        return part


def _groups(side: str) -> list[list[str]]:
    """Splits "1 (n o) i" into [[], [n, o], [i]]."""
    groups: list[list[str]] = []
    inside = False
    for word in side.replace("(", " ( ").replace(")", " ) ").split():
        if word in "()":
            inside = word == "("
            if inside:
                groups.append([])
        elif inside:
            groups[-1].append(word)
        else:
            groups.append([] if word == "1" else [word])
    return groups


def _copy(view: View, region: Region, out: np.ndarray) -> None:
    """Copies a region into `out`, in blocks that lie together where they are stored."""
    if isinstance(view, Stacked):
        for number, source in enumerate(view.sources[region[0]]):
            _copy(source, region[1:], out[number])
        return
    extents = out.shape
    size = math.prod(extents) * max(out.itemsize, view.dtype.itemsize)
    axes = [axis for axis, extent in enumerate(extents) if extent > 1]
    if size <= _BLOCK or not axes:
        out[...] = view[region]
        return
    axis = max(axes, key=lambda axis: view.strides[axis])
    step = max(1, extents[axis] * _BLOCK // size)
    for start in range(0, extents[axis], step):
        stop = min(start + step, extents[axis])
        shifted = slice(region[axis].start + start, region[axis].start + stop)
        there = (*region[:axis], shifted, *region[axis + 1 :])
        _copy(view, there, out[(slice(None),) * axis + (slice(start, stop),)])


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An empty array at an address that JAX takes over as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)
