"""The weights that `draw_weights` draws, for sides that know JAX."""

import numpy as np

from benchmarks.sides import draw_weights
from jax_tformer.model.functional import AnyTransformer, Params
from jax_tformer.weights.names import from_reference, reference_shape, slots


def reference_weights(net: AnyTransformer, seed: int) -> dict[str, np.ndarray]:
    """Under `torch_ref`'s names."""
    return draw_weights({name: reference_shape(slot) for name, slot in slots(net.shapes).items()}, seed)


def parameters(net: AnyTransformer, seed: int) -> Params:
    """As `net` takes them."""
    return from_reference(reference_weights(net, seed), net.shapes)
