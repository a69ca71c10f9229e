"""Gemma 1 to 3."""

from transformers import AutoModelForCausalLM
from transformers.models.gemma import GemmaForCausalLM
from transformers.models.gemma2 import Gemma2ForCausalLM
from transformers.models.gemma3 import Gemma3ForCausalLM

from parity_tests.oracles.decoders import SCALINGS, SETTINGS, STACKS
from parity_tests.oracles.entry import Entry

_SETTINGS = SETTINGS | {"head_dim": 12, "sliding_window": 4, "query_pre_attn_scalar": 20}
_FULL, _WINDOW = "full_attention", "sliding_attention"
# Older versions, and some classes, have null for false.
_UNUSED = frozenset({"use_bidirectional_attention"})
ENTRIES = {
    "gemma": Entry(
        kind=GemmaForCausalLM,
        auto=AutoModelForCausalLM,
        settings=SETTINGS | {"head_dim": 12},
        stacks=STACKS,
        variants={
            "untied, biases": {"tie_word_embeddings": False, "attention_bias": True},
            "all heads have keys, scaled": {"num_key_value_heads": 4, **SCALINGS["scaled linearly"]},
            "another activation and epsilon": {"hidden_act": "silu", "rms_norm_eps": 1e-2},
        },
        further=True,
        islands=True,
        no_longer_written=_UNUSED,
    ),
    "gemma2": Entry(
        kind=Gemma2ForCausalLM,
        auto=AutoModelForCausalLM,
        # Caps that random logits and scores reach.
        settings=_SETTINGS | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5},
        stacks=STACKS,
        variants={
            "no caps": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
            "untied, biases": {"tie_word_embeddings": False, "attention_bias": True},
            "other layers, scaled": {"layer_types": [_FULL, _WINDOW, _WINDOW], **SCALINGS["scaled as in Llama 3"]},
            "no window, another scale": {"layer_types": [_FULL] * 3, "query_pre_attn_scalar": 5},
        },
        further=True,
        islands=True,
        no_longer_written=_UNUSED,
    ),
    "gemma3": Entry(
        kind=Gemma3ForCausalLM,
        auto=AutoModelForCausalLM,
        settings=_SETTINGS | {"layer_types": [_WINDOW, _WINDOW, _FULL]},
        stacks=STACKS,
        variants={
            "logits capped, scaled": {
                "final_logit_softcapping": 2.0,
                "rope_parameters": {
                    _FULL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                    _WINDOW: {"rope_type": "default", "rope_theta": 30.0},
                },
            },
            "every second layer": {"layer_types": [_WINDOW, _FULL, _WINDOW], "tie_word_embeddings": False},
            "windows alone": {"layer_types": [_WINDOW] * 3},
            "no window": {"layer_types": [_FULL] * 3, "attention_bias": True},
        },
        further=True,
        islands=True,
        no_longer_written=_UNUSED,
    ),
}
