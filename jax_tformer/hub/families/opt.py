"""The tables of OPT (Zhang et al., 2022), `transformers.OPTForCausalLM`."""

from jax_tformer.config import DropoutConfig, StackConfig, TransformerConfig
from jax_tformer.config.errors import require
from jax_tformer.hub.families import (
    ACTIVATIONS,
    ATTENTION,
    BIASES,
    LAYER,
    Family,
    Fields,
    Rows,
    Setting,
    Settings,
    head,
    modules,
    named,
)

TEMPLATE = TransformerConfig(
    vocab_size=50272,
    d_model=768,
    decoder=StackConfig(
        num_layers=12,
        num_heads=12,
        feedforward_width=3072,
        norm_placement="pre",
        final_norm=True,
        positions="learned",
        max_positions=2048,
        # Position p is row p + 2 of their table; no position uses the first two.
        position_offset=2,
    ),
    tied_head=True,
    dropout=DropoutConfig(residual=0.1),
)
SETTINGS = (
    *named(
        vocab_size="vocab_size",
        hidden_size="d_model",
        num_hidden_layers="decoder.num_layers",
        num_attention_heads="decoder.num_heads",
        ffn_dim="decoder.feedforward_width",
        max_position_embeddings="decoder.max_positions",
        final_norm="decoder.final_norm",
        enable_bias=f"{BIASES} decoder.feedforward_bias",
        tie_word_embeddings="tied_head",
        init_std="initializer_std",
        dropout="dropout.residual",
        attention_dropout="dropout.attention",
    ),
    Setting("activation_function", "decoder.activation", ACTIVATIONS),
    Setting("do_layer_norm_before", "decoder.norm_placement", {True: "pre", False: "post"}),
)


def _flatten(config: Settings) -> Fields:
    """Works out `final_norm`, which follows from two of their settings."""
    width = config.get("hidden_size", TEMPLATE.d_model)
    projected = config.get("word_embed_proj_dim")
    require(
        projected in (None, width),
        f"word_embed_proj_dim is {projected!r} in the Hugging Face config; only hidden_size, {width!r}, is supported",
    )
    kept = config.get("do_layer_norm_before") is not False and config.get("_remove_final_layer_norm") is not True
    return {**config, "final_norm": kept}


def _nest(written: Settings) -> Fields:
    nested = dict(written)
    removed = nested["do_layer_norm_before"] is True and not nested.pop("final_norm")
    return {**nested, "_remove_final_layer_norm": removed, "word_embed_proj_dim": nested["hidden_size"]}


def _rows(config: TransformerConfig) -> Rows:
    layer = "model.decoder.layers.*."
    ours = "decoder.blocks.*."
    outside = {"embed_tokens": "embedding.tokens", "embed_positions": "embedding.positions"}
    if config.output_stack.final_norm:
        outside["final_layer_norm"] = "decoder.final_norm"
    return (
        *modules(outside, "model.decoder."),
        *modules(ATTENTION, f"{layer}self_attn.", f"{ours}self_attention."),
        *modules(LAYER, layer, ours),
        head("lm_head.weight", config),
    )


FAMILIES = {
    "OPTForCausalLM": Family(
        "opt",
        TEMPLATE,
        SETTINGS,
        _rows,
        fixed={"layer_norm_elementwise_affine": True, "layerdrop": 0.0},
        flatten=_flatten,
        nest=_nest,
    )
}
"""`pad_token_id` is not read: PyTorch does not train that row of the token table, but no output depends on it."""
