"""Arrays in other layouts: they are those that einops makes, and nothing is copied before somebody reads."""

import einops
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from jax_tformer.hub.families import Place
from jax_tformer.hub.names import Lazy, Stacked, read, same_bytes

AXES = [
    ("(n o) i -> n o i", (12, 5), {}),
    ("i (n o) -> n o i", (5, 12), {}),
    ("1 (n o) -> n o", (1, 12), {}),
    ("(h n c) i -> n (h c) i", (24, 5), {"h": 2}),
    ("(h n c) -> n (h c)", (24,), {"h": 2}),
]


@pytest.mark.parametrize("axes, shape, sizes", AXES, ids=[axes for axes, _, _ in AXES])
def test_parts_are_those_of_einops(axes, shape, sizes):
    source = np.random.default_rng(0).integers(0, 1000, shape)
    place = Place("theirs", shape, ("a", "b", "c"), axes, sizes, False)
    wanted = einops.rearrange(source, axes, n=3, **sizes)
    for number, part in enumerate(wanted):
        found = place.part(source, number)
        assert np.shares_memory(found, source)
        assert_array_equal(found.reshape(part.shape), part)
    assert same_bytes(place.fuse(list(wanted)), source)
    assert not same_bytes(place.fuse(list(wanted + (wanted == wanted.max()))), source)


def test_a_region_of_a_stack_is_read_in_another_type():
    layers = np.random.default_rng(0).normal(size=(4, 300, 520)).astype(np.float32)
    views = Stacked([Lazy((520, 300), layers.dtype, lambda layer=layer: layer.T) for layer in layers])
    assert (views.shape, views.dtype) == ((4, 520, 300), layers.dtype)
    whole = layers.swapaxes(1, 2)
    assert_array_equal(read(views), whole)
    found = read(views, np.dtype(np.float64), (slice(None), slice(3, 500), slice(None)))
    assert found.dtype == np.float64
    assert_array_equal(found, whole[:, 3:500])
    # Where JAX takes it over without a copy.
    assert found.ctypes.data % 64 == 0
    assert_array_equal(read(views.layers[2]), whole[2])
