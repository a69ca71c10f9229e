"""Records what a module of PyTorch computes: every value that an operation makes, forward and backward.

Values are known by where they lie in memory, so that views, operations in place and what autograd saves are followed.
"""

import math
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._decomp import get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from parity.differ.fingerprints import as_numpy
from parity.differ.values import GRADIENT, Othersteps, Place, Value, Values, as_chain, is_narrow, others_than, similar

_TORCH = f"{Path(torch.__file__).parent}/"
_HERE = f"{Path(__file__).parents[1]}/"
_LAYERS = tuple(f"{_TORCH}{part}/" for part in ("nn", "optim"))
Key = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


_FUSED = """
    addmm native_layer_norm native_layer_norm_backward native_group_norm native_batch_norm
    _native_batch_norm_legit_no_training gelu gelu_backward silu silu_backward
    _log_softmax _softmax_backward_data _log_softmax_backward_data addcmul addcdiv
    hardsigmoid hardsigmoid_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
"""


class SeveralPassesError(Exception):
    """A weight has got its gradient in more than one pass backward."""


@cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Fused operations that are taken apart, so that a difference inside of them has a place."""
    return get_decompositions([getattr(torch.ops.aten, name) for name in _FUSED.split()])


def values_of_torch(
    module: nn.Module,
    run: Callable[[], Mapping[str, torch.Tensor]],
    inputs: Mapping[str, torch.Tensor],
    *,
    constants: frozenset[str] = frozenset(),
    keep: frozenset[int] = frozenset(),
    taken: Callable[[str, np.ndarray], None] | None = None,
    at_once: bool = False,
    sketched: bool = False,
    put: Mapping[int, np.ndarray] = {},
    digits: Mapping[float, float] = {},
    widening: bool = False,
) -> Values:
    """Every value that `run` computes with `module`; it returns tensors by name, which become the outputs.

    `constants` names buffers that the other side has no parameter for. A fused attention is run as its single
    operations. `taken` is given each gradient as soon as it is there, and the module lets go of it; or all of them
    after the run, `at_once`. What is in `put` takes the place of these values' numbers, and what is in `digits` that of
    numbers of this size in the program. With `widening`, weights of fewer digits than float64 are widened where they
    are used. Raises whatever `run` raises, and SeveralPassesError for a gradient that comes in parts.
    """
    recorder = Recorder(Values("theirs", keep, {} if sketched else None), put, digits, widening)
    trained = {name: p for name, p in module.named_parameters() if taken and p.requires_grad}

    def hand_over(name: str) -> None:
        if taken:
            recorder.hand_over(name, trained[name], taken)

    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        recorder.leaf("constant" if name in constants else "parameter", name, tensor)
    for name, tensor in inputs.items():
        recorder.leaf("input", name, tensor)
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_without_fast_path())
        # A run that ends in between would hold its frame, and so the module, in a circle.
        stack.callback(setattr, recorder, "_call", None)
        for name, part in module.named_modules():
            before = part.register_forward_pre_hook(lambda *_, name=name: recorder.enter(name))
            after = part.register_forward_hook(lambda *_: recorder.leave())
            stack.callback(before.remove)
            stack.callback(after.remove)
        for name, parameter in () if at_once else trained.items():
            complete = parameter.register_post_accumulate_grad_hook(lambda _, name=name: hand_over(name))
            stack.callback(complete.remove)
        with recorder:
            outputs = run()
    for name, parameter in trained.items():
        if parameter.grad is not None:
            hand_over(name)
    for name, tensor in outputs.items():
        recorder.values.outputs[name] = recorder.number(tensor)
        recorder.values.arrays[recorder.values.outputs[name]] = np.asarray(as_numpy(tensor))
    return recorder.values


@contextmanager
def evaluating(module: nn.Module) -> Iterator[nn.Module]:
    """The module itself, without dropout; afterwards it is as it was."""
    before = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield module
    finally:
        for part, training in before.items():
            part.training = training


class Widening(TorchDispatchMode):
    """Computes in float64 with weights of fewer digits, each of which is widened where it is used."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The call, and its results, in float64; views stay as they are, and what is only looked up is widened then."""
        return widened_call(
            lambda func, args, kwargs: func(*args, **kwargs), func, args, kwargs or {}, torch.Tensor.double
        )


