"""Faults planted in the library: what it computes or stores too coarsely, or leaves to a default."""

from dataclasses import replace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from jax_tformer.cache import Cache, KeyValue
from jax_tformer.decoding import loop, sampling
from jax_tformer.decoding.sampling import History
from jax_tformer.hub import names
from jax_tformer.model import attention, blocks, embedding, fast, layers
from jax_tformer.model.attention import Attention
from jax_tformer.model.blocks import Stack
from jax_tformer.model.layers import Norm
from jax_tformer.model.masks import Mask
from jax_tformer.training import linear_loss, step
from jax_tformer.training import optimizer as our_optimizer
from parity_tests import narrow_parts
from parity_tests.faults import call_fault


def one_pass_variance(right, self, x):
    """In a LayerNorm of float32, which has a bias."""
    bias, mean = self.bias[...].reshape(1, 1, -1), x.mean(-1, keepdims=True)
    variance = jnp.maximum(jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean), 0)
    ratio = jnp.sqrt((x.var(-1, keepdims=True) + self.eps) / (variance + self.eps))
    return (right(self, x) - bias) * ratio + bias


def no_higher(right, dtype):
    """What should be computed in at least float32 is computed in the type of the rest."""
    return jnp.dtype(dtype)


def narrow_where(chosen):
    """In layers.py and embedding.py: the type of the input, and no higher, in the calls that `chosen` chooses."""

    def call(right, *args):
        if not chosen(*args):
            return right(*args)
        with patch.object(layers, "accumulator", jnp.dtype), patch.object(embedding, "accumulator", jnp.dtype):
            return right(*args)

    return call


def narrow_norm(kind):
    """LayerNorm or RMSNorm in the type of its input."""
    return narrow_where(lambda norm, x: norm.kind == kind)


def narrow_activation(prefix):
    """Activations whose names begin so in the type of their input."""
    return narrow_where(lambda x, activation: activation.startswith(prefix))


def rounded(x):
    return x.astype(jnp.bfloat16).astype(x.dtype)


def rounded_result(right, *args, **options):
    return rounded(right(*args, **options))


def rounded_scores(in_rows):
    """Of attention in rows, which asks for a part of the mask, or of the weights as a whole, which are captured."""

    def softmax(right, self, scores, length, slots, *part):
        return right(self, rounded(scores) if bool(part) == in_rows else scores, length, slots, *part)

    return softmax


def by_default(option):
    """What the config says of this option of AdamW is left to optax."""
    return lambda right, *args, **options: right(*args, **{k: v for k, v in options.items() if k != option})


def uncapped(right, *given):
    """Logits, of which the cap is the last argument, are as large as they come."""
    return right(*given[:-1])


CAP = 0.5
"""Of the logits of the model that is trained with faults: near their size."""


def capped_without_slope(right, logits, *rest):
    """The gradient by the capped logits is divided by the slope of the cap, with which it is multiplied afterwards."""
    loss, by_logits = right(logits, *rest)
    return loss, by_logits / (1 - jnp.square(logits / CAP))


def cached_masks(**changes):
    """The masks of self-attention with these fields changed, where there is a cache."""

    def masks(right, self, tokens, is_token, segments, prefix=None, cache=None):
        seen = right(self, tokens, is_token, segments, prefix, cache)
        return seen if cache is None else {window: replace(mask, **changes) for window, mask in seen.items()}

    return masks


def padding_counted(right, self, new):
    positions, placed = right(self, new)
    return jnp.broadcast_to(self.filled + jnp.arange(new.shape[1]), positions.shape), placed


def unmasked_source(right, self, x, memory, mask, rotation, key, cache, capture):
    crosses = cache is not None and not mask.causal
    return right(self, x, memory, replace(mask, is_token=None) if crosses else mask, rotation, key, cache, capture)


def hope_again(right, rules, beams, state, *rest):
    """A search that is over goes on where its unfinished beams look better later."""
    return right(rules, beams, state._replace(done=jnp.zeros_like(state.done)), *rest)


def said_by_another(right, history, token):
    """What another beam has said last counts as said by this one."""
    return right(history, jnp.roll(token, 1))


def one_more_before_the_end(right, scores, rules, place):
    fewest = None if rules.min_new_tokens is None else rules.min_new_tokens + 1
    return right(scores, replace(rules, min_new_tokens=fewest), place)


def never_behind_a_forced_token(right, scores, rules, place):
    """What may not begin is suppressed at the first place, though the token there is forced."""
    begun = right(scores, replace(rules, forced_bos_token_id=None), place)
    return right(begun, replace(rules, begin_suppress_tokens=None), place)


def same_number(right, logits, keys, *rest):
    return right(logits, jax.random.split(jax.random.key(0), len(keys)), *rest)


def later_start(right, self, length, slots, rows=slice(None), *columns):
    return right(replace(self, first=self.first + 1) if rows.start else self, length, slots, rows, *columns)


def whole_blocks(right, self, length, slots, *part):
    """The mask of a block is that of its own keys, with nothing hidden: what a bidirectional model has."""
    return right(replace(self, causal=False) if part else self, length, slots, *part)


