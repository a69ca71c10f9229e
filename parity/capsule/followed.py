"""What a side computed value by value, as tensors for a capsule: fingerprints, lines, and the smaller arrays."""

import json
import linecache
import re
from dataclasses import fields

import numpy as np

from parity.capsule.files import DamageError
from parity.differ.values import GRADIENT, Place, Value, Values, short
from parity.gates.measure import ParityError
from parity.gates.projection import Tensors

_TOLD = [field.name for field in fields(Value) if field.name not in ("place", "again")]
_ROOM = 32 << 20
"""Bytes of all rows, and of the arrays beside the outputs."""


def packed(values: Values) -> Tensors:
    """`rows`, in JSON, and `array N`: the numbers of outputs, and of others as long as there is room, small ones first.

    Gradients stand elsewhere in the capsule. Raises ParityError for too many values.
    """
    rows = []
    for row in values.rows:
        file, line, function, *_ = row.place
        place = short(file), line, function, (), linecache.getline(file, line).strip()
        rows.append([place, *(getattr(row, name) for name in _TOLD)])
    said = json.dumps({"rows": rows, "outputs": values.outputs, "opaque": values.opaque}, default=np.ndarray.tolist)
    if len(said) > _ROOM:
        raise ParityError(f"{len(rows):,} values are too many for a capsule")
    tensors, room = {"rows": np.frombuffer(said.encode(), np.uint8)}, _ROOM
    wanted = {number for name, number in values.outputs.items() if not name.startswith(GRADIENT)}
    for number, array in sorted(values.arrays.items(), key=lambda item: item[1].nbytes):
        room -= array.nbytes
        if number in wanted or room > 0:
            tensors[f"array {number}"] = array
    return tensors


def unpacked(tensors: Tensors) -> Values:
    """What `packed` was given, without the larger arrays; raises DamageError, or whatever else, for what is foreign."""
    # Text of strangers must not move a terminal's cursor.
    said = json.loads(re.sub(rb"(?i)(?<!\\)\\u00[019].", b"", tensors["rows"].tobytes()))
    values = Values("theirs", outputs=said["outputs"], opaque=said["opaque"])
    for number, (place, *told) in enumerate(said["rows"]):
        told = [tuple(x) if isinstance(x, list) else x for x in told]
        row = Value(**dict(zip(_TOLD, told, strict=True)), place=Place(*place))
        if any(i >= number for i in (*row.inputs, row.forward or 0) if i):
            raise DamageError(f"value {number} is made of one that comes later")
        row.features = row.features and np.array(row.features)
        if (array := tensors.get(f"array {number}")) is not None:
            values.arrays[number] = array
        values.rows.append(row)
    return values
