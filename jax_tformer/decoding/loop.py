"""The compiled parts of decoding: one pass over the prompt, then a loop over single tokens without Python.

`layers_apart` rearranges parameters so that the loop reads them fastest; the model does not depend on this. Layers
apart save a copy of the weights in every call, which for `stream` is every token. Transposed kernels are multiplied
with 8 rows in 0.7 of the time, with 2 rows in 0.6 (2 cores of an AMD EPYC).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array, Bool, Int, Key, UInt32

from jax_tformer.cache import Cache, KeyValue
from jax_tformer.decoding.sampling import History, Keys, Logits, Rules, Seen, Step, TokenIds, choose
from jax_tformer.functional import DecoderTransformer, Params
from jax_tformer.model.fast.rows import FEW_ROWS, Transposed
from jax_tformer.model.transformer import DecoderOnly


class Prompts(NamedTuple):
    """B prompts, padded on the left; those of an encoder-decoder are start tokens."""

    tokens: Int[Array, "B P"]
    mask: Bool[Array, "B P"]
    """True at tokens."""
    source: tuple[Int[Array, "B S"], Bool[Array, "B S"]] | None
    """The texts that an encoder-decoder translates, and their mask."""
    limits: Int[Array, " B"]
    """The largest number of new tokens of each."""


class State(NamedTuple):
    """The state of N rows that are being generated."""

    cache: Cache
    token: TokenIds
    """The token chosen last, not yet in the cache."""
    done: Bool[Array, " N"]
    """Whether the row has ended."""
    seen: Seen
    history: History | None
    """None where the rules do not look back at it."""
    keys: Keys
    limits: TokenIds
    """The largest number of new tokens of each row; the last of them ends it."""
    new_tokens: Int[Array, ""]
    """How many tokens have been chosen, the last one included."""
    broken: Bool[Array, ""]
    """Whether a row that had not ended had NaN among its logits."""


@partial(jax.jit, static_argnames=("net", "cache_length", "room"))
def start(
    net: DecoderTransformer,
    rules: Rules,
    params: Params,
    prompts: Prompts,
    keys: Key[Array, "B R"],
    cache_length: int,
    room: int = 0,
) -> State:
    """Reads the prompts and chooses the first token of N = B * R rows, R for each prompt.

    `keys` are those of `row_keys`. Where the rules look back, `room` is at least the largest of the limits.
    """
    logits, cache = prefill(net, params, prompts, cache_length)
    samples = keys.shape[1]
    rows = jnp.repeat(jnp.arange(len(keys)), samples)
    state = State(
        take_sequences(cache, rows) if samples > 1 else cache,
        jnp.zeros(rows.shape, jnp.int32),
        jnp.zeros(rows.shape, bool),
        mark_seen(net, rules, prompts, rows),
        start_history(rules, prompts, rows, room),
        keys.reshape(-1),
        prompts.limits[rows],
        jnp.asarray(0, jnp.int32),
        jnp.asarray(False),
    )
    return append_token(rules, state, logits[rows])


@partial(jax.jit, static_argnames=("net", "room"), donate_argnames=("state",))
def advance(
    net: DecoderTransformer,
    rules: Rules,
    params: Params,
    state: State,
    steps: Int[Array, ""],
    room: int,
) -> tuple[State, Int[Array, "N M"]]:
    """Chooses up to `steps` more tokens, of at most `room` (M), and stops early when all rows have ended.

    Returns them in order; the rest is filled with the first end token. Donates `state`.
    """
    before = state.new_tokens

    def unfinished(loop: tuple[State, Array]) -> Array:
        state, _ = loop
        return (state.new_tokens - before < steps) & ~state.done.all()

    def one_more(loop: tuple[State, Array]) -> tuple[State, Array]:
        state, tokens = loop
        logits, cache = extend(net, params, state.token[:, None], state.cache)
        column = state.new_tokens - before
        state = append_token(rules, state._replace(cache=cache), logits)
        return state, jax.lax.dynamic_update_slice_in_dim(tokens, state.token[:, None], column, axis=1)

    tokens = jnp.full((len(state.token), room), rules.end_ids[0], jnp.int32)
    return jax.lax.while_loop(unfinished, one_more, (state, tokens))


@partial(jax.jit, static_argnames=("net", "cache_length"), donate_argnames=("state",))
def restart(
    net: DecoderTransformer,
    params: Params,
    state: State,
    prompts: Prompts,
    cache_length: int,
) -> State:
    """Returns `state` with a new cache of `cache_length` slots that holds only `prompts`; the chosen tokens stay."""
    _, cache = prefill(net, params, prompts, cache_length)
    return state._replace(cache=cache)


@partial(jax.jit, static_argnames=("samples",))
def row_keys(key: Key[Array, ""], hashes: UInt32[Array, " B"], samples: int) -> Key[Array, "B R"]:
    """Makes a key for each of the R samples of each prompt, from the prompt's hash and not its place."""
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(fold, (0, None))(fold(key, hashes), jnp.arange(samples))


def prefill(net: DecoderTransformer, params: Params, prompts: Prompts, cache_length: int) -> tuple[Array, Cache]:
    """Returns the logits after the prompts, `[B, V]`, and a cache of `cache_length` slots that holds the prompts."""
    model, (tokens, mask, source, _) = net.bind(params), prompts
    batch, length = tokens.shape
    # The cache grows afterwards, so that the prompt attends only to itself and not to empty slots.
    if isinstance(model, DecoderOnly):
        outputs = model(tokens, mask=mask, cache=model.new_cache(batch, length))
    else:
        assert source is not None
        cache = model.new_cache(batch, length, source[0].shape[1])
        outputs = model(source[0], tokens, source_mask=source[1], target_mask=mask, cache=cache)
    assert outputs.cache is not None
    assert model.head is not None
    return model.head(outputs.hidden[:, -1:], model.table)[:, 0], grow_cache(outputs.cache, cache_length)


