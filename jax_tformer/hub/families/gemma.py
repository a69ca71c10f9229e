"""The tables of Gemma 1 to 3 (Gemma Team, 2024; 2024; 2025), `transformers.GemmaForCausalLM` and so on."""

from dataclasses import replace
from functools import partial
from typing import Any

from jax_tformer.config import RotaryConfig, TransformerConfig
from jax_tformer.config.errors import InputError, require
from jax_tformer.hub.families import ACTIVATIONS, Family, Fields, Setting, Settings, layer_types, llama, rope
from jax_tformer.hub.families.layer_types import FULL, WINDOWED

_GEMMA = TransformerConfig(
    vocab_size=256000,
    d_model=3072,
    tied_head=True,
    decoder=replace(
        llama.STACK,
        num_layers=28,
        num_heads=16,
        key_value_heads=16,
        head_width=256,
        feedforward_width=24576,
        activation="gelu_tanh",
        norm_unit_offset=True,
        embedding_scale=True,
        max_positions=8192,
    ),
)
_STACK = replace(
    llama.STACK,
    num_layers=26,
    num_heads=8,
    key_value_heads=4,
    head_width=256,
    feedforward_width=9216,
    activation="gelu_tanh",
    norm_placement="sandwich",
    norm_unit_offset=True,
    embedding_scale=True,
    attention_scale=256,
    window=4096,
)
_GEMMA2 = TransformerConfig(
    vocab_size=256000,
    d_model=2304,
    tied_head=True,
    logit_cap=30.0,
    decoder=replace(_STACK, max_positions=8192, window_layers=(True, False), score_cap=50.0),
)
_GEMMA3 = TransformerConfig(
    vocab_size=262208,
    d_model=2304,
    tied_head=True,
    decoder=replace(
        _STACK,
        max_positions=131072,
        window_layers=(True, True, True, True, True, False),
        query_key_norm=True,
        position_base=1e6,
        rotary=RotaryConfig(window_base=1e4),
    ),
)
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS}
_SETTINGS1 = (*llama.SETTINGS, llama.ATTENTION_BIAS, Setting("head_dim", "decoder.head_width"))
_SETTINGS = (
    *_SETTINGS1,
    *layer_types.SETTINGS,
    Setting("hidden_activation", "decoder.activation", _ACTIVATIONS),
    Setting("query_pre_attn_scalar", "decoder.attention_scale"),
    Setting("final_logit_softcapping", "logit_cap", nullable=True),
)
_NORMS = {
    "input_layernorm": "self_attention_norm",
    "post_attention_layernorm": "self_attention_output_norm",
    "pre_feedforward_layernorm": "feedforward_norm",
    "post_feedforward_layernorm": "feedforward_output_norm",
}
_LOCAL = "rope_local_base_freq"


def _flatten2(config: Settings) -> Fields:
    config = rope.flatten(config)
    return layer_types.flatten(config, _window(config), _STACK.num_layers, lambda layer: layer % 2 == 0)


def _flatten3(config: Settings) -> Fields:
    """Each kind of layer has rotary positions of its own; older fields speak of those without a window, but one."""
    kinds = rope.rope_object(config)
    require(
        not kinds.keys() - {FULL, WINDOWED},
        f"rope_parameters has {sorted(kinds)} in the Hugging Face config; expected {FULL}, {WINDOWED}",
    )
    whole, local = (rope.rope_object(kinds, kind) for kind in (FULL, WINDOWED))
    whole |= rope.rope_object(config, "rope_scaling")
    rope.require_whole({"partial_rotary_factor": config.get("partial_rotary_factor"), **whole})
    whole.setdefault("rope_theta", config.get("rope_theta"))
    local.setdefault("rope_theta", config.get(_LOCAL))
    if (kind := local.get("rope_type", "default")) != "default":
        raise InputError(f"rope_parameters.{WINDOWED}.rope_type is {kind!r}; only 'default' is supported")
    every = given if isinstance(given := config.get("sliding_window_pattern"), int) else 6
    flat = {**config, **rope.flat_rope(whole), _LOCAL: local["rope_theta"]}
    flat = layer_types.flatten(flat, _window(config), _STACK.num_layers, lambda layer: (layer + 1) % every != 0)
    if flat["window"] is None:
        # No layer turns by the base of those with a window.
        flat |= {_LOCAL: None}
    elif flat[_LOCAL] is None:
        flat |= {_LOCAL: 1e4}
    return flat


def _window(config: Settings) -> object:
    return config.get("sliding_window", _STACK.window)


def _nest2(written: Settings) -> Fields:
    scale: Any = written["query_pre_attn_scalar"]
    widths = {"head_width": written["head_dim"], "model_width": written["hidden_size"], "none": 1}
    nested = layer_types.nest(rope.nest(written))
    # Their field is a whole number: a scale that is none is refused, because it is not what is read back.
    return {**nested, "sliding_window": written["window"], "query_pre_attn_scalar": int(widths.get(scale, scale))}


def _nest3(written: Settings) -> Fields:
    nested = _nest2(written)
    local = nested.pop(_LOCAL)
    kinds = {FULL: nested["rope_parameters"], WINDOWED: {"rope_type": "default", "rope_theta": local}}
    return {**nested, "rope_parameters": kinds}


_FIXED = {"use_bidirectional_attention": False}
_FAMILY2 = Family(
    "gemma2",
    _GEMMA2,
    (*_SETTINGS, Setting("attn_logit_softcapping", "decoder.score_cap", nullable=True)),
    partial(llama.rows, norms=_NORMS),
    _FIXED,
    _flatten2,
    _nest2,
)
FAMILIES = {
    "GemmaForCausalLM": replace(
        llama.FAMILY,
        model_type="gemma",
        template=_GEMMA,
        # What the first releases call gelu is the approximation.
        settings=(*_SETTINGS1, Setting("hidden_act", "decoder.activation", {**_ACTIVATIONS, "gelu": "gelu_tanh"})),
        fixed=_FIXED,
    ),
    "Gemma2ForCausalLM": _FAMILY2,
    "Gemma3ForCausalLM": replace(
        _FAMILY2,
        model_type="gemma3_text",
        template=_GEMMA3,
        settings=(*_SETTINGS, Setting(_LOCAL, "decoder.rotary.window_base", nullable=True)),
        fixed={**_FIXED, "attn_logit_softcapping": None},
        flatten=_flatten3,
        nest=_nest3,
    ),
}
