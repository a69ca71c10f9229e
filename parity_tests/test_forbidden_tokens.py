"""Gate 8 where words of several tokens, first tokens and n-grams of the prompt are forbidden: Hugging Face's tokens."""

import numpy as np
import pytest

from jax_tformer.config.experiment import DecodingConfig
from jax_tformer.decoding.generate import generate
from parity_tests.depth import deep
from parity_tests.generation import as_tuples, huggingface_generate
from parity_tests.test_decoding import BEAMS, ENDS, NEW, checkpoint, compared_beams, differing

LIKED = {"gpt2": [13, 38, 43, 45, 53, 55], "bart": [24, 30, 39]}
"""Tokens that the model likes to say, so that its answers repeat some of a prompt of these."""


def alone(model, prompts, **settings):
    """Theirs one by one: in a batch, padding counts among the tokens that may not repeat."""
    return [huggingface_generate(model, [prompt], **settings)[0] for prompt in prompts]


def prompts_of(tokens):
    """Of 1 to 12 tokens, so that their padding differs."""
    rng = np.random.default_rng(1)
    return [rng.choice(tokens, length).tolist() for length in (12, 1, 9, 12, 6)]


def pieces(answers):
    """From the middle of every answer that has four tokens: two or three of them."""
    said = [list(answer.tokens) for [answer] in answers if len(answer.tokens) >= 4]
    return [tokens[len(tokens) // 2 - 1 :][: 2 + row % 2] for row, tokens in enumerate(said)]


@pytest.mark.parametrize("name", ["gpt2", deep("bart")])
def test_what_is_forbidden_does_not_come(name, record):
    """Each setting changes the answers of transformers, beside the others."""
    net, params, model, options = checkpoint(name)
    prompts, end = prompts_of(LIKED[name]), ENDS[name][0]
    plain = {**options, "end_id": end, "max_new_tokens": NEW}
    free = alone(model, prompts, **plain)
    begins = sorted({answer.tokens[0] for [answer] in free[::2]})
    never = {"begin_suppress_tokens": begins, "encoder_no_repeat_ngram_size": 2, "no_repeat_ngram_size": 3}
    # Words that would come, of two and three tokens. An end token is no bad word.
    words = [*pieces(free), *pieces(alone(model, prompts, **plain | never))]
    assert {len(word) for word in words} == {2, 3}
    never["bad_words_ids"] = [*words, [end]]
    ours = {setting: as_tuples(value) for setting, value in never.items()}
    beams = {**BEAMS[1], "renormalize_logits": True, "repetition_penalty": 1.2}
    for search in ({}, beams):
        theirs = alone(model, prompts, **plain | search | never)
        for less in never.keys() | search.keys() & {"renormalize_logits"}:
            fewer = {name: value for name, value in (plain | search | never).items() if name != less}
            assert alone(model, prompts, **fewer) != theirs, less
        decoding = DecodingConfig(NEW, length_penalty_form="power", **search, **ours)
        found = generate(net, params, prompts, decoding, end_id=end, start_id=options.get("start_id"))
        for figure in compared_beams(found, theirs) if search else [differing(found, theirs)]:
            record(f"huggingface {name}", figure)
