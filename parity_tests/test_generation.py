"""The oracle of decoding is right by itself: its answers are those of plain loops over the reference."""

from itertools import chain

import numpy as np
import pytest
import torch

from jax_tformer.hub.families import from_huggingface
from parity.gates.measure import FLOAT64_BAR, ParityError
from parity.gates.pair import to_torch
from parity_tests.generation import Hypothesis, drivable, huggingface_generate
from parity_tests.huggingface import Narrowed, Oracle
from torch_ref import reference
from twin.cases import CONFIGS, weights_for

NAMES = ["gpt2", "vaswani-base", "switches-decoder-only", "switches-encoder-decoder"]
PROMPTS = [[7, 3, 50, 3, 9], [12], [5, 44, 0]]
"""Of uneven lengths; 0, the id of padding, is also a token like any other."""
NEW = 12


class Loops:
    """A model's next log-probabilities, one sequence at a time, without padding, and what follows from them."""

    def __init__(self, config):
        self.start = None if config.encoder is None else 1
        self.weights = weights_for(config, 0.2)
        self.model = reference(config.with_dtype("float64")).eval()
        self.model.load_state_dict({name: to_torch(array) for name, array in self.weights.items()})
        self.oracle = drivable(config, self.weights)

    def generate(self, prompts, **settings):
        return huggingface_generate(self.oracle, prompts, start_id=self.start, **settings)

    def logits(self, prompt, new):
        """`[V]`, for the token after `new`."""
        with torch.no_grad():
            if self.start is None:
                return self.model(torch.tensor([[*prompt, *new]])).logits[0, -1]
            return self.model(torch.tensor([prompt]), torch.tensor([[self.start, *new]])).logits[0, -1]

    def greedy(self, prompt, end_id):
        """(new tokens, margins)."""
        new, margins = [], []
        while len(new) < NEW and (not new or new[-1] != end_id):
            logits = self.logits(prompt, new)
            best, second = logits.topk(2).values.tolist()
            new.append(int(logits.argmax()))
            margins.append(best - second)
        return tuple(new), margins

    def total(self, prompt, new):
        """The sum of the log-probabilities of `new`."""
        log_probs = [self.logits(prompt, new[:count]).log_softmax(-1) for count in range(len(new))]
        return sum(float(each[token]) for each, token in zip(log_probs, new, strict=True))


@pytest.fixture(scope="module", params=NAMES)
def loops(request):
    return Loops(CONFIGS[request.param])


def test_greedy_search_of_padded_prompts_is_a_loop_over_each(loops):
    endless = [loops.greedy(prompt, None) for prompt in PROMPTS]
    for end_id in (None, endless[0][0][3]):
        settings = {"end_id": end_id, "max_new_tokens": NEW}
        answers = loops.generate(PROMPTS, **settings)
        for prompt, [answer] in zip(PROMPTS, answers, strict=True):
            tokens, expected = loops.greedy(prompt, end_id)
            assert answer == Hypothesis(tokens)
            np.testing.assert_allclose(answer.margins, expected, rtol=0, atol=FLOAT64_BAR)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6])
def test_scores_are_sums_of_log_probabilities(loops, length_penalty):
    end_id = loops.greedy(PROMPTS[0], None)[0][4]
    settings = {"end_id": end_id, "max_new_tokens": NEW, "num_beams": 4, "length_penalty": length_penalty}
    answers = loops.generate(PROMPTS, num_return_sequences=4, **settings)
    for prompt, beams in zip(PROMPTS, answers, strict=True):
        # Alone, without padding, a prompt has the same answers.
        [alone] = loops.generate([prompt], num_return_sequences=4, **settings)
        assert [beam.tokens for beam in beams] == [beam.tokens for beam in alone]
        assert len({beam.tokens for beam in beams}) == 4
        for beam in beams:
            assert len(beam.tokens) == NEW or beam.tokens[-1] == end_id
            expected = loops.total(prompt, beam.tokens) / len(beam.tokens) ** length_penalty
            assert beam.score == pytest.approx(expected, rel=FLOAT64_BAR)
    lengths = {len(beam.tokens) for beams in answers for beam in beams}
    assert len(lengths) > 1, "some beams must end before others, or the penalty of length is not seen"


def gpt2():
    """(Hugging Face's own model, the reference with its weights)."""
    theirs = Oracle("gpt2")
    weights = theirs.random_weights(0.2, 0)
    theirs.load(weights)
    return theirs.model, drivable(*from_huggingface(theirs.json, weights))


@pytest.mark.parametrize("settings", [{}, {"num_beams": 4, "num_return_sequences": 3}], ids=["greedy", "beams"])
def test_hugging_faces_model_and_the_reference_answer_the_same(settings):
    theirs, driven = gpt2()
    free = {"end_id": None, "max_new_tokens": NEW}
    end_id = huggingface_generate(theirs, PROMPTS, **free)[1][0].tokens[5]
    for changes in ({}, {"use_cache": True}):
        with Narrowed() as islands:
            one = huggingface_generate(theirs, PROMPTS, **free | settings | changes | {"end_id": end_id})
        assert not islands.found, "computed in float32"
        two = huggingface_generate(driven, PROMPTS, **free | settings | {"end_id": end_id})
        for a, b in zip(chain(*one), chain(*two), strict=True):
            assert a.tokens == b.tokens
            assert a.score == (b.score and pytest.approx(b.score, rel=FLOAT64_BAR))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_nothing_is_computed_in_float32(loops, num_beams):
    default = torch.get_default_dtype()
    with Narrowed() as islands:
        loops.generate(PROMPTS, end_id=5, max_new_tokens=4, num_beams=num_beams)
    assert not islands.found
    assert torch.get_default_dtype() == default


def test_what_cannot_be_an_oracle():
    theirs, driven = gpt2()
    with pytest.raises(ParityError, match="float32"):
        huggingface_generate(theirs.float(), PROMPTS, end_id=None, max_new_tokens=2)
    with pytest.raises(ValueError, match="start_id"):
        huggingface_generate(driven, PROMPTS, end_id=None, start_id=1, max_new_tokens=2)
    with pytest.raises(ValueError, match="token in every prompt"):
        huggingface_generate(driven, [[1], []], end_id=None, max_new_tokens=2)
    with pytest.raises(ValueError, match="decoder and a head"):
        drivable(CONFIGS["bert-base"], {})
