"""The bound of decoding: what one step must read from memory, over how fast the memory is read."""

import math
import statistics

import numpy as np
from flax import traverse_util

from jax_tformer.model.functional import AnyTransformer


def weight_bytes(net: AnyTransformer) -> int:
    """Parameters that a step reads: the decoder's and the head's, which may be the token table.

    Of the other tables it reads a row, and of the encoder's output the keys and values that are in the cache.
    """
    shapes = traverse_util.flatten_dict(net.shapes, sep=".")
    # The decoder's is declared last, or is the only one.
    table = [path for path in shapes if path.endswith("tokens.embedding")][-1]
    read = 0
    for path, leaf in shapes.items():
        once = ".cross_attention.key." in path or ".cross_attention.value." in path
        head = path.startswith("head.") or (net.config.tied_head and path == table)
        if (path.startswith("decoder.") and not once) or head:
            read += math.prod(leaf.shape) * leaf.dtype.itemsize
    return read


def cache_bytes(net: AnyTransformer, batch: int, prompt: int, new_tokens: int, beams: int) -> int:
    """Keys and values that a step reads, on average over a generation: of tokens so far, and of the sources.

    The beams of a source share its keys and values. A decoder alone has the prompt in the cache.
    """
    config, stack = net.config, net.config.output_stack
    of_token = 2 * stack.num_layers * (stack.key_value_heads or stack.num_heads) * config.head_width(stack)
    of_token *= np.dtype(config.compute.dtype).itemsize
    translates = config.encoder is not None
    tokens = new_tokens / 2 + (1 if translates else prompt)
    return int(of_token * (batch * beams * tokens + (batch * prompt if translates else 0)))


def best_way(found: dict[str, list[float]]) -> tuple[str, float]:
    """The way with the largest median, and that median."""
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    name = max(medians, key=medians.__getitem__)
    return name, medians[name]
