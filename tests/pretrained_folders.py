"""A small GPT-2 in a folder, as `save_pretrained` writes it, for tests that open, damage or measure it."""

from dataclasses import replace

import jax
import tokenizers

from jax_tformer import save_pretrained, transformer
from jax_tformer.data.tokenizers import Tokenizer
from tests import small_models

STACK = replace(
    small_models.STACK,
    num_heads=4,
    feedforward_width=48,
    activation="gelu_tanh",
    positions="learned",
    max_positions=20,
)
CONFIG = replace(small_models.GPT, vocab_size=40, decoder=STACK, tied_head=True, residual_init_scale=True)


def words(count):
    """A tokenizer of so many words; w0 ends a text."""
    model = tokenizers.models.WordLevel({f"w{id}": id for id in range(count)}, "w0")
    return Tokenizer(tokenizers.Tokenizer(model), {"end": "w0"})


def save_small(folder, **options):
    """Writes the folder; returns its net and parameters."""
    net = transformer(CONFIG)
    params = net.init(jax.random.key(3))
    save_pretrained(folder, net, params, words(40), **options)
    return net, params
