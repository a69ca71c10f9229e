"""The compiled parts of decoding: one pass over the prompt, then a loop over single tokens without Python.

`start` and `advance` take a token for each row, greedily, by sampling or in a beam search. That has the semantics of
Hugging Face's `generate`, and the paper's length penalty.

`layers_apart` rearranges parameters so that the loop reads them fastest; the model does not depend on this. Layers
apart save a copy of the weights in every call, which for `stream` is every token. Transposed kernels are multiplied
with 8 rows in 0.7 of the time, with 2 rows in 0.6 (2 cores of an AMD EPYC).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import traverse_util
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jax_tformer.cache import Cache
from jax_tformer.decoding.sampling import History, Keys, Logits, Rules, TokenIds, choose, restrict
from jax_tformer.functional import DecoderTransformer, Params
from jax_tformer.model.fast import FEW_ROWS, Transposed
from jax_tformer.model.parameters import Count, RandomKey
from jax_tformer.model.transformer import DecoderOnly
from jax_tformer.training.sharding import mesh_of, replicate, split_rows

_NEVER = -1e9
"""Whatever has no higher score is no sequence: a free place, or one that may not go on."""


class Sequences(NamedTuple):
    """W finished sequences of new tokens for each of B prompts, best first."""

    tokens: Int[Array, "B W M"]
    """What stands behind the last token of a sequence is not a part of it."""
    lengths: Int[Array, "B W"]
    """The number of tokens, the end token included."""
    scores: Float[Array, "B W"]
    """Sums of log-probabilities, divided by the length penalty."""

    @property
    def exist(self) -> Bool[Array, "B W"]:
        """Whether there is a sequence."""
        return self.scores > _NEVER


class Beams(NamedTuple):
    """What a beam search knows beside its rows, which are W unfinished sequences for each of B prompts."""

    scores: Float[Array, "B W"]
    """Of the unfinished sequences: sums of log-probabilities."""
    finished: Sequences


class State(NamedTuple):
    """The state of N rows that are being generated."""

    cache: Cache
    """It does not hold the token chosen last."""
    history: History
    done: Bool[Array, " E"]
    """Whether a row has ended; in a beam search, whether the finished sequences of a prompt are final."""
    keys: Keys
    broken: Bool[Array, ""]
    """Whether a row that had not ended had NaN among its logits."""
    beams: Beams | None


@partial(jax.jit, static_argnames=("net", "cache_length", "room"))
def start(
    net: DecoderTransformer,
    rules: Rules,
    params: Params,
    prompts: History,
    keys: Key[Array, "B R"],
    cache_length: int,
    room: int,
) -> State:
    """Reads the prompts and chooses the first token of N = B * R rows, R for each prompt.

    `keys` are those of `row_keys`, for R samples or for R = W beams, which do not use them. The cache has
    `cache_length` slots. `room` is for how many new tokens the prompts have columns (M).
    """
    logits, cache = prefill(net, params, prompts.tokens[:, :-room], prompts.source, cache_length)
    batch, count = keys.shape
    rows = jnp.repeat(jnp.arange(batch), count)
    searches = rules.num_beams > 1
    state = State(
        take_sequences(cache, rows) if count > 1 else cache,
        prompts.take(rows),
        jnp.zeros(batch if searches else len(rows), bool),
        keys.reshape(-1),
        jnp.asarray(False),
        None,
    )
    if searches:
        never = jnp.full((batch, count), _NEVER, logits.dtype)
        nothing = Sequences(jnp.zeros((batch, count, room), jnp.int32), jnp.zeros((batch, count), jnp.int32), never)
        # At first all beams are equal, so one of them is enough.
        state = state._replace(beams=Beams(never.at[:, 0].set(0), nothing))
    return _spread(append_token(rules, state, logits[rows]))


@partial(jax.jit, static_argnames="net", donate_argnames="state")
def advance(net: DecoderTransformer, rules: Rules, params: Params, state: State, steps: Count) -> State:
    """Chooses up to `steps` more tokens, for which the cache must have room; stops early when all is done.

    Donates `state`.
    """
    last = state.history.made + steps

    def one_more(state: State) -> State:
        logits, cache = extend(net, params, state.history.last(1), state.cache)
        return append_token(rules, state._replace(cache=cache), logits)

    return _spread(jax.lax.while_loop(lambda state: ~state.done.all() & (state.history.made < last), one_more, state))


@partial(jax.jit, static_argnames=("net", "count", "cache_length"), donate_argnames="state")
def restart(net: DecoderTransformer, params: Params, state: State, count: int, cache_length: int) -> State:
    """Returns `state` with a new cache of `cache_length` slots, which holds the last `count` tokens that were read."""
    history = state.history
    _, cache = prefill(net, params, history.last(count + 1)[:, :-1], history.source, cache_length)
    return _spread(state._replace(cache=cache))


@partial(jax.jit, static_argnames=("samples",))
def row_keys(key: RandomKey, hashes: UInt32[Array, " B"], samples: int) -> Key[Array, "B R"]:
    """Makes a key for each of the R samples of each prompt, from the prompt's hash and not its place."""
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(fold, (0, None))(fold(key, hashes), jnp.arange(samples))


