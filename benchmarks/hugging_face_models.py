"""Hugging Face's models of our architectures: GPT-2 and BERT with our weights, a BART of our shape with its own."""

from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from benchmarks.sides import START_ID
from benchmarks.weights import reference_weights
from jax_tformer.config import TransformerConfig
from jax_tformer.model.functional import transformer
from jax_tformer.weights.huggingface import to_huggingface

_LOADABLE: dict[str, tuple[Any, Any, set[str]]] = {
    "GPT2LMHeadModel": (GPT2LMHeadModel, GPT2Config, {"lm_head.weight"}),
    "BertForMaskedLM": (
        BertForMaskedLM,
        BertConfig,
        {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"},
    ),
}
"""Class, config, and what is tied to other weights and saved once."""


def same_model(config: TransformerConfig, seed: int) -> Any:
    """The model that computes what ours does, with the weights that `draw_weights` draws (a BART draws its own)."""
    if config.encoder is None:
        return _load("GPT2LMHeadModel", config, seed, {"bos_token_id": None, "eos_token_id": None})
    return _load("BertForMaskedLM", config, seed, {}) if config.decoder is None else _bart(config, seed)


def _load(name: str, config: TransformerConfig, seed: int, changes: dict[str, Any]) -> Any:
    settings, arrays = to_huggingface(name, config, reference_weights(transformer(config), seed))
    model_class, config_class, tied = _LOADABLE[name]
    model = model_class(config_class(**settings | changes))
    missing, unexpected = model.load_state_dict({name: torch.from_numpy(x) for name, x in arrays.items()}, strict=False)
    assert set(missing) <= tied, missing
    assert not unexpected, unexpected
    return model


def _bart(config: TransformerConfig, seed: int) -> Any:
    encoder, decoder = config.encoder, config.decoder
    assert encoder is not None
    assert decoder is not None
    assert config.vocab_size is not None
    torch.manual_seed(seed)
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            encoder_layers=encoder.num_layers,
            decoder_layers=decoder.num_layers,
            encoder_attention_heads=encoder.num_heads,
            decoder_attention_heads=decoder.num_heads,
            encoder_ffn_dim=encoder.feedforward_width,
            decoder_ffn_dim=decoder.feedforward_width,
            activation_function="relu",
            scale_embedding=True,
            dropout=config.dropout.residual,
            bos_token_id=None,
            eos_token_id=None,
            forced_eos_token_id=None,
            decoder_start_token_id=START_ID,
        )
    )
