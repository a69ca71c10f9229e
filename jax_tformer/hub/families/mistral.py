"""The tables of Mistral (Jiang et al., 2023), `transformers.MistralForCausalLM`: Llama with a window."""

from dataclasses import replace

from jax_tformer.hub.families import llama

_STACK = replace(llama.STACK, feedforward_width=14336, key_value_heads=8, max_positions=4096 * 32, window=4096)
FAMILIES = {
    "MistralForCausalLM": replace(
        llama.FAMILY,
        model_type="mistral",
        template=replace(llama.TEMPLATE, decoder=_STACK),
        settings=(*llama.SETTINGS, llama.ACTIVATION, llama.HEAD_WIDTH, llama.WINDOW),
    )
}