def prefill(
    net: DecoderTransformer,
    params: Params,
    tokens: Int[Array, "B P"],
    source: Int[Array, "B S"],
    cache_length: int,
) -> tuple[Array, Cache]:
    """Reads tokens (and the source of an encoder-decoder), where -1 is padding.

    Returns the logits after the last of them, `[B, V]`, and a cache of `cache_length` slots that holds them.
    """
    model = net.bind(params)
    batch, length = tokens.shape
    (tokens, mask), given = split_rows([(jnp.maximum(ids, 0), ids >= 0) for ids in (tokens, source)], batch)
    # The cache grows afterwards, so that the prompt attends only to itself and not to empty slots.
    if isinstance(model, DecoderOnly):
        outputs = model(tokens, mask=mask, cache=model.new_cache(batch, length))
    else:
        cache = model.new_cache(batch, length, source.shape[1])
        outputs = model(given[0], tokens, source_mask=given[1], target_mask=mask, cache=cache)
    assert outputs.cache is not None
    assert model.head is not None
    return model.head(outputs.hidden[:, -1:], model.table)[:, 0], grow_cache(outputs.cache, cache_length)


def extend(net: DecoderTransformer, params: Params, tokens: Int[Array, "N T"], cache: Cache) -> tuple[Logits, Cache]:
    """Appends `tokens` to the cache; returns the logits after the last of them, and the new cache."""
    model = net.bind(params)
    # An encoder-decoder's cache remembers the encoded source.
    tokens = split_rows(tokens, len(tokens))
    outputs = model(tokens, cache=cache) if isinstance(model, DecoderOnly) else model.decode(tokens, None, cache=cache)
    assert outputs.cache is not None
    return outputs.logits[:, -1], outputs.cache


@partial(jax.jit, static_argnames="cache_length")
def grow_cache(cache: Cache, cache_length: int) -> Cache:
    """Returns the cache with `cache_length` slots; the new ones are empty."""
    more = cache_length - cache.is_token.shape[1]
    longer = cache.map_self_attention(lambda rows: jnp.pad(rows, ((0, 0), (0, more), (0, 0))))
    return longer._replace(is_token=jnp.pad(cache.is_token, ((0, 0), (0, more))))


def take_sequences(cache: Cache, rows: TokenIds) -> Cache:
    """Returns the cache of the sequences `rows`, in that order; a sequence may come several times.

    Cross-attention stays as it is, so the sequences of one source must remain neighbours.
    """

    def take(x: Array) -> Array:
        apart = rearrange(x, "(b k) s c -> b k s c", b=len(cache.is_token))
        return rearrange(apart[rows], "b k s c -> (b k) s c")

    return cache.map_self_attention(take)._replace(is_token=cache.is_token[rows])


def append_token(rules: Rules, state: State, logits: Logits) -> State:
    """Chooses the next token of each row from its logits; rows that have ended repeat the first end token."""
    broken = jnp.isnan(logits).reshape(len(state.done), -1).any(1) & ~state.done
    state = state._replace(broken=state.broken | broken.any())
    if state.beams is not None:
        return _extend_beams(rules, state.beams, state, logits)
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.history.made)
    token = jnp.where(state.done, rules.end_ids[0], choose(logits, keys, rules, state.history)).astype(jnp.int32)
    history = state.history.append(token)
    done = state.done | jnp.isin(token, rules.end_ids) | (history.made >= history.limits)
    return state._replace(history=history, done=done)


