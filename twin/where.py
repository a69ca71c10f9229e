"""Where JAX and PyTorch part if a comparison is beyond its bar: on the first batch, in float64, without dropout."""

import jax
import numpy as np

from jax_tformer.config import TransformerConfig
from parity.differ.answer import Difference
from twin.bridge import Pair, where_they_part
from twin.jax_side import JaxSide
from twin.sides import Tensors
from twin.torch_side import TorchSide

SAME = (
    "On the first batch both compute the same loss and the same gradients in float64. So it is not the model that "
    "differs: it is the step of the optimizer, or rounding."
)


def first_difference(
    ours: JaxSide, theirs: TorchSide, model: TransformerConfig, batch: Tensors, seed: int, name: str
) -> Difference | str:
    """Finds where the two part with the weights of `seed`, or says in a sentence why it finds nothing."""
    ours.start(seed, None)
    weights = ours.parameters()
    # PyTorch's cross entropy takes no labels of 32 bits.
    wide = {key: array.astype(np.int64) if array.dtype == np.int32 else array for key, array in batch.items()}
    with jax.enable_x64(True):
        pair = Pair(model, weights, "float64", optimised=False)
        pair.module = theirs.in_float64().eval()
        pair.load(weights)
        return where_they_part(pair, wide, name) or SAME
