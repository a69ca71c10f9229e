"""Decoding: what `generate` does is what plain Python loops over full forward passes do."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.decoding.generate import Generated, generate, stream
from jax_tformer.decoding.loop import advance, layers_apart, row_keys, start
from jax_tformer.decoding.sampling import make_rules
from jax_tformer.decoding.score import score
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.functional import AnyTransformer, Params, transformer

STACK = StackConfig(num_layers=2, num_heads=2, feedforward_width=32, norm_placement="pre", final_norm=True)
GPT = TransformerConfig(vocab_size=17, d_model=16, decoder=STACK, initializer_std=0.5)
SEQ2SEQ = TransformerConfig(vocab_size=17, d_model=16, encoder=STACK, decoder=STACK, initializer_std=0.5)
START, END = 1, 2
PROMPTS = [[3, 4, 5], [9], [9, 2, 11, 12, 3], [3, 4, 5]]
Model = tuple[AnyTransformer, Params]


@pytest.fixture(scope="module")
def gpt() -> Model:
    net = transformer(GPT)
    return net, net.init(jax.random.key(0))


@pytest.fixture(scope="module")
def seq2seq() -> Model:
    net = transformer(SEQ2SEQ)
    return net, net.init(jax.random.key(3))


def next_logits(model: Model, sequence: Sequence[int], source: Sequence[int] | None = None) -> np.ndarray:
    """After all of the sequence, by a forward pass of it alone."""
    net, params = model
    # Padding after the last token changes nothing: the mask is causal.
    window = np.zeros((1, 32), np.int32)
    window[0, : len(sequence)] = sequence
    inputs = (window,) if source is None else (np.array([source], np.int32), window)
    return np.asarray(compiled(net)(params, *inputs))[0, len(sequence) - 1]


@cache
def compiled(net: AnyTransformer) -> Callable[..., jax.Array]:
    return jax.jit(net.apply)


def test_greedy_also_beyond_the_context(gpt: Model) -> None:
    net, params = gpt
    context, new = 8, 21
    ours = generate(net, params, PROMPTS, DecodingConfig(new), context=context)
    slots = context
    for row, prompt in enumerate(PROMPTS):
        # Padded to a multiple of a quarter of the context.
        sequence, kept, used = list(prompt), list(prompt), -(-len(prompt) // 2) * 2
        for _ in range(new):
            token = int(next_logits(gpt, kept).argmax())
            sequence, kept = [*sequence, token], [*kept, token]
            # When the slots are full, the newer half of what was read stays, and the token that was chosen last.
            if used == slots:
                kept, used = sequence[-1 - slots // 2 :], slots // 2
            used += 1
        assert ours.rows(row) == [sequence[len(prompt) :]]
    assert len(np.unique(ours.tokens)) > 3, "a model that says one token only would prove nothing"


def test_rows_end_where_the_end_token_comes(seq2seq: Model) -> None:
    net, params = seq2seq
    sources, length = [[3, 4, 5, 6], [7, 8], [9, 10, 11], [12], [13, 14, 15, 16, 3]], 20
    free = generate(net, params, sources, DecodingConfig(length), start_id=START)
    end = free.rows(0)[0][4]
    found = generate(net, params, sources, DecodingConfig(length), start_id=START, end_id=end)
    expected = []
    for source in sources:
        target = [START]
        while len(target) <= length and (len(target) == 1 or target[-1] != end):
            target.append(int(next_logits(seq2seq, target, source).argmax()))
        expected.append(target[1:])
    assert [row for number in range(len(sources)) for row in found.rows(number)] == expected
    assert len({len(row) for row in expected}) > 1, "rows should end at different places"
    # Behind the end stands the end token, and nothing is longer than the longest row.
    for row, tokens in zip(expected, found.tokens[:, 0], strict=True):
        assert (tokens[len(row) :] == end).all()
    assert found.tokens.shape[2] == max(map(len, expected))


def test_the_loop_stops_when_all_rows_have_ended(gpt: Model) -> None:
    net, params = gpt
    decoding, rules = DecodingConfig(30), make_rules(DecodingConfig())
    prompt, mask = jnp.array([[3, 4, 5]], jnp.int32), jnp.ones((1, 3), bool)
    end = generate(net, params, [[3, 4, 5]], decoding).rows(0)[0][4]
    first = generate(net, params, [[3, 4, 5]], decoding).rows(0)[0].index(end)
    keys, ends, limits = row_keys(jax.random.key(0), jnp.zeros(1, jnp.uint32), 1), jnp.array([end]), jnp.array([30])
    apart = layers_apart(params)
    state = start(net, rules, apart, prompt, mask, None, limits, ends, keys, cache_length=33)
    state, _ = advance(net, rules, apart, state, ends, jnp.int32(29), room=29)
    assert int(state.new_tokens) == first + 1 < 30


def test_stream_says_what_generate_says(gpt: Model) -> None:
    net, params = gpt
    end = generate(net, params, PROMPTS, DecodingConfig(12)).rows(1)[0][3]
    for decoding, end_id in (
        (DecodingConfig(12), end),
        (DecodingConfig(12, temperature=1.0, num_return_sequences=2), None),
    ):
        for context in (None, 8):
            pieces = list(stream(net, params, PROMPTS, decoding, end_id=end_id, context=context, seed=3))
            whole = generate(net, params, PROMPTS, decoding, end_id=end_id, context=context, seed=3)
            assert (np.stack(pieces, axis=2) == whole.tokens).all()


@pytest.mark.parametrize("form", ["stacked", "apart"])
def test_a_row_depends_on_seed_and_prompt_only(gpt: Model, form: str) -> None:
    net, params = gpt
    params = layers_apart(params) if form == "apart" else params
    decoding = DecodingConfig(10, temperature=1.0, top_p=0.95, repetition_penalty=1.1, num_return_sequences=3)
    prompts = [*PROMPTS, [7, 3, 8] * 20]
    together = generate(net, params, prompts, decoding, seed=5)
    again = generate(net, params, prompts, decoding, seed=5)
    assert (together.tokens == again.tokens).all()
    sliding = generate(net, params, PROMPTS, decoding, seed=5, context=8)
    for number, prompt in enumerate(PROMPTS):
        assert generate(net, params, [prompt], decoding, seed=5).rows(0) == together.rows(number)
        assert generate(net, params, [prompt], decoding, seed=5, context=8).rows(0) == sliding.rows(number)
    assert together.rows(0) == together.rows(3), "equal prompts have equal samples"
    assert len({tuple(row) for row in together.rows(0)}) == 3, "samples of one prompt differ"
    assert generate(net, params, PROMPTS, decoding, seed=6).rows(0) != together.rows(0)


def test_no_pair_of_tokens_comes_twice(gpt: Model) -> None:
    """Also where the text slides and the pair was forgotten."""
    net, params = gpt
    free = generate(net, params, PROMPTS, DecodingConfig(21), context=8)
    found = generate(net, params, PROMPTS, DecodingConfig(40, no_repeat_ngram_size=2), context=8)

    def most(row: int, answer: Generated) -> int:
        [new] = answer.rows(row)
        return max(Counter(pairwise([*PROMPTS[row], *new])).values())

    assert max(most(row, free) for row in range(4)) > 1
    assert [most(row, found) for row in range(4)] == [1, 1, 1, 1]


def test_what_is_forbidden_is_never_drawn(gpt: Model) -> None:
    """Several samples of texts that slide: the prompt, its words and the last tokens are remembered."""
    net, params = gpt
    prompts, pairs = [[3, 4, 5], [9, 2, 11]], product(range(17), range(6))
    words = (*((first, (first * 5 + step) % 17) for first, step in pairs), (END,))
    begins = tuple(range(8))
    free = DecodingConfig(20, temperature=1.0, num_return_sequences=4)
    never = {"encoder_no_repeat_ngram_size": 1, "bad_words_ids": words, "begin_suppress_tokens": begins}
    strict = replace(free, **never)

    def broken(decoding: DecodingConfig) -> list[bool]:
        """Which of the settings an answer breaks."""
        found = generate(net, params, prompts, decoding, context=8, end_id=END)
        answers = [(prompt, row) for number, prompt in enumerate(prompts) for row in found.rows(number)]
        return [
            any(set(prompt) & set(row) for prompt, row in answers),
            any(pair in words for prompt, row in answers for pair in pairwise([*prompt, *row][len(prompt) - 1 :])),
            any(row[0] in begins for _, row in answers),
        ]

    assert broken(free) == [True, True, True]
    assert broken(strict) == [False, False, False]


def test_beams_find_the_most_probable_sequence() -> None:
    """With as many beams as there are beginnings, a beam search is exhaustive."""
    small = TransformerConfig(vocab_size=5, d_model=8, decoder=STACK, initializer_std=0.8)
    net = transformer(small)
    model = net, net.init(jax.random.key(0))
    prompt, length, alpha = [1, 3], 3, 0.6

    def log_probability(tokens: tuple[int, ...]) -> float:
        total = 0.0
        for place, token in enumerate(tokens):
            logits = next_logits(model, [*prompt, *tokens[:place]]).astype(np.float64)
            total += logits[token] - np.log(np.exp(logits).sum())
        return total

    ended = {tokens[: tokens.index(END) + 1] if END in tokens else tokens for tokens in product(range(5), repeat=3)}
    scores = {tokens: log_probability(tokens) / ((5 + len(tokens)) / 6) ** alpha for tokens in ended}
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:4]
    decoding = DecodingConfig(length, num_beams=25, num_return_sequences=4, length_penalty=alpha)
    found = generate(*model, [prompt], decoding, end_id=END)
    assert [tuple(row) for row in found.rows(0)] == best
    assert found.scores is not None
    np.testing.assert_allclose(found.scores[0], [scores[tokens] for tokens in best], rtol=1e-5)
    assert any(len(tokens) < length for tokens in best), "a sequence that ends early should be among the best"


def test_score_is_the_log_probability(gpt: Model, seq2seq: Model) -> None:
    texts = [[3, 4, 5, 6, 7], [9, 2]]
    for start_id in (None, START):
        found = score(*gpt, texts, start_id=start_id)
        for text, log_probs, perplexity in zip(texts, *found, strict=True):
            sequence = [START, *text] if start_id else text
            expected = [_log_softmax(next_logits(gpt, sequence[:t]))[sequence[t]] for t in range(1, len(sequence))]
            np.testing.assert_allclose(log_probs, expected, atol=1e-5)
            assert perplexity == pytest.approx(np.exp(-np.mean(expected)), rel=1e-5)
    sources = [[3, 4], [5, 6, 7]]
    found = score(*seq2seq, texts, sources=sources, start_id=START)
    for source, text, log_probs in zip(sources, texts, found.log_probs, strict=True):
        target = [START, *text]
        expected = [_log_softmax(next_logits(seq2seq, target[:t], source))[target[t]] for t in range(1, len(target))]
        np.testing.assert_allclose(log_probs, expected, atol=1e-5)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits.astype(np.float64)).sum())


def test_limits_of_single_prompts(gpt: Model) -> None:
    net, params = gpt
    limits = [5, 1, 12, 3]
    for decoding in (DecodingConfig(12), DecodingConfig(12, num_beams=2)):
        found = generate(net, params, PROMPTS, decoding, limits=limits)
        assert found.lengths[:, 0].tolist() == limits
        for row, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True)):
            alone = generate(net, params, [prompt], replace(decoding, max_new_tokens=limit))
            assert alone.rows(0) == found.rows(row)


def test_what_slides_is_decided_text_by_text(gpt: Model) -> None:
    net, params = gpt
    limits, decoding = [2, 20, 1, 20], DecodingConfig(20, temperature=1.0)
    found = generate(net, params, PROMPTS, decoding, limits=limits, context=8, seed=3)
    assert found.lengths[:, 0].tolist() == limits
    for row, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True)):
        alone = generate(net, params, [prompt], decoding, limits=[limit], context=8, seed=3)
        assert alone.rows(0) == found.rows(row)
        if len(prompt) + limit - 1 <= 8:
            assert generate(net, params, [prompt], decoding, limits=[limit], seed=3).rows(0) == found.rows(row)


def test_settings_lengths_and_equal_models_share_what_is_compiled(gpt: Model) -> None:
    net, params = gpt
    generate(net, params, PROMPTS, DecodingConfig(3, temperature=0.5, top_p=0.5))
    before = start._cache_size(), advance._cache_size()
    generate(transformer(GPT), params, [[5], [6, 7], [8] * 30, [9]], DecodingConfig(20, temperature=1.5, top_p=0.7))
    assert (start._cache_size(), advance._cache_size()) == before
    generate(net, params, PROMPTS, DecodingConfig(3, temperature=0.5, top_k=3))
    assert (start._cache_size(), advance._cache_size()) == (before[0] + 1, before[1] + 1)


def test_broken_parameters_are_no_tokens(gpt: Model) -> None:
    net, params = gpt
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, params)
    for decoding in (DecodingConfig(3), DecodingConfig(3, temperature=1.0), DecodingConfig(3, num_beams=2)):
        with pytest.raises(InputError, match="the model's logits are NaN"):
            generate(net, broken, PROMPTS, decoding)


def test_beams_that_do_not_exist(gpt: Model) -> None:
    everything = DecodingConfig(1, num_beams=20, num_return_sequences=17)
    found = generate(*gpt, PROMPTS, everything)
    assert all(sorted(row[0] for row in found.rows(number)) == list(range(17)) for number in range(len(PROMPTS)))
    with pytest.raises(InputError, match="num_return_sequences is 18, and the beam search has found 17"):
        generate(*gpt, PROMPTS, replace(everything, num_return_sequences=18))


def test_bad_input(gpt: Model, seq2seq: Model) -> None:
    learned = TransformerConfig(
        vocab_size=17,
        d_model=16,
        decoder=StackConfig(num_layers=1, num_heads=2, feedforward_width=8, positions="learned", max_positions=8),
    )
    net = transformer(learned)
    limited, eight = (net, net.init(jax.random.key(0))), DecodingConfig(8)
    bert = transformer(TransformerConfig(vocab_size=17, d_model=16, encoder=STACK))
    for model, prompts, options, message in [
        (gpt, [], {}, "there are no prompts"),
        (gpt, [[3], []], {}, "prompt 2 of 2 has no tokens"),
        (gpt, [[3, 17]], {}, "a token has the id 17"),
        (gpt, [[3]], {"end_id": 40}, "a token has the id 40"),
        (gpt, [[3] * 9], {"context": 8}, "a prompt has 9 tokens; expected at most 8"),
        (gpt, [[3]], {"context": 1}, "context is 1"),
        (limited, [[3, 4]], {}, "a text has 9 tokens; the model has 8 learned positions"),
        (limited, [[3]], {"context": 9}, "the context has 9 tokens; the model has 8 learned positions"),
        (gpt, [[3]], {"limits": [0]}, "a limit is 0"),
        (gpt, [[3]], {"limits": [1, 2]}, "there are 2 limits"),
        (seq2seq, [[3]], {}, "start_id is None"),
        (seq2seq, [[3]], {"start_id": 1, "context": 8}, "context is 8"),
        ((bert, bert.init(jax.random.key(0))), [[3]], {"start_id": 1}, "no decoder with a head"),
    ]:
        with pytest.raises(InputError, match=message):
            generate(*model, prompts, eight, **options)
    for beyond in (
        DecodingConfig(8, begin_suppress_tokens=(3, 17)),
        DecodingConfig(8, bad_words_ids=((3, 4), (17, 3))),
    ):
        with pytest.raises(InputError, match="a token has the id 17"):
            generate(*gpt, [[3]], beyond)
    for texts, options, message in [
        ([], {}, "there are no texts"),
        ([[3]], {}, "text 1 has no token to score"),
        ([[3, 4]], {"sources": [[3]]}, "sources are for encoder-decoders"),
        ([[3, 99]], {}, "a token has the id 99"),
    ]:
        with pytest.raises(InputError, match=message):
            score(*gpt, texts, **options)
    with pytest.raises(InputError, match="a source has no tokens"):
        score(*seq2seq, [[3]], sources=[[]], start_id=START)
    with pytest.raises(InputError, match="a beam search knows its tokens at the end"):
        next(stream(*gpt, [[3]], DecodingConfig(4, num_beams=2)))
