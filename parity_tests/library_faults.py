"""Faults planted in the library: what it computes or stores too coarsely, or leaves to a default."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from jax_tformer.cache import Cache, KeyValue
from jax_tformer.decoding import beam, loop, sampling
from jax_tformer.decoding.sampling import History
from jax_tformer.hub import names
from jax_tformer.model import attention, blocks, embedding, layers
from jax_tformer.model.attention import Attention
from jax_tformer.model.blocks import Stack
from jax_tformer.model.fast import rows
from jax_tformer.model.layers import Norm
from jax_tformer.model.masks import Mask
from jax_tformer.model.parameters import accumulator
from jax_tformer.training import linear_loss, step
from jax_tformer.training import optimizer as our_optimizer
from parity_tests import narrow_parts
from parity_tests.faults import code_fault


def one_pass_variance(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def call(self: Norm, x: jax.Array) -> jax.Array:
        high = x.astype(accumulator(x.dtype))
        mean = high.mean(-1, keepdims=True) if self.kind == "layernorm" else jnp.zeros_like(high[..., :1])
        variance = jnp.maximum(jnp.square(high).mean(-1, keepdims=True) - jnp.square(mean), 0)
        high = (high - mean) * jax.lax.rsqrt(variance + self.eps) * self.scale[...].reshape(1, 1, -1)
        return (high if self.bias is None else high + self.bias[...].reshape(1, 1, -1)).astype(x.dtype)

    return call


def no_higher(right: Callable[..., Any]) -> Callable[..., Any]:
    """What should be computed in at least float32 is computed in the type of the rest."""
    return lambda dtype: jnp.dtype(dtype)


def narrow_where(chosen: Callable[..., bool]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """In layers.py and embedding.py: the type of the input, and no higher, in the calls that `chosen` chooses."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            kept = no_higher(accumulator) if chosen(*args) else accumulator
            with patch.object(layers, "accumulator", kept), patch.object(embedding, "accumulator", kept):
                return right(*args)

        return call

    return wrong


