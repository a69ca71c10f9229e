"""Draws the dropout masks of a model's forward pass again, from outside, to give them to PyTorch.

The forward pass's key and a site's name determine the site's key (`site_key`), so nothing needs to be recorded.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Bool, Key

from jax_tformer.config import TransformerConfig
from jax_tformer.functional import AnyTransformer
from jax_tformer.model.parameters import keep_mask, site_key
from jax_tformer.training.step import Batch, TrainState, dropout_keys, split_batch

Masks = dict[str, Bool[Array, "..."]]
"""Name of the site -> mask, True = kept: `decoder.blocks.3.self_attention.dropout` inside a layer's self-attention,
`decoder.blocks.3.self_attention_residual_dropout` after it, `embedding.dropout` at the input,
`decoder.final_dropout` after the last norm."""
INPUTS = ("tokens", "source", "target")
"""The arrays of ids in a batch, in the order in which a model takes them."""


def dropout_sites(config: TransformerConfig, batch: Mapping[str, Any]) -> dict[str, tuple[float, tuple[int, ...]]]:
    """Returns the rate and the shape of every dropout site for this batch, by name, as torch_ref's model reaches them.

    It runs without numbers, so that only shapes are computed.
    """
    import torch  # a process that measures JAX alone draws no masks

    from torch_ref import reference
    from torch_ref.layers import Dropout

    sites: dict[str, tuple[float, tuple[int, ...]]] = {}

    def note(name: str, site: Dropout, inputs: tuple[torch.Tensor]) -> None:
        sites[name] = (site.p, tuple(inputs[0].shape))

    with torch.device("meta"):
        model = reference(config)
        for name, module in model.named_modules():
            if isinstance(module, Dropout):
                module.register_forward_pre_hook(partial(note, name))
        model(*(torch.zeros(batch[name].shape, dtype=torch.long) for name in INPUTS if name in batch))
    return sites


def drawn_masks(config: TransformerConfig, key: Key[Array, ""] | None, batch: Mapping[str, Any]) -> Masks:
    """Draws the masks of a forward pass with this dropout key and batch, for every site with a rate above 0."""
    if key is None:
        return {}
    sites = dropout_sites(config, batch).items()
    return {name: keep_mask(site_key(key, name), rate, shape) for name, (rate, shape) in sites if rate > 0}


def masks_of_step(net: AnyTransformer, *, accumulation: int = 1) -> Callable[[TrainState, Batch], list[Masks]]:
    """Makes a function (state, batch) -> the masks that `train_step` then draws, for each part of the batch."""

    def draw(state: TrainState, batch: Batch) -> list[Masks]:
        keys = dropout_keys(net, state, accumulation)
        part = jax.tree.map(lambda x: x[0], split_batch(batch, accumulation))
        return [drawn_masks(net.config, None if keys is None else keys[n], part) for n in range(accumulation)]

    return draw
