"""The tables of StarCoder2 (Lozhkov et al., 2024), `transformers.Starcoder2ForCausalLM`."""

from dataclasses import replace
from functools import partial

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.hub.families import ACTIVATIONS, BIASES, Setting, llama, named

FAMILIES = {
    "Starcoder2ForCausalLM": replace(
        llama.FAMILY,
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
            Setting("hidden_act", "decoder.activation", {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS}),
            llama.HEAD_WIDTH,
            llama.WINDOW,
            *named(
                norm_epsilon="decoder.norm_eps",
                use_bias=f"{BIASES} decoder.feedforward_bias",
                residual_dropout="dropout.residual",
                embedding_dropout="dropout.embedding",
            ),
        ),
        rows=partial(llama.rows, mlp={"mlp.c_fc": "feedforward.up", "mlp.c_proj": "feedforward.down"}),
    )
}
