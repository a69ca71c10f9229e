"""The transformer on one page: plain functions of a nested dict of arrays, in JAX, without Flax and without options.

The encoder-decoder is that of "Attention is all you need" (post-norm, ReLU, sinusoidal positions), the decoder alone
is GPT-2 (pre-norm, GELU, learned positions), and the encoder alone is the paper's encoder with a vocabulary projection.
The dicts are those of `jax_tformer`: the arrays of a stack's layers lie in one array with a leading L axis.

B rows, T queries, S keys, D model width, H heads, C head width, F feed-forward width, V vocabulary, L layers.
"""

import jax
import jax.numpy as jnp

EPS = 1e-5


def linear(p, x):
    """y = x W + b, `[B, T, D] -> [B, T, F]`."""
    return x @ p["kernel"] + p["bias"]


def layer_norm(p, x):
    """scale (x - mean) / sqrt(variance + eps) + bias, over the last axis (Ba et al., 2016)."""
    centred = x - x.mean(-1, keepdims=True)
    return p["scale"] * centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPS) + p["bias"]


def attention(p, x, memory, mask):
    """softmax(Q K^T / sqrt(C)) V over H heads (section 3.2): queries from x, keys and values from memory.

    `mask` is True where a query may attend to a key, `[B, 1, T, S]`, and every query sees a key.
    """
    query = jnp.einsum("btd,dhc->bthc", x, p["query"]["kernel"]) + p["query"]["bias"]
    key = jnp.einsum("bsd,dhc->bshc", memory, p["key"]["kernel"]) + p["key"]["bias"]
    value = jnp.einsum("bsd,dhc->bshc", memory, p["value"]["kernel"]) + p["value"]["bias"]
    scores = jnp.einsum("bthc,bshc->bhts", query, key) / jnp.sqrt(query.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    heads = jnp.einsum("bhts,bshc->bthc", weights, value)
    return jnp.einsum("bthc,hcd->btd", heads, p["output"]["kernel"]) + p["output"]["bias"]


def feed_forward(p, x, activation):
    """The same two projections at every position (section 3.3)."""
    return linear(p["down"], activation(linear(p["up"], x)))


def post_norm_layer(p, x, mask, memory=None, memory_mask=None):
    """x = norm(x + f(x)) for self-attention, attention to the memory in a decoder, and feed-forward (section 3.1)."""
    x = layer_norm(p["self_attention_norm"], x + attention(p["self_attention"], x, x, mask))
    if memory is not None:
        x = layer_norm(p["cross_attention_norm"], x + attention(p["cross_attention"], x, memory, memory_mask))
    return layer_norm(p["feedforward_norm"], x + feed_forward(p["feedforward"], x, jax.nn.relu))


def pre_norm_layer(p, x, mask):
    """x = x + f(norm(x)) (Radford et al., 2019)."""
    h = layer_norm(p["self_attention_norm"], x)
    x = x + attention(p["self_attention"], h, h, mask)
    return x + feed_forward(p["feedforward"], layer_norm(p["feedforward_norm"], x), jax.nn.gelu)


def stack(layer, p, x, *rest):
    """Runs the layers, one after the other."""
    return jax.lax.scan(lambda x, own: (layer(own, x, *rest), None), x, p["blocks"])[0]


def sinusoids(length, width):
    """sin and cos of position / 10000^(2i / D), in even and odd columns, `[T, D]` (section 3.5)."""
    angles = jnp.arange(length)[:, None] / 10000 ** (jnp.arange(0, width, 2) / width)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(length, width)


def embed(table, tokens):
    """sqrt(D) E[token] + position (sections 3.4 and 3.5)."""
    width = table.shape[1]
    return jnp.sqrt(width) * table[tokens] + sinusoids(tokens.shape[1], width)


def causal(length):
    """Who sees whom in a decoder: itself and what comes before, `[1, 1, T, T]` (section 3.2.3)."""
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


def encoder_decoder(params, source, target, source_mask):
    """Logits of the token after each of `target`, `[B, T, V]`; `source_mask` is True at tokens, `[B, S]`."""
    seen = source_mask[:, None, None, :]
    tables = (params[f"{side}_embedding"]["tokens"]["embedding"] for side in ("source", "target"))
    source, target = (embed(table, tokens) for table, tokens in zip(tables, (source, target), strict=True))
    memory = stack(post_norm_layer, params["encoder"], source, seen)
    x = stack(post_norm_layer, params["decoder"], target, causal(target.shape[1]), memory, seen)
    return x @ params["head"]["kernel"]


def decoder_alone(params, tokens):
    """Logits of the token after each of `tokens`, `[B, T, V]`; the token table is the head, too."""
    table, length = params["embedding"]["tokens"]["embedding"], tokens.shape[1]
    x = table[tokens] + params["embedding"]["positions"]["embedding"][:length]
    x = stack(pre_norm_layer, params["decoder"], x, causal(length))
    return layer_norm(params["decoder"]["final_norm"], x) @ table.T


def encoder_alone(params, tokens, mask):
    """Logits of each of `tokens`, every one of which sees every other, `[B, T, V]`; `mask` is True at tokens."""
    x = embed(params["embedding"]["tokens"]["embedding"], tokens)
    return stack(post_norm_layer, params["encoder"], x, mask[:, None, None, :]) @ params["head"]["kernel"]
