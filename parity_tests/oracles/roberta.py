"""RoBERTa, without a head and with its three heads."""

from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.roberta import (
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
)

from parity_tests.oracles.entry import Entry
from twin.cases import VOCABULARY

_SETTINGS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 42,
    "type_vocab_size": 1,
    # Positions count from the next row.
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
_PARTS = {
    "stacks": {"encoder": ("encoder.layer", {"attention.self": "self_attention"})},
    "first_position": 2,
    "no_longer_written": frozenset({"position_embedding_type"}),
}
ENTRIES = {
    "roberta": Entry(
        kind=RobertaModel,
        auto=AutoModel,
        settings=_SETTINGS,
        variants={"two token types, short": {"type_vocab_size": 2, "max_position_embeddings": 13}},
        further=True,
        **_PARTS,
    ),
    "roberta masked": Entry(
        kind=RobertaForMaskedLM,
        auto=AutoModelForMaskedLM,
        settings=_SETTINGS,
        variants={"untied": {"tie_word_embeddings": False}, "large epsilon": {"layer_norm_eps": 1e-2}},
        unused_untied=frozenset({"lm_head.bias"}),
        **_PARTS,
    ),
    "roberta texts": Entry(
        kind=RobertaForSequenceClassification,
        auto=AutoModelForSequenceClassification,
        settings=_SETTINGS | {"num_labels": 3},
        variants={"two classes": {"num_labels": 2}},
        further=True,
        **_PARTS,
    ),
    "roberta tokens": Entry(
        kind=RobertaForTokenClassification,
        auto=AutoModelForTokenClassification,
        settings=_SETTINGS | {"num_labels": 5},
        variants={"approximate GELU": {"hidden_act": "gelu_new"}},
        further=True,
        **_PARTS,
    ),
}
