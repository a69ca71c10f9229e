"""Gate 8, for what is drawn: from the same logits, the same logits after penalties and filters as Hugging Face's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_tformer.decoding.past import Past
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.decoding.strategies import Place, process, rules_of
from parity.measure import Measured, compared
from parity_tests.cases import CONFIGS, weights_for
from parity_tests.generation import Float64, drivable
from parity_tests.test_decoding import CACHED

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.8, "temperature": 1.5},
    {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    {"no_repeat_ngram_size": 1, "repetition_penalty": 1.2},
    {"no_repeat_ngram_size": 2, "temperature": 0.7},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[7], *([id, 7 * id % 61] for id in range(61)), *([id, 3, 60 - id] for id in range(61))]},
    {"begin_suppress_tokens": [3, 5, 60]},
]
FORBIDDING = {"top_k", "top_p", "min_p", "no_repeat_ngram_size"} | {
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "begin_suppress_tokens",
}


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings)[:120])
def test_processed_logits(settings: dict[str, Any], record: Callable[[str, Measured], None]) -> None:
    model = drivable(CONFIGS["gpt2"], weights_for(CONFIGS["gpt2"], 0.2))
    # From few tokens, so that some stand side by side again.
    prompts = torch.randint(0, 6, (6, 12), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    with Float64():
        answer = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=10,
            do_sample=True,
            pad_token_id=0,
            use_cache=False,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            # Its own default is top_k = 50.
            **{"top_k": 0} | settings,
        )
    tuples = {name: tuple(settings[name]) for name in settings.keys() & {"begin_suppress_tokens"}}
    tuples |= {name: tuple(map(tuple, settings[name])) for name in settings.keys() & {"bad_words_ids"}}
    decoding, rows = DecodingConfig(**{"temperature": 1.0} | settings | tuples), np.arange(len(prompts))[:, None]
    limits, ends, forbidden = jnp.full(len(prompts), 10), jnp.array([-1]), 0
    for step, (raw, processed) in enumerate(zip(answer.logits, answer.scores, strict=True)):
        seen = np.zeros(raw.shape, bool)
        said = answer.sequences[:, : prompts.shape[1] + step].numpy()
        seen[rows, said] = True
        given = jnp.asarray(prompts.numpy())
        past = Past.of(jnp.asarray(said), jnp.ones(said.shape, bool), 3, (given, jnp.ones(given.shape, bool)))
        place = Place(jnp.asarray(step), limits, ends, past)
        ours = process(jnp.asarray(raw.numpy()), rules_of(decoding), jnp.asarray(seen), place)
        # Up to a constant a row, which the softmax takes out.
        ours, theirs = np.asarray(jax.nn.log_softmax(ours)), processed.log_softmax(-1).numpy()
        assert (np.isneginf(ours) == np.isneginf(theirs)).all()
        kept = np.where(np.isneginf(theirs), 0, 1)
        forbidden += kept.size - kept.sum()
        figure = compared(
            CACHED, {"processed logits": np.where(kept, ours, 0)}, {"processed logits": np.where(kept, theirs, 0)}
        )
        record("huggingface gpt2", figure)
    assert bool(forbidden) == bool(settings.keys() & FORBIDDING)
