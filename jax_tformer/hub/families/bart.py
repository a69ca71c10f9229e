"""The tables of BART (Lewis et al., 2019), `transformers.BartForConditionalGeneration` and `BartModel`.

facebook/bart-base and bart-large are of the class BartModel, which has no head. Ours predicts with its token table, as
`AutoModelForSeq2SeqLM` does with these files; that needs no array of its own, so that the model is saved as it came.
"""

from dataclasses import replace

from jax_tformer.config import DropoutConfig, StackConfig, TransformerConfig
from jax_tformer.hub.families import (
    ACTIVATIONS,
    ATTENTION,
    LAYER,
    Family,
    Row,
    Rows,
    Setting,
    modules,
    named,
)

STACK = StackConfig(
    num_layers=12,
    num_heads=16,
    feedforward_width=4096,
    activation="gelu_erf",
    embedding_norm=True,
    positions="learned",
    max_positions=1024,
    # fairseq kept rows for padding, which no position uses.
    position_offset=2,
)
LARGE = TransformerConfig(
    vocab_size=50265,
    d_model=1024,
    encoder=STACK,
    decoder=STACK,
    shared_embedding=True,
    tied_head=True,
    head_bias=True,
    dropout=DropoutConfig(embedding=0.1, residual=0.1),
)
SETTINGS = (
    *named(
        vocab_size="vocab_size",
        d_model="d_model",
        encoder_layers="encoder.num_layers",
        decoder_layers="decoder.num_layers",
        encoder_attention_heads="encoder.num_heads",
        decoder_attention_heads="decoder.num_heads",
        encoder_ffn_dim="encoder.feedforward_width",
        decoder_ffn_dim="decoder.feedforward_width",
        max_position_embeddings="encoder.max_positions decoder.max_positions",
        scale_embedding="encoder.embedding_scale decoder.embedding_scale",
        tie_word_embeddings="tied_head shared_embedding",
        init_std="initializer_std",
        dropout="dropout.embedding dropout.residual",
        attention_dropout="dropout.attention",
        activation_dropout="dropout.feedforward",
    ),
    Setting("activation_function", "encoder.activation decoder.activation", ACTIVATIONS),
)
SYNONYMS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}
FIXED = {
    "is_encoder_decoder": True,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    # From early versions, in which this class also served mBART and others.
    "normalize_before": False,
    "normalize_embedding": True,
    "add_final_layer_norm": False,
    "static_position_embeddings": False,
}
"""`pad_token_id` is not read, as with BERT, nor are the other ids, which only their `generate` uses."""


def _stack(side: str, embedding: str) -> Rows:
    theirs = f"model.{side}."
    layer = f"model.{side}.layers.*."
    ours = f"{side}.blocks.*."
    return (
        *modules({"embed_positions": "positions", "layernorm_embedding": "norm"}, theirs, f"{embedding}."),
        *modules(ATTENTION, f"{layer}self_attn.", f"{ours}self_attention."),
        *modules(LAYER, layer, ours),
        # The format of fairseq, which older versions saved.
        Row(f"{theirs}version", None),
    )


ROWS = (
    *_stack("encoder", "source_embedding"),
    *_stack("decoder", "target_embedding"),
    *modules(ATTENTION, "model.decoder.layers.*.encoder_attn.", "decoder.blocks.*.cross_attention."),
    *modules({"encoder_attn_layer_norm": "cross_attention_norm"}, "model.decoder.layers.*.", "decoder.blocks.*."),
)


def _tables(config: TransformerConfig) -> tuple[str, str]:
    """Returns the names of the encoder's and the decoder's token tables, which are one if they are shared."""
    source = "source_embedding.tokens.weight"
    return source, source if config.shared_embedding else "target_embedding.tokens.weight"


def _stacks(config: TransformerConfig) -> Rows:
    """Returns the rows of all but the head; untied it has three token tables, and `shared` is unused."""
    source, target = _tables(config)
    shared = config.shared_embedding
    return (
        Row("model.shared.weight", source if shared else None, filled=None if shared else source),
        Row("model.encoder.embed_tokens.weight", source),
        Row("model.decoder.embed_tokens.weight", target),
        *ROWS,
    )


def rows(config: TransformerConfig) -> Rows:
    """Returns the rows of a BartForConditionalGeneration."""
    return (
        *_stacks(config),
        Row("lm_head.weight", _tables(config)[1] if config.tied_head else "head.weight"),
        # A buffer there, which is added to the logits but not trained.
        Row("final_logits_bias", "head.bias", "1 (n o) -> n o"),
    )


_FAMILY = Family("bart", LARGE, SETTINGS, rows, FIXED, synonyms=SYNONYMS)
FAMILIES = {
    "BartForConditionalGeneration": _FAMILY,
    "BartModel": replace(
        _FAMILY,
        template=replace(LARGE, head_bias=False),
        settings=(*SETTINGS, Setting("head", "head")),
        # A tied head without a bias has no arrays.
        rows=lambda config: tuple(row._replace(theirs=row.theirs.removeprefix("model.")) for row in _stacks(config)),
        # Tied tables serve as a head; untied, AutoModelForSeq2SeqLM would draw one.
        flatten=lambda config: {**config, "head": "none" if config.get("tie_word_embeddings") is False else "linear"},
        nest=lambda written: {name: value for name, value in written.items() if name != "head"},
    ),
}
