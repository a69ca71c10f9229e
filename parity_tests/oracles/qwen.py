"""Qwen2 and Qwen3."""

from transformers import AutoModelForCausalLM
from transformers.models.qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3ForCausalLM

from parity_tests.oracles.decoders import SCALINGS, SETTINGS, STACKS
from parity_tests.oracles.entry import Entry

WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
TURNS = ["sliding_attention", "full_attention", "sliding_attention"]
ENTRIES = {
    "qwen2": Entry(
        kind=Qwen2ForCausalLM,
        auto=AutoModelForCausalLM,
        settings=SETTINGS,
        stacks=STACKS,
        variants={
            "window above the first layer": WINDOW,
            "window in all layers": WINDOW | {"max_window_layers": 0},
            "window in every other layer": WINDOW | {"layer_types": TURNS},
            "tied, scaled": {"tie_word_embeddings": True, **SCALINGS["scaled linearly"]},
            "wide heads": {"head_dim": 12},
        },
        further=True,
        islands=True,
        no_longer_written=frozenset({"head_dim"}),
    ),
    "qwen3": Entry(
        kind=Qwen3ForCausalLM,
        auto=AutoModelForCausalLM,
        settings=SETTINGS | {"head_dim": 12},
        stacks=STACKS,
        variants={
            "window above the first layer": WINDOW,
            "tied, biases, narrow heads": {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 8},
            "scaled as in Llama 3": SCALINGS["scaled as in Llama 3"],
        },
        further=True,
        islands=True,
    ),
}
