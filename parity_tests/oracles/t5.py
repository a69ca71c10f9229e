"""T5: 1.0, whose head is tied and scaled, and 1.1, gated and untied."""

from dataclasses import replace

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.t5 import T5ForConditionalGeneration

from parity_tests.oracles.entry import Entry
from twin.cases import VOCABULARY


def untied(model: PreTrainedModel) -> None:
    """Unties the head of a new T5 1.1, which it gets only from a file that has one."""
    head = model.get_output_embeddings()
    if not model.config.scale_decoder_outputs and head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(torch.ones_like(head.weight))


T5 = Entry(
    kind=T5ForConditionalGeneration,
    auto=AutoModelForSeq2SeqLM,
    settings={
        "vocab_size": VOCABULARY,
        "d_model": 32,
        # Not a quarter of the width.
        "d_kv": 10,
        "d_ff": 80,
        # The cache of `generate` has as many layers as the encoder.
        "num_layers": 3,
        "num_decoder_layers": 2,
        "num_heads": 4,
        # Sequences are as long as it takes to reach every bucket.
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 8,
        "pad_token_id": None,
        "eos_token_id": None,
        "decoder_start_token_id": None,
    },
    stacks={
        "encoder": ("encoder.block", {"layer.0.SelfAttention": "self_attention"}),
        "decoder": (
            "decoder.block",
            {"layer.0.SelfAttention": "self_attention", "layer.1.EncDecAttention": "cross_attention"},
        ),
    },
    weights_at=2,
    prepare=untied,
    variants={
        "gated SiLU, other buckets": {
            "feed_forward_proj": "gated-silu",
            "relative_attention_num_buckets": 4,
            "relative_attention_max_distance": 5,
        },
        "exact GELU, other widths": {"feed_forward_proj": "gelu", "d_kv": 16, "d_ff": 24, "num_decoder_layers": 1},
    },
    islands=True,
    # The installed version writes true, and goes by the arrays when it reads.
    no_longer_written=frozenset({"tie_word_embeddings"}),
)
ENTRIES = {
    "t5": T5,
    "t5 1.1": replace(
        T5,
        settings={**T5.settings, "d_kv": 8, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        variants={"ungated": {"feed_forward_proj": "gelu_new"}},
        further=True,
    ),
}
