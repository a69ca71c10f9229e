"""Llama 2 and 3."""

from transformers import AutoModelForCausalLM
from transformers.models.llama import LlamaForCausalLM

from parity_tests.oracles.decoders import LLAMA3, SCALINGS, SETTINGS, STACKS
from parity_tests.oracles.entry import Entry

ENTRIES = {
    "llama": Entry(
        kind=LlamaForCausalLM,
        auto=AutoModelForCausalLM,
        settings=SETTINGS,
        stacks=STACKS,
        variants={
            **SCALINGS,
            "scaled as of now": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}},
            "all heads have keys": {"num_key_value_heads": 4},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "tied, wide heads": {"tie_word_embeddings": True, "head_dim": 12},
            "another base, activation and epsilon": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
                "hidden_act": "gelu",
                "rms_norm_eps": 1e-2,
            },
        },
        islands=True,
    )
}
