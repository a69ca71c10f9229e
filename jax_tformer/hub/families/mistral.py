"""The tables of Mistral (Jiang et al., 2023), `transformers.MistralForCausalLM`: Llama with a window."""

from dataclasses import replace

from jax_tformer.hub import rope
from jax_tformer.hub.families import llama
from jax_tformer.hub.tables import Family, Setting

FAMILIES = {
    "MistralForCausalLM": Family(
        model_type="mistral",
        template=replace(
            llama.TEMPLATE,
            decoder=replace(
                llama.STACK, feedforward_width=14336, key_value_heads=8, max_positions=4096 * 32, window=4096
            ),
        ),
        settings=(
            *llama.SETTINGS,
            llama.ACTIVATION,
            llama.HEAD_WIDTH,
            Setting("sliding_window", ("decoder.window",), nullable=True),
        ),
        fixed={},
        rows=llama.rows,
        flatten=rope.flatten,
        nest=rope.nest,
    )
}
