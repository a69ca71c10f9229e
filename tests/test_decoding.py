"""Decoding: the loop does what a plain Python loop over full forward passes does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.decoding import completer, pick, translator
from jax_tformer.models.transformer import transformer

STACK = StackConfig(num_layers=2, num_heads=2, feedforward_width=32, norm_placement="pre", final_norm=True)
GPT = TransformerConfig(vocab_size=17, d_model=16, decoder=STACK, initializer_std=0.5)
SEQ2SEQ = TransformerConfig(vocab_size=17, d_model=16, encoder=STACK, decoder=STACK, initializer_std=0.5)
START, END = 1, 2


def test_greedy_completion_equals_a_plain_loop_also_beyond_the_context() -> None:
    net = transformer(GPT)
    params = net.init(jax.random.key(0))
    context, new = 6, 9
    prompt = np.array([[3, 4, 5], [9, 2, 11]], np.int32)
    complete = completer(net, context=context, new_tokens=new, temperature=0.0, top_k=None)
    ours = np.asarray(complete(params, jnp.asarray(prompt), jax.random.key(0)))

    apply = jax.jit(net.apply)
    for row, tokens in enumerate(prompt):
        sequence = list(tokens)
        for _ in range(new):
            window = np.zeros((1, context), np.int32)
            seen = sequence[-context:]
            window[0, : len(seen)] = seen
            sequence.append(int(np.asarray(apply(params, window))[0, len(seen) - 1].argmax()))
        assert ours[row].tolist() == sequence[len(tokens) :]
    assert len(set(ours.ravel().tolist())) > 1, "a model that says one token only would prove nothing"


def test_translation_equals_a_plain_loop_and_stops_at_the_end_token() -> None:
    net = transformer(SEQ2SEQ)
    params = net.init(jax.random.key(3))
    length = 8
    source = np.array([[5, 6, 7, 8], [9, 10, 0, 0], [3, 3, 4, 0]], np.int32)
    mask = source > 0
    translate = translator(net, length=length, start_id=START, end_id=END)
    ours = np.asarray(translate(params, jnp.asarray(source), jnp.asarray(mask), jax.random.key(0)))
    apply = jax.jit(lambda params, source, target, mask: net.apply(params, source, target, source_mask=mask))
    ended = 0
    for row in range(len(source)):
        target = [START]
        while len(target) <= length:
            # Padding after the last token changes nothing: the mask is causal.
            padded = np.full((1, length), END, np.int32)
            padded[0, : len(target)] = target
            logits = apply(params, source[row : row + 1], padded, mask[row : row + 1])
            target.append(int(np.asarray(logits)[0, len(target) - 1].argmax()))
            if target[-1] == END:
                ended += 1
                break
        expected = target[1:] + [END] * (length + 1 - len(target))
        assert ours[row].tolist() == expected


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (1.0, 2)])
def test_draws_follow_the_softmax(temperature: float, top_k: int | None) -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1]))
    draws = 40_000
    keys = jax.random.split(jax.random.key(1), draws)
    one = jax.vmap(lambda key: pick(jnp.asarray(logits)[None], key, temperature=temperature, top_k=top_k)[0])
    counts = np.bincount(np.asarray(jax.jit(one)(keys)), minlength=4)
    weights = np.exp(logits / temperature)
    weights[4 if top_k is None else top_k :] = 0
    expected = weights / weights.sum() * draws
    drawn = expected > 0
    assert counts[~drawn].sum() == 0
    chi_square = ((counts - expected)[drawn] ** 2 / expected[drawn]).sum()
    # The 0.999 quantile of chi-square with 3 degrees of freedom is 16.3; with 1, 10.8.
    assert chi_square < 16.3


def test_temperature_zero_is_greedy_whatever_the_key() -> None:
    logits = jnp.array([[0.1, 3.0, 0.2], [2.0, 1.9, 0.0]])
    for seed in range(5):
        assert pick(logits, jax.random.key(seed), temperature=0.0, top_k=None).tolist() == [1, 0]