def _extend_beams(rules: Rules, beams: Beams, state: State, logits: Logits) -> State:
    """Returns the state, whose `beams` are given, with one more token in each unfinished sequence.

    Considers the (1 + E) W best continuations of the W unfinished sequences, so that W of them do not end. Those among
    the first W that end, or are as long as `limits` allows, compete for the W finished sequences. The W best of those
    that do not end continue.
    """
    history = state.history
    finished = beams.finished
    batch, width = beams.scores.shape
    limits = history.limits.reshape(batch, width)[:, 0]
    vocabulary = logits.shape[1]
    log_probabilities = restrict(jax.nn.log_softmax(logits, axis=-1), rules, history)
    if rules.renormalize_logits:
        log_probabilities = jax.nn.log_softmax(log_probabilities, axis=-1)
    total = (beams.scores.reshape(-1, 1) + log_probabilities).reshape(batch, -1)
    scores, best = jax.lax.top_k(total, min((1 + len(rules.end_ids)) * width, total.shape[1]))
    origins = best // vocabulary
    token = (best % vocabulary).astype(jnp.int32)
    length = history.made + 1
    ends = jnp.isin(token, rules.end_ids) | (length >= limits)[:, None]

    # Finished sequences, old and new.
    said = history.tokens.reshape(batch, width, -1)[:, :, -finished.tokens.shape[2] :]
    # Of a part of the best ones, XLA on CPU would sort all.
    enters = ends & (jnp.arange(ends.shape[1]) < width)[None] & (scores > _NEVER) & ~state.done[:, None]
    new = Sequences(
        _take(said, origins).at[:, :, history.made].set(token),
        jnp.broadcast_to(length, enters.shape),
        jnp.where(enters, scores / _penalty(rules, length, scores.dtype), _NEVER),
    )
    both = Sequences(*(jnp.concatenate(pair, axis=1) for pair in zip(finished, new, strict=True)))
    best = jax.lax.top_k(both.scores, width)[1]
    finished = Sequences(*(_take(x, best) for x in both))

    # Unfinished ones.
    scores, best = jax.lax.top_k(jnp.where(ends, _NEVER, scores), width)
    rows = (_take(origins, best) + width * jnp.arange(batch)[:, None]).reshape(-1)
    hoped = scores[:, 0] / _penalty(rules, _hoped_length(rules, length, limits), scores.dtype)
    # Any sequence is better than a free place.
    full = finished.exist.all(1)
    over = full if rules.early_stopping is True else full & (hoped <= finished.scores.min(1))
    return state._replace(
        cache=take_sequences(state.cache, rows),
        history=history.take(rows).append(_take(token, best).reshape(-1)),
        done=state.done | over | (length >= limits),
        beams=Beams(scores, finished),
    )


@jax.vmap
def _take(of_prompt: Array, numbers: Int[Array, " w"]) -> Array:
    """Takes, for each prompt, what has the given numbers."""
    return of_prompt[numbers]


def _hoped_length(rules: Rules, length: Count, limits: Int[Array, " B"]) -> Int[Array, "*B"]:
    """Returns the length at which an unfinished sequence may still win: its own, or its limit if length is rewarded."""
    return jnp.where(rules.length_penalty > 0, limits, length) if rules.early_stopping == "never" else length


def _penalty(rules: Rules, length: Int[Array, "*B"], dtype: jnp.dtype) -> Float[Array, "*B"]:
    """Returns the divisor of the log-probability of a sequence of `length` tokens."""
    tokens = length.astype(dtype)
    if rules.length_penalty_form == "paper":
        tokens = (5 + tokens) / 6
    return tokens**rules.length_penalty


def _spread(state: State) -> State:
    """Splits the cache over the mesh in use, if there is one; the rest, which is small and which every process reads,
    is whole on every device."""
    if jax.sharding.get_abstract_mesh().empty:
        return state
    cache = state.cache
    layers = split_rows(cache.layers, len(cache.is_token))
    return replicate(state._replace(cache=cache._replace(layers=())))._replace(cache=cache._replace(layers=layers))


def layers_apart(params: Params, *, rows: int | None = 1) -> Params:
    """Returns `params` as decoding reads them fastest: layers apart and, for few rows, kernels transposed.

    Layers apart are tuples of L arrays instead of arrays with a leading L axis. `rows` is the number of sequences that
    are decoded at once, beams and samples included; None leaves kernels as they are, and so does a mesh. Call this
    once: `generate` and `stream` accept both forms, and would take the layers apart in every call.
    """

    few = rows is not None and rows <= FEW_ROWS and mesh_of(params) is None

    def change(path: tuple[Any, ...], leaf: Any) -> tuple[Any, ...]:
        kernels = leaf if isinstance(leaf, tuple) else tuple(jnp.unstack(leaf))
        if path[-1] != "kernel" or not few or isinstance(kernels[0], Transposed):
            return kernels
        # [D, H, C] of a query, [H, C, D] of an output, [I, O] of a feed-forward layer.
        inputs = math.prod(kernels[0].shape[:-1]) if path[-2] == "output" else kernels[0].shape[0]
        return tuple(Transposed.of(kernel, inputs) for kernel in kernels)

    decoder = params["decoder"]
    return {**params, "decoder": {**decoder, "blocks": traverse_util.path_aware_map(change, decoder["blocks"])}}
