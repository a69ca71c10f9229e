"""OPT."""

from transformers import AutoModelForCausalLM
from transformers.models.opt import OPTForCausalLM

from parity_tests.oracles.decoders import IDS
from parity_tests.oracles.entry import Entry
from twin.cases import VOCABULARY

ENTRIES = {
    "opt": Entry(
        kind=OPTForCausalLM,
        auto=AutoModelForCausalLM,
        settings={
            **IDS,
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 40,
        },
        stacks={"decoder": ("decoder.layers", {"self_attn": "self_attention"})},
        variants={
            "post-norm": {"do_layer_norm_before": False},
            "no final norm": {"_remove_final_layer_norm": True},
            "no biases": {"enable_bias": False, "activation_function": "gelu"},
            "untied": {"tie_word_embeddings": False},
        },
        further=True,
        islands=True,
    )
}
