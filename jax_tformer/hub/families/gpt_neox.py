"""The tables of GPT-NeoX and Pythia (Black et al., 2022; Biderman et al., 2023), `transformers.GPTNeoXForCausalLM`."""

from jax_tformer.config import RotaryConfig, StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.hub.families import (
    ACTIVATIONS,
    BIASES,
    Family,
    Fields,
    Row,
    Rows,
    Setting,
    Settings,
    head,
    modules,
    named,
    rope,
)

TEMPLATE = TransformerConfig(
    vocab_size=50432,
    d_model=6144,
    decoder=StackConfig(
        num_layers=44,
        num_heads=64,
        feedforward_width=24576,
        activation="gelu_erf",
        norm_placement="pre",
        parallel=True,
        final_norm=True,
        positions="rotary",
        max_positions=2048,
        rotary=RotaryConfig(width=24),
    ),
)
SETTINGS = (
    *named(
        vocab_size="vocab_size",
        hidden_size="d_model",
        num_hidden_layers="decoder.num_layers",
        num_attention_heads="decoder.num_heads",
        intermediate_size="decoder.feedforward_width",
        max_position_embeddings="decoder.max_positions",
        layer_norm_eps="decoder.norm_eps",
        use_parallel_residual="decoder.parallel",
        attention_bias=BIASES,
        tie_word_embeddings="tied_head",
        initializer_range="initializer_std",
        hidden_dropout="dropout.embedding dropout.residual",
        attention_dropout="dropout.attention",
    ),
    Setting("hidden_act", "decoder.activation", ACTIVATIONS),
    *rope.SETTINGS,
    Setting("rotary_width", "decoder.rotary.width", nullable=True, said="rotary_pct"),
)
HEADS = "(h n c) i -> n (h c) i"
"""Query, key and value of one head stand together."""


def _head_width(config: Settings) -> int:
    default = {"hidden_size": TEMPLATE.d_model, "num_attention_heads": 64}
    width, heads = (usual if config.get(name) is None else config[name] for name, usual in default.items())
    if not isinstance(width, int) or not isinstance(heads, int) or not 1 <= heads <= width:
        raise InputError(
            f"hidden_size is {width!r} and num_attention_heads is {heads!r}; expected whole numbers of at least 1, and "
            "no more heads than columns"
        )
    return width // heads


def _flatten(config: Settings) -> Fields:
    """Works out `rotary_width`, of which they say the part of a head's width that it is."""
    given = rope.rope_object(config, "rope_scaling") or rope.rope_object(config)
    given.setdefault("rope_theta", config.get("rotary_emb_base"))
    part = given.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    width = _head_width(config)
    if not isinstance(part, int | float) or not 0 < part <= 1:
        raise InputError(f"rotary_pct is {part!r} in the Hugging Face config; expected a number above 0, at most 1")
    flat = rope.only_positions(config, rope.flat_rope(given))
    if config.get("head_dim") not in (None, 0, width):
        raise InputError(
            f"head_dim is {config['head_dim']!r} in the Hugging Face config; only hidden_size / num_attention_heads, "
            f"{width}, is supported"
        )
    return {**config, **flat, "rotary_width": None if part == 1 else int(width * part)}


def _nest(written: Settings) -> Fields:
    nested = rope.nest(written)
    turned = nested.pop("rotary_width")
    part = 1.0 if turned is None else turned / _head_width(written)
    return {**nested, "rope_parameters": {**rope.nested_rope(written), "partial_rotary_factor": part}}


def _rows(config: TransformerConfig) -> Rows:
    layer = ("gpt_neox.layers.*.", "decoder.blocks.*.")
    heads = (("h", config.output_stack.num_heads),)
    weights, biases = (
        " ".join(f"decoder.blocks.*.self_attention.{name}.{leaf}" for name in ("query", "key", "value"))
        for leaf in ("weight", "bias")
    )
    return (
        *modules({"embed_in": "embedding.tokens", "final_layer_norm": "decoder.final_norm"}, "gpt_neox."),
        Row(f"{layer[0]}attention.query_key_value.weight", weights, HEADS, heads),
        Row(f"{layer[0]}attention.query_key_value.bias", biases, "(h n c) -> n (h c)", heads, optional=True),
        *modules(
            {
                "input_layernorm": "self_attention_norm",
                "attention.dense": "self_attention.output",
                "post_attention_layernorm": "feedforward_norm",
                "mlp.dense_h_to_4h": "feedforward.up",
                "mlp.dense_4h_to_h": "feedforward.down",
            },
            *layer,
        ),
        # Files have the first name, and models the second.
        head("embed_out.weight", config),
        head("lm_head.weight", config),
        # The causal mask, its large negative number and the frequencies of the rotation, which older versions saved.
        *(Row(f"{layer[0]}attention.{name}", None) for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
    )


FAMILIES = {
    "GPTNeoXForCausalLM": Family("gpt_neox", TEMPLATE, SETTINGS, _rows, flatten=_flatten, nest=_nest),
}
