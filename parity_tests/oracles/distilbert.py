"""DistilBERT, without a head and with its three heads."""

from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.distilbert import (
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
    DistilBertModel,
)

from parity_tests.oracles.entry import Entry
from twin.cases import VOCABULARY

_SETTINGS = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 80,
    "max_position_embeddings": 40,
    "pad_token_id": None,
}
_STACKS = {"encoder": ("transformer.layer", {"attention": "self_attention"})}
ENTRIES = {
    "distilbert": Entry(
        kind=DistilBertModel,
        auto=AutoModel,
        settings=_SETTINGS,
        stacks=_STACKS,
        further=True,
        variants={"other sizes": {"n_heads": 8, "n_layers": 1, "hidden_dim": 24, "max_position_embeddings": 11}},
    ),
    "distilbert masked": Entry(
        kind=DistilBertForMaskedLM,
        auto=AutoModelForMaskedLM,
        settings=_SETTINGS,
        stacks=_STACKS,
        further=True,
        variants={"ReLU": {"activation": "relu"}, "untied": {"tie_word_embeddings": False}},
    ),
    "distilbert texts": Entry(
        kind=DistilBertForSequenceClassification,
        auto=AutoModelForSequenceClassification,
        settings=_SETTINGS | {"num_labels": 3},
        stacks=_STACKS,
        further=True,
        variants={"two classes": {"num_labels": 2}},
    ),
    "distilbert tokens": Entry(
        kind=DistilBertForTokenClassification,
        auto=AutoModelForTokenClassification,
        settings=_SETTINGS | {"num_labels": 5},
        stacks=_STACKS,
        further=True,
        variants={"approximate GELU": {"activation": "gelu_new"}},
    ),
}
