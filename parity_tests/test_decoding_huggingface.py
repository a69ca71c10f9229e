"""Gate 8 for every Hugging Face model with a decoder: the tokens of its own `generate`, which keeps a cache."""

import pytest

from jax_tformer.hub.families import FAMILIES
from parity_tests.generation import huggingface_generate
from parity_tests.oracles import ENTRIES
from parity_tests.test_decoding import checkpoint, room, searched, uneven_prompts

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


@pytest.mark.deep
def test_tokens_of_hugging_face(name, record):
    """Greedy and beams, from prompts (or sources) of uneven lengths, with an end token that comes.

    With --deep, of all models that can generate.
    """
    *given, options = checkpoint(name)
    net, _, model = given
    prompts = uneven_prompts(net.config, rows=6)
    plain = {"max_new_tokens": room(net.config), "num_beams": 1, **options}
    free = huggingface_generate(model, prompts, end_id=None, **plain)
    assert len({answer.tokens for [answer] in free}) == len(prompts)
    for figure in searched(*given, prompts, free, **options):
        record(f"huggingface {name}", figure)
