"""Draws the dropout masks of a model's forward pass again, from outside, to give them to PyTorch.

The forward pass's key and a site's name determine the site's key (`site_key`), so nothing needs to be recorded.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Bool, Key

from jax_tformer.config import TransformerConfig
from jax_tformer.functional import AnyTransformer
from jax_tformer.model.dropout import keep_mask, site_key
from jax_tformer.training.step import Batch, TrainState, dropout_keys, split_batch

Masks = dict[str, Bool[Array, "..."]]
"""Name of the site -> mask, True = kept: `decoder.blocks.3.self_attention.dropout` inside a layer's self-attention,
`decoder.blocks.3.self_attention_residual_dropout` after it, `embedding.dropout` at the input,
`decoder.final_dropout` after the last norm."""


def dropout_sites(config: TransformerConfig, batch: Mapping[str, Any]) -> dict[str, tuple[float, tuple[int, ...]]]:
    """Returns the rate and the shape of every dropout site for this batch, by name."""
    rates, model = config.dropout, config.d_model
    both = config.encoder is not None and config.decoder is not None
    inputs = {"encoder": "source", "decoder": "target"} if both else {"encoder": "tokens", "decoder": "tokens"}
    sites: dict[str, tuple[float, tuple[int, ...]]] = {}
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is None:
            continue
        rows, length = batch[inputs[side]].shape
        sites[f"{inputs[side]}_embedding.dropout" if both else "embedding.dropout"] = (
            rates.embedding,
            (rows, length, model),
        )
        lengths = {"self_attention": length}
        if both and side == "decoder":
            lengths["cross_attention"] = batch["source"].shape[1]
        for layer in range(stack.num_layers):
            block = f"{side}.blocks.{layer}"
            for attention, keys in lengths.items():
                shape = (rows, stack.num_heads, length, keys)
                sites[f"{block}.{attention}.dropout"] = (rates.attention, shape)
                sites[f"{block}.{attention}_residual_dropout"] = (rates.of_attention_output, (rows, length, model))
            sites[f"{block}.feedforward.dropout"] = (rates.feedforward, (rows, length, stack.feedforward_width))
            sites[f"{block}.feedforward_residual_dropout"] = (rates.residual, (rows, length, model))
            for module in (*lengths, "feedforward") if config.lora is not None else ():
                for name, (width, _) in config.projections(stack).items():
                    inside = (name in ("gate", "up", "down")) == (module == "feedforward")
                    if inside and config.lora is not None and config.lora.adapts(name):
                        read = lengths[module] if name in ("key", "value") else length
                        sites[f"{block}.{module}.{name}.lora.dropout"] = config.lora.dropout, (rows, read, width)
        sites[f"{side}.final_dropout"] = (rates.final, (rows, length, model))
    if config.pooler != "none":
        sites["pooler.dropout"] = (rates.pooler, (rows, model))
    if config.classes is not None:
        each = (rows, length, model) if config.head == "classify_tokens" else (rows, model)
        sites["classifier.dropout"] = (rates.classifier, each)
    return sites


def drawn_masks(config: TransformerConfig, key: Key[Array, ""] | None, batch: Mapping[str, Any]) -> Masks:
    """Draws the masks of a forward pass with this dropout key and batch, for every site with a rate above 0."""
    masks = {}
    for name, (rate, shape) in dropout_sites(config, batch).items():
        if key is not None and rate > 0:
            masks[name] = keep_mask(site_key(key, name), rate, shape)
    return masks


def masks_of_step(net: AnyTransformer, *, accumulation: int = 1) -> Callable[[TrainState, Batch], list[Masks]]:
    """Makes a function (state, batch) -> the masks that `train_step` then draws, for each part of the batch."""

    def draw(state: TrainState, batch: Batch) -> list[Masks]:
        keys = dropout_keys(net, state, accumulation)
        part = jax.tree.map(lambda x: x[0], split_batch(batch, accumulation))
        return [drawn_masks(net.config, None if keys is None else keys[n], part) for n in range(accumulation)]

    return draw
