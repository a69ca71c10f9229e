"""Gate 8 for every Hugging Face model with a decoder: the tokens of its own `generate`, which keeps a cache."""

from functools import lru_cache

import pytest

from jax_tformer.hub.families import FAMILIES, Layout, from_huggingface
from jax_tformer.hub.names import read
from parity_tests.generation import huggingface_generate
from parity_tests.huggingface import Oracle
from parity_tests.oracles import ENTRIES
from parity_tests.test_decoding import START, model_of, room, searched, uneven_prompts

DECODERS = [
    name
    for name, entry in ENTRIES.items()
    if FAMILIES[entry.kind.__name__].template.decoder is not None and entry.kind.can_generate()
]
UNLIKE = ["gemma3", "gpt_neox", "llama", "mistral", "t5"]
"""Those whose steps no other test of gate 8 takes: windows, kinds of layers, parallel branches, shared keys, relative
positions."""


def pytest_generate_tests(metafunc):
    metafunc.parametrize("name", UNLIKE if metafunc.config.getoption("--deep") is None else DECODERS)


@lru_cache(maxsize=1)
def sides(name):
    """Ours and theirs, with sharp attention and small token tables: else answers are one token over and over."""
    oracle = Oracle(name)
    raw = oracle.random_weights(0.2, 0)
    weights = from_huggingface(oracle.json, raw)[1]
    factors = {"query.weight": 4.0, "key.weight": 4.0, "tokens.weight": 0.2}
    sharp = {
        key: array * next((factor for end, factor in factors.items() if key.endswith(end)), 1.0)
        for key, array in weights.items()
    }
    rows = FAMILIES[ENTRIES[name].kind.__name__].rows(oracle.config)
    # By the names of the model, which its files may not have.
    oracle.load({key: read(view) for key, view in Layout(rows, oracle.config).theirs(sharp, raw).items()})
    return *model_of(oracle.config, sharp), oracle.model


@pytest.mark.deep
def test_tokens_of_hugging_face(name, record):
    """Greedy and beams, from prompts (or sources) of uneven lengths, with an end token that comes.

    With --deep, of all models that can generate.
    """
    net, params, model = sides(name)
    prompts = uneven_prompts(net.config, rows=6)
    options = {"use_cache": True, **ENTRIES[name].generation}
    options |= {} if net.config.encoder is None else {"start_id": START}
    plain = {"max_new_tokens": room(net.config), "num_beams": 1, **options}
    free = huggingface_generate(model, prompts, end_id=None, **plain)
    assert len({answer.tokens for [answer] in free}) == len(prompts)
    for figure in searched(net, params, model, prompts, free, **options):
        record(f"huggingface {name}", figure)
