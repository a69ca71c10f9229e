"""BART."""

from transformers import AutoModelForSeq2SeqLM
from transformers.models.bart import BartForConditionalGeneration

from parity_tests.cases import VOCABULARY
from parity_tests.oracles.entry import Entry

ENTRIES = {
    "bart": Entry(
        kind=BartForConditionalGeneration,
        auto=AutoModelForSeq2SeqLM,
        settings={
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
        },
        stacks={
            "encoder": ("encoder.layers", {"self_attn": "self_attention"}),
            "decoder": ("decoder.layers", {"self_attn": "self_attention", "encoder_attn": "cross_attention"}),
        },
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
        position_tables={"source": "model.encoder.embed_positions", "target": "model.decoder.embed_positions"},
        dropped_untied=frozenset({"model.shared.weight"}),
        no_longer_written=frozenset(
            {"normalize_before", "normalize_embedding", "add_final_layer_norm", "static_position_embeddings"}
        ),
        generation={
            "forced_bos_token_id": None,
            "forced_eos_token_id": None,
            "no_repeat_ngram_size": 0,
            "encoder_no_repeat_ngram_size": 0,
            "min_length": 0,
        },
    )
}
