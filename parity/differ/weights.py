"""Whether weights are at fault: numbers that are not what the weight map says, or a place that reads another weight."""

import re
from collections.abc import Mapping, Sequence
from itertools import islice, product

import numpy as np

from parity.differ.alignment import PRODUCT, Start
from parity.differ.answer import Difference
from parity.differ.confirmation import Change, Mended, mended, most_mended
from parity.differ.element_order import error_of, layouts
from parity.differ.fingerprints import BAR, fingerprint
from parity.differ.values import Values
from parity.gates.projection import double
from parity.gates.pytrees import Tensors

_STEPS = 12
_ORDERS = 4
"""Orders of the axes of a weight, at most, with which a side is run to its end."""

Held = Mapping[str, Sequence[tuple[str, int | None]]]
"""Name of the module's weight -> (path of ours that holds it, its row where layers are stacked)."""


def inverted(holds: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, list[tuple[str, int | None]]]:
    """`Held`, from the module's weights in each layer of our parameters, by path."""
    found: dict[str, list[tuple[str, int | None]]] = {}
    for path, layers in holds.items():
        for row, names in enumerate(layers):
            for name in names:
                found.setdefault(name, []).append((path, row if len(layers) > 1 else None))
    return found


def wrong_weights(held: Tensors, tensors: Tensors, name: str, bar: float) -> Difference | None:
    """Weights that are not what the map says, by name; None where all are."""
    wrong, errors = [], []
    scales = {key: array for key, array in tensors.items() if array.size > 1}
    for key, array in held.items():
        array, truth = double(array), double(tensors[key])
        error = error_of(array, truth)
        if error <= max(BAR, bar):
            continue
        errors.append(f"{key}: {error:.1e}")
        wrong.append(f"{key} is not what our parameters hold: {_misheld(array, key, truth, scales)}")
    if not wrong:
        return None
    kind = wrong[0].split(": ", 1)[1]
    return Difference("parameters", None, None, (), kind, True, True, tuple(wrong), tuple(errors), name=name)


def _misheld(array: np.ndarray, key: str, truth: np.ndarray, tensors: Tensors) -> str:
    """In which way a weight is another one."""
    if array.ndim == 2 and array.shape[0] == array.shape[1] and error_of(array.T, truth) <= BAR:
        return "it is transposed"
    for other, tensor in tensors.items():
        if other != key and tensor.shape == array.shape and error_of(array, tensor) <= BAR:
            return f"it is {other}"
    if not array.any():
        return "it is zero"
    if float(np.abs(np.sort(array, axis=None) - np.sort(truth, axis=None)).max()) <= BAR * float(np.abs(truth).max()):
        return "it has the same numbers in another order"
    ratio = array[truth != 0] / truth[truth != 0]
    if ratio.size and not array[truth == 0].any() and np.ptp(ratio) < BAR:
        return f"it is {float(ratio.mean()):.6g} times as large"
    return "its numbers are others"


def other_weights(first: Start, second: Start, held_by: Held) -> tuple[str | None, bool]:
    """What is wrong where both sides multiply activations that were made with different weights, and whether theirs
    there mends all.

    So a map is found out that gives one projection the weights of another: each product by itself has an equal on the
    other side, and only where two of them meet do the sides part.
    """
    here, there = _first_product(first), _first_product(second)
    if here is None or there is None or not held_by:
        return None, False
    behind = _behind(first.values, here).items()
    mine = {name: (path, i) for (path, row), i in behind for name in _names(path, row, held_by)}
    their = {name: j for (name, _), j in _behind(second.values, there).items()}
    wrong, missing = sorted(mine.keys() - their.keys()), sorted(their.keys() - mine.keys())
    if len(mine) != len(their) or not wrong or not missing:
        return None, False
    (path, i), j = mine[wrong[0]], their[missing[0]]
    said = f"ours reads {', '.join(wrong)}, as {path}, where theirs reads {', '.join(missing)}"
    return said, _mends(first, second, i, j)