def widened_call(
    call: Callable[[Any, Any, Any], Any],
    func: Any,
    args: Any,
    kwargs: Any,
    widen: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    """What `call` of an operation returns if it computes in float64; `widen` does it to a tensor of fewer digits."""

    def wide(leaf: Any) -> Any:
        return widen(leaf) if isinstance(leaf, torch.Tensor) and is_narrow(leaf.dtype) else leaf

    if func.is_view or func._schema.is_mutable or func in _CASTS:
        return call(func, args, kwargs)
    if func.overloadpacket in _LOOKED_UP:
        return tree_map(wide, call(func, args, kwargs))
    return call(func, tree_map(wide, args), tree_map(wide, kwargs))


_LOOKED_UP = (torch.ops.aten.embedding, torch.ops.aten.index_select, torch.ops.aten.index, torch.ops.aten.gather)
_CASTS = (torch.ops.aten._to_copy.default,)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    # One kernel for a whole layer hides everything inside of it.
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Recorder(TorchDispatchMode):
    """Sees every operation below autograd."""

    def __init__(
        self, values: Values, put: Mapping[int, np.ndarray], digits: Mapping[float, float], widening: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values, self._put, self._digits, self._widening = values, put, digits, widening
        self.modules = [""]
        self._call: Any = None
        """The frame that called the whole module, while that runs."""
        self._known: dict[Key, tuple[int, int]] = {}
        self._objects: dict[int, tuple[Any, int, int]] = {}
        """The same by the tensor itself, as long as it lives: a detached copy lies where the original does."""
        self._writes: dict[int, int] = {}
        """Memory -> how often it was written to. What is known of it from before has to be looked at again."""
        self._writers: dict[int, tuple[int, Key]] = {}
        """Memory -> the last value that was written there, and where."""
        self._nodes: dict[int, int] = {}
        """Sequence number of autograd -> the value of the forward pass."""

    def enter(self, name: str) -> None:
        """A module is called."""
        if not name:
            self._call = sys._getframe(2)
        self.modules.append(name)

    def leave(self) -> None:
        """It has returned."""
        if not self.modules.pop():
            self._call = None

    def leaf(self, kind: Any, name: str, tensor: torch.Tensor) -> None:
        """A weight or an input."""
        if (given := self._put.get(len(self.values.rows))) is not None:
            tensor.data.copy_(torch.from_numpy(given))
        self._is(tensor, self.values.add(Value(kind, kind, name=name), tensor))

    def number(self, tensor: torch.Tensor) -> int:
        """The value that a tensor holds now."""
        reference, number, version = self._objects.get(id(tensor), (None, 0, 0))
        written = self._writes.get(tensor.untyped_storage().data_ptr(), 0)
        if reference is not None and reference() is tensor and version == written:
            return int(number)
        key = _key(tensor)
        if key in self._known:
            number, version = self._known[key]
            if version == written:
                return number
            # Somebody wrote to the memory since, perhaps through another view.
            writer, part = self._writers.get(key[0], (number, key))
            made = self.values.rows[writer]
            row = Value("operation", made.operation, (*dict.fromkeys((number, writer)),), "", made.module, made.place)
            row.layer = made.layer
            # It is all that was written, or something was written beside it.
            arrays = [self.values.arrays.get(i) for i in row.inputs]
            now = as_numpy(tensor)
            same = [n for n, array in enumerate(arrays) if array is not None and np.array_equal(array, np.asarray(now))]
            row.again = itemgetter(same[-1]) if same else None
            if not same and written - version == 1 and writer != number:
                row.again = partial(_written_to, key, part)
        else:
            row = Value("constant", "constant")
            if (given := self._put.get(len(self.values.rows))) is not None:
                tensor.data = torch.from_numpy(given)
        number = self.values.add(row, tensor)
        self._is(tensor, number)
        return number

    def hand_over(self, name: str, parameter: torch.Tensor, taken: Callable[[str, np.ndarray], None]) -> None:
        """The gradient of a weight is there: it is an output, is looked at, and let go."""
        if GRADIENT + name in self.values.outputs:
            raise SeveralPassesError
        gradient = parameter.grad
        assert gradient is not None
        with _disable_current_modes():
            self.values.outputs[GRADIENT + name] = self.number(gradient)
            taken(name, gradient.numpy())
        parameter.grad = None

    def _is(self, tensor: torch.Tensor, number: int) -> None:
        key = _key(tensor)
        written = self._writes.get(key[0], 0)
        self._known[key] = number, written
        self._objects[id(tensor)] = weakref.ref(tensor), number, written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._digits:
            args, kwargs = tree_map_only(float, self._in_full, (args, kwargs))
        if self._widening:
            return widened_call(self._compute, func, args, kwargs, self._widened)
        return self._compute(func, args, kwargs)

    def _in_full(self, number: float) -> float:
        return math.copysign(self._digits.get(abs(number), abs(number)), number)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same value in float64."""
        wide = tensor.double()
        self._is(wide, self.number(tensor))
        return wide

    def _goes_back(self) -> bool:
        """Whether this is the way back; what a module differentiates itself belongs to its way forward."""
        return self._call is None and torch._C._current_autograd_node() is not None

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        taken_apart = _decompositions().get(func)
        if taken_apart is not None:
            with self:
                out = taken_apart(*args, **kwargs)
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            if tensors and not self._goes_back():
                self._nodes[torch._C._autograd._get_sequence_nr() - 1] = self.number(tensors[0])
            return out
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # What is fresh may lie in memory where a value was that nobody holds any more.
        fresh = func is torch.ops.aten.lift_fresh.default
        numbers = [] if fresh else [self.number(tensor) for tensor in tensors]
        known = tuple(dict.fromkeys(numbers))
        again = partial(_made_again, func, *_without_tensors(args, kwargs), [known.index(n) for n in numbers])
        out = func(*args, **kwargs)
        if "empty" in str(func):
            out.zero_()  # what lies there by chance is no number of the program
        literals = tuple(float(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, float))
        node = torch._C._current_autograd_node()
        back, written = self._goes_back(), _place(self._call)
        forward = None if node is None else self._nodes.get(node._sequence_nr())
        module, place = self.modules[-1], written
        if node is not None and forward is not None:
            made = self.values.rows[forward]
            module, place = made.module, written if back and _is_written(written) else made.place
        for n, tensor in enumerate(tree_leaves(out)):
            if not isinstance(tensor, torch.Tensor):
                continue
            row = Value("operation", str(func.overloadpacket), known, "", module, place, _layer(module), literals)
            row.backward, row.derived, row.forward = back, not back and node is not None, forward if back else None
            row.again = partial(again, n) if known else None
            row.otherwise = partial(_otherwise, again, n) if known else None
            given = self._put.get(len(self.values.rows))
            # What is expanded holds each number once, and has it from the value that it is a view of.
            if given is not None and (tensor.numel() < 2 or 0 not in tensor.stride()):
                if is_narrow(tensor.dtype) and tensor.numel() == 1:
                    tensor.data = torch.from_numpy(given.astype(np.float64))
                else:
                    tensor.copy_(torch.from_numpy(given))
            number = self.values.add(row, tensor)
            self.values.stopped |= set() if back or torch.is_grad_enabled() or _in_function() else {number}
            self.values.note_island(number, tensor, "site-packages/" not in place.file)
            if func._schema.is_mutable:
                storage = tensor.untyped_storage().data_ptr()
                self._writers[storage] = number, _key(tensor)
                self._writes[storage] = self._writes.get(storage, 0) + 1
            self._is(tensor, number)
            if not back:
                # Operations that need no derivative follow, and have the number of the last that does.
                self._nodes.setdefault(torch._C._autograd._get_sequence_nr() - 1, number)
        return out


def _without_tensors(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """The arguments of an operation, with its shape in the place of each tensor, and their structure: none is held."""
    leaves, structure = tree_flatten((args, kwargs))
    return [_Shape(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure


_UNCHECKED = re.compile(r"backward|aten\._(?!softmax|log_softmax|to_copy|unsafe_view|reshape_alias)")
"""Operations that PyTorch alone calls: some do not check the shapes of what they are given, and write beyond it."""


_RESHAPED = dict.fromkeys((torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default), torch.reshape)
"""What computes the same, however the array lies in memory, which may be in another way when it is made again."""


def _otherwise(again: Any, output: int, numbers: Sequence[float]) -> Othersteps:
    """An operation with another number, argument or name: what is said of it, and how it is computed."""
    func, leaves, structure, places = again.args
    if "as_strided" in str(func) or _UNCHECKED.search(str(func)):
        return
    for n, held in enumerate(leaves):
        for number in others_than(held, numbers) if isinstance(held, int | float) else ():
            given = [*leaves[:n], number, *leaves[n + 1 :]]
            yield f"has {held:g} here; with {number:g}", partial(_made_again, func, given, structure, places, output)
    name = func.overloadpacket.__name__
    for other in similar(name.rstrip("_")):
        overload = getattr(getattr(torch.ops.aten, other, None), func._overloadname, None)
        if overload is not None:
            yield (
                f"applies {name} here; with {other}",
                partial(_made_again, overload, leaves, structure, places, output),
            )


class _Shape(tuple[int, ...]):
    """Of a tensor; the other arguments of an operation have none."""


def _made_again(
    func: Any, leaves: list[Any], structure: Any, places: list[int], output: int, arrays: Sequence[np.ndarray]
) -> Any:
    """One of the results of an operation on other arrays in the place of its tensors."""
    shapes = [leaf for leaf in leaves if isinstance(leaf, _Shape)]
    if _UNCHECKED.search(str(func)) and shapes != [arrays[place].shape for place in places]:
        raise ValueError(f"{func} takes {shapes}")
    given = (torch.from_numpy(np.array(arrays[place])) for place in places)
    args, kwargs = tree_unflatten([next(given) if isinstance(leaf, _Shape) else leaf for leaf in leaves], structure)
    with torch.no_grad():
        return tree_leaves(_RESHAPED.get(func, func)(*args, **kwargs))[output].numpy()


def _key(tensor: torch.Tensor) -> Key:
    storage = tensor.untyped_storage().data_ptr()
    return storage, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _written_to(whole: Key, part: Key, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """A tensor after one of its parts was written to: [the tensor before, what was written] -> the tensor."""
    before, made = arrays
    after, own, its = np.array(before), _offsets(whole), _offsets(part)
    within, order = np.isin(its, own), np.argsort(own, kind="stable")
    after.reshape(-1)[order[np.searchsorted(own, its[within], sorter=order)]] = made.reshape(-1)[within]
    return after


def _offsets(key: Key) -> np.ndarray:
    """Where in memory the elements of a tensor lie, in their order."""
    _, offset, shape, strides, _ = key
    places: np.ndarray = offset + np.tensordot(strides, np.indices(shape), 1).reshape(-1).astype(int)
    return places


def _layer(module: str) -> tuple[int, ...]:
    return tuple(int(part) for part in module.split(".") if re.fullmatch(r"\d+", part))


def _place(call: Any) -> Place:
    """The innermost line that somebody wrote for this module; where PyTorch wrote all, the innermost of its layers."""
    frame: Any = sys._getframe(2)
    written: list[Any] = []
    layers: list[Any] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if frame is call or (file.startswith(_HERE) and file != __file__ and not _passes_on(frame.f_code)):
            break  # what lies outside of the call of the module is the caller's
        if file.startswith(_LAYERS):
            layers.append(frame)
        elif not file.startswith((_TORCH, _HERE, "<")) and not _passes_on(frame.f_code):
            written.append(frame)
        frame = frame.f_back
    chosen = (written or layers or [None])[0]
    if chosen is None:
        return Place()
    chain = as_chain((), [(frame.f_code.co_name, frame.f_lineno) for frame in reversed((written or layers)[:6])])
    return Place(chosen.f_code.co_filename, chosen.f_lineno, chosen.f_code.co_name, chain)


def _in_function() -> bool:
    """Whether this is within an autograd.Function, which computes without gradients, and hands its own back."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("torch/autograd/function.py"):
        frame = frame.f_back
    return frame is not None


def _passes_on(code: Any) -> bool:
    """Whether a function only hands operations on: a context manager, a mode that changes them."""
    return "contextlib" in code.co_filename or code.co_name in ("__torch_function__", "__torch_dispatch__")


def _is_written(place: Place) -> bool:
    return bool(place.file) and not place.file.startswith(_TORCH)
