"""The tables of Qwen2 and Qwen3 (Yang et al., 2024; 2025), `transformers.Qwen2ForCausalLM` and `Qwen3ForCausalLM`.

Both are Llamas; Qwen2 has biases of queries, keys and values, and Qwen3 normalises queries and keys.
"""

from dataclasses import replace

from jax_tformer.hub.families import Fields, Settings, layer_types, llama, rope

_STACK = replace(llama.STACK, feedforward_width=22016, max_positions=32768, key_value_heads=32)
_TEMPLATE = replace(llama.TEMPLATE, vocab_size=151936)
# Qwen2's models obey a head_dim, which its configuration class does not have.
_SETTINGS = (*llama.SETTINGS, llama.ACTIVATION, llama.HEAD_WIDTH, *layer_types.SETTINGS)


def _flatten(config: Settings) -> Fields:
    config = rope.flatten(config)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers")
    first = first if isinstance(first, int) else 28
    return layer_types.flatten(config, window, _STACK.num_layers, lambda layer: layer >= first)


def _nest(written: Settings) -> Fields:
    window = written["window"]
    flags = layer_types.flags_of(written)
    fields = {"use_sliding_window": window is not None, "sliding_window": window}
    if window is not None and all(flags[flags.index(True) :]):
        fields["max_window_layers"] = flags.index(True)
    return {**layer_types.nest(rope.nest(written)), **fields}


_QWEN2 = replace(
    llama.FAMILY,
    model_type="qwen2",
    template=replace(_TEMPLATE, decoder=replace(_STACK, query_bias=True, key_bias=True, value_bias=True)),
    settings=_SETTINGS,
    flatten=_flatten,
    nest=_nest,
)
FAMILIES = {
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": replace(
        _QWEN2,
        model_type="qwen3",
        template=replace(_TEMPLATE, decoder=replace(_STACK, head_width=128, query_key_norm=True)),
        settings=(*_SETTINGS, llama.ATTENTION_BIAS),
    ),
}
