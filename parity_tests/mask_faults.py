"""Faults of who sees whom: windows, segments and prefixes, in training and from a cache."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import jax
import jax.numpy as jnp

from jax_tformer import cache
from jax_tformer.config import StackConfig
from jax_tformer.model import masks
from jax_tformer.model.blocks import Block, Stack
from jax_tformer.model.masks import Mask
from parity_tests.faults import code_fault
from parity_tests.library_faults import cached_masks
from torch_ref import blocks as reference


def seen_as(change):
    """A method of `Mask` works on another mask."""
    return lambda right: lambda self, *args: right(change(self), *args)


def wider(mask):
    return mask if mask.window is None else replace(mask, window=mask.window + 1)


def narrower(mask):
    return mask if mask.window is None else replace(mask, window=mask.window - 1)


def prefix_sees_all(mask):
    """Also what comes behind the prefix."""
    return mask if mask.prefix is None else replace(mask, prefix=(mask.prefix[0], jnp.ones_like(mask.prefix[1])))


def wider_reference(right):
    return lambda ids, *, window, **given: right(ids, window=window and window + 1, **given)


def segments_before(right):
    """A segment sees those before it too."""

    def boolean(self, length, slots, *part):
        if self.segments is None:
            return right(self, length, slots, *part)
        rows, columns = part or (slice(None), slice(None))
        asking, answering = self.segments
        earlier = asking[:, None, rows, None] >= answering[:, None, None, columns]
        seen = right(replace(self, segments=None), length, slots, *part)
        return earlier if seen is None else seen & earlier

    return boolean


def one_long_text(right):
    return lambda length, tokens, segments=None: right(length, tokens)


def segments_crossed(right):
    def call(self, x, mask, rotation, memory, across, *rest):
        return right(self, x, mask, rotation, memory, across and replace(across, segments=None), *rest)

    return call


def window_behind(right):
    """From a cache, the window is counted from the place behind the new tokens."""

    def boolean(self, length, slots, *part):
        # The place of the first query is known before anything is computed where there is no cache.
        if isinstance(self.first, int) or self.window is None:
            return right(self, length, slots, *part)
        late = Mask(window=self.window, first=self.first + length)
        return right(replace(self, window=None), length, slots, *part) & right(late, length, slots, *part)

    return boolean


def turns_from_the_end(right):
    """From a cache, layers by turns are counted from the last one, which is the same where the pattern divides them."""

    def call(self, *args, cache=None, **given):
        late = -self.stack.num_layers % len(self.stack.windows)
        turned = (*self.stack.windows[late:], *self.stack.windows[:late])
        with patch.object(StackConfig, "windows", self.stack.windows if cache is None else turned):
            return right(self, *args, cache=cache, **given)

    return call


def averaged_when_blind(right):
    """A query that may attend to nothing attends to everything."""

    def softmax(scores, mask):
        return right(scores, None if mask is None else mask | ~mask.any(-1, keepdims=True))

    return softmax


def asked_for(**others):
    """A kernel is asked for something else."""
    return lambda right: lambda *arrays, **options: right(*arrays, **options | others)


def window_changed(more):
    def wrong(right):
        def call(*arrays, local_window_size, **options):
            other = local_window_size and (local_window_size[0] + more, local_window_size[1])
            return right(*arrays, local_window_size=other, **options)

        return call

    return wrong


TEXT, PAIR = "text", "pair"
"""Of one stack, and of two: the model that shows the fault."""
MASKS = (
    (TEXT, code_fault("window: a place too many", Mask, "boolean", seen_as(wider))),
    (TEXT, code_fault("window: blocks skip its furthest key", Mask, "spanned", seen_as(narrower))),
    (PAIR, code_fault("window: blocks skip what comes later", Mask, "spanned", seen_as(partial(replace, causal=True)))),
    (TEXT, code_fault("segments: ignored", Mask, "boolean", seen_as(partial(replace, segments=None)))),
    (PAIR, code_fault("segments: those before are seen", Mask, "boolean", segments_before)),
    (TEXT, code_fault("segments: positions go on", cache, "position_ids", one_long_text)),
    (PAIR, code_fault("segments: ignored by cross-attention", Block, "__call__", segments_crossed)),
    (TEXT, code_fault("prefix: seen in one direction only", Mask, "boolean", seen_as(partial(replace, prefix=None)))),
    (TEXT, code_fault("prefix: sees what is behind it", Mask, "boolean", seen_as(prefix_sees_all))),
    (TEXT, code_fault("prefix: blocks skip its later keys", Mask, "spanned", seen_as(partial(replace, prefix=None)))),
    (TEXT, code_fault("queries that see nothing see everything", masks, "masked_softmax", averaged_when_blind)),
)
"""Gate 1, planted in the library."""
REFERENCE = code_fault("window: a place too many in the reference", reference, "visible", wider_reference)
"""Gate 1."""
CUDNN = (
    code_fault("cuDNN: window a place too many", jax.nn, "dot_product_attention", window_changed(1)),
    code_fault("cuDNN: window a place too few", jax.nn, "dot_product_attention", window_changed(-1)),
    code_fault("cuDNN: padding and texts not hidden", jax.nn, "dot_product_attention", asked_for(mask=None)),
    code_fault("cuDNN: later keys not hidden", jax.nn, "dot_product_attention", asked_for(is_causal=False)),
    code_fault("cuDNN: scores scaled by its default", jax.nn, "dot_product_attention", asked_for(scale=None)),
)
"""Gate 1: what the kernel is asked for."""
CACHED = (
    code_fault("cache: window counted from the wrong place", Mask, "boolean", window_behind),
    code_fault("cache: prefix forgotten", Stack, "masks", cached_masks(prefix=None)),
    code_fault("cache: layers by turns counted from the last", Stack, "__call__", turns_from_the_end),
)
"""Gate 8."""
