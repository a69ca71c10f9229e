"""Scaled dot-product attention with its projections (paper, section 3.2), the same as in torch_ref/attention.py."""

import math

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jax_tformer.cache import KeyValue
from jax_tformer.config import AttentionImplementation, StackConfig, TransformerConfig
from jax_tformer.model import fast
from jax_tformer.model.embedding import Rotation, rotate
from jax_tformer.model.layers import Linear, Norm, identity
from jax_tformer.model.masks import Mask
from jax_tformer.model.parameters import Dropout, DropoutKey, KeyHeads, Memory, Queries, Stream, accumulator, drop
from jax_tformer.scan import ATTENTION_OUTPUT


def attend(
    query: Queries,
    key: KeyHeads,
    value: KeyHeads,
    mask: Mask,
    scale: float,
    dropout_rate: float = 0.0,
    keep: Bool[Array, "B H T S"] | None = None,
) -> tuple[Queries, Float[Array, "B H T S"]]:
    """Computes softmax(scale * Q K^T) V (paper, section 3.2.1); H/K query heads share a key/value head.

    Returns it with the weights before dropout, of which `keep` is the dropout mask. The softmax runs in at least
    float32. A query that may attend to nothing gets zeros, with zero gradients. The functions of fast.py compute the
    same.
    """
    grouped = rearrange(query, "b t (k g) c -> b t k g c", k=key.shape[2])
    scores = jnp.einsum("btkgc,bskc->bkgts", grouped, key, preferred_element_type=accumulator(query.dtype)) * scale
    weights = mask.softmax(rearrange(scores, "b k g t s -> b (k g) t s"), query.shape[1], key.shape[1])
    dropped = drop(weights, dropout_rate, keep).astype(value.dtype).reshape(scores.shape)
    output = jnp.einsum("bkgts,bskc->btkgc", dropped, value).reshape(query.shape)
    return checkpoint_name(output, ATTENTION_OUTPUT), weights


def attend_by(
    implementation: AttentionImplementation,
    query: Float[Array, "N T H C"],
    key: KeyHeads,
    value: KeyHeads,
    mask: Mask,
    scale: float,
    dropout_rate: float = 0.0,
    keep: Bool[Array, "N H T S"] | None = None,
) -> tuple[Float[Array, "N T H C"], Float[Array, "N H T S"] | None]:
    """Computes `attend` by the implementation that a config names; the weights are None where a faster one runs."""
    compute = fast.lookup(implementation, query, key, mask, drops=keep is not None) or attend
    return fast.share_queries(compute)(query, key, value, mask, scale, dropout_rate, keep)


class Attention(nnx.Module):
    """softmax(scale * Q K^T) V over heads; queries come from x, keys and values from memory."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, residual_branches: int) -> None:
        width = config.head_width(stack)
        model = (config.d_model,)
        heads = (stack.num_heads, width)
        shared = (stack.key_value_heads or stack.num_heads, width)
        self.query = Linear(model, heads, config, bias=stack.query_bias, target="query")
        self.key = Linear(model, shared, config, bias=stack.key_bias, target="key")
        self.value = Linear(model, shared, config, bias=stack.value_bias, target="value")
        self.output = Linear(
            heads, model, config, bias=stack.output_bias, residual_branches=residual_branches, target="output"
        )
        normed = stack.query_key_norm
        scales = stack.query_key_scale
        self.query_norm = Norm(config, stack, width, scales=scales) if normed else identity
        self.key_norm = Norm(config, stack, width, scales=scales) if normed else identity
        self.scale = 1 / math.sqrt(config.scale_width(stack))
        self.dropout = Dropout(config.dropout.attention)
        self.implementation = config.compute.attention

    def __call__(
        self,
        x: Stream,
        memory: Memory,
        mask: Mask,
        rotation: Rotation | None = None,
        dropout_key: DropoutKey = None,
        cache: KeyValue | None = None,
        capture: bool = False,
    ) -> tuple[Stream, Float[Array, "B H T S"] | None, KeyValue | None]:
        """Returns the output, the weights before dropout (with `capture`), and the cache with the memory in it.

        With a cache, memory's keys and values are written to it from slot `mask.first` on (None: nothing is written),
        and x attends to all that it then holds. A cache of fewer sequences than x has serves several neighbours in x.
        """
        query = rotate(self.query_norm(self.query(x, dropout_key)), rotation)
        if memory is not None:
            key = rotate(self.key_norm(self.key(memory, dropout_key)), rotation)
            value = self.value(memory, dropout_key)
            cache = None if cache is None else cache.write(key, value, mask.first)
        if cache is not None:
            key, value = cache.read(self.key.outputs[0])
        keep = self.dropout.keep(dropout_key, (len(x), query.shape[2], x.shape[1], key.shape[1]))
        by = self.implementation if cache is None else "blocks"
        output, weights = attend_by(by, query, key, value, mask, self.scale, self.dropout.rate, keep)
        if capture and weights is None:
            weights = attend(query, key, value, mask, self.scale)[1]
        return self.output(output, dropout_key), weights if capture else None, cache
