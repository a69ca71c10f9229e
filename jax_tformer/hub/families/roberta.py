"""The tables of RoBERTa (Liu et al., 2019), whose encoder is BERT's: without a head, and with its three heads.

Positions count from the row behind that of the padding token, and the rows up to there are never used. transformers
counts the tokens that are not the padding token; we count those of the mask, which is the same wherever the mask
hides the padding tokens and no others.
"""

from dataclasses import replace

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.hub.families import Family, Row, Setting, Settings, bert, modules


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
    Setting("position_offset", "encoder.position_offset", said="pad_token_id"),
    Setting("max_positions", "encoder.max_positions", said="max_position_embeddings"),
)
SETTINGS = (*(setting for setting in bert.SETTINGS if setting.theirs != "max_position_embeddings"), *_POSITIONS)
# Their head has this activation whatever the encoder has; ours has the encoder's.
_GELU = {"gelu": "gelu_erf", "gelu_python": "gelu_erf"}
MASKED = (
    *(setting._replace(values=_GELU) if setting.theirs == "hidden_act" else setting for setting in SETTINGS),
    bert.TIED,
)


def _masked(config: TransformerConfig) -> tuple[Row, ...]:
    return (
        *bert.encoder("roberta."),
        *bert.no_pooler("roberta."),
        *modules({"dense": "dense", "layer_norm": "norm"}, "lm_head.", "head."),
        *bert.masked_head("lm_head.", config),
    )


def _texts(config: TransformerConfig) -> tuple[Row, ...]:
    """Returns the rows of a RobertaForSequenceClassification: what pools is a part of its head."""
    return (
        *bert.encoder("roberta."),
        *bert.no_pooler("roberta."),
        *modules({"classifier.dense": "pooler.dense", "classifier.out_proj": "classifier"}),
    )


def _tokens(config: TransformerConfig) -> tuple[Row, ...]:
    return *bert.encoder("roberta."), *bert.no_pooler("roberta."), *modules({"classifier": "classifier"})


_TEMPLATE = replace(bert.TEMPLATE, vocab_size=50265, encoder=replace(bert.STACK, max_positions=510, position_offset=2))
_OF_TEXTS = bert.of_texts(_TEMPLATE, replace(_TEMPLATE.dropout, pooler=0.1, classifier=0.1))
_OF_TOKENS = bert.of_tokens(_TEMPLATE, replace(_TEMPLATE.dropout, classifier=0.1))
# This head drops twice, at the same rate.
_TEXT_SETTINGS = (*SETTINGS, bert.CLASSES, bert.classifier_dropout("dropout.pooler dropout.classifier"))
_TOKEN_SETTINGS = (*SETTINGS, bert.CLASSES, bert.classifier_dropout("dropout.classifier"))
_ROBERTA = Family(
    model_type="roberta",
    template=_TEMPLATE,
    settings=MASKED,
    rows=_masked,
    fixed=bert.FIXED,
    flatten=count_positions,
    nest=nest_positions,
)
_CLASSIFIER = replace(_ROBERTA, flatten=_flatten, nest=_nest)
FAMILIES = {
    "RobertaModel": replace(
        _ROBERTA,
        template=bert.headless(_TEMPLATE),
        settings=SETTINGS,
        rows=bert.bare,
        adapted=bert.with_or_without_pooler,
    ),
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": replace(_CLASSIFIER, template=_OF_TEXTS, settings=_TEXT_SETTINGS, rows=_texts),
    "RobertaForTokenClassification": replace(_CLASSIFIER, template=_OF_TOKENS, settings=_TOKEN_SETTINGS, rows=_tokens),
}
