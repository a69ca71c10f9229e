"""BART, with its head and without."""

from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForSeq2SeqLM
from transformers.models.bart import BartForConditionalGeneration, BartModel

from parity_tests.oracles.entry import Entry
from twin.cases import VOCABULARY

_SETTINGS = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    # Nothing of one stack fits the other.
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    "max_position_embeddings": 40,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "decoder_start_token_id": None,
    "forced_eos_token_id": None,
}
_STACKS = {
    "encoder": ("encoder.layers", {"self_attn": "self_attention"}),
    "decoder": ("decoder.layers", {"self_attn": "self_attention", "encoder_attn": "cross_attention"}),
}
_POSITIONS = {"source": "encoder.embed_positions", "target": "decoder.embed_positions"}
_NO_LONGER_WRITTEN = frozenset(
    {"normalize_before", "normalize_embedding", "add_final_layer_norm", "static_position_embeddings"}
)


def _to_logits(model: BartModel, output: Tensor) -> Tensor:
    """As AutoModelForSeq2SeqLM does with such a file; untied it would draw a head, and we have none."""
    return F.linear(output, model.shared.weight) if model.config.tie_word_embeddings else output


ENTRIES = {
    "bart": Entry(
        kind=BartForConditionalGeneration,
        auto=AutoModelForSeq2SeqLM,
        settings=_SETTINGS,
        stacks=_STACKS,
        variants={
            "scaled embedding, approximate GELU": {"scale_embedding": True, "activation_function": "gelu_new"},
            "untied": {"tie_word_embeddings": False, "max_position_embeddings": 11},
            "other depths and heads": {
                "encoder_layers": 4,
                "decoder_layers": 1,
                "encoder_attention_heads": 1,
                "decoder_attention_heads": 8,
            },
            "other widths": {"encoder_ffn_dim": 24, "activation_function": "relu", "vocab_size": 29},
        },
        position_tables={side: f"model.{table}" for side, table in _POSITIONS.items()},
        unused_untied=frozenset({"model.shared.weight"}),
        no_longer_written=_NO_LONGER_WRITTEN,
        generation={
            "forced_bos_token_id": None,
            "forced_eos_token_id": None,
            "no_repeat_ngram_size": 0,
            "encoder_no_repeat_ngram_size": 0,
            "min_length": 0,
        },
    ),
    "bart bare": Entry(
        kind=BartModel,
        auto=AutoModel,
        settings=_SETTINGS,
        stacks=_STACKS,
        further=True,
        variants={"scaled embedding": {"scale_embedding": True}},
        to_logits=_to_logits,
        position_tables=_POSITIONS,
        unused_untied=frozenset({"shared.weight"}),
        no_longer_written=_NO_LONGER_WRITTEN,
    ),
}
