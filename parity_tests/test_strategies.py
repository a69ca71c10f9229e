"""Gate 8, for what is drawn: from the same logits, the same logits after penalties and filters as Hugging Face's.

Gate 10, for successive tokens: each is drawn by itself, with the reference's probabilities.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_tformer.config.experiment import DecodingConfig
from jax_tformer.decoding.generate import generate, pad_rows
from jax_tformer.decoding.sampling import History, make_rules, process_logits
from parity.gates.measure import compared, worst
from parity_tests.draws import judged, largest
from parity_tests.generation import Float64, as_tuples, drivable
from parity_tests.test_decoding import CACHED, TOKENS, model_of
from twin.cases import CONFIGS, VOCABULARY, weights_for

PROMPT = [3, 4, 5]
# The first three show the faults of library_faults.CHOICES.
SETTINGS = [
    {"min_new_tokens": 4, "eos_token_id": 3},
    {"forced_bos_token_id": 7, "begin_suppress_tokens": [3, 5, 60]},
    {"no_repeat_ngram_size": 1, "repetition_penalty": 1.2},
    {"no_repeat_ngram_size": 2, "temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"repetition_penalty": 0.8, "temperature": 1.5},
    {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[7], *([id, 7 * id % 61] for id in range(61)), *([id, 3, 60 - id] for id in range(61))]},
    {"begin_suppress_tokens": [3, 5, 60]},
]
FORBIDDING = (
    "top_k top_p min_p no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids begin_suppress_tokens "
    "min_new_tokens"
)


def processed(settings):
    """Step by step, with whatever fault is planted: which tokens are forbidden, and the logits of the others."""
    model = drivable(CONFIGS["gpt2"], weights_for(CONFIGS["gpt2"], 0.2))
    # From few tokens, so that some stand side by side again. transformers forces a token behind a single one only.
    length = 1 if "forced_bos_token_id" in settings else 12
    prompts = torch.randint(1, 7, (6, length), generator=torch.Generator().manual_seed(0))
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
    asked = {"temperature": 1.0} | {name: as_tuples(setting) for name, setting in settings.items()}
    ends = [asked.pop("eos_token_id", -1)]
    rules, limits, banned = make_rules(DecodingConfig(**asked), ends), np.full(len(prompts), 10), 0
    for step, (raw, scores) in enumerate(zip(answer.logits, answer.scores, strict=True)):
        said = answer.sequences[:, : length + step].numpy()
        # Padding, on our side alone, has the id of a token that may be said.
        tokens, given = (pad_rows(text.tolist(), 25, side="left") for text in (said, prompts))
        history = History.of(tokens, 3, given, limits)._replace(made=jnp.asarray(step))
        found = process_logits(jnp.asarray(raw.numpy()), rules, history)
        # Up to a constant a row, which the softmax takes out.
        ours, theirs = np.asarray(jax.nn.log_softmax(found)), scores.log_softmax(-1).numpy()
        missing, forbidden = np.isneginf(ours), np.isneginf(theirs)
        banned += forbidden.sum()
        yield worst(TOKENS, {"forbidden tokens": float((missing != forbidden).sum())}, 0.0)
        sides = ({"processed logits": np.where(missing | forbidden, 0, side)} for side in (ours, theirs))
        yield compared(CACHED, *sides)
    assert bool(banned) == bool(settings.keys() & FORBIDDING.split())


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings)[:120])
def test_processed_logits(settings, record):
    for figure in processed(settings):
        record("huggingface gpt2", figure)


def expected_pairs():
    """`[61, 61]`: the reference's p(a) p(b given a) of the two tokens after a prompt."""
    model = drivable(CONFIGS["gpt2"], weights_for(CONFIGS["gpt2"], 0.2)).reference
    texts = torch.tensor([[*PROMPT, token] for token in range(VOCABULARY)])
    with torch.no_grad():
        first, second = model(texts).logits[:, -2:].softmax(-1).unbind(1)
    return (first[0, :, None] * second).numpy()


def successive(expected):
    """3,000 draws of two tokens, with whatever fault is planted; counted in 4 x 4 groups of tokens by their ids."""
    net, params = model_of(CONFIGS["gpt2"])
    decoding = DecodingConfig(2, temperature=1.0, num_return_sequences=3000)
    [drawn] = generate(net, params, [PROMPT], decoding).tokens
    counts = np.zeros((4, 4))
    np.add.at(counts, tuple((drawn // 16).T), 1)
    chances = np.add.reduceat(np.add.reduceat(expected, range(0, VOCABULARY, 16), 0), range(0, VOCABULARY, 16), 1)
    assert chances.min() * len(drawn) > 20, "counts should be nearly normal"
    z = (counts - len(drawn) * chances) / np.sqrt(len(drawn) * chances * (1 - chances))
    return judged(largest({f"tokens of groups {a} and {b}": float(z[a, b]) for a, b in np.ndindex(4, 4)}))


def test_successive_tokens(record):
    """Each of them is drawn with a random number of its own."""
    record("gpt2", successive(expected_pairs()))
