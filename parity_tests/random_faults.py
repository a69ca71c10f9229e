"""Faults of what is drawn at random: dropout masks that depend on one another, parameters that start wrong.

All are planted in the library. None changes what a given mask or a given weight does, so that no comparison with
another implementation sees them: that one is told the masks and the weights.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax.numpy as jnp
from jax_tformer.model.OLD_models import encoder_decoder
from jax_tformer.model.OLD_nn import blocks, embedding, linear, parameters, stacks
from jax_tformer.model.OLD_nn.blocks import DropoutMasks

from jax_tformer.model.functional import transformer
from jax_tformer.model.transformer import Block
from jax_tformer.training import step
from parity_tests.faults import Fault, code_fault


def first_alone(right: Callable[..., Any]) -> Callable[..., Any]:
    """Of several keys, the first for all."""

    def keys(key: Any, count: int) -> Any:
        drawn = right(key, count)
        return drawn and [drawn[0]] * count

    return keys


def one_for_all(right: Callable[..., Any]) -> Callable[..., Any]:
    """The same of an array of keys, where there are any."""

    def keys(*args: Any) -> Any:
        drawn = right(*args)
        return None if drawn is None else jnp.broadcast_to(drawn[:1], drawn.shape)

    return keys


def one_residual_mask(right: Callable[..., DropoutMasks]) -> Callable[..., DropoutMasks]:
    def masks(*args: Any) -> DropoutMasks:
        drawn = right(*args)
        return drawn._replace(feedforward_residual=drawn.self_attention_residual)

    return masks


def shared_along(axis: int, ndim: int | None = None) -> Callable[..., Any]:
    """One mask along this axis, where there are `ndim` axes."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def draw(key: Any, rate: float, shape: tuple[int, ...]) -> Any:
            if len(shape) != (ndim or len(shape)):
                return right(key, rate, shape)
            drawn = right(key, rate, (*shape[:axis], 1, *shape[axis:][1:]))
            return None if drawn is None else jnp.broadcast_to(drawn, shape)

        return draw

    return wrong


def without_step(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda net, state, accumulation: right(net, state._replace(step=jnp.zeros_like(state.step)), accumulation)


def swapped(right: Callable[..., Any]) -> Callable[..., Any]:
    """Drops what should be kept."""
    return lambda key, rate, shape: right(key, 1 - rate if rate else 0.0, shape)


DRAWS = (
    code_fault("dropout: one key for all layers", stacks, "layer_keys", one_for_all),
    code_fault("dropout: one mask for both residual branches", Block, "_draw_masks", one_residual_mask),
    code_fault("dropout: encoder and decoder share a key", encoder_decoder, "split_key", first_alone),
    code_fault("dropout: all rows share a mask", blocks, "draw_mask", shared_along(0)),
    code_fault("dropout: all rows of the embedding share a mask", embedding, "draw_mask", shared_along(0)),
    code_fault("dropout: all heads share a mask", blocks, "draw_mask", shared_along(1, ndim=4)),
    code_fault("dropout: all positions share a mask", blocks, "draw_mask", shared_along(1, ndim=3)),
    code_fault("dropout: all steps share a key", step, "dropout_keys", without_step),
    code_fault("dropout: accumulated parts share a key", step, "dropout_keys", one_for_all),
    code_fault("dropout: keeps what it should drop", blocks, "draw_mask", swapped),
)
"""Gate 10, of dropout masks."""


def branches_are_layers(right: Callable[..., None]) -> Callable[..., None]:
    """The scale of residual projections counts each layer once, however many branches it has."""

    def start(self: Any, config: Any, stack: Any, *, residual_branches: int) -> None:
        right(self, config, stack, residual_branches=stack.num_layers)

    return start


def fan_of_one_head(right: Callable[..., None]) -> Callable[..., None]:
    def start(self: Any, inputs: Any, outputs: Any, config: Any, **options: Any) -> None:
        right(self, inputs, outputs, config, **options)
        alone = parameters.projection_start(config, inputs[-1], outputs[-1])
        self.kernel = parameters.parameter(inputs + outputs, config, alone)

    return start


def layers_alike(right: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any) -> Any:
        drawn = right(*args)
        return {path: jnp.broadcast_to(x[:1], x.shape) if ".blocks." in path else x for path, x in drawn.items()}

    return draw


def key_from_query(right: Callable[..., int]) -> Callable[..., int]:
    return lambda path: right(path.replace(b".key.", b".query."))


def narrow_tables(right: Callable[..., None]) -> Callable[..., None]:
    return lambda self, rows, config, *, std: right(self, rows, config, std=0.02)


def another_kind(right: Callable[..., Any]) -> Callable[..., Any]:
    """Uniform numbers where normal ones of the same deviation are meant, or the reverse."""

    def start(*args: Any) -> Any:
        meant = right(*args)
        if meant.kind == "normal":
            return parameters.Start("uniform", meant.size * 3**0.5)
        return parameters.Start("normal", meant.size / 3**0.5)

    return start


@contextmanager
def in_both(name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    with ExitStack() as planted:
        for module in (blocks.Attention, blocks.FeedForward):
            planted.enter_context(code_fault("", module, name, wrong).plant())
        yield


INITIALISATION = (
    Fault("init: residual scale by layers, not branches", lambda: in_both("__init__", branches_are_layers)),
    code_fault("init: xavier with the fan of one head", linear.Linear, "__init__", fan_of_one_head),
    code_fault("init: all layers alike", transformer, "draw", layers_alike),
    code_fault("init: query equal to key", parameters.zlib, "crc32", key_from_query),
    code_fault("init: tables at 0.02", embedding.Table, "__init__", narrow_tables),
    code_fault("init: normal for uniform", linear, "projection_start", another_kind),
)
"""Gate 10, of fresh parameters."""
