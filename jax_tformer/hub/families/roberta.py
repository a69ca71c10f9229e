"""The tables of RoBERTa (Liu et al., 2019), whose encoder is BERT's: without a head, and with its three heads.

Positions count from the row behind that of the padding token, and the rows up to there are never used. transformers
counts the tokens that are not the padding token; we count those of the mask, which is the same wherever the mask
hides the padding tokens and no others.
"""

from dataclasses import replace

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.hub.families import Family, Fields, Rows, Setting, Settings, bert, modules


def count_positions(config: Settings) -> Fields:
    """Works out how many positions there are, and in which row the first one is."""
    numbers = []
    for name, default in (("pad_token_id", 1), ("max_position_embeddings", 512)):
        value = default if config.get(name) is None else config[name]
        if not isinstance(value, int) or value < 0:
            raise InputError(f"{name} is {value!r} in the Hugging Face config; expected a whole number of at least 0")
        numbers.append(value)
    padding, rows = numbers
    return {**config, "position_offset": padding + 1, "max_positions": rows - padding - 1}


def nest_positions(written: Settings) -> Fields:
    """Inverts `count_positions`."""
    nested = dict(written)
    offset = nested.pop("position_offset")
    positions = nested.pop("max_positions") or 0
    # Without an offset there is no padding token; the default is read back, and refused.
    return {**nested, "pad_token_id": offset - 1 if offset else None, "max_position_embeddings": positions + offset}


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


def _masked(config: TransformerConfig) -> Rows:
    return (
        *bert.encoder("roberta."),
        *bert.no_pooler("roberta."),
        *modules({"dense": "dense", "layer_norm": "norm"}, "lm_head.", "head."),
        *bert.masked_head("lm_head.", config),
    )


_TEMPLATE = replace(bert.TEMPLATE, vocab_size=50265, encoder=replace(bert.STACK, max_positions=510, position_offset=2))
_MASKED = Family("roberta", _TEMPLATE, MASKED, _masked, bert.FIXED, count_positions, nest_positions)
_WITHOUT_POOLER = (*bert.encoder("roberta."), *bert.no_pooler("roberta."))
# What pools is a part of its head.
_TEXTS = (*_WITHOUT_POOLER, *modules({"classifier.dense": "pooler.dense", "classifier.out_proj": "classifier"}))
_TOKENS = (*_WITHOUT_POOLER, *modules({"classifier": "classifier"}))
# The head of texts drops twice, at the same rate.
_TEXT_SETTINGS = (*SETTINGS, bert.classifier_dropout("dropout.pooler dropout.classifier"))
_TOKEN_SETTINGS = (*SETTINGS, bert.classifier_dropout("dropout.classifier"))
FAMILIES = {
    "RobertaModel": replace(
        _MASKED, template=bert.headless(_MASKED), settings=SETTINGS, rows=bert.bare, adapted=bert.with_or_without_pooler
    ),
    "RobertaForMaskedLM": _MASKED,
    "RobertaForSequenceClassification": bert.classifier(
        _MASKED, "classify_text", _TEXTS, _TEXT_SETTINGS, "tanh", pooler=0.1, classifier=0.1
    ),
    "RobertaForTokenClassification": bert.classifier(
        _MASKED, "classify_tokens", _TOKENS, _TOKEN_SETTINGS, classifier=0.1
    ),
}
