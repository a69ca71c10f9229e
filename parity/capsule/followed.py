"""What a side computed value by value, as tensors for a capsule: fingerprints, lines, and the smaller arrays."""

import json
import re
from dataclasses import fields
from typing import Any

import numpy as np

from parity.differ.values import Place, Value, Values, read_line, short
from parity.gates.pytrees import Tensors

_ROOM = 32 << 20
"""Bytes of all rows, and of the arrays beside the outputs."""


def packed(values: Values) -> Tensors:
    """`rows`, in JSON; by their numbers the arrays of outputs and, as long as there is room, others, small ones first.

    Raises ValueError for too many values.
    """
    for row in values.rows:
        file, line, function = row.place[:3]
        row.place = Place(short(file), line, function, (), read_line(file, line))
    # All but how it is computed, once more or otherwise.
    rows = [[getattr(row, field.name) for field in fields(row)[:-2]] for row in values.rows]
    said = json.dumps([rows, values.outputs, values.opaque], default=np.ndarray.tolist)
    if len(said) > _ROOM:
        raise ValueError(f"{len(rows):,} values are too many for a capsule")
    tensors, room = {"rows": np.frombuffer(said.encode(), np.uint8)}, _ROOM
    for number, array in sorted(values.arrays.items(), key=lambda item: item[1].nbytes):
        room -= array.nbytes
        if number in values.outputs.values() or room > 0:
            tensors[str(number)] = array
    return tensors


def unpacked(tensors: Tensors) -> Values:
    """What `packed` was given, without the larger arrays; raises ValueError, or whatever else, for what is foreign."""
    # Text of strangers must not move a terminal's cursor.
    said = re.sub(rb"(?i)(?<!\\)\\u00[019].", b"", tensors.pop("rows").tobytes())
    rows, outputs, opaque = json.loads(said)
    values = Values("theirs", outputs=outputs, opaque=opaque)
    values.arrays = {int(number): array for number, array in tensors.items()}
    for number, told in enumerate(rows):
        of: Any = [tuple(x) if isinstance(x, list) else x for x in told]
        row = Value(*of)
        place: Any = (tuple(x) if isinstance(x, list) else x for x in row.place)
        row.place, row.features = Place(*place), row.features and np.array(row.features)
        if not all(0 <= i < number for i in row.inputs):
            raise ValueError(f"value {number} is made of one that comes later")
        values.rows.append(row)
    return values
