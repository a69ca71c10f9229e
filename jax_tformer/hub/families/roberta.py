"""The tables of RoBERTa (Liu et al., 2019), whose encoder is BERT's: without a head, and with its three heads.

Positions count from the row behind that of the padding token, and the rows up to there are never used. transformers
counts the tokens that are not the padding token; we count those of the mask, which is the same wherever the mask
hides the padding tokens and no others.
"""

from dataclasses import replace

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.hub.families import bert
from jax_tformer.hub.tables import VECTOR, Family, Row, Setting, Settings, pair


def count_positions(config: Settings) -> dict[str, object]:
    """Works out how many positions there are, and in which row the first one is."""
    numbers = []
    for name, default in (("pad_token_id", 1), ("max_position_embeddings", 512)):
        value = default if config.get(name) is None else config[name]
        if not isinstance(value, int) or value < 0:
            raise InputError(f"{name} is {value!r} in the Hugging Face config; expected a whole number of at least 0")
        numbers.append(value)
    padding, rows = numbers
    return {**config, "position_offset": padding + 1, "max_positions": rows - padding - 1}


def nest_positions(written: Settings) -> dict[str, object]:
    """Inverts `count_positions`."""
    nested = dict(written)
    offset, positions = int(str(nested.pop("position_offset"))), int(str(nested.pop("max_positions") or 0))
    # Without an offset there is no padding token; the default is read back, and refused.
    return {**nested, "pad_token_id": offset - 1 if offset else None, "max_position_embeddings": positions + offset}


def _flatten(config: Settings) -> dict[str, object]:
    return bert.count_labels(count_positions(config))


def _nest(written: Settings) -> dict[str, object]:
    return nest_positions(bert.classifier_nested(written))


_POSITIONS = (
    Setting("position_offset", ("encoder.position_offset",), said="pad_token_id"),
    Setting("max_positions", ("encoder.max_positions",), said="max_position_embeddings"),
)
SETTINGS = (*(setting for setting in bert.SETTINGS if setting.theirs != "max_position_embeddings"), *_POSITIONS)
# Their head has this activation whatever the encoder has; ours has the encoder's.
_GELU = {"gelu": "gelu_erf", "gelu_python": "gelu_erf"}
MASKED = (
    *(setting._replace(values=_GELU) if setting.theirs == "hidden_act" else setting for setting in SETTINGS),
    bert.TIED,
)


def _masked(config: TransformerConfig) -> tuple[Row, ...]:
    """Returns the rows of a RobertaForMaskedLM; an untied head has arrays of its own, and `lm_head.bias` is unused."""
    tied = config.tied_head
    return (
        *bert.encoder("roberta."),
        *bert.no_pooler("roberta."),
        *pair("lm_head.dense", "head.dense"),
        *pair("lm_head.layer_norm", "head.norm", VECTOR),
        Row("lm_head.bias", ("head.bias",) if tied else None, VECTOR, filled=None if tied else "head.bias"),
        Row("lm_head.decoder.weight", ("embedding.tokens.weight" if tied else "head.weight",)),
        Row("lm_head.decoder.bias", ("head.bias",), VECTOR),
    )


def _texts(config: TransformerConfig) -> tuple[Row, ...]:
    """Returns the rows of a RobertaForSequenceClassification: what pools is a part of its head."""
    return (
        *bert.encoder("roberta."),
        *bert.no_pooler("roberta."),
        *pair("classifier.dense", "pooler.dense"),
        *pair("classifier.out_proj", "classifier"),
    )


def _tokens(config: TransformerConfig) -> tuple[Row, ...]:
    return *bert.encoder("roberta."), *bert.no_pooler("roberta."), *pair("classifier", "classifier")


_BERT = ARCHITECTURES["bert-base"]
assert isinstance(_BERT.encoder, StackConfig)
_TEMPLATE = replace(_BERT, vocab_size=50265, encoder=replace(_BERT.encoder, max_positions=510, position_offset=2))
_OF_TEXTS = bert.of_texts(_TEMPLATE, replace(_TEMPLATE.dropout, pooler=0.1, classifier=0.1))
_OF_TOKENS = bert.of_tokens(_TEMPLATE, replace(_TEMPLATE.dropout, classifier=0.1))
# This head drops twice, at the same rate.
_TEXT_SETTINGS = (*SETTINGS, bert.CLASSES, bert.classifier_dropout("dropout.pooler", "dropout.classifier"))
_TOKEN_SETTINGS = (*SETTINGS, bert.CLASSES, bert.classifier_dropout("dropout.classifier"))
FAMILIES = {
    "RobertaModel": Family(
        "roberta",
        bert.headless(_TEMPLATE),
        SETTINGS,
        bert.FIXED,
        bert.bare,
        count_positions,
        nest_positions,
        bert.with_or_without_pooler,
    ),
    "RobertaForMaskedLM": Family("roberta", _TEMPLATE, MASKED, bert.FIXED, _masked, count_positions, nest_positions),
    "RobertaForSequenceClassification": Family(
        "roberta", _OF_TEXTS, _TEXT_SETTINGS, bert.FIXED, _texts, _flatten, _nest
    ),
    "RobertaForTokenClassification": Family(
        "roberta", _OF_TOKENS, _TOKEN_SETTINGS, bert.FIXED, _tokens, _flatten, _nest
    ),
}
