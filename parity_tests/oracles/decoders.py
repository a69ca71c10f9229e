"""What the descendants of Llama have in common."""

from typing import Any

from twin.cases import VOCABULARY

STACKS = {"decoder": ("layers", {"self_attn": "self_attention"})}
IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SETTINGS: dict[str, Any] = {
    **IDS,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
"""Of the waves of a head 8 wide one is kept, one is divided, and two are between."""
SCALINGS = {
    "scaled linearly": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5}},
    "scaled as in Llama 3": {"rope_parameters": LLAMA3},
}
