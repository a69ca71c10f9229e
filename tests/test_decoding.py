"""Decoding: what `generate` does is what plain Python loops over full forward passes do, in a cache of any length."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jax_tformer import DecodingConfig, transformer
from jax_tformer.decoding import generate as generation
from jax_tformer.decoding.generate import generate, stream
from jax_tformer.decoding.loop import advance, layers_apart, start
from jax_tformer.decoding.score import score
from jax_tformer.model.fast import multiply_by_rows
from tests import small_models
from tests.refusals import refused
from tests.small_models import STACK

GPT = replace(small_models.GPT, vocab_size=17, initializer_std=0.5)
MODELS = {
    "gpt": GPT,
    "seq2seq": replace(GPT, encoder=STACK),
    "eight": replace(GPT, decoder=replace(STACK, positions="learned", max_positions=8)),
    "encoder": replace(GPT, encoder=STACK, decoder=None),
    "small": replace(GPT, vocab_size=5, d_model=8, initializer_std=0.8),
}
START, END = 1, 2
PROMPTS = [[3, 4, 5], [9], [9, 2, 11, 12, 3], [3, 4, 5]]


@cache
def model(name):
    net = transformer(MODELS[name])
    return net, net.init(jax.random.key(0))


@cache
def compiled(name):
    return jax.jit(model(name)[0].apply)


def logits_of(name, sequence, source=None):
    """After each token of the sequence, by a forward pass of it alone."""
    # Padding after the last token changes nothing: the mask is causal.
    window = np.pad(np.int32([sequence]), ((0, 0), (0, 32 - len(sequence))))
    inputs = [window] if source is None else [np.int32([source]), window]
    return np.asarray(compiled(name)(model(name)[1], *inputs), np.float64)[0, : len(sequence)]


def log_probabilities(name, sequence, source=None):
    """Of the tokens but the first, each given those before it."""
    logits = logits_of(name, sequence, source)[:-1]
    return (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))[range(len(logits)), sequence[1:]]


def test_greedy_also_beyond_the_context():
    context, new = 8, 21
    ours = generate(*model("gpt"), PROMPTS, DecodingConfig(new), context=context)
    for row, prompt in enumerate(PROMPTS):
        # Padded to a multiple of a quarter of the context.
        sequence, kept, used = list(prompt), list(prompt), -(-len(prompt) // 2) * 2
        for _ in range(new):
            token = int(logits_of("gpt", kept)[-1].argmax())
            sequence, kept = [*sequence, token], [*kept, token]
            # When the cache is full, the newer half of what was read stays, and the token that was chosen last.
            if used == context:
                kept, used = sequence[-1 - context // 2 :], context // 2
            used += 1
        assert ours.rows(row) == [sequence[len(prompt) :]]
    assert len(np.unique(ours.tokens)) > 3, "a model that says one token only would prove nothing"


def test_rows_end_with_an_end_token_and_all_work_with_the_last_row(monkeypatch):
    sources, length = [[3, 4, 5, 6], [7, 8], [9, 10, 11], [12], [13, 14, 15, 16, 3]], 20
    free = generate(*model("seq2seq"), sources, DecodingConfig(length), start_id=START).tokens[:, 0].tolist()
    ends, done = [*{row[4] for row in free}], []

    def watch(*given, **options):
        state = advance(*given, **options)
        done.append(int(state.history.made))
        return state

    monkeypatch.setattr(generation, "advance", watch)
    call, asked = (*model("seq2seq"), sources, DecodingConfig(length)), {"start_id": START, "end_id": ends}
    found = generate(*call, **asked)
    lengths = [next(place for place, token in enumerate(row, 1) if token in ends) for row in free]
    assert min(lengths) < max(lengths) < length, "rows should end at different places"
    assert done == [max(lengths)]
    assert found.lengths[:, 0].tolist() == lengths
    # Behind its end, a row has the first end token.
    expected = [row[:end] + ends[:1] * (max(lengths) - end) for row, end in zip(free, lengths, strict=True)]
    assert found.tokens[:, 0].tolist() == expected
    assert (np.stack([*stream(*call, **asked)], axis=2) == found.tokens).all()


SAMPLES = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "num_return_sequences": 3}


@pytest.mark.parametrize(
    "settings, limits, context",
    [
        (SAMPLES, [6, 20, 1, 20], 8),
        (SAMPLES, [5, 1, 12, 5, 9], None),
        ({}, [5, 1, 12, 5, 9], None),
        ({"num_beams": 2}, [5, 1, 12, 5, 9], None),
    ],
)
def test_an_answer_depends_on_its_prompt_limit_and_the_seed_alone(settings, limits, context):
    """Not on the rest of the batch, on padding, or on how the parameters are laid out."""
    (net, params), decoding = model("gpt"), DecodingConfig(20, **settings)
    prompts = [*PROMPTS, [7, 3, 8] * 20][: len(limits)]
    found = generate(net, params, prompts, decoding, limits=limits, context=context)
    assert found.lengths[:, 0].tolist() == limits
    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        call = (net, layers_apart(layers_apart(params)), [prompt], replace(decoding, max_new_tokens=limit))
        assert generate(*call, context=context).rows(0) == found.rows(row)
        if context and len(prompt) + limit - 1 <= context:
            assert generate(*call).rows(0) == found.rows(row)


def test_texts_that_slide_remember_what_they_have_forgotten():
    prompts = [[3, 4, 5], [9, 2, 11]]

    def said(**never):
        """For each answer whether it has a token of its prompt, and whether two tokens stand side by side again."""
        decoding = DecodingConfig(40, temperature=1.0, num_return_sequences=4, **never)
        found = generate(*model("gpt"), prompts, decoding, context=8)
        for prompt, rows in zip(prompts, found.tokens.tolist(), strict=True):
            for row in rows:
                yield bool(set(prompt) & set(row)), max(Counter(pairwise([*prompt, *row])).values()) > 1

    assert set(said()) == {(True, True)}
    assert set(said(no_repeat_ngram_size=2, encoder_no_repeat_ngram_size=1)) == {(False, False)}


def test_beams_find_the_most_probable_sequence():
    """With as many beams as there are beginnings, a beam search is exhaustive."""
    prompt, length, alpha = [1, 3], 3, 0.6
    ended = {tokens[: tokens.index(END) + 1] if END in tokens else tokens for tokens in product(range(5), repeat=3)}
    scores = {
        tokens: log_probabilities("small", [*prompt, *tokens])[1:].sum() / ((5 + len(tokens)) / 6) ** alpha
        for tokens in ended
    }
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:4]
    decoding = DecodingConfig(length, num_beams=25, num_return_sequences=4, length_penalty=alpha)
    found = generate(*model("small"), [prompt], decoding, end_id=END)
    assert [tuple(row) for row in found.rows(0)] == best
    assert_allclose(found.scores[0], [scores[tokens] for tokens in best], rtol=1e-5)
    assert any(len(tokens) < length for tokens in best), "a sequence that ends early should be among the best"


@pytest.mark.parametrize(
    "name, sources, start_id",
    [("gpt", None, None), ("gpt", None, START), ("seq2seq", [[3, 4], [5, 6, 7]], START)],
)
def test_score_is_the_log_probability(name, sources, start_id):
    texts = [[3, 4, 5, 6, 7], [9, 2]]
    scored = score(*model(name), texts, sources=sources, start_id=start_id)
    for text, source, found, perplexity in zip(texts, sources or [None] * 2, *scored, strict=True):
        expected = log_probabilities(name, text if start_id is None else [start_id, *text], source)
        assert_allclose(found, expected, atol=1e-5)
        assert perplexity == pytest.approx(np.exp(-np.mean(expected)), rel=1e-5)


def test_settings_lengths_and_equal_models_share_what_is_compiled():
    counts = []
    for length, settings in ((3, {"top_p": 0.5}), (20, {"top_p": 0.7}), (3, {"top_k": 3})):
        prompts = [[5], [6, 7], [8] * length, [9]]
        for ways in ({"temperature": length / 4, **settings}, {"num_beams": 2, "length_penalty": length}):
            generate(transformer(GPT), model("gpt")[1], prompts, DecodingConfig(length, **ways))
        counts.append(sum(program._cache_size() for program in (start, advance)))
    assert counts[0] == counts[1] == counts[2] - 2


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"num_beams": 2}])
def test_broken_parameters_are_no_tokens(settings):
    net, params = model("gpt")
    with refused("the model's logits are NaN"):
        generate(net, jax.tree.map(lambda leaf: leaf * jnp.nan, params), PROMPTS, DecodingConfig(3, **settings))


UNKNOWN = "a token has the id 17"


@pytest.mark.parametrize(
    "name, prompts, options, message",
    [
        ("gpt", [], {}, "there are no prompts"),
        ("gpt", [[3], []], {}, "prompt 2 of 2 has no tokens"),
        ("gpt", [[3, -1]], {}, "a token has the id -1; expected ids from 0 to 16"),
        ("gpt", [[3], [17]], {}, UNKNOWN),
        ("gpt", [[3]], {"end_id": 17}, UNKNOWN),
        ("seq2seq", [[3]], {"start_id": 17}, UNKNOWN),
        ("gpt", [[3]], {"decoding": DecodingConfig(8, begin_suppress_tokens=(3, 17))}, UNKNOWN),
        ("gpt", [[3]], {"decoding": DecodingConfig(8, bad_words_ids=((3, 4), (17, 3)))}, UNKNOWN),
        ("gpt", [[3] * 9], {"context": 8}, "a prompt has 9 tokens; expected at most 8"),
        ("gpt", [[3]], {"context": 1}, "context is 1"),
        ("eight", [[3, 4]], {}, "a text has 9 tokens; the model has 8 positions"),
        ("eight", [[3]], {"context": 9}, "the context has 9 tokens; the model has 8 positions"),
        ("gpt", [[3]], {"limits": [0]}, "a limit is 0"),
        ("gpt", [[3]], {"limits": [1, 2]}, "there are 2 limits"),
        ("seq2seq", [[3]], {}, "start_id is None"),
        ("seq2seq", [[3]], {"start_id": 1, "context": 8}, "context is 8"),
        ("encoder", [[3]], {"start_id": 1}, "no decoder with a head"),
    ],
)
def test_what_cannot_be_generated(name, prompts, options, message):
    for ask in (generate, stream):
        with refused(message):
            list(ask(*model(name), prompts, **{"decoding": DecodingConfig(8)} | options))


def test_a_beam_search_is_no_stream():
    with refused("a beam search knows its tokens at the end"):
        list(stream(*model("gpt"), PROMPTS, DecodingConfig(8, num_beams=2)))


@pytest.mark.parametrize(
    "name, texts, options, message",
    [
        ("gpt", [], {}, "there are no texts"),
        ("gpt", [[3]], {}, "text 1 has no token to score"),
        ("gpt", [[3, 4]], {"sources": [[3]]}, "sources are for encoder-decoders"),
        ("gpt", [[3, 17]], {}, UNKNOWN),
        ("gpt", [[3, 4]], {"start_id": 17}, UNKNOWN),
        ("seq2seq", [[3]], {"sources": [[17]], "start_id": START}, UNKNOWN),
        ("seq2seq", [[3]], {"sources": [[]], "start_id": START}, "a source has no tokens"),
    ],
)
def test_what_cannot_be_scored(name, texts, options, message):
    with refused(message):
        score(*model(name), texts, **options)


def test_a_full_cache_segments_and_layers_apart_are_refused():
    net, params = model("gpt")
    bound, apart, token = net.bind(params), layers_apart(params), jnp.array([[6]])
    full = bound(token, cache=bound.new_cache(1, 1)).cache
    for message, call in (
        ("the cache has 1 slots and 1 are used; expected 1 free", lambda: bound(token, cache=full)),
        ("there are segments and a cache", lambda: bound(token, cache=bound.new_cache(1, 3), segments=token)),
        ("the parameters have layers apart, for generate and stream", lambda: net.apply(apart, token)),
        ("the parameters have layers apart, for generate and stream", lambda: score(net, apart, [[3, 4]])),
    ):
        with refused(message):
            call()


UNEVEN = {"end_id": 4, "limits": [140, 100, 12, 60]}


@pytest.mark.parametrize(
    "name, settings, asked",
    [
        ("gpt", {"temperature": 1.0, "num_return_sequences": 2}, {}),
        # What these look back at goes on when the cache grows.
        (
            "gpt",
            {"num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 3, "repetition_penalty": 1.2},
            UNEVEN,
        ),
        pytest.param(
            "seq2seq",
            {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0},
            UNEVEN | {"start_id": START},
            marks=pytest.mark.deep,
        ),
    ],
)
def test_a_cache_that_grows_and_a_stream_say_the_same(name, settings, asked, monkeypatch):
    call = (*model(name), PROMPTS, DecodingConfig(140, **settings))
    whole = generate(*call, **asked)
    before = advance._cache_size()
    monkeypatch.setattr(generation, "SHORT", 16)
    found = generate(*call, **asked)
    assert advance._cache_size() > before, "a shorter cache has a program of its own"
    assert found.lengths.max() > 64, "the cache should grow"
    assert (found.tokens == whole.tokens).all()
    assert (found.lengths == whole.lengths).all()
    if found.scores is not None:
        assert_allclose(found.scores, whole.scores, rtol=1e-5)
    else:  # tests/test_generate.py has streams that slide
        assert (np.stack([*stream(*call, **asked)], axis=2) == whole.tokens).all()


@pytest.mark.deep
def test_two_thousand_tokens_are_compiled_once_and_leave_nothing_behind():
    net, params = model("gpt")
    params, decoding = layers_apart(params), DecodingConfig(2_000, temperature=1.0)
    measured = []
    for count, _ in enumerate(stream(net, params, [[3, 4, 5]], decoding, context=64), 1):
        if count % 200 == 0:
            measured.append((advance._cache_size(), sum(array.nbytes for array in jax.live_arrays())))
    assert count == 2_000
    assert len(set(measured)) == 1


def test_products_of_rows_that_are_summed_in_a_wider_type():
    """In five parts; gate 8 has other numbers of rows and parts, and asks for the same numbers."""
    x, matrix = (np.arange(rows * 16).reshape(rows, 16) % 11 for rows in (3, 35))
    found = multiply_by_rows(jnp.array(x, jnp.bfloat16), jnp.array(matrix, jnp.bfloat16), jnp.float32)
    assert found.dtype == "float32"
    assert (found == x @ matrix.T).all()
