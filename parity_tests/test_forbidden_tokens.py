"""Gate 8 where words of several tokens, first tokens and n-grams of the prompt are forbidden: Hugging Face's tokens."""

import numpy as np
import pytest

from jax_tformer.decoding.generate import generate
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.hub.families import from_huggingface
from parity_tests.huggingface import Oracle
from parity_tests.test_decoding import BEAMS, END, NEW, START, alone, compared_beams, differing, model_of
from parity_tests.test_decoding_bart import ENDS, IDS, PLAIN

LIKED = {"gpt2": [13, 38, 43, 45, 53, 55], "bart": [24, 30, 39]}
"""Tokens that the model likes to say, so that its answers repeat some of a prompt of these."""


def prompts_of(tokens):
    """Of 1 to 12 tokens, so that their padding differs."""
    rng = np.random.default_rng(1)
    return [rng.choice(tokens, length).tolist() for length in (12, 1, 9, 12, 6)]


def pieces(answers):
    """From the middle of every answer that has four tokens: two or three of them."""
    said = [list(answer.tokens) for [answer] in answers if len(answer.tokens) >= 4]
    return [tokens[len(tokens) // 2 - 1 :][: 2 + row % 2] for row, tokens in enumerate(said)]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("bart", marks=pytest.mark.deep)])
def test_what_is_forbidden_does_not_come(name, record):
    """Each of the three settings changes the answers of transformers, alone and beside the others."""
    translates = name == "bart"
    oracle = Oracle(name, **(IDS if translates else {}))
    # Sharp attention: else random answers are one token over and over.
    sharp = ("q_proj.weight", "k_proj.weight")
    raw = {path: array * (4 if path.endswith(sharp) else 1) for path, array in oracle.random_weights(0.2, 0).items()}
    oracle.load(raw)
    config, weights = from_huggingface(oracle.json, raw)
    (net, params), model, prompts = model_of(config, weights), oracle.model, prompts_of(LIKED[name])
    end = ENDS[0] if translates else END
    options = {"end_id": end, "start_id": START} if translates else {"end_id": end}
    plain = {**options, **(PLAIN if translates else {"use_cache": True}), "max_new_tokens": NEW}

    free = alone(model, prompts, **plain)
    begins = sorted({answer.tokens[0] for [answer] in free[::2]})
    never = {"begin_suppress_tokens": begins, "encoder_no_repeat_ngram_size": 2}
    # Words that would come, of two and three tokens. An end token is no bad word.
    words = [*pieces(free), *pieces(alone(model, prompts, **plain | never))]
    never["bad_words_ids"] = [*words, [end]]
    ours = {"bad_words_ids": tuple(map(tuple, never["bad_words_ids"])), "begin_suppress_tokens": tuple(begins)}
    ours["encoder_no_repeat_ngram_size"] = 2

    theirs = alone(model, prompts, **plain | never)
    assert {len(word) for word in words} == {2, 3}
    assert any(answer.tokens[-1] == end for [answer] in theirs)
    for setting in never:
        others = {name: value for name, value in never.items() if name != setting}
        assert alone(model, prompts, **plain | {setting: never[setting]}) != free, setting
        assert alone(model, prompts, **plain | others) != theirs, setting
    found = generate(net, params, prompts, DecodingConfig(NEW, **ours), **options)
    record(f"huggingface {name}", differing(found, theirs))

    beams = {**BEAMS[1], "renormalize_logits": True}
    theirs = alone(model, prompts, **plain | beams | never)
    assert theirs != alone(model, prompts, **plain | beams)
    decoding = DecodingConfig(NEW, length_penalty_form="power", **beams, **ours)
    for figure in compared_beams(generate(net, params, prompts, decoding, **options), theirs):
        record(f"huggingface {name}", figure)
