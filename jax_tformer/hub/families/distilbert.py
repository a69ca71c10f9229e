"""The tables of DistilBERT (Sanh et al., 2019): BERT without token types, and with half of its layers."""

from dataclasses import replace

from jax_tformer.config import TransformerConfig
from jax_tformer.hub.families import ACTIVATIONS, Family, Row, Rows, Setting, bert, head, modules, named


def _settings(more: str = "") -> tuple[Setting, ...]:
    """Returns the settings; `dropout` sets `more` rates besides others.

    `sinusoidal_pos_embds` is not read: it decides how the position table starts, and the table is in the file.
    """
    return (
        Setting("activation", "encoder.activation", ACTIVATIONS),
        *named(
            vocab_size="vocab_size",
            dim="d_model",
            n_layers="encoder.num_layers",
            n_heads="encoder.num_heads",
            hidden_dim="encoder.feedforward_width",
            max_position_embeddings="encoder.max_positions",
            initializer_range="initializer_std",
            dropout=f"dropout.embedding dropout.residual {more}",
            attention_dropout="dropout.attention",
        ),
    )


_EMBEDDING = {"word_embeddings": "tokens", "position_embeddings": "positions", "LayerNorm": "norm"}
_LAYER = {
    "attention.q_lin": "self_attention.query",
    "attention.k_lin": "self_attention.key",
    "attention.v_lin": "self_attention.value",
    "attention.out_lin": "self_attention.output",
    "sa_layer_norm": "self_attention_norm",
    "ffn.lin1": "feedforward.up",
    "ffn.lin2": "feedforward.down",
    "output_layer_norm": "feedforward_norm",
}


def _encoder(prefix: str = "") -> Rows:
    return bert.encoder(prefix, _EMBEDDING, "transformer", _LAYER)


def _masked(config: TransformerConfig) -> Rows:
    return (
        *_encoder("distilbert."),
        *modules({"vocab_transform": "head.dense", "vocab_layer_norm": "head.norm"}),
        head("vocab_projector.weight", config),
        Row("vocab_projector.bias", "head.bias"),
    )


_TEMPLATE = replace(
    bert.TEMPLATE,
    encoder=replace(bert.STACK, num_layers=6, token_types=0),
    dropout=replace(bert.TEMPLATE.dropout, attention_output=0.0),
)
_MASKED = Family(
    "distilbert",
    _TEMPLATE,
    (*_settings(), bert.TIED),
    _masked,
    synonyms={"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
)
_TEXTS = (*_encoder("distilbert."), *modules({"pre_classifier": "pooler.dense", "classifier": "classifier"}))
_TOKENS = (*_encoder("distilbert."), *modules({"classifier": "classifier"}))
_TEXT_SETTINGS = (*_settings(), Setting("seq_classif_dropout", "dropout.classifier"))
FAMILIES = {
    "DistilBertModel": replace(
        _MASKED, template=bert.headless(_MASKED, "none"), settings=_settings(), rows=lambda config: _encoder()
    ),
    "DistilBertForMaskedLM": _MASKED,
    "DistilBertForSequenceClassification": bert.classifier(
        _MASKED, "classify_text", _TEXTS, _TEXT_SETTINGS, "relu", classifier=0.2
    ),
    "DistilBertForTokenClassification": bert.classifier(
        _MASKED, "classify_tokens", _TOKENS, _settings("dropout.classifier"), classifier=0.1
    ),
}
