"""Whether our parameters hold what the weight map says, by name, and in which way they do not."""

import numpy as np

from parity.answer import Difference
from parity.fingerprints import BAR
from parity.measure import relative_error
from parity.pairs import Tensors


def wrong_weights(held: Tensors, tensors: Tensors, name: str) -> Difference | None:
    """Weights that are not what the map says, by name; None where all are."""
    wrong, errors = [], []
    scales = {key: array for key, array in tensors.items() if array.size > 1}
    for key, array in held.items():
        truth = tensors[key]
        error = error_of(array, truth)
        if error <= BAR:
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
    ratio = array / np.where(truth == 0, np.nan, truth)
    if np.nanmax(ratio) - np.nanmin(ratio) < BAR:
        return f"it is {float(np.nanmean(ratio)):.6g} times as large"
    return "its numbers are others"


def error_of(ours: np.ndarray, theirs: np.ndarray) -> float:
    """`relative_error` of what is finite; infinite where the two are not finite at the same places."""
    if (np.isfinite(ours) != np.isfinite(theirs)).any():
        return float("inf")
    mask = np.isfinite(theirs)
    return relative_error(np.where(mask, ours, 0), np.where(mask, theirs, 0))
