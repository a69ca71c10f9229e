"""Faults of what is drawn at random: dropout masks that depend on one another, parameters that start wrong.

All are planted in the library. What a site's mask is, the forward pass and the masks that are drawn again from outside
say alike, by `site_key` and `keep_mask`: a fault of these changes nothing that a comparison with another
implementation sees, and gate 10 must see it. A forward pass that drops something else than these say is what gate 7
sees.
"""

from contextlib import ExitStack, contextmanager

import jax
import jax.numpy as jnp

from jax_tformer import functional
from jax_tformer.model import attention, layers, parameters
from jax_tformer.model.blocks import Block
from jax_tformer.model.embedding import Table
from jax_tformer.model.layers import FeedForward, Linear
from jax_tformer.model.parameters import Start
from jax_tformer.training import step
from parity_tests.faults import Fault, call_fault
from twin import dropout


@contextmanager
def in_all(owners, name, wrong):
    with ExitStack() as planted:
        for owner in owners:
            if hasattr(owner, name):
                planted.enter_context(call_fault("", owner, name, wrong).plant())
        yield


def defined(name, function, wrong):
    """What draws masks is wrong by definition: wherever it is used, in training and from outside."""
    return Fault(name, lambda *_: in_all((parameters, step, dropout), function, wrong))


def one_for_all(right, *args):
    """Of an array of keys, the first for all, where there are any."""
    drawn = right(*args)
    return None if drawn is None else jnp.broadcast_to(drawn[:1], drawn.shape)


def named(**others):
    """Parts that have the key of another."""
    return lambda right, key, site: right(key, ".".join(others.get(part, part) for part in site.split(".")))


def one_key(right, self, *args):
    """Every layer drops by one key."""
    *given, key, cache, capture = args
    return right(self, *given, None if key is None else jax.random.key(7), cache, capture)


def alike(part):
    """Where the names have this part, all rows (or layers) have what the first one has."""

    def draw(right, *args):
        drawn = right(*args)
        return {name: jnp.broadcast_to(x[:1], x.shape) if part in name else x for name, x in drawn.items()}

    return draw


def shared_along(axis, ndim=None):
    """One mask along this axis, where there are `ndim` axes."""

    def draw(right, key, rate, shape):
        if len(shape) != (ndim or len(shape)):
            return right(key, rate, shape)
        drawn = right(key, rate, (*shape[:axis], 1, *shape[axis:][1:]))
        return None if drawn is None else jnp.broadcast_to(drawn, shape)

    return draw


def without_step(right, net, state, accumulation):
    return right(net, state._replace(step=jnp.zeros_like(state.step)), accumulation)


def swapped(right, key, rate, shape):
    """Drops what should be kept."""
    return right(key, 1 - rate if rate else 0.0, shape)


_ONE_BRANCH = named(feedforward_residual_dropout="self_attention_residual_dropout")
_ONE_SIDE = named(encoder="decoder", source_embedding="target_embedding")
DRAWS = (
    defined("dropout: one key for all layers", "layer_key", lambda right, key, layer: key),
    defined("dropout: one mask for both residual branches", "site_key", _ONE_BRANCH),
    defined("dropout: encoder and decoder share a key", "site_key", _ONE_SIDE),
    defined("dropout: all rows share a mask", "keep_mask", shared_along(0)),
    call_fault("dropout: all rows of the embedding share a mask", dropout, "drawn_masks", alike("embedding")),
    defined("dropout: all heads share a mask", "keep_mask", shared_along(1, ndim=4)),
    defined("dropout: all positions share a mask", "keep_mask", shared_along(1, ndim=3)),
    defined("dropout: all steps share a key", "dropout_keys", without_step),
    defined("dropout: accumulated parts share a key", "dropout_keys", one_for_all),
    defined("dropout: keeps what it should drop", "keep_mask", swapped),
)
"""Gate 10, of dropout masks."""
FORWARD_DRAWS = (
    call_fault("forward pass drops by one key in all layers", Block, "__call__", one_key),
    call_fault("forward pass drops one mask in both residual branches", parameters, "site_key", _ONE_BRANCH),
    call_fault("forward pass drops by one key in encoder and decoder", parameters, "site_key", _ONE_SIDE),
    call_fault("forward pass drops the same in all rows", parameters, "keep_mask", shared_along(0)),
    call_fault("forward pass drops the same in all heads", parameters, "keep_mask", shared_along(1, ndim=4)),
)
"""Gate 7, of one forward pass."""
STEP_DRAWS = (
    call_fault("training drops the same in all steps", step, "dropout_keys", without_step),
    call_fault("training drops the same in all accumulated parts", step, "dropout_keys", one_for_all),
)
"""Gate 7, of training."""


def branches_are_layers(right, self, config, stack, *, residual_branches):
    """The scale of residual projections counts each layer once, however many branches it has."""
    right(self, config, stack, residual_branches=stack.num_layers)


def fan_of_one_head(right, self, inputs, outputs, config, **options):
    right(self, inputs, outputs, config, **options)
    alone = layers.projection_start(config, inputs[-1], outputs[-1])
    self.kernel = layers.parameter(inputs + outputs, config, alone)


def another_kind(right, *args):
    """Uniform numbers where normal ones of the same deviation are meant, or the reverse."""
    meant = right(*args)
    normal = meant.kind == "normal"
    return Start("uniform", meant.size * 3**0.5) if normal else Start("normal", meant.size / 3**0.5)


NARROW_TABLES = call_fault(
    "init: tables at 0.02",
    Table,
    "__init__",
    lambda right, self, rows, config, *, std: right(self, rows, config, std=0.02),
)
INITIALISATION = (
    Fault(
        "init: residual scale by layers, not branches",
        lambda *_: in_all((attention.Attention, FeedForward), "__init__", branches_are_layers),
    ),
    call_fault("init: xavier with the fan of one head", Linear, "__init__", fan_of_one_head),
    call_fault("init: all layers alike", functional, "draw", alike(".blocks.")),
    call_fault(
        "init: query equal to key",
        parameters.zlib,
        "crc32",
        lambda right, path: right(path.replace(b".key.", b".query.")),
    ),
    NARROW_TABLES,
    call_fault("init: normal for uniform", layers, "projection_start", another_kind),
)
"""Gate 10, of fresh parameters."""
