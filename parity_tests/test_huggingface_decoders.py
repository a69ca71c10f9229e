"""What settings of the decoder families mean: older forms of config.json, kinds of layers, and what is refused."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from jax_tformer.config import RotaryConfig, StackConfig
from jax_tformer.config.errors import InputError
from jax_tformer.hub.families import config_from_huggingface, to_huggingface
from parity_tests.huggingface import Oracle
from parity_tests.oracles import ENTRIES
from parity_tests.oracles.decoders import LLAMA3
from twin.cases import weights_for

WINDOWS, FULL = "sliding_attention", "full_attention"
OLDER: list[tuple[str, dict[str, Any]]] = [
    # As on the Hub: Llama 2 7B with a longer context, Llama 3.2 1B, Mistral 7B v0.1 and v0.3.
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4}, "num_key_value_heads": 32}),
    ("llama", {"rope_scaling": None, "rope_theta": 5e5, "num_key_value_heads": None, "head_dim": None}),
    ("llama", {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}, "rope_theta": 5e5}),
    ("llama", {"rope_parameters": {k: v for k, v in LLAMA3.items() if not k.startswith("orig")}, "rope_theta": 3.0}),
    ("llama", {"rope_parameters": {"rope_theta": 7e5, "factor": 3.0}, "rope_theta": 3.0, "rope_scaling": {}}),
    ("llama", {"num_attention_heads": 16, "attention_dropout": None}),
    ("mistral", {"sliding_window": None, "rope_theta": 1e6, "head_dim": 64}),
    ("mistral", {"num_attention_heads": 16, "num_key_value_heads": 16, "sliding_window": 100}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28, "rope_theta": 1e6}),
    ("starcoder2", {"rope_parameters": {k: v for k, v in LLAMA3.items() if not k.startswith("orig")}}),
    ("qwen2", {"num_attention_heads": 64}),
    ("qwen2", {"num_attention_heads": 16, "num_key_value_heads": None}),
    ("qwen2", {"use_sliding_window": True, "num_hidden_layers": 30}),
    ("qwen2", {"use_sliding_window": True, "num_hidden_layers": 5}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "layer_types": [WINDOWS, FULL] * 3, "num_hidden_layers": 6}),
    ("gemma", {"hidden_act": "gelu", "rope_theta": 3e4, "num_key_value_heads": 1}),
    ("gemma2", {"num_hidden_layers": 7, "rope_theta": 3e4, "hidden_act": "relu"}),
    ("gemma2", {"num_hidden_layers": 2, "layer_types": [FULL, FULL], "attn_logit_softcapping": None}),
    ("gemma3", {"sliding_window_pattern": 2, "rope_theta": 1e5, "rope_local_base_freq": 2e4, "num_hidden_layers": 8}),
    (
        "gemma3",
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 9e3},
    ),
    ("gemma3", {"num_hidden_layers": 2, "layer_types": [FULL, FULL]}),
    ("gemma3", {"rope_parameters": {FULL: {"rope_theta": 5e5}}}),
    ("opt", {"word_embed_proj_dim": 768, "do_layer_norm_before": False, "dropout": 0.2}),
    ("gpt_neox", {"rotary_emb_base": 500, "rotary_pct": 0.5, "rope_theta": 3.0}),
    ("gpt_neox", {"rotary_pct": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "hidden_dropout": 0.1}),
    ("starcoder2", {"rope_theta": 1e6, "sliding_window": 4096, "use_bias": False, "residual_dropout": 0.1}),
]


@pytest.mark.parametrize(("name", "settings"), OLDER)
def test_a_config_json_means_what_transformers_reads_in_it(name: str, settings: dict[str, Any]) -> None:
    """Whatever its form: `transformers` brings it into the newest one, and ours reads both."""
    kind = ENTRIES[name].kind
    architecture = {"architectures": [kind.__name__]}
    # A copy: it writes into the objects that it is given.
    newest = kind.config_class(**deepcopy(settings)).to_dict()
    ours = config_from_huggingface(settings | architecture)
    assert ours == config_from_huggingface(newest | architecture)
    assert ours != config_from_huggingface(architecture) or name == "qwen2"


def test_what_settings_become() -> None:
    """The same test with the numbers: reading both forms wrongly alike would pass the other."""

    def stack(name: str, **settings: Any) -> StackConfig:
        read = config_from_huggingface(settings | {"architectures": [ENTRIES[name].kind.__name__]}).decoder
        assert read is not None
        return read

    assert stack("llama", rope_scaling={"type": "linear", "factor": 4}).rotary == RotaryConfig(
        scaling="linear", factor=4.0
    )
    assert stack("llama", rope_theta=5e5).position_base == 5e5
    assert stack("llama", num_attention_heads=16).key_value_heads is None
    # What the first releases of Gemma say, and `transformers` does not take by its word.
    assert stack("gemma", hidden_act="gelu").activation == "gelu_tanh"
    assert stack("mistral").window == 4096
    assert stack("mistral", sliding_window=None).window is None
    assert (stack("qwen2").window, stack("qwen2", use_sliding_window=True).window) == (None, 4096)
    some = stack("qwen2", use_sliding_window=True, num_hidden_layers=4, max_window_layers=3)
    assert some.window_layers == (False, False, False, True)
    assert stack("qwen3", hidden_size=1024).head_width == 128
    assert stack("gemma2", query_pre_attn_scalar=144).attention_scale == 144
    assert stack("gemma2", num_hidden_layers=7).window_layers == (True, False)
    gemma = stack("gemma3", rope_local_base_freq=9e3, rope_theta=2e5)
    assert (gemma.window_layers, gemma.position_base) == ((True,) * 5 + (False,), 2e5)
    assert gemma.rotary == RotaryConfig(window_base=9e3)
    assert stack("gpt_neox", hidden_size=64, num_attention_heads=2).rotary.width == 8
    assert stack("opt", _remove_final_layer_norm=True).final_norm is False


@pytest.mark.parametrize(("scale", "number"), [("head_width", 12), ("model_width", 32), ("none", 1), (12, 12), (7, 7)])
def test_scales_of_gemma_are_written_as_numbers(scale: Any, number: int) -> None:
    config = Oracle("gemma2").config
    assert config.decoder is not None
    config = replace(config, decoder=replace(config.decoder, attention_scale=scale))
    written, _ = to_huggingface("Gemma2ForCausalLM", config, weights_for(config, 0.02))
    assert written["query_pre_attn_scalar"] == number


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn' .* expected one of 'default'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type is 'dynamic'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "'linear' .*, and factor is missing"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
    ("llama", {"rope_parameters": {"rope_type": ["linear"]}}, "rope_type is"),
    ("llama", {"rope_parameters": "linear"}, "rope_parameters is 'linear' .* expected an object"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 .* only 1.0"),
    ("llama", {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
    ("llama", {"num_key_value_heads": 3}, "divide"),
    ("llama", {"num_hidden_layers": None, "hidden_size": "32"}, "hidden_size"),
    (
        "qwen2",
        {"layer_types": ["chunked_attention"] * 3},
        "layer_types is .* expected a list of num_hidden_layers, 3, of",
    ),
    ("qwen2", {"layer_types": [FULL]}, "layer_types is .* expected a list of num_hidden_layers, 3, of"),
    ("qwen2", {"layer_types": [WINDOWS] * 3}, "sliding_window is missing"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0"),
    ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "rope_parameters has"),
    ("gemma3", {"rope_parameters": {WINDOWS: {"rope_type": "linear", "factor": 8.0}}}, "only 'default'"),
    ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim is 16 .* only hidden_size, 32"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
    ("opt", {"layerdrop": 0.1}, r"layerdrop is 0\.1"),
    ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.0}}, "rotary_pct is"),
    ("gpt_neox", {"hidden_size": "32"}, "hidden_size is '32'"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_settings_that_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        config_from_huggingface(Oracle(name).json | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"window": 4}, "decoder.window: null -> 4"),
        ("llama", {"query_bias": True}, "decoder.key_bias: true -> false"),
        ("llama", {"rotary": RotaryConfig(width=4)}, "decoder.rotary.width: null -> 4"),
        ("llama", {"query_key_norm": True}, "decoder.query_key_norm: false -> true"),
        ("qwen2", {"output_bias": True}, "decoder.output_bias: false -> true"),
        ("mistral", {"window_layers": (True, False)}, "decoder.window_layers"),
        ("gemma2", {"norm_unit_offset": False}, "decoder.norm_unit_offset: true -> false"),
        ("gemma3", {"score_cap": 5.0}, r"decoder.score_cap: null -> 5\.0"),
        ("opt", {"norm_placement": "post"}, "decoder.final_norm: false -> true"),
        ("opt", {"position_offset": 0}, "decoder.position_offset: 2 -> 0"),
        ("gpt_neox", {"key_value_heads": 1}, "decoder.key_value_heads: null -> 1"),
    ],
)
def test_configs_that_a_family_cannot_express(name: str, change: dict[str, Any], message: str) -> None:
    config = Oracle(name).config
    assert config.decoder is not None
    config = replace(config, decoder=replace(config.decoder, **change))
    with pytest.raises(InputError, match=message) as error:
        to_huggingface(ENTRIES[name].kind.__name__, config, weights_for(config, 0.02))
    assert "\n" not in str(error.value)
