"""The tables of Llama 2 and 3 (Touvron et al., 2023; Dubey et al., 2024), `transformers.LlamaForCausalLM`."""

from collections.abc import Mapping
from dataclasses import replace

from jax_tformer.config import TransformerConfig
from jax_tformer.config.presets import NO_BIASES
from jax_tformer.hub.families import ACTIVATIONS, BIASES, Family, Row, Rows, Setting, head, modules, named, rope

STACK = replace(
    NO_BIASES,
    num_layers=32,
    num_heads=32,
    feedforward_width=11008,
    activation="silu",
    gated=True,
    norm="rmsnorm",
    norm_placement="pre",
    norm_eps=1e-6,
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
        intermediate_size="decoder.feedforward_width",
        max_position_embeddings="decoder.max_positions",
        rms_norm_eps="decoder.norm_eps",
        tie_word_embeddings="tied_head",
        initializer_range="initializer_std",
        attention_dropout="dropout.attention",
    ),
    Setting("num_key_value_heads", "decoder.key_value_heads", nullable=True),
    *rope.SETTINGS,
)
"""Those that the descendants of Llama have too."""
ACTIVATION = Setting("hidden_act", "decoder.activation", ACTIVATIONS)
WINDOW = Setting("sliding_window", "decoder.window", nullable=True)
HEAD_WIDTH = Setting("head_dim", "decoder.head_width", nullable=True)
ATTENTION_BIAS = Setting("attention_bias", BIASES)
MLP_BIAS = Setting("mlp_bias", "decoder.feedforward_bias")
ATTENTION = {
    "self_attn.q_proj": "self_attention.query",
    "self_attn.k_proj": "self_attention.key",
    "self_attn.v_proj": "self_attention.value",
    "self_attn.o_proj": "self_attention.output",
}
NORMS = {"input_layernorm": "self_attention_norm", "post_attention_layernorm": "feedforward_norm"}
"""Their norms of a layer -> ours."""
MLP = {f"mlp.{name}_proj": f"feedforward.{name}" for name in ("gate", "up", "down")}


def rows(config: TransformerConfig, norms: Mapping[str, str] = NORMS, mlp: Mapping[str, str] = MLP) -> Rows:
    """Returns the rows of a LlamaForCausalLM, or of a descendant with other `norms`, or another `mlp`."""
    names = {**ATTENTION, **norms, **mlp}
    if config.output_stack.query_key_norm:
        names |= {"self_attn.q_norm": "self_attention.query_norm", "self_attn.k_norm": "self_attention.key_norm"}
    return (
        *modules({"embed_tokens": "embedding.tokens", "norm": "decoder.final_norm"}, "model."),
        *modules(names, "model.layers.*.", "decoder.blocks.*."),
        head("lm_head.weight", config),
        # The frequencies of the rotation, which older versions saved.
        Row("model.layers.*.self_attn.rotary_emb.inv_freq", None),
    )


_SETTINGS = (*SETTINGS, ACTIVATION, HEAD_WIDTH, ATTENTION_BIAS, MLP_BIAS)
FAMILY = Family("llama", TEMPLATE, _SETTINGS, rows, flatten=rope.flatten, nest=rope.nest)
FAMILIES = {"LlamaForCausalLM": FAMILY}
"""`pretraining_tp` split products into parts of one sum in older versions, which changes no function."""