def through_float16(right, view):
    array = right(view)
    return array.astype(np.float16).astype(array.dtype)


BLOCKS = (
    call_fault("attention: later blocks see one key too many", Mask, "boolean", later_start),
    call_fault("attention: nothing hidden inside a block", Mask, "boolean", whole_blocks),
)
"""Gate 1."""
ONE_PASS = call_fault("LayerNorm: one-pass variance", Norm, "__call__", one_pass_variance)
"""Gate 3."""
NARROW_SOFTMAX = call_fault("softmax computed in bfloat16", fast, "accumulator", no_higher)
NARROW_WEIGHTS = call_fault("captured weights computed in bfloat16", attention, "accumulator", no_higher)
NARROW_ANGLES = call_fault("rotary angles computed in bfloat16", blocks, "rotary_angles", narrow_where(lambda *_: True))
"""Gate 4."""
NARROW_PARTS = (
    call_fault("logits rounded to bfloat16", narrow_parts.Head, "__call__", rounded_result),
    call_fault("logits rounded to bfloat16 in the training loss", linear_loss, "_logits", rounded_result),
    call_fault("attention scores rounded to bfloat16", Mask, "softmax", rounded_scores(True)),
    call_fault("captured attention scores rounded to bfloat16", Mask, "softmax", rounded_scores(False)),
    call_fault("GELU computed in bfloat16", narrow_parts, "activate", narrow_activation("gelu")),
    call_fault("SiLU computed in bfloat16", narrow_parts, "activate", narrow_activation("silu")),
    call_fault("LayerNorm computed in bfloat16", Norm, "__call__", narrow_norm("layernorm")),
    call_fault("RMSNorm computed in bfloat16", Norm, "__call__", narrow_norm("rmsnorm")),
)
"""Gate 4, part by part."""
LIBRARY_TRAINING = (
    call_fault(
        "learning rate rounded to float32",
        our_optimizer,
        "learning_rate",
        lambda right, *given: lambda n: right(*given)(n).astype(jnp.float32),
    ),
    *(
        call_fault(f"optax's default {name}", our_optimizer.optax, "adamw", by_default(option))
        for name, option in {"weight decay": "weight_decay", "beta1": "b1", "beta2": "b2", "eps": "eps"}.items()
    ),
    call_fault(
        "padding among the tokens that were read",
        step,
        "tokens_read",
        lambda right, batch: right({name: x for name, x in batch.items() if "mask" not in name}),
    ),
    call_fault("logits not capped in the training loss", step, "linear_cross_entropy", uncapped),
    call_fault("logits capped without the cap's derivative", linear_loss, "_losses", capped_without_slope),
)
"""Gate 5."""
COARSE_MOMENT = call_fault(
    "Adam's first moment kept in bfloat16",
    our_optimizer.optax,
    "adamw",
    lambda right, *args, **options: right(*args, **options, mu_dtype=jnp.bfloat16),
)
"""Gate 6."""
DECODING = (
    call_fault(
        "greedy choice among logits kept in 8 bits",
        sampling,
        "argmax",
        lambda right, logits: right(logits.astype(jnp.float8_e4m3fn).astype(logits.dtype)),
    ),
    call_fault("cache: padding attended to", Stack, "masks", cached_masks(is_token=None)),
    call_fault("cache: positions count padding", Cache, "take_slots", padding_counted),
    call_fault(
        "cache: written one slot too early",
        KeyValue,
        "write",
        lambda right, self, key, value, first: right(self, key, value, jnp.maximum(first - 1, 0)),
    ),
    call_fault("cache: padding of the source attended to", Attention, "__call__", unmasked_source),
)
BEAMS = (
    call_fault(
        "beams: cache not reordered",
        loop,
        "take_sequences",
        lambda right, cache, chosen: cache if len(chosen) == len(cache.is_token) else right(cache, chosen),
    ),
    call_fault(
        "beams: length penalty of one token more",
        loop,
        "_penalty",
        lambda right, rules, length, dtype: right(rules, length + 1, dtype),
    ),
    call_fault(
        "beams: hope for one token more",
        loop,
        "_hoped_length",
        lambda right, rules, made, limits: right(rules, made + 1, limits),
    ),
    call_fault("beams: a lost hope comes back", loop, "_extend_beams", hope_again),
    call_fault("beams: tokens seen by another beam", History, "append", said_by_another),
)
"""Gate 8."""
CHOICES = (
    call_fault("min_new_tokens: one more", sampling, "restrict", one_more_before_the_end),
    call_fault("begin_suppress_tokens: not behind a forced one", sampling, "restrict", never_behind_a_forced_token),
    call_fault(
        "n-grams: padding counts",
        History,
        "of",
        lambda right, prompts, *rest: right(np.maximum(prompts, 0), *rest),
    ),
)
"""Gate 8, for the first settings of test_strategies.py, one by one."""
SAME_NUMBER = call_fault("sampling: one random number for every step", loop, "choose", same_number)
"""Gate 10."""
THROUGH_FLOAT16 = call_fault("weights converted by way of float16", names, "read", through_float16)
"""Gate 9."""
