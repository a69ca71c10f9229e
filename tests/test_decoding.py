"""Decoding: what `generate` does is what plain Python loops over full forward passes do, in a cache of any length."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import DecodingConfig
from jax_tformer.decoding import generate as generation
from jax_tformer.decoding.generate import generate, stream
from jax_tformer.decoding.loop import Prompts, advance, layers_apart, row_keys, search, start
from jax_tformer.decoding.sampling import make_rules
from jax_tformer.decoding.score import score
from jax_tformer.functional import transformer

STACK = StackConfig(num_layers=2, num_heads=2, feedforward_width=32, norm_placement="pre", final_norm=True)
GPT = TransformerConfig(vocab_size=17, d_model=16, decoder=STACK, initializer_std=0.5)
SEQ2SEQ = replace(GPT, encoder=STACK)
START, END = 1, 2
PROMPTS = [[3, 4, 5], [9], [9, 2, 11, 12, 3], [3, 4, 5]]


def make(config, seed=0):
    net = transformer(config)
    return net, net.init(jax.random.key(seed))


@pytest.fixture(scope="module")
def gpt():
    return make(GPT)


@pytest.fixture(scope="module")
def seq2seq():
    return make(SEQ2SEQ, 3)


def next_logits(model, sequence, source=None):
    """After all of the sequence, by a forward pass of it alone."""
    net, params = model
    # Padding after the last token changes nothing: the mask is causal.
    window = np.zeros((1, 32), np.int32)
    window[0, : len(sequence)] = sequence
    inputs = (window,) if source is None else (np.array([source], np.int32), window)
    return np.asarray(compiled(net)(params, *inputs))[0, len(sequence) - 1]


@cache
def compiled(net):
    return jax.jit(net.apply)


def log_probabilities(model, sequence, source=None, first=1):
    """Of the tokens from the place `first` on, each given those before it."""
    for place in range(first, len(sequence)):
        logits = next_logits(model, sequence[:place], source).astype(np.float64)
        yield logits[sequence[place]] - np.log(np.exp(logits).sum())


def test_greedy_also_beyond_the_context(gpt):
    context, new = 8, 21
    ours = generate(*gpt, PROMPTS, DecodingConfig(new), context=context)
    for row, prompt in enumerate(PROMPTS):
        # Padded to a multiple of a quarter of the context.
        sequence, kept, used = list(prompt), list(prompt), -(-len(prompt) // 2) * 2
        for _ in range(new):
            token = int(next_logits(gpt, kept).argmax())
            sequence, kept = [*sequence, token], [*kept, token]
            # When the cache is full, the newer half of what was read stays, and the token that was chosen last.
            if used == context:
                kept, used = sequence[-1 - context // 2 :], context // 2
            used += 1
        assert ours.rows(row) == [sequence[len(prompt) :]]
    assert len(np.unique(ours.tokens)) > 3, "a model that says one token only would prove nothing"


def test_rows_end_where_the_end_token_comes(seq2seq):
    sources, length = [[3, 4, 5, 6], [7, 8], [9, 10, 11], [12], [13, 14, 15, 16, 3]], 20
    end = generate(*seq2seq, sources, DecodingConfig(length), start_id=START).rows(0)[0][4]
    found = generate(*seq2seq, sources, DecodingConfig(length), start_id=START, end_id=end)
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


def test_the_loop_stops_when_all_rows_have_ended(gpt):
    net, params = gpt
    [said] = generate(net, params, [[3, 4, 5]], DecodingConfig(30)).rows(0)
    rules, apart = make_rules(DecodingConfig(), said[4:5]), layers_apart(params)
    prompts = Prompts(jnp.array([[3, 4, 5]], jnp.int32), jnp.ones((1, 3), bool), None, jnp.array([30]))
    keys = row_keys(jax.random.key(0), jnp.zeros(1, jnp.uint32), 1)
    state = start(net, rules, apart, prompts, keys, cache_length=33)
    state, _ = advance(net, rules, apart, state, jnp.int32(29), room=29)
    assert int(state.new_tokens) == said.index(said[4]) + 1 < 30


@pytest.mark.parametrize("context", [None, 8])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "num_return_sequences": 2}])
def test_stream_says_what_generate_says(gpt, settings, context):
    end = None if settings else generate(*gpt, PROMPTS, DecodingConfig(12)).rows(1)[0][3]
    call = (*gpt, PROMPTS, DecodingConfig(12, **settings))
    pieces = list(stream(*call, end_id=end, context=context, seed=3))
    assert (np.stack(pieces, axis=2) == generate(*call, end_id=end, context=context, seed=3).tokens).all()


@pytest.mark.parametrize("form", ["stacked", "apart"])
def test_a_row_depends_on_seed_and_prompt_only(gpt, form):
    net, params = gpt
    params = layers_apart(params) if form == "apart" else params
    decoding = DecodingConfig(10, temperature=1.0, top_p=0.95, repetition_penalty=1.1, num_return_sequences=3)
    prompts = [*PROMPTS, [7, 3, 8] * 20]
    together = generate(net, params, prompts, decoding, seed=5)
    assert (together.tokens == generate(net, params, prompts, decoding, seed=5).tokens).all()
    sliding = generate(net, params, PROMPTS, decoding, seed=5, context=8)
    for number, prompt in enumerate(PROMPTS):
        assert generate(net, params, [prompt], decoding, seed=5).rows(0) == together.rows(number)
        assert generate(net, params, [prompt], decoding, seed=5, context=8).rows(0) == sliding.rows(number)
    assert together.rows(0) == together.rows(3), "equal prompts have equal samples"
    assert len({tuple(row) for row in together.rows(0)}) == 3, "samples of one prompt differ"
    assert generate(net, params, PROMPTS, decoding, seed=6).rows(0) != together.rows(0)


def test_what_is_forbidden_is_never_drawn(gpt):
    """Several samples of texts that slide: the prompt, its words and what was forgotten are remembered."""
    prompts, pairs = [[3, 4, 5], [9, 2, 11]], product(range(17), range(6))
    words = (*((first, (first * 5 + step) % 17) for first, step in pairs), (END,))
    begins, free = tuple(range(8)), DecodingConfig(20, temperature=1.0, num_return_sequences=4)
    never = {"encoder_no_repeat_ngram_size": 1, "bad_words_ids": words, "begin_suppress_tokens": begins}

    def broken(decoding):
        """Which of the settings an answer breaks."""
        found = generate(*gpt, prompts, decoding, context=8, end_id=END)
        answers = [(prompt, row) for number, prompt in enumerate(prompts) for row in found.rows(number)]
        return [
            any(set(prompt) & set(row) for prompt, row in answers),
            any(pair in words for prompt, row in answers for pair in pairwise([*prompt, *row][len(prompt) - 1 :])),
            any(row[0] in begins for _, row in answers),
            any(max(Counter(pairwise([*prompt, *row])).values()) > 1 for prompt, row in answers),
        ]

    assert broken(free) == [True, True, True, True]
    assert broken(replace(free, **never))[:3] == [False, False, False]
    assert not broken(replace(free, max_new_tokens=40, no_repeat_ngram_size=2))[3]


def test_beams_find_the_most_probable_sequence():
    """With as many beams as there are beginnings, a beam search is exhaustive."""
    model = make(TransformerConfig(vocab_size=5, d_model=8, decoder=STACK, initializer_std=0.8))
    prompt, length, alpha = [1, 3], 3, 0.6
    ended = {tokens[: tokens.index(END) + 1] if END in tokens else tokens for tokens in product(range(5), repeat=3)}
    scores = {
        tokens: sum(log_probabilities(model, [*prompt, *tokens], first=2)) / ((5 + len(tokens)) / 6) ** alpha
        for tokens in ended
    }
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:4]
    decoding = DecodingConfig(length, num_beams=25, num_return_sequences=4, length_penalty=alpha)
    found = generate(*model, [prompt], decoding, end_id=END)
    assert [tuple(row) for row in found.rows(0)] == best
    np.testing.assert_allclose(found.scores[0], [scores[tokens] for tokens in best], rtol=1e-5)
    assert any(len(tokens) < length for tokens in best), "a sequence that ends early should be among the best"


def test_score_is_the_log_probability(gpt, seq2seq):
    texts, sources = [[3, 4, 5, 6, 7], [9, 2]], [[3, 4], [5, 6, 7]]
    for model, start_id, given in ((gpt, None, None), (gpt, START, None), (seq2seq, START, sources)):
        found = score(*model, texts, sources=given, start_id=start_id)
        for text, source, scored, perplexity in zip(texts, given or [None, None], *found, strict=True):
            expected = list(log_probabilities(model, [START, *text] if start_id else text, source))
            np.testing.assert_allclose(scored, expected, atol=1e-5)
            assert perplexity == pytest.approx(np.exp(-np.mean(expected)), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "limits", "context"),
    [({}, [5, 1, 12, 3], None), ({"num_beams": 2}, [5, 1, 12, 3], None), ({"temperature": 1.0}, [2, 20, 1, 20], 8)],
)
def test_limits_and_sliding_are_of_single_prompts(gpt, settings, limits, context):
    decoding = DecodingConfig(20, **settings)
    found = generate(*gpt, PROMPTS, decoding, limits=limits, context=context, seed=3)
    assert found.lengths[:, 0].tolist() == limits
    for row, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True)):
        short = replace(decoding, max_new_tokens=limit)
        assert generate(*gpt, [prompt], short, context=context, seed=3).rows(0) == found.rows(row)
        if context and len(prompt) + limit - 1 <= context:
            assert generate(*gpt, [prompt], short, seed=3).rows(0) == found.rows(row)


def test_settings_lengths_and_equal_models_share_what_is_compiled(gpt):
    net, params = gpt
    generate(net, params, PROMPTS, DecodingConfig(3, temperature=0.5, top_p=0.5))
    before = start._cache_size(), advance._cache_size()
    generate(transformer(GPT), params, [[5], [6, 7], [8] * 30, [9]], DecodingConfig(20, temperature=1.5, top_p=0.7))
    assert (start._cache_size(), advance._cache_size()) == before
    generate(net, params, PROMPTS, DecodingConfig(3, temperature=0.5, top_k=3))
    assert (start._cache_size(), advance._cache_size()) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"num_beams": 2}])
def test_broken_parameters_are_no_tokens(gpt, settings):
    net, params = gpt
    with pytest.raises(InputError, match="the model's logits are NaN"):
        generate(net, jax.tree.map(lambda leaf: leaf * jnp.nan, params), PROMPTS, DecodingConfig(3, **settings))


def test_beams_that_do_not_exist(gpt):
    everything = DecodingConfig(1, num_beams=20, num_return_sequences=17)
    found = generate(*gpt, PROMPTS, everything)
    assert all(sorted(row[0] for row in found.rows(number)) == list(range(17)) for number in range(len(PROMPTS)))
    with pytest.raises(InputError, match="num_return_sequences is 18, and the beam search has found 17"):
        generate(*gpt, PROMPTS, replace(everything, num_return_sequences=18))


SMALL = StackConfig(num_layers=1, num_heads=2, feedforward_width=8)
MODELS = {
    "gpt": GPT,
    "seq2seq": SEQ2SEQ,
    "eight": replace(GPT, decoder=replace(SMALL, positions="learned", max_positions=8)),
    "encoder": replace(SEQ2SEQ, decoder=None),
}


@pytest.mark.parametrize(
    ("name", "prompts", "options", "message"),
    [
        ("gpt", [], {}, "there are no prompts"),
        ("gpt", [[3], []], {}, "prompt 2 of 2 has no tokens"),
        ("gpt", [[3, 17]], {}, "a token has the id 17"),
        ("gpt", [[3]], {"end_id": 40}, "a token has the id 40"),
        ("gpt", [[3]], {"begin_suppress_tokens": (3, 17)}, "a token has the id 17"),
        ("gpt", [[3]], {"bad_words_ids": ((3, 4), (17, 3))}, "a token has the id 17"),
        ("gpt", [[3] * 9], {"context": 8}, "a prompt has 9 tokens; expected at most 8"),
        ("gpt", [[3]], {"context": 1}, "context is 1"),
        ("eight", [[3, 4]], {}, "a text has 9 tokens; the model has 8 learned positions"),
        ("eight", [[3]], {"context": 9}, "the context has 9 tokens; the model has 8 learned positions"),
        ("gpt", [[3]], {"limits": [0]}, "a limit is 0"),
        ("gpt", [[3]], {"limits": [1, 2]}, "there are 2 limits"),
        ("seq2seq", [[3]], {}, "start_id is None"),
        ("seq2seq", [[3]], {"start_id": 1, "context": 8}, "context is 8"),
        ("encoder", [[3]], {"start_id": 1}, "no decoder with a head"),
    ],
)
def test_what_cannot_be_generated(name, prompts, options, message):
    settings = {key: options.pop(key) for key in options.keys() & DecodingConfig.__dataclass_fields__.keys()}
    with pytest.raises(InputError, match=message):
        generate(*make(MODELS[name]), prompts, DecodingConfig(8, **settings), **options)


@pytest.mark.parametrize(
    ("name", "texts", "options", "message"),
    [
        ("gpt", [], {}, "there are no texts"),
        ("gpt", [[3]], {}, "text 1 has no token to score"),
        ("gpt", [[3, 4]], {"sources": [[3]]}, "sources are for encoder-decoders"),
        ("gpt", [[3, 99]], {}, "a token has the id 99"),
        ("seq2seq", [[3]], {"sources": [[]], "start_id": START}, "a source has no tokens"),
    ],
)
def test_what_cannot_be_scored(name, texts, options, message):
    with pytest.raises(InputError, match=message):
        score(*make(MODELS[name]), texts, **options)


def test_beams_cannot_be_streamed(gpt):
    with pytest.raises(InputError, match="a beam search knows its tokens at the end"):
        next(stream(*gpt, [[3]], DecodingConfig(4, num_beams=2)))


def test_a_full_cache(gpt):
    net, params = gpt
    model = net.bind(params)
    cache = model(jnp.array([[3, 4, 5]]), cache=model.new_cache(1, 3)).cache
    with pytest.raises(InputError, match="the cache has 3 slots and 3 are used; expected 1 free"):
        model(jnp.array([[6]]), cache=cache)
    with pytest.raises(InputError, match="there are segments and a cache"):
        model(jnp.array([[6]]), cache=model.new_cache(1, 3), segments=jnp.array([[1]]))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gpt", {"temperature": 1.0}),
        ("gpt", {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True}),
        # What these look back at goes on when the cache grows.
        ("gpt", {"num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 3, "repetition_penalty": 1.2}),
        pytest.param(
            "seq2seq", {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0}, marks=pytest.mark.deep
        ),
    ],
)
def test_a_cache_that_grows(request, kind, settings, monkeypatch):
    call = (*request.getfixturevalue(kind), PROMPTS, DecodingConfig(140, **settings))
    asked = {"end_id": 4, "limits": [140, 100, 12, 60]} if "num_beams" in settings else {}
    asked |= {"start_id": START} if kind == "seq2seq" else {}
    whole, program = generate(*call, **asked), search if "num_beams" in settings else advance
    before = program._cache_size()
    monkeypatch.setattr(generation, "SHORT", 16)
    assert [generation.cache_length(filled, 192) for filled in (1, 32, 33, 64)] == [64, 64, 192, 192]
    found = generate(*call, **asked)
    more = program._cache_size() - before
    assert more == 1 if program is advance else more > 0, "a shorter cache has a program of its own"
    assert found.lengths.max() > 64, "the cache should grow"
    assert (found.tokens == whole.tokens).all()
    assert (found.lengths == whole.lengths).all()
    if found.scores is not None:
        np.testing.assert_allclose(found.scores, whole.scores, rtol=1e-5)
    else:
        assert (np.stack([*stream(*call, **asked)], axis=2) == whole.tokens).all()


@pytest.mark.deep
def test_two_thousand_tokens_are_compiled_once_and_leave_nothing_behind(gpt):
    net, params = gpt
    params, decoding = layers_apart(params), DecodingConfig(2_000, temperature=1.0)
    measured = []
    for count, _ in enumerate(stream(net, params, [[3, 4, 5]], decoding, context=64), 1):
        if count % 200 == 0:
            measured.append((advance._cache_size(), sum(array.nbytes for array in jax.live_arrays())))
    assert count == 2_000
    assert len(set(measured)) == 1
