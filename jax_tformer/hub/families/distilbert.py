"""The tables of DistilBERT (Sanh et al., 2019): BERT without token types, and with half of its layers."""

from dataclasses import replace

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.hub.families import bert
from jax_tformer.hub.tables import ACTIVATIONS, VECTOR, Family, Row, Setting, linears, named, pair


def _settings(*drop: str) -> tuple[Setting, ...]:
    """Returns the settings; `dropout` sets these rates besides others.

    `sinusoidal_pos_embds` is not read: it decides how the position table starts, and the table is in the file.
    """
    return (
        Setting("vocab_size", ("vocab_size",)),
        Setting("dim", ("d_model",), synonym="hidden_size"),
        Setting("n_layers", ("encoder.num_layers",), synonym="num_hidden_layers"),
        Setting("n_heads", ("encoder.num_heads",), synonym="num_attention_heads"),
        *named(
            hidden_dim="encoder.feedforward_width",
            max_position_embeddings="encoder.max_positions",
        ),
        Setting("activation", ("encoder.activation",), ACTIVATIONS),
        Setting("initializer_range", ("initializer_std",)),
        Setting("dropout", ("dropout.embedding", "dropout.residual", *drop)),
        Setting("attention_dropout", ("dropout.attention",)),
    )


_ATTENTION = {"q_lin": "query", "k_lin": "key", "v_lin": "value", "out_lin": "output"}


def _encoder(prefix: str = "") -> tuple[Row, ...]:
    layer, ours = "transformer.layer.*", "encoder.blocks.*"
    rows = (
        Row("embeddings.word_embeddings.weight", ("embedding.tokens.weight",)),
        Row("embeddings.position_embeddings.weight", ("embedding.positions.weight",)),
        *pair("embeddings.LayerNorm", "embedding.norm", VECTOR),
        *linears(f"{layer}.attention", f"{ours}.self_attention", _ATTENTION),
        *pair(f"{layer}.sa_layer_norm", f"{ours}.self_attention_norm", VECTOR),
        *linears(f"{layer}.ffn", f"{ours}.feedforward", {"lin1": "up", "lin2": "down"}),
        *pair(f"{layer}.output_layer_norm", f"{ours}.feedforward_norm", VECTOR),
        # 0, 1, 2 ..., which older versions saved.
        Row("embeddings.position_ids", None),
    )
    return tuple(row._replace(theirs=prefix + row.theirs) for row in rows)


def _masked(config: TransformerConfig) -> tuple[Row, ...]:
    return (
        *_encoder("distilbert."),
        *pair("vocab_transform", "head.dense"),
        *pair("vocab_layer_norm", "head.norm", VECTOR),
        Row("vocab_projector.weight", ("embedding.tokens.weight" if config.tied_head else "head.weight",)),
        Row("vocab_projector.bias", ("head.bias",), VECTOR),
    )


def _texts(config: TransformerConfig) -> tuple[Row, ...]:
    return *_encoder("distilbert."), *pair("pre_classifier", "pooler.dense"), *pair("classifier", "classifier")


def _tokens(config: TransformerConfig) -> tuple[Row, ...]:
    return *_encoder("distilbert."), *pair("classifier", "classifier")


_BERT = ARCHITECTURES["bert-base"]
assert isinstance(_BERT.encoder, StackConfig)
_TEMPLATE = replace(
    _BERT,
    encoder=replace(_BERT.encoder, num_layers=6, token_types=0),
    dropout=replace(_BERT.dropout, attention_output=0.0),
)
_OF_TEXTS = replace(bert.of_texts(_TEMPLATE, replace(_TEMPLATE.dropout, classifier=0.2)), pooler="relu")
_OF_TOKENS = bert.of_tokens(_TEMPLATE, replace(_TEMPLATE.dropout, classifier=0.1))
_TEXT_SETTINGS = (*_settings(), bert.CLASSES, Setting("seq_classif_dropout", ("dropout.classifier",)))
_TOKEN_SETTINGS = (*_settings("dropout.classifier"), bert.CLASSES)
FAMILIES = {
    "DistilBertModel": Family(
        "distilbert", replace(bert.headless(_TEMPLATE), pooler="none"), _settings(), {}, lambda config: _encoder()
    ),
    "DistilBertForMaskedLM": Family("distilbert", _TEMPLATE, (*_settings(), bert.TIED), {}, _masked),
    "DistilBertForSequenceClassification": Family(
        "distilbert", _OF_TEXTS, _TEXT_SETTINGS, {}, _texts, bert.count_labels, bert.name_labels
    ),
    "DistilBertForTokenClassification": Family(
        "distilbert", _OF_TOKENS, _TOKEN_SETTINGS, {}, _tokens, bert.count_labels, bert.name_labels
    ),
}