def narrow_norm(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """LayerNorm or RMSNorm in the type of its input."""
    return narrow_where(lambda norm, x: norm.kind == kind)


def narrow_activation(prefix: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Activations whose names begin so in the type of their input."""
    return narrow_where(lambda x, activation: activation.startswith(prefix))


def rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(x.dtype)


def rounded_result(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *args, **options: rounded(right(*args, **options))


def rounded_scores(in_rows: bool) -> Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]:
    """Of attention in rows, which asks for a part of the mask, or of the weights as a whole, which are captured."""

    def wrong(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def softmax(self: Mask, scores: jax.Array, length: int, slots: int, *part: slice) -> jax.Array:
            return right(self, rounded(scores) if bool(part) == in_rows else scores, length, slots, *part)

        return softmax

    return wrong


def rounded_schedule(right: Callable[..., Any]) -> Callable[..., Any]:
    def learning_rate(config: Any, steps: int) -> Callable[[jax.Array], jax.Array]:
        return lambda n: right(config, steps)(n).astype(jnp.float32)

    return learning_rate


def by_default(option: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What the config says of this option of AdamW is left to optax."""
    return lambda right: lambda *args, **options: right(*args, **{k: v for k, v in options.items() if k != option})


def padding_read(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda batch: right({name: x for name, x in batch.items() if "mask" not in name})


def uncapped(right: Callable[..., Any]) -> Callable[..., Any]:
    """Logits, of which the cap is the last argument, are as large as they come."""
    return lambda *given: right(*given[:-1])


CAP = 0.5
"""Of the logits of the model that is trained with faults: near their size."""


def capped_without_slope(right: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient by the capped logits is divided by the slope of the cap, with which it is multiplied afterwards."""

    def losses(logits: jax.Array, *rest: Any) -> tuple[jax.Array, jax.Array]:
        loss, by_logits = right(logits, *rest)
        return loss, by_logits / (1 - jnp.square(logits / CAP))

    return losses


def coarse_moment(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: right(*args, **options, mu_dtype=jnp.bfloat16)


def coarse_choice(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Two logits that 8 bits do not tell apart are a tie."""
    return lambda logits: right(logits.astype(jnp.float8_e4m3fn).astype(logits.dtype))


def cached_masks(**changes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The masks of self-attention with these fields changed, where there is a cache."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def masks(self: Stack, tokens: Any, is_token: Any, segments: Any, prefix: Any = None, cache: Any = None) -> Any:
            seen = right(self, tokens, is_token, segments, prefix, cache)
            return seen if cache is None else {window: replace(mask, **changes) for window, mask in seen.items()}

        return masks

    return wrong


def padding_counted(right: Callable[..., Any]) -> Callable[..., Any]:
    def take_slots(self: Cache, new: jax.Array) -> Any:
        positions, placed = right(self, new)
        return jnp.broadcast_to(self.filled + jnp.arange(new.shape[1]), positions.shape), placed

    return take_slots


def slot_before(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, key, value, first: right(self, key, value, jnp.maximum(first - 1, 0))


def unmasked_source(right: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        self: Attention, x: Any, memory: Any, mask: Mask, rotation: Any, key: Any, cache: Any, capture: bool
    ) -> Any:
        crosses = cache is not None and not mask.causal
        mask = replace(mask, is_token=None) if crosses else mask
        return right(self, x, memory, mask, rotation, key, cache, capture)

    return call


def never_reordered(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cache, chosen: cache if len(chosen) == len(cache.is_token) else right(cache, chosen)


def one_token_more(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda rules, length, dtype: right(rules, length + 1, dtype)


def one_token_longer(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Unfinished beams are hoped to end with a token more than they have, for no loss."""
    return lambda rules, made, limits: right(rules, made + 1, limits)


def hope_again(right: Callable[..., Any]) -> Callable[..., Any]:
    """A search that is over goes on where its unfinished beams look better later."""
    return lambda rules, beams, *rest: right(rules, beams._replace(improvable=jnp.ones_like(beams.improvable)), *rest)


def said_by_another(right: Callable[..., Any]) -> Callable[..., Any]:
    """A beam counts what another one has just said among its own tokens."""

    def extended(rules: Any, beams: beam.Beams, *rest: Any) -> beam.Beams:
        made = right(rules, beams, *rest)
        if made.seen is None:
            return made
        said = jax.nn.one_hot(made.running.tokens[:, :, beams.length], made.seen.shape[-1], dtype=bool)
        return made._replace(seen=made.seen | jnp.roll(said, 1, axis=1).reshape(made.seen.shape))

    return extended


def one_more_before_the_end(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda scores, rules, place: right(
        scores, replace(rules, min_new_tokens=None if rules.min_new_tokens is None else rules.min_new_tokens + 1), place
    )


def never_behind_a_forced_token(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """What may not begin is suppressed at the first place, though the token there is forced."""

    def constrain(scores: jax.Array, rules: Any, place: Any) -> jax.Array:
        begun = right(scores, replace(rules, forced_bos_token_id=None), place)
        return right(begun, replace(rules, begin_suppress_tokens=None), place)

    return constrain


def padding_said(right: Callable[..., Any]) -> Callable[..., Any]:
    """Padding is among the tokens of a text, and of its n-grams."""
    return lambda prompt, mask, *rest: right(prompt, jnp.ones_like(mask), *rest)


def same_number(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda logits, keys, *rest: right(logits, jax.random.split(jax.random.key(0), len(keys)), *rest)


def later_start(right: Callable[..., Any]) -> Callable[..., Any]:
    def boolean(self: Mask, length: int, slots: int, rows: slice = slice(None), *columns: slice) -> Any:
        return right(replace(self, first=self.first + 1) if rows.start else self, length, slots, rows, *columns)

    return boolean


def whole_blocks(right: Callable[..., Any]) -> Callable[..., Any]:
    """The mask of a block is that of its own keys, with nothing hidden: what a bidirectional model has."""

    def boolean(self: Mask, length: int, slots: int, *part: slice) -> Any:
        return right(replace(self, causal=False) if part else self, length, slots, *part)

    return boolean


def through_float16(right: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def read(view: Any) -> np.ndarray:
        array = right(view)
        return array.astype(np.float16).astype(array.dtype)

    return read


BLOCKS = (
    code_fault("attention: later blocks see one key too many", Mask, "boolean", later_start),
    code_fault("attention: nothing hidden inside a block", Mask, "boolean", whole_blocks),
)
"""Gates 1 and 2."""
ONE_PASS = code_fault("LayerNorm: one-pass variance", Norm, "__call__", one_pass_variance)
"""Gate 3."""
NARROW_SOFTMAX = code_fault("softmax computed in bfloat16", rows, "accumulator", no_higher)
NARROW_WEIGHTS = code_fault("captured weights computed in bfloat16", attention, "accumulator", no_higher)
NARROW_ANGLES = code_fault("rotary angles computed in bfloat16", blocks, "rotary_angles", narrow_where(lambda *_: True))
"""Gate 4."""
NARROW_PARTS = (
    code_fault("logits rounded to bfloat16", narrow_parts.Head, "__call__", rounded_result),
    code_fault("logits rounded to bfloat16 in the training loss", linear_loss, "_logits", rounded_result),
    code_fault("attention scores rounded to bfloat16", Mask, "softmax", rounded_scores(True)),
    code_fault("captured attention scores rounded to bfloat16", Mask, "softmax", rounded_scores(False)),
    code_fault("GELU computed in bfloat16", narrow_parts, "activate", narrow_activation("gelu")),
    code_fault("SiLU computed in bfloat16", narrow_parts, "activate", narrow_activation("silu")),
    code_fault("LayerNorm computed in bfloat16", Norm, "__call__", narrow_norm("layernorm")),
    code_fault("RMSNorm computed in bfloat16", Norm, "__call__", narrow_norm("rmsnorm")),
)
"""Gate 4, part by part."""
LIBRARY_TRAINING = (
    code_fault("learning rate rounded to float32", our_optimizer, "learning_rate", rounded_schedule),
    code_fault("optax's default weight decay", our_optimizer.optax, "adamw", by_default("weight_decay")),
    code_fault("optax's default beta1", our_optimizer.optax, "adamw", by_default("b1")),
    code_fault("optax's default beta2", our_optimizer.optax, "adamw", by_default("b2")),
    code_fault("optax's default eps", our_optimizer.optax, "adamw", by_default("eps")),
    code_fault("padding among the tokens that were read", step, "tokens_read", padding_read),
    code_fault("logits not capped in the training loss", step, "linear_cross_entropy", uncapped),
    code_fault("logits capped without the cap's derivative", linear_loss, "_losses", capped_without_slope),
)
"""Gate 5."""
COARSE_MOMENT = code_fault("Adam's first moment kept in bfloat16", our_optimizer.optax, "adamw", coarse_moment)
"""Gate 6."""
DECODING = (
    code_fault("greedy choice among logits kept in 8 bits", sampling, "argmax", coarse_choice),
    code_fault("cache: padding attended to", Stack, "masks", cached_masks(is_token=None)),
    code_fault("cache: positions count padding", Cache, "take_slots", padding_counted),
    code_fault("cache: written one slot too early", KeyValue, "write", slot_before),
    code_fault("cache: padding of the source attended to", Attention, "__call__", unmasked_source),
    code_fault("beams: cache not reordered", beam, "take_sequences", never_reordered),
    code_fault("beams: length penalty of one token more", beam, "_penalty", one_token_more),
    code_fault("beams: hope for one token more", beam, "_hoped_length", one_token_longer),
    code_fault("beams: a lost hope comes back", beam, "_extend_beams", hope_again),
    code_fault("beams: tokens seen by another beam", beam, "_extend_beams", said_by_another),
)
"""Gate 8."""
CHOICES = (
    code_fault("min_new_tokens: one more", sampling, "constrain", one_more_before_the_end),
    code_fault("begin_suppress_tokens: not behind a forced one", sampling, "constrain", never_behind_a_forced_token),
    code_fault("n-grams: padding counts", History, "of", padding_said),
)
"""Gate 8, for the first settings of test_strategies.py, one by one."""
SAME_NUMBER = code_fault("sampling: one random number for every step", loop, "choose", same_number)
"""Gate 10."""
THROUGH_FLOAT16 = code_fault("weights converted by way of float16", names, "read", through_float16)
"""Gate 9."""
