"""The tables of Llama 2 and 3 (Touvron et al., 2023; Dubey et al., 2024), `transformers.LlamaForCausalLM`."""

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.hub import rope
from jax_tformer.hub.tables import ACTIVATIONS, VECTOR, Family, Row, Setting, linears, named, scales

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
    *named(
        vocab_size="vocab_size",
        hidden_size="d_model",
        num_hidden_layers="decoder.num_layers",
        num_attention_heads="decoder.num_heads",
    ),
    Setting("num_key_value_heads", ("decoder.key_value_heads",), nullable=True),
    *named(
        intermediate_size="decoder.feedforward_width",
        max_position_embeddings="decoder.max_positions",
        rms_norm_eps="decoder.norm_eps",
        tie_word_embeddings="tied_head",
        initializer_range="initializer_std",
        attention_dropout="dropout.attention",
    ),
    *rope.SETTINGS,
)
"""Those that the descendants of Llama have too."""
ACTIVATION = Setting("hidden_act", ("decoder.activation",), ACTIVATIONS)
HEAD_WIDTH = Setting("head_dim", ("decoder.head_width",), nullable=True)
ATTENTION_BIAS = Setting(
    "attention_bias", tuple(f"decoder.{name}_bias" for name in ("query", "key", "value", "output"))
)
MLP_BIAS = Setting("mlp_bias", ("decoder.feedforward_bias",))
QUERY_KEY_VALUE = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
NORMS = {"input_layernorm": "self_attention_norm", "post_attention_layernorm": "feedforward_norm"}
"""Their norms of a layer -> ours."""


def rows(config: TransformerConfig, norms: dict[str, str] = NORMS) -> tuple[Row, ...]:
    """Returns the rows of a LlamaForCausalLM, or of a descendant with other `norms`."""
    stack, theirs, ours = config.output_stack, "model.layers.*", "decoder.blocks.*"
    attention = (f"{theirs}.self_attn", f"{ours}.self_attention")
    turned = {"q_norm": "query_norm", "k_norm": "key_norm"} if stack.query_key_norm else {}
    feedforward = {f"{name}_proj": name for name in ("gate", "up", "down")}
    return (
        Row("model.embed_tokens.weight", ("embedding.tokens.weight",)),
        *scales(theirs, ours, norms),
        *linears(*attention, QUERY_KEY_VALUE, stack.query_bias),
        *linears(*attention, {"o_proj": "output"}, stack.output_bias),
        *scales(*attention, turned),
        *linears(f"{theirs}.mlp", f"{ours}.feedforward", feedforward, stack.feedforward_bias),
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