def read_by_both(first: Start, second: Start, held_by: Held) -> tuple[str | None, bool]:
    """What is wrong with the weights that the two places read, another one or transposed; whether the code is."""
    ours, theirs = first.values, second.values
    for i, j in product(first.agreed, second.agreed):
        mine, their = ours.parameter(i), theirs.parameter(j)
        if mine is None or their is None:
            continue
        right = {name for k in ours.equal.get(i, ()) if (name := theirs.parameter(k))}
        another = their not in right and right and ours.rows[i].shape and held_by
        if another and _would_agree(first, i, second, theirs.array(j)) and _mends(first, second, i, j):
            said = f"ours reads {', '.join(sorted(right))}, as {mine}, where theirs reads {their}"
            return said, is_code(ours, mine, their, held_by)
        if their in right and _would_agree(first, i, second, ours.array(i), transposed=True):
            return f"{mine} holds {their} transposed", False
    return None, False


def _mends(first: Start, second: Start, i: int, j: int) -> bool:
    """Whether ours, with their weight in the place of its own, or with the two exchanged, goes on as theirs does to the
    end, as far as that can be seen."""
    ours, theirs = first.values, second.values
    mine, their = ours.array(i), theirs.array(j)
    if mine is None or their is None or ours.again is None or first.row.backward:
        return True
    exchanged = {k: mine for k in theirs.equal.get(j, ()) if ours.rows[k].shape == ours.rows[i].shape}
    orders = islice(layouts(mine, their), _ORDERS)
    changes = (Change(i, array, twins) for array in orders for twins in (({}, exchanged) if exchanged else ({},)))
    return most_mended((ours, theirs), changes, (first, second)) > Mended.NOT_ALL


def _would_agree(first: Start, i: int, second: Start, weight: np.ndarray | None, *, transposed: bool = False) -> bool:
    """Whether our product with another weight than `i` (or with that one `transposed`) has the numbers of theirs."""
    target = second.row.features
    if weight is None or target is None or (weight := weight.squeeze()).ndim != 2:
        return False
    for k in first.agreed:
        x = first.values.array(k) if k != i else None
        if x is None:
            continue
        for matrix in (weight.T,) if transposed else (weight, weight.T):
            if x.shape[-1] != matrix.shape[0] or (transposed and matrix.shape[0] != matrix.shape[1]):
                continue
            features, _ = fingerprint(x.reshape(-1, x.shape[-1]) @ matrix, depends_on_data=True)
            if features is not None and float(np.abs(features - target).max()) < BAR:
                return True
    return False


def unread_weights(ours: Values, theirs: Values, held_by: Held) -> tuple[str, ...]:
    """The weights of the map that theirs computes its outputs with, and ours does not; of those of a stack of layers,
    as far as ours takes others of it as they are."""
    here, there = ours.live(), theirs.live()
    read = {ours.rows[i].name for i in here if ours.rows[i].kind == "parameter"}
    weights = [j for j in sorted(there) if theirs.rows[j].kind == "parameter" and theirs.rows[j].features is not None]
    alone = {theirs.rows[j].name for j in weights if j not in theirs.equal} & held_by.keys()
    taken = {held for j in weights if j in theirs.equal for held, _ in held_by.get(theirs.rows[j].name, ())}
    return tuple(
        name
        for name in (theirs.rows[j].name for j in weights)
        if name in alone and all(path not in read or (row is not None and path in taken) for path, row in held_by[name])
    )


