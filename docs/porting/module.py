"""The module to port: Hugging Face's OPT, small, with random weights."""

import numpy as np
import torch
from torch import nn
from transformers.models.opt import OPTConfig, OPTForCausalLM


class Opt(nn.Module):
    """Of what Hugging Face's model returns, the logits: `[B, T]` -> `[B, T, V]`."""

    def __init__(self) -> None:
        super().__init__()
        config = OPTConfig(
            vocab_size=50,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=24,
        )
        self.model = OPTForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens, use_cache=False).logits
        return logits


def opt() -> Opt:
    """Weights off their 0 and 1: fresh biases and norms would hide what is wrong with them."""
    torch.manual_seed(0)
    module = Opt()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def tokens() -> np.ndarray:
    """`[B, T]`; 1 is OPT's padding, and stands in every row."""
    ids = np.random.default_rng(0).integers(0, 50, (2, 10))
    ids[:, 3] = 1
    return ids
