"""The tables of StarCoder2 (Lozhkov et al., 2024), `transformers.Starcoder2ForCausalLM`."""

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.hub import rope
from jax_tformer.hub.families import llama
from jax_tformer.hub.tables import ACTIVATIONS, VECTOR, Family, Row, Setting, linears, named, pair

_BIASES = ("query", "key", "value", "output", "feedforward")


def _rows(config: TransformerConfig) -> tuple[Row, ...]:
    stack, theirs, ours = config.output_stack, "model.layers.*", "decoder.blocks.*"
    attention, feedforward = {**llama.QUERY_KEY_VALUE, "o_proj": "output"}, {"c_fc": "up", "c_proj": "down"}
    return (
        Row("model.embed_tokens.weight", ("embedding.tokens.weight",)),
        *linears(f"{theirs}.self_attn", f"{ours}.self_attention", attention, stack.output_bias),
        *linears(f"{theirs}.mlp", f"{ours}.feedforward", feedforward, stack.feedforward_bias),
        *(row for name, our in llama.NORMS.items() for row in pair(f"{theirs}.{name}", f"{ours}.{our}", VECTOR)),
        *pair("model.norm", "decoder.final_norm", VECTOR),
        Row("lm_head.weight", ("embedding.tokens.weight" if config.tied_head else "head.weight",)),
    )


FAMILIES = {
    "Starcoder2ForCausalLM": Family(
        model_type="starcoder2",
        template=TransformerConfig(
            vocab_size=49152,
            d_model=3072,
            decoder=StackConfig(
                num_layers=30,
                num_heads=24,
                key_value_heads=2,
                feedforward_width=12288,
                activation="gelu_tanh",
                norm_placement="pre",
                norm_eps=1e-5,
                final_norm=True,
                positions="rotary",
                max_positions=4096,
            ),
            tied_head=True,
            initializer_std=0.018042,
        ),
        settings=(
            *(setting for setting in llama.SETTINGS if setting.theirs != "rms_norm_eps"),
            Setting("hidden_act", ("decoder.activation",), {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS}),
            llama.HEAD_WIDTH,
            Setting("norm_epsilon", ("decoder.norm_eps",)),
            Setting("use_bias", tuple(f"decoder.{name}_bias" for name in _BIASES)),
            Setting("sliding_window", ("decoder.window",), nullable=True),
            *named(
                residual_dropout="dropout.residual",
                embedding_dropout="dropout.embedding",
            ),
        ),
        fixed={},
        rows=_rows,
        flatten=rope.flatten,
        nest=rope.nest,
    )
}
