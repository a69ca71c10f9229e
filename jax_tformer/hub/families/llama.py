"""The tables of Llama 2 and 3 (Touvron et al., 2023; Dubey et al., 2024), `transformers.LlamaForCausalLM`."""

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.hub import rope
from jax_tformer.hub.tables import ACTIVATIONS, VECTOR, Family, Row, Setting, linear

STACK = StackConfig(
    num_layers=32,
    num_heads=32,
    feedforward_width=11008,
    query_bias=False,
    key_bias=False,
    value_bias=False,
    output_bias=False,
    feedforward_bias=False,
    activation="silu",
    gated=True,
    norm="rmsnorm",
    norm_placement="pre",
    norm_eps=1e-6,
    norm_bias=False,
    final_norm=True,
    positions="rotary",
    max_positions=2048,
)
TEMPLATE = TransformerConfig(vocab_size=32000, d_model=4096, decoder=STACK)
SETTINGS = (
    Setting("vocab_size", ("vocab_size",)),
    Setting("hidden_size", ("d_model",)),
    Setting("num_hidden_layers", ("decoder.num_layers",)),
    Setting("num_attention_heads", ("decoder.num_heads",)),
    Setting("num_key_value_heads", ("decoder.key_value_heads",), nullable=True),
    Setting("intermediate_size", ("decoder.feedforward_width",)),
    Setting("max_position_embeddings", ("decoder.max_positions",)),
    Setting("rms_norm_eps", ("decoder.norm_eps",)),
    Setting("tie_word_embeddings", ("tied_head",)),
    Setting("initializer_range", ("initializer_std",)),
    Setting("attention_dropout", ("dropout.attention",)),
    *rope.SETTINGS,
)
"""Those that the descendants of Llama have too."""
ACTIVATION = Setting("hidden_act", ("decoder.activation",), ACTIVATIONS)
HEAD_WIDTH = Setting("head_dim", ("decoder.head_width",), nullable=True)
ATTENTION_BIAS = Setting(
    "attention_bias", tuple(f"decoder.{name}_bias" for name in ("query", "key", "value", "output"))
)
MLP_BIAS = Setting("mlp_bias", ("decoder.feedforward_bias",))
NORMS = {"input_layernorm": "self_attention_norm", "post_attention_layernorm": "feedforward_norm"}
"""Their norms of a layer -> ours."""


def rows(config: TransformerConfig, norms: dict[str, str] = NORMS) -> tuple[Row, ...]:
    """Returns the rows of a LlamaForCausalLM, or of a descendant with other `norms`."""
    stack, theirs, ours = config.output_stack, "model.layers.*", "decoder.blocks.*"
    attention = {"q": "query", "k": "key", "v": "value", "o": "output"}
    query_and_key = ("q", "k") if stack.query_key_norm else ()
    return (
        Row("model.embed_tokens.weight", ("embedding.tokens.weight",)),
        *(Row(f"{theirs}.{norm}.weight", (f"{ours}.{our}.weight",), VECTOR) for norm, our in norms.items()),
        *(
            row
            for letter, name in attention.items()
            for row in linear(
                f"{theirs}.self_attn.{letter}_proj", f"{ours}.self_attention.{name}", getattr(stack, f"{name}_bias")
            )
        ),
        *(
            Row(f"{theirs}.self_attn.{x}_norm.weight", (f"{ours}.self_attention.{attention[x]}_norm.weight",), VECTOR)
            for x in query_and_key
        ),
        *(
            row
            for name in ("gate", "up", "down")
            for row in linear(f"{theirs}.mlp.{name}_proj", f"{ours}.feedforward.{name}", stack.feedforward_bias)
        ),
        Row("model.norm.weight", ("decoder.final_norm.weight",), VECTOR),
        Row("lm_head.weight", ("embedding.tokens.weight" if config.tied_head else "head.weight",)),
        # The frequencies of the rotation, which older versions saved.
        Row(f"{theirs}.self_attn.rotary_emb.inv_freq", None),
    )


FAMILIES = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        template=TEMPLATE,
        settings=(*SETTINGS, ACTIVATION, HEAD_WIDTH, ATTENTION_BIAS, MLP_BIAS),
        fixed={},
        rows=rows,
        flatten=rope.flatten,
        nest=rope.nest,
    )
}
"""`pretraining_tp` split products into parts of one sum in older versions, which changes no function."""