def extend(net: DecoderTransformer, params: Params, tokens: Int[Array, "N T"], cache: Cache) -> tuple[Logits, Cache]:
    """Appends `tokens` to the cache; returns the logits after the last of them, and the new cache."""
    model = net.bind(params)
    # An encoder-decoder's cache remembers the encoded source.
    outputs = model(tokens, cache=cache) if isinstance(model, DecoderOnly) else model.decode(tokens, None, cache=cache)
    assert outputs.cache is not None
    return outputs.logits[:, -1], outputs.cache


@partial(jax.jit, static_argnames="cache_length")
def grow_cache(cache: Cache, cache_length: int) -> Cache:
    """Returns the cache with `cache_length` slots; the new ones are empty."""
    more = cache_length - cache.is_token.shape[1]

    def pad(old: KeyValue) -> KeyValue:
        return KeyValue(*(jnp.pad(x, ((0, 0), (0, more), (0, 0))) for x in old))

    layers = tuple(layer._replace(self_attention=pad(layer.self_attention)) for layer in cache.layers)
    return cache._replace(layers=layers, is_token=jnp.pad(cache.is_token, ((0, 0), (0, more))))


def take_sequences(cache: Cache, rows: TokenIds) -> Cache:
    """Returns the cache of the sequences `rows`, in that order; a sequence may come several times.

    Cross-attention stays as it is, so the sequences of one source must remain neighbours.
    """

    def take(x: Array) -> Array:
        apart = x.reshape(cache.is_token.shape[0], -1, *x.shape[1:])
        return apart[rows].reshape(-1, *x.shape[1:])

    layers = tuple(layer._replace(self_attention=KeyValue(*map(take, layer.self_attention))) for layer in cache.layers)
    return cache._replace(layers=layers, is_token=cache.is_token[rows])


def append_token(rules: Rules, state: State, logits: Logits) -> State:
    """Chooses the next token of each row from its logits; rows that have ended repeat the first end token."""
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.new_tokens)
    step = Step(state.new_tokens, state.limits, state.history)
    token = jnp.where(state.done, rules.end_ids[0], choose(logits, keys, rules, state.seen, step)).astype(jnp.int32)
    new_tokens = state.new_tokens + 1
    return state._replace(
        token=token,
        done=state.done | jnp.isin(token, rules.end_ids) | (new_tokens >= state.limits),
        seen=None if state.seen is None else state.seen.at[jnp.arange(len(token)), token].set(True),
        history=None if state.history is None else state.history.append(token),
        new_tokens=new_tokens,
        broken=state.broken | (jnp.isnan(logits).any(-1) & ~state.done).any(),
    )


def start_history(rules: Rules, prompts: Prompts, rows: TokenIds, room: int) -> History | None:
    """Returns what each row begins with, with room for new tokens; None where the rules do not look back.

    Row n is a continuation of prompt `rows[n]`.
    """
    if not rules.look_back:
        return None
    ids, mask = (prompts.tokens, prompts.mask) if prompts.source is None else prompts.source
    text = (ids[rows], mask[rows]) if rules.encoder_no_repeat_ngram_size else None
    return History.of(prompts.tokens[rows], prompts.mask[rows], room, text)


def mark_seen(net: DecoderTransformer, rules: Rules, prompts: Prompts, rows: TokenIds) -> Seen:
    """Returns the tokens that each row begins with, but for padding; None without a repetition penalty."""
    if rules.repetition_penalty is None:
        return None
    nothing = jnp.zeros((len(prompts.tokens), net.config.vocab_size or 0), bool)
    return nothing.at[jnp.arange(len(nothing))[:, None], prompts.tokens].max(prompts.mask)[rows]


def layers_apart(params: Params, *, rows: int = 1) -> Params:
    """Returns `params` as decoding reads them fastest: layers apart and, for few rows, kernels transposed.

    Layers apart are tuples of L arrays instead of arrays with a leading L axis. `rows` is the number of sequences that
    are decoded at once, beams and samples included. Call this once: `generate` and `stream` accept both forms, and
    would take the layers apart in every call.
    """
    blocks = traverse_util.flatten_dict(unstack_layers(params)["decoder"]["blocks"])

    def transpose(path: tuple[str, ...], kernels: tuple[Any, ...]) -> tuple[Any, ...]:
        if path[-1] != "kernel" or rows > FEW_ROWS or isinstance(kernels[0], Transposed):
            return kernels
        # [D, H, C] of a query, [H, C, D] of an output, [I, O] of a feed-forward layer.
        inputs = math.prod(kernels[0].shape[:-1]) if path[-2] == "output" else kernels[0].shape[0]
        return tuple(Transposed.of(kernel, inputs) for kernel in kernels)

    blocks = traverse_util.unflatten_dict({path: transpose(path, leaf) for path, leaf in blocks.items()})
    return {**params, "decoder": {**params["decoder"], "blocks": blocks}}


def unstack_layers(params: Params) -> Params:
    """Returns `params` with the decoder's layers apart, and kernels as they are."""
    blocks = jax.tree.map(tuple, params["decoder"]["blocks"], is_leaf=lambda leaf: isinstance(leaf, tuple))
    return {**params, "decoder": {**params["decoder"], "blocks": blocks}}