def other_layers(first: Start, second: Start, held_by: Held) -> str | None:
    """Whether both read the same weight of two layers, and ours goes on as theirs does with these two exchanged in all
    its weights, or with all layers turned round."""
    ours, theirs = first.values, second.values
    for i, j in product(first.agreed, second.agreed):
        their = (theirs.parameter(j) if ours.parameter(i) else None) or ""
        right = [name for k in ours.equal.get(i, ()) if (name := theirs.parameter(k))]
        for name in right if their and their not in right else ():
            found, wanted = re.split(r"(\d+)", name), re.split(r"(\d+)", their)
            apart = [n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b]
            if len(found) != len(wanted) or len(apart) != 1 or apart[0] % 2 == 0:
                continue
            before, a, b = "".join(found[: apart[0]]), int(found[apart[0]]), int(wanted[apart[0]])
            numbers = [int(at[1]) for each in held_by if (at := re.match(rf"{re.escape(before)}(\d+)", each))]
            # The layers may be one list, or each of their parts a list of its own.
            lists = re.escape(before), r"\D+" + r"\d+\D+" * (apart[0] // 2)
            for begins, order in product(lists, ({a: b, b: a}, {n: max(numbers) - n for n in numbers})):
                change = _with_layers(ours, held_by, begins, order) if order.get(a) == b else None
                if change and mended((ours, theirs), 0, change, (first, second)) is Mended.ALL:
                    return f"ours takes the layers in another order: {before}{a} where theirs takes {before}{b}"
    return None


def _with_layers(ours: Values, held_by: Held, begins: str, order: Mapping[int, int]) -> Change | None:
    """Our parameters with the layers whose names begin so in another order; None where they are not of one shape."""
    leaves = {row.name: i for i, row in enumerate(ours.rows) if row.kind == "parameter"}
    changed: dict[int, np.ndarray] = {}
    for name, held in held_by.items():
        other = re.sub(rf"^({begins})(\d+)", lambda at: f"{at[1]}{order.get(int(at[2]), int(at[2]))}", name)
        for (path, row), (its, its_row) in zip(held, held_by.get(other, ()), strict=False) if other != name else ():
            mine, array = (ours.array(leaves[each]) if each in leaves else None for each in (path, its))
            if mine is None or array is None:
                continue
            array = array if its_row is None else array[its_row]
            whole = changed.setdefault(leaves[path], mine.copy())
            if array.shape != (whole if row is None else whole[row]).shape:
                return None
            whole[... if row is None else row] = array
    return Change(*changed.popitem(), changed) if changed else None


def is_code(ours: Values, path: str, their: str, held_by: Held) -> bool:
    """Whether it is the code that takes the wrong weight, at `path` in our parameters, and not the map.

    So it is where the map gives that parameter their weight as well, as one of its layers, or gives it to a parameter
    that ours never reads.
    """
    holders = {held for held, _ in held_by.get(their, ())}
    live = ours.live()
    read = {row.name for i, row in enumerate(ours.rows) if row.kind == "parameter" and i in live}
    return bool(holders) and (path in holders or not holders & read)


def _first_product(start: Start) -> int | None:
    """The first product behind a start of two values that both have an equal, but for factors that are constants."""
    values = start.values
    for i in start.near:
        row = values.rows[i]
        data = [k for k in row.inputs if values.rows[k].data]
        if (
            PRODUCT.search(row.operation)
            and len(data) == 2
            and all(values.leaf(k) is None and values.unscaled(k) in values.equal for k in data)
        ):
            return i
    return None


def _behind(values: Values, number: int) -> dict[tuple[str, int | None], int]:
    """(weight, layer) of the nearest products with a weight that a value was made of -> that weight, as it is read."""
    found: dict[tuple[str, int | None], int] = {}
    for operand in values.rows[number].inputs:
        near = [operand]
        for _ in range(_STEPS):
            weights = {
                (name, row.layer[-1] if row.layer else None): k
                for row in map(values.rows.__getitem__, near)
                if PRODUCT.search(row.operation)
                for k in row.inputs
                if (name := values.parameter(k))
            }
            found = weights | found
            if weights:
                break
            near = [k for i in near for k in values.rows[i].inputs if values.rows[k].data and values.leaf(k) is None]
    return found


def _names(path: str, row: int | None, held_by: Held) -> list[str]:
    return [name for name, held in held_by.items() if (path, row) in held or (path, None) in held]
