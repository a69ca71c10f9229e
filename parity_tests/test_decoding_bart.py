"""Gate 8 on a real encoder-decoder: every token of BART's own `generate`, which keeps a cache of both attentions."""

from itertools import chain
from typing import Any

import jax
import pytest
from transformers import PreTrainedModel

from jax_tformer.decoding.generate import generate
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.functional import AnyTransformer, Params
from jax_tformer.hub.families import from_huggingface
from parity_tests.generation import greedy_margins, huggingface_generate
from parity_tests.huggingface import Oracle
from parity_tests.test_decoding import BEAMS, NEW, START, beams_of, differing, model_of, uneven_prompts

Sides = tuple[AnyTransformer, Params, PreTrainedModel]

IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
"""Those that a BART has by default: every call has to say otherwise."""
ENDS = (24, 39, None)
"""End tokens that about half of the answers come to, and none."""
PLAIN: dict[str, Any] = {
    "use_cache": True,
    # What the config of a BART may ask of `generate`, and these calls do not.
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
}


@pytest.fixture(scope="module")
def bart():
    with jax.enable_x64(True):
        oracle = Oracle("bart", **IDS)
        # Sharp attention: else random answers are one token over and over.
        raw = {
            name: array * (4 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1)
            for name, array in oracle.random_weights(0.2, 0).items()
        }
        oracle.load(raw)
        config, weights = from_huggingface(oracle.json, raw)
        return *model_of(config, weights), oracle.model


@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("end_id", ENDS)
def test_greedy_tokens(end_id, penalty, bart, record):
    net, params, model = bart
    sources = uneven_prompts(net.config, rows=8)
    options: dict[str, Any] = {"end_id": end_id, "start_id": START}
    settings = PLAIN | {"num_beams": 1, "max_new_tokens": NEW, "repetition_penalty": penalty}
    theirs = huggingface_generate(model, sources, **options, **settings)
    margins = greedy_margins(model, sources, **options, **settings)
    ours = generate(net, params, sources, DecodingConfig(NEW, repetition_penalty=penalty), **options)
    record("huggingface bart", differing(ours, theirs, margins))


@pytest.mark.deep
@pytest.mark.parametrize("end_id", ENDS)
@pytest.mark.parametrize("settings", BEAMS, ids=lambda settings: f"{settings['num_beams']} beams")
def test_beams(settings, end_id, bart, record):
    net, params, model = bart
    sources = uneven_prompts(net.config, rows=6, seed=7)
    for figure in beams_of(net, params, model, sources, settings, end_id=end_id, start_id=START, **PLAIN):
        record("huggingface bart", figure)


@pytest.mark.deep
def test_ngrams_that_may_not_repeat(bart, record):
    """As in BART's own summaries, but bigrams: what counts is the start token and what was said, and not the source."""
    net, params, model = bart
    sources, options = uneven_prompts(net.config, rows=6), {"end_id": ENDS[0], "start_id": START}
    settings = PLAIN | {"num_beams": 1, "max_new_tokens": NEW, "no_repeat_ngram_size": 2}
    theirs = huggingface_generate(model, sources, **options, **settings)
    assert theirs != huggingface_generate(model, sources, **options, **settings | {"no_repeat_ngram_size": 0})
    margins = greedy_margins(model, sources, **options, **settings)
    ours = generate(net, params, sources, DecodingConfig(NEW, no_repeat_ngram_size=2), **options)
    record("huggingface bart", differing(ours, theirs, margins))
    beams = {**BEAMS[2], "no_repeat_ngram_size": 2}
    others = {name: value for name, value in PLAIN.items() if name not in beams}
    for figure in beams_of(net, params, model, sources, beams, **options, **others):
        record("huggingface bart", figure)


def test_the_answers_are_worth_comparing(bart):
    """They differ, use many tokens, and some of them end."""
    net, _, model = bart
    options: dict[str, Any] = {"start_id": START, "max_new_tokens": NEW} | PLAIN
    sources = uneven_prompts(net.config, rows=8)
    free = [answer.tokens for [answer] in huggingface_generate(model, sources, end_id=None, **options)]
    assert len(set(free)) == 8
    assert len(set(chain(*free))) > 20
    ended = [answer.tokens for [answer] in huggingface_generate(model, sources, end_id=ENDS[0], **options)]
    assert len({len(tokens) for tokens in ended}) >= 4


def test_hugging_face_decodes_from_its_cache(bart):
    _, _, model = bart
    seen: list[int] = []
    decoder = model.get_submodule("model.decoder.layers.0")

    def note(block, inputs):
        seen.append(inputs[0].shape[1])

    handle = decoder.register_forward_pre_hook(note)
    try:
        huggingface_generate(model, [[5, 6, 7], [8]], end_id=None, start_id=START, max_new_tokens=6, **PLAIN)
    finally:
        handle.remove()
    assert seen == [1] * 6
