"""From a trained model to tokens: one compiled loop over a buffer, the whole forward pass for every token."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jax_tformer.models.transformer import Transformer
from jax_tformer.nn.arrays import Params


def pick(
    logits: Float[Array, "B V"], key: Key[Array, ""], *, temperature: float, top_k: int | None
) -> Int[Array, " B"]:
    """One token a row: the most probable at temperature 0, else drawn from softmax(logits / temperature).

    With top_k, only tokens at least as probable as the k-th can be drawn (all of a tie with it stay).
    """
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature, axis=-1)


def completer(
    net: Transformer, *, context: int, new_tokens: int, temperature: float, top_k: int | None
) -> Callable[[Params, Int[Array, "B P"], Key[Array, ""]], Int[Array, "B N"]]:
    """A compiled (params, prompt, key) -> continuation, for decoder-only models.

    The model sees the last `context` tokens at most; the prompt must fit in there (P from 1 to `context`).
    """

    @jax.jit
    def complete(params: Params, prompt: Int[Array, "B P"], key: Key[Array, ""]) -> Int[Array, "B N"]:
        batch, length = prompt.shape
        window = jnp.zeros((batch, context), jnp.int32).at[:, :length].set(prompt)
        # What stands beyond `filled` is not seen: the mask is causal.

        def extend(
            state: tuple[Array, Array], step_key: Key[Array, ""]
        ) -> tuple[tuple[Int[Array, "B W"], Int[Array, ""]], Int[Array, " B"]]:
            window, filled = state
            logits = net.apply(params, window)
            tokens = pick(logits[:, filled - 1], step_key, temperature=temperature, top_k=top_k).astype(jnp.int32)
            window = jnp.where(filled == context, jnp.roll(window, -1, axis=1), window)
            filled = jnp.minimum(filled + 1, context)
            return (window.at[:, filled - 1].set(tokens), filled), tokens

        start = (window, jnp.asarray(length, jnp.int32))
        _, tokens = jax.lax.scan(extend, start, jax.random.split(key, new_tokens))
        return tokens.T

    return complete


def translator(
    net: Transformer, *, length: int, start_id: int, end_id: int, temperature: float = 0.0, top_k: int | None = None
) -> Callable[[Params, Int[Array, "B S"], Bool[Array, "B S"], Key[Array, ""]], Int[Array, "B T"]]:
    """A compiled (params, source, source_mask, key) -> target of up to `length` tokens, for encoder-decoders.

    The source is encoded once; rows end with `end_id`, which also fills what follows it.
    """

    @jax.jit
    def translate(
        params: Params, source: Int[Array, "B S"], source_mask: Bool[Array, "B S"], key: Key[Array, ""]
    ) -> Int[Array, "B T"]:
        memory = net.encode(params, source, source_mask=source_mask)
        keys = jax.random.split(key, length)
        target = jnp.full((source.shape[0], length + 1), end_id, jnp.int32).at[:, 0].set(start_id)

        def unfinished(state: tuple[Array, Array, Array]) -> Array:
            position, _, done = state
            return (position < length) & ~done.all()

        def extend(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            position, target, done = state
            logits = net.decode(params, target[:, :length], memory, source_mask=source_mask)
            tokens = pick(logits[:, position], keys[position], temperature=temperature, top_k=top_k)
            tokens = jnp.where(done, end_id, tokens).astype(jnp.int32)
            return position + 1, target.at[:, position + 1].set(tokens), done | (tokens == end_id)

        start = (jnp.asarray(0, jnp.int32), target, jnp.zeros(source.shape[0], bool))
        return jax.lax.while_loop(unfinished, extend, start)[1][:, 1:]

    return translate
