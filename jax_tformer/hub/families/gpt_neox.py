"""The tables of GPT-NeoX and Pythia (Black et al., 2022; Biderman et al., 2023), `transformers.GPTNeoXForCausalLM`."""

from jax_tformer.config import RotaryConfig, StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.hub import rope
from jax_tformer.hub.tables import ACTIVATIONS, VECTOR, Family, Row, Setting, Settings, linear, named, pair

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
    ),
    Setting("hidden_act", ("decoder.activation",), ACTIVATIONS),
    *named(
        layer_norm_eps="decoder.norm_eps",
        use_parallel_residual="decoder.parallel",
    ),
    Setting("attention_bias", tuple(f"decoder.{name}_bias" for name in ("query", "key", "value", "output"))),
    *named(
        tie_word_embeddings="tied_head",
        initializer_range="initializer_std",
        hidden_dropout="dropout.embedding dropout.residual",
        attention_dropout="dropout.attention",
    ),
    *rope.SETTINGS,
    Setting("rotary_width", ("decoder.rotary.width",), nullable=True, said="rotary_pct"),
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


def _flatten(config: Settings) -> dict[str, object]:
    """Works out `rotary_width`, of which they say the part of a head's width that it is."""
    given = rope.rope_object(config, "rope_scaling") or rope.rope_object(config)
    given.setdefault("rope_theta", config.get("rotary_emb_base"))
    part, width = given.get("partial_rotary_factor", config.get("rotary_pct", 0.25)), _head_width(config)
    if not isinstance(part, int | float) or not 0 < part <= 1:
        raise InputError(f"rotary_pct is {part!r} in the Hugging Face config; expected a number above 0, at most 1")
    flat = rope.only_positions(config, rope.flat_rope(given))
    if config.get("head_dim") not in (None, 0, width):
        raise InputError(
            f"head_dim is {config['head_dim']!r} in the Hugging Face config; only hidden_size / num_attention_heads, "
            f"{width}, is supported"
        )
    return {**config, **flat, "rotary_width": None if part == 1 else int(width * part)}


def _nest(written: Settings) -> dict[str, object]:
    nested, width = rope.nest(written), _head_width(written)
    turned = nested.pop("rotary_width")
    part = 1.0 if turned is None else int(str(turned)) / width
    return {**nested, "rope_parameters": {**rope.nested_rope(written), "partial_rotary_factor": part}}


def _rows(config: TransformerConfig) -> tuple[Row, ...]:
    stack, theirs, ours = config.output_stack, "gpt_neox.layers.*", "decoder.blocks.*"
    fused = tuple(f"{ours}.self_attention.{name}" for name in ("query", "key", "value"))
    heads, head = (("h", stack.num_heads),), "embedding.tokens.weight" if config.tied_head else "head.weight"
    bias = Row(
        f"{theirs}.attention.query_key_value.bias",
        tuple(f"{name}.bias" for name in fused),
        "(h n c) -> n (h c)",
        sizes=heads,
    )
    return (
        Row("gpt_neox.embed_in.weight", ("embedding.tokens.weight",)),
        *pair(f"{theirs}.input_layernorm", f"{ours}.self_attention_norm", VECTOR),
        Row(
            f"{theirs}.attention.query_key_value.weight", tuple(f"{name}.weight" for name in fused), HEADS, sizes=heads
        ),
        *((bias,) if stack.query_bias else ()),
        *linear(f"{theirs}.attention.dense", f"{ours}.self_attention.output", stack.output_bias),
        *pair(f"{theirs}.post_attention_layernorm", f"{ours}.feedforward_norm", VECTOR),
        *pair(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.feedforward.up"),
        *pair(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.feedforward.down"),
        *pair("gpt_neox.final_layer_norm", "decoder.final_norm", VECTOR),
        # Files have the first name, and models the second.
        Row("embed_out.weight", (head,)),
        Row("lm_head.weight", (head,)),
        # The causal mask, its large negative number and the frequencies of the rotation, which older versions saved.
        Row(f"{theirs}.attention.bias", None),
        Row(f"{theirs}.attention.masked_bias", None),
        Row(f"{theirs}.attention.rotary_emb.inv_freq", None),
    )


FAMILIES = {
    "GPTNeoXForCausalLM": Family(
        model_type="gpt_neox",
        template=TEMPLATE,
        settings=SETTINGS,
        fixed={},
        rows=_rows,
        flatten=_flatten,
        nest=_nest,
    )
}
