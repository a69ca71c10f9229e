"""BERT, without a head and with its three heads."""

from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.bert import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)

from parity_tests.oracles.entry import Entry
from twin.cases import VOCABULARY

_SETTINGS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 40,
    # As the padding_idx of the token table it would take token 0 its gradient.
    "pad_token_id": None,
}
_STACKS = {"encoder": ("encoder.layer", {"attention.self": "self_attention"})}
_NO_LONGER_WRITTEN = frozenset({"position_embedding_type"})
ENTRIES = {
    "bert": Entry(
        kind=BertModel,
        auto=AutoModel,
        settings=_SETTINGS,
        stacks=_STACKS,
        variants={
            "approximate GELU, large epsilon, narrow": {
                "hidden_act": "gelu_new",
                "layer_norm_eps": 1e-2,
                "intermediate_size": 24,
            },
            "other sizes": {"type_vocab_size": 3, "num_attention_heads": 8, "num_hidden_layers": 1},
        },
        no_longer_written=_NO_LONGER_WRITTEN,
    ),
    "bert masked": Entry(
        kind=BertForMaskedLM,
        auto=AutoModelForMaskedLM,
        settings=_SETTINGS,
        stacks=_STACKS,
        variants={"ReLU": {"hidden_act": "relu"}, "untied": {"tie_word_embeddings": False}},
        unused_untied=frozenset({"cls.predictions.bias"}),
        no_longer_written=_NO_LONGER_WRITTEN,
    ),
    "bert texts": Entry(
        kind=BertForSequenceClassification,
        auto=AutoModelForSequenceClassification,
        settings=_SETTINGS | {"num_labels": 3},
        stacks=_STACKS,
        variants={"two classes": {"num_labels": 2}},
        no_longer_written=_NO_LONGER_WRITTEN,
    ),
    "bert tokens": Entry(
        kind=BertForTokenClassification,
        auto=AutoModelForTokenClassification,
        settings=_SETTINGS | {"num_labels": 5},
        stacks=_STACKS,
        further=True,
        variants={"two classes": {"num_labels": 2}},
        no_longer_written=_NO_LONGER_WRITTEN,
    ),
}
