"""GPT-2."""

from transformers import AutoModelForCausalLM
from transformers.models.gpt2 import GPT2LMHeadModel

from parity_tests.oracles.entry import Entry
from twin.cases import VOCABULARY

ENTRIES = {
    "gpt2": Entry(
        kind=GPT2LMHeadModel,
        auto=AutoModelForCausalLM,
        settings={
            "vocab_size": VOCABULARY,
            "n_positions": 40,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_inner": 80,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        stacks={"decoder": ("h", {"attn": "self_attention"})},
        variants={
            "default feed-forward width": {"n_inner": None},
            "exact GELU": {"activation_function": "gelu"},
            "large epsilon": {"layer_norm_epsilon": 1e-2},
            "unscaled scores": {"scale_attn_weights": False},
            "untied": {"tie_word_embeddings": False},
            "other sizes": {"n_head": 2, "n_layer": 1, "n_positions": 11, "vocab_size": 29},
        },
    )
}
