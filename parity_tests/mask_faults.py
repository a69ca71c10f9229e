"""Faults of who sees whom: windows, segments and prefixes, in training and from a cache."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import jax
import jax.numpy as jnp

from jax_tformer import cache
from jax_tformer.config import StackConfig
from jax_tformer.model import fast, masks
from jax_tformer.model.blocks import Block, Stack
from jax_tformer.model.masks import Mask
from parity_tests.faults import call_fault
from parity_tests.library_faults import cached_masks
from torch_ref import blocks as reference


def seen_as(change):
    """A method of `Mask` works on another mask."""
    return lambda right, self, *args: right(change(self), *args)


def wider(mask, more=1):
    return mask if mask.window is None else replace(mask, window=mask.window + more)


def prefix_sees_all(mask):
    """Also what comes behind the prefix."""
    return mask if mask.prefix is None else replace(mask, prefix=(mask.prefix[0], jnp.ones_like(mask.prefix[1])))


def segments_before(right, self, length, slots, *part):
    """A segment sees those before it too."""
    if self.segments is None:
        return right(self, length, slots, *part)
    rows, columns = part or (slice(None), slice(None))
    asking, answering = self.segments
    earlier = asking[:, None, rows, None] >= answering[:, None, None, columns]
    seen = right(replace(self, segments=None), length, slots, *part)
    return earlier if seen is None else seen & earlier


def segments_crossed(right, self, x, mask, rotation, memory, across, *rest):
    return right(self, x, mask, rotation, memory, across and replace(across, segments=None), *rest)


def window_behind(right, self, length, slots, *part):
    """From a cache, the window is counted from the place behind the new tokens."""
    # The place of the first query is known before anything is computed where there is no cache.
    if isinstance(self.first, int) or self.window is None:
        return right(self, length, slots, *part)
    late = Mask(window=self.window, first=self.first + length)
    return right(replace(self, window=None), length, slots, *part) & right(late, length, slots, *part)


def turns_from_the_end(right, self, *args, cache=None, **given):
    """From a cache, layers by turns are counted from the last one, which is the same where the pattern divides them."""
    late = -self.stack.num_layers % len(self.stack.windows)
    turned = (*self.stack.windows[late:], *self.stack.windows[:late])
    with patch.object(StackConfig, "windows", self.stack.windows if cache is None else turned):
        return right(self, *args, cache=cache, **given)


def averaged_when_blind(right, scores, mask):
    """A query that may attend to nothing attends to everything."""
    return right(scores, None if mask is None else mask | ~mask.any(-1, keepdims=True))


def asked_for(**others):
    """A kernel is asked for something else."""
    return lambda right, *arrays, **options: right(*arrays, **options | others)


def window_changed(more):
    """A kernel is asked for another window."""

    def call(right, *arrays, local_window_size, **options):
        other = local_window_size and (local_window_size[0] + more, local_window_size[1])
        return right(*arrays, local_window_size=other, **options)

    return call


TEXT, PAIR = "text", "pair"
"""Of one stack, and of two: the model that shows the fault."""
MASKS = {
    TEXT: (
        call_fault("window: a place too many", Mask, "boolean", seen_as(wider)),
        call_fault("window: blocks skip its furthest key", Mask, "spanned", seen_as(partial(wider, more=-1))),
        call_fault("segments: ignored", Mask, "boolean", seen_as(partial(replace, segments=None))),
        call_fault(
            "segments: positions go on", cache, "position_ids", lambda right, length, tokens, *_: right(length, tokens)
        ),
        call_fault("prefix: seen in one direction only", Mask, "boolean", seen_as(partial(replace, prefix=None))),
        call_fault("prefix: sees what is behind it", Mask, "boolean", seen_as(prefix_sees_all)),
        call_fault("prefix: blocks skip its later keys", Mask, "spanned", seen_as(partial(replace, prefix=None))),
        call_fault("queries that see nothing see everything", masks, "masked_softmax", averaged_when_blind),
    ),
    PAIR: (
        call_fault("window: blocks skip what comes later", Mask, "spanned", seen_as(partial(replace, causal=True))),
        call_fault("segments: those before are seen", Mask, "boolean", segments_before),
        call_fault("segments: ignored by cross-attention", Block, "__call__", segments_crossed),
    ),
}
"""Gate 1, planted in the library."""
REFERENCE = call_fault(
    "window: a place too many in the reference",
    reference,
    "visible",
    lambda right, ids, *, window, **given: right(ids, window=window and window + 1, **given),
)
"""Gate 1."""
CUDNN = [
    call_fault(f"cuDNN: {name}", jax.nn, "dot_product_attention", wrong)
    for name, wrong in {
        "window a place too many": window_changed(1),
        "window a place too few": window_changed(-1),
        "padding and texts not hidden": asked_for(mask=None),
        "later keys not hidden": asked_for(is_causal=False),
        "scores scaled by its default": asked_for(scale=None),
    }.items()
]
"""Gate 1: what the kernel is asked for."""
CACHED = (
    call_fault("cache: window counted from the wrong place", Mask, "boolean", window_behind),
    call_fault("cache: prefix forgotten", Stack, "masks", cached_masks(prefix=None)),
    call_fault("cache: layers by turns counted from the last", Stack, "__call__", turns_from_the_end),
)
"""Gate 8."""


def blocks_of_four():
    """Inside, attention is in blocks of 4 queries: short sequences would otherwise fit into one block."""
    return patch.object(fast, "block_length", lambda length: 4)
