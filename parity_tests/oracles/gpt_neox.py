"""GPT-NeoX and Pythia."""

from transformers import AutoModelForCausalLM
from transformers.models.gpt_neox import GPTNeoXForCausalLM

from parity_tests.oracles.decoders import IDS
from parity_tests.oracles.entry import Entry
from twin.cases import VOCABULARY

ENTRIES = {
    "gpt_neox": Entry(
        kind=GPTNeoXForCausalLM,
        auto=AutoModelForCausalLM,
        settings={
            **IDS,
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "max_position_embeddings": 40,
        },
        stacks={"decoder": ("layers", {"attention": "self_attention"})},
        variants={
            "one after the other": {"use_parallel_residual": False},
            "no biases of attention, approximate GELU": {"attention_bias": False, "hidden_act": "gelu_new"},
            "all columns turn": {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 1.0}},
            "half turns, scaled, tied": {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
                "tie_word_embeddings": True,
                "layer_norm_eps": 1e-2,
            },
        },
        further=True,
        islands=True,
    )
}
