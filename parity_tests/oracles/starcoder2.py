"""StarCoder2."""

from transformers import AutoModelForCausalLM
from transformers.models.starcoder2 import Starcoder2ForCausalLM

from parity_tests.oracles.decoders import SCALINGS, SETTINGS, STACKS
from parity_tests.oracles.entry import Entry

ENTRIES = {
    "starcoder2": Entry(
        kind=Starcoder2ForCausalLM,
        auto=AutoModelForCausalLM,
        settings=SETTINGS | {"sliding_window": 4},
        stacks=STACKS,
        variants={
            "no window": {"sliding_window": None},
            "no biases, untied": {"use_bias": False, "tie_word_embeddings": False},
            "wide heads, scaled": {"head_dim": 12, **SCALINGS["scaled linearly"]},
            "another activation and epsilon": {"hidden_act": "gelu", "norm_epsilon": 1e-2},
        },
        further=True,
        islands=True,
        no_longer_written=frozenset({"head_dim"}),
    )
}
