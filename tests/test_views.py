"""Views of weights: every part of a view is the part of the array that einops makes."""

import einops
import numpy as np
import pytest

from jax_tformer.hub import names
from jax_tformer.hub.names import Part, Rearranged, Stacked, read, same_bytes

AXES = [
    ("(n o) i -> n o i", (12, 5), {"n": 3}),
    ("i (n o) -> n o i", (5, 12), {"n": 3}),
    ("1 (n o) -> n o", (1, 12), {"n": 2}),
    ("n o -> 1 (n o)", (2, 3), {}),
    ("(h n c) i -> n (h c) i", (24, 5), {"n": 3, "h": 2}),
    ("n (h c) i -> (h n c) i", (3, 8, 5), {"h": 2}),
    ("d h c -> (h c) d", (5, 3, 4), {}),
    ("(h c) d -> d h c", (12, 5), {"h": 3}),
]


@pytest.mark.parametrize(("axes", "shape", "sizes"), AXES, ids=[axes for axes, _, _ in AXES])
def test_parts_are_those_of_einops(axes, shape, sizes, monkeypatch):
    rng = np.random.default_rng(0)
    source = rng.integers(0, 1000, shape)
    view, wanted = Rearranged(source, axes, sizes), einops.rearrange(source, axes, **sizes)
    assert (view.shape, view.dtype) == (wanted.shape, wanted.dtype)
    for _ in range(200):
        ends = np.sort([rng.permutation(size + 1)[:2] for size in wanted.shape])
        region = tuple(slice(*map(int, pair)) for pair in ends)
        np.testing.assert_array_equal(view[region], wanted[region])
    # Several blocks, and another type.
    monkeypatch.setattr(names, "_BLOCK", 64)
    np.testing.assert_array_equal(read(view, np.dtype(np.float32)), wanted.astype(np.float32))
    assert same_bytes(view, wanted)
    assert not same_bytes(view, wanted + (wanted == wanted.max()))


def test_layers_apart_and_together():
    layers = np.arange(24.0).reshape(4, 2, 3)
    np.testing.assert_array_equal(read(Stacked([*layers])), layers)
    np.testing.assert_array_equal(read(Part(layers, 2)), layers[2])
