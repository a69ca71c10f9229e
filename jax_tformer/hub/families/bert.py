"""The tables of BERT (Devlin et al., 2018): without a head, as a masked language model, and as a classifier."""

from collections.abc import Mapping
from dataclasses import replace

from jax_tformer.config import Head, Pooler, StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.hub.families import ACTIVATIONS, Family, Fields, Row, Rows, Setting, Settings, head, modules, named
from jax_tformer.hub.names import Views

SETTINGS = (
    *named(
        vocab_size="vocab_size",
        hidden_size="d_model",
        num_hidden_layers="encoder.num_layers",
        num_attention_heads="encoder.num_heads",
        intermediate_size="encoder.feedforward_width",
        max_position_embeddings="encoder.max_positions",
        type_vocab_size="encoder.token_types",
        layer_norm_eps="encoder.norm_eps",
        initializer_range="initializer_std",
        hidden_dropout_prob="dropout.embedding dropout.residual",
        attention_probs_dropout_prob="dropout.attention",
    ),
    Setting("hidden_act", "encoder.activation", ACTIVATIONS),
)
TIED = Setting("tie_word_embeddings", "tied_head")
FIXED = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}
"""`pad_token_id` is not read: PyTorch does not train that row of the token table, but no output depends on it."""


CLASSES = Setting("classes", "classes", said="num_labels")
"""Made by `count_labels`; what the classes are called is not part of our config."""


def count_labels(config: Settings) -> Fields:
    """Works out the number of classes from their names, or from `num_labels`, as config.json may say instead."""
    names = config.get("id2label")
    if names is not None and not isinstance(names, Mapping):
        raise InputError(f"id2label is {names!r} in the Hugging Face config; expected an object with a name per class")
    number = config.get("num_labels")
    if names is not None and number not in (None, len(names)):
        raise InputError(
            f"id2label names {len(names)} classes and num_labels is {number!r} in the Hugging Face config; expected "
            "one number of classes; remove the wrong one"
        )
    return {**config, "classes": number if names is None else len(names)}


def name_labels(written: Settings) -> Fields:
    """Inverts `count_labels`, with the names that transformers gives to classes without one.

    A rate of the classifier that is the hidden one's is null, as by default.
    """
    named = dict(written)
    labels = {f"LABEL_{number}": number for number in range(named.pop("classes") or 0)}
    if "classifier_dropout" in named and named["classifier_dropout"] == named["hidden_dropout_prob"]:
        named["classifier_dropout"] = None
    return {**named, "id2label": {str(number): name for name, number in labels.items()}, "label2id": labels}


def classifier_dropout(ours: str) -> Setting:
    """Makes the setting of these rates; absent or null it means `hidden_dropout_prob`."""
    return Setting("classifier_dropout", ours, default=lambda read: read["dropout.residual"])


_EMBEDDING = {
    "word_embeddings": "tokens",
    "position_embeddings": "positions",
    "token_type_embeddings": "token_types",
    "LayerNorm": "norm",
}
_LAYER = {
    **{f"attention.self.{name}": f"self_attention.{name}" for name in ("query", "key", "value")},
    "attention.output.dense": "self_attention.output",
    "attention.output.LayerNorm": "self_attention_norm",
    "intermediate.dense": "feedforward.up",
    "output.dense": "feedforward.down",
    "output.LayerNorm": "feedforward_norm",
}


def encoder(
    prefix: str = "",
    embedding: Mapping[str, str] = _EMBEDDING,
    layers: str = "encoder",
    names: Mapping[str, str] = _LAYER,
) -> Rows:
    """Returns the rows of embedding and encoder, which RoBERTa shares, and DistilBERT with other names."""
    return (
        *modules(embedding, f"{prefix}embeddings.", "embedding."),
        *modules(names, f"{prefix}{layers}.layer.*.", "encoder.blocks.*."),
        # 0, 1, 2 ..., which older versions saved.
        Row(f"{prefix}embeddings.position_ids", None),
    )


def no_pooler(prefix: str) -> Rows:
    """Returns the rows of a pooler that files of other classes hold, and this class does not have."""
    return Row(f"{prefix}pooler.dense.weight", None), Row(f"{prefix}pooler.dense.bias", None)


def bare(config: TransformerConfig) -> Rows:
    """Returns the rows of a BertModel or RobertaModel; one made with `add_pooling_layer=False` has no pooler."""
    return *encoder(), *modules({} if config.pooler == "none" else {"pooler.dense": "pooler.dense"})


def with_or_without_pooler(config: TransformerConfig, weights: Views) -> TransformerConfig:
    """Returns the config without its pooler if no array is called so: config.json does not tell."""
    return config if any(name.endswith("pooler.dense.weight") for name in weights) else replace(config, pooler="none")


def masked_head(theirs: str, config: TransformerConfig) -> Rows:
    """Returns the rows of a head's projection; an untied one has arrays of its own, and the first bias is unused."""
    bias = "head.bias"
    tied = config.tied_head
    return (
        Row(f"{theirs}bias", bias if tied else None, filled=None if tied else bias),
        head(f"{theirs}decoder.weight", config),
        Row(f"{theirs}decoder.bias", bias),
    )


def _masked(config: TransformerConfig) -> Rows:
    return (
        *encoder("bert."),
        *no_pooler("bert."),
        *modules({"dense": "dense", "LayerNorm": "norm"}, "cls.predictions.transform.", "head."),
        *masked_head("cls.predictions.", config),
        # Of BertForPreTraining, whose file may be read as this class.
        Row("cls.seq_relationship.weight", None),
        Row("cls.seq_relationship.bias", None),
    )


def headless(masked: Family, pooler: Pooler = "tanh") -> TransformerConfig:
    """Returns the template of a class without a head: that of `masked`, and a pooler."""
    return replace(masked.template, head="none", tied_head=False, head_bias=False, pooler=pooler)


def classifier(
    masked: Family,
    head: Head,
    rows: Rows,
    settings: tuple[Setting, ...],
    pooled: Pooler = "none",
    **rates: float,
) -> Family:
    """Returns the tables of a class with a head for two classes, the number of a config.json that names none."""
    dropout = replace(masked.template.dropout, **rates)
    return replace(
        masked,
        template=replace(headless(masked, pooled), head=head, classes=2, dropout=dropout),
        settings=(*settings, CLASSES),
        rows=lambda config: rows,
        flatten=lambda config: count_labels(masked.flatten(config)),
        nest=lambda written: masked.nest(name_labels(written)),
    )


TEMPLATE = ARCHITECTURES["bert-base"]
assert isinstance(TEMPLATE.encoder, StackConfig)
STACK = TEMPLATE.encoder
_MASKED = Family("bert", TEMPLATE, (*SETTINGS, TIED), _masked, FIXED)
_CLASSIFYING = (*SETTINGS, classifier_dropout("dropout.classifier"))
_TEXTS = (*encoder("bert."), *modules({"bert.pooler.dense": "pooler.dense", "classifier": "classifier"}))
_TOKENS = (*encoder("bert."), *no_pooler("bert."), *modules({"classifier": "classifier"}))
FAMILIES = {
    "BertModel": replace(
        _MASKED, template=headless(_MASKED), settings=SETTINGS, rows=bare, adapted=with_or_without_pooler
    ),
    "BertForMaskedLM": _MASKED,
    "BertForSequenceClassification": classifier(_MASKED, "classify_text", _TEXTS, _CLASSIFYING, "tanh", classifier=0.1),
    "BertForTokenClassification": classifier(_MASKED, "classify_tokens", _TOKENS, _CLASSIFYING, classifier=0.1),
}
