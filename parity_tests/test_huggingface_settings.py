"""What fields of a config.json mean: each is applied, refused in one line, or listed with the reason why it is idle."""

import re
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from itertools import product
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import traverse_util
from transformers.activations import ACT2FN

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.files import from_dict
from jax_tformer.functional import transformer
from jax_tformer.hub import families
from jax_tformer.hub.families import FAMILIES, config_from_huggingface, to_huggingface
from jax_tformer.model.layers import activate
from parity.gates.measure import compared
from parity_tests.huggingface import Oracle, config_json
from parity_tests.oracles import ENTRIES, LLAMA3
from parity_tests.transformers_reads import attributes, rotary_parameters
from tests.refusals import refused
from twin.cases import CONFIGS, weights_for

WINDOWS, FULL = "sliding_attention", "full_attention"


def read(name, **settings):
    """Our config of a model with these settings, and the defaults for all others."""
    return config_from_huggingface({**settings, "architectures": [ENTRIES[name].kind.__name__]})


MORE = {"bart": 50_265, "marian": 58_101 - 2 * 1024 * 1024}
"""Of ours, beside their parameters: the bias of logits, a buffer there; and no two tables of computed positions."""


@pytest.mark.parametrize("name", ENTRIES)
def test_absent_settings_mean_their_defaults(name):
    """At full size, with as many parameters as theirs."""
    kind, ours = ENTRIES[name].kind, read(name)
    with torch.device("meta"):
        model = kind(kind.config_class())
    assert config_from_huggingface(config_json(model)) == ours
    count = sum(p.numel() for p in model.parameters()) + MORE.get(name, 0)
    assert sum(leaf.size for leaf in jax.tree.leaves(transformer(ours).shapes)) == count


def test_defaults_are_our_presets():
    assert read("gpt2") == ARCHITECTURES["gpt2"]
    assert read("bert masked") == ARCHITECTURES["bert-base"]


WITHOUT_ORIGINAL = {key: value for key, value in LLAMA3.items() if not key.startswith("orig")}
OLDER = [
    # As on the Hub: Llama 2 7B with a longer context, Llama 3.2 1B.
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4}, "num_key_value_heads": 32}),
    ("llama", {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}, "rope_theta": 5e5}),
    ("llama", {"rope_parameters": WITHOUT_ORIGINAL, "rope_theta": 3.0}),
    ("llama", {"rope_parameters": {"rope_theta": 7e5, "factor": 3.0}, "rope_theta": 3.0, "rope_scaling": {}}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28, "rope_theta": 1e6}),
    ("qwen2", {"use_sliding_window": True, "num_hidden_layers": 30}),
    ("qwen2", {"use_sliding_window": True, "num_hidden_layers": 4, "max_window_layers": 3}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "layer_types": [WINDOWS, FULL] * 3, "num_hidden_layers": 6}),
    ("gemma3", {"sliding_window_pattern": 2, "rope_theta": 1e5, "rope_local_base_freq": 2e4, "num_hidden_layers": 8}),
    (
        "gemma3",
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 9e3},
    ),
    ("gemma3", {"rope_parameters": {FULL: {"rope_theta": 5e5}}}),
    ("gpt_neox", {"rotary_emb_base": 500, "rotary_pct": 0.5, "rope_theta": 3.0}),
    ("gpt_neox", {"rotary_pct": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "hidden_dropout": 0.1}),
    *(("t5", {"feed_forward_proj": words}) for words in ("gelu", "gated-gelu", "gated-silu")),
]


@pytest.mark.parametrize("name, settings", OLDER)
def test_a_config_json_means_what_transformers_reads_in_it(name, settings):
    """Whatever its form: `transformers` brings it into the newest one, and ours reads both."""
    # A copy: it writes into the objects that it is given.
    newest = ENTRIES[name].kind.config_class(**deepcopy(settings)).to_dict()
    ours = read(name, **settings)
    assert ours == read(name, **newest)
    assert ours != read(name) or name == "qwen2"


@pytest.mark.parametrize(
    "name, settings, fields, expected",
    [
        # What the first releases of Gemma say, and `transformers` does not take by its word.
        ("gemma", {"hidden_act": "gelu"}, "decoder.activation", "gelu_tanh"),
        # What newer versions save beside it is what they compute.
        (
            "t5",
            {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu", "is_gated_act": True},
            "encoder.activation encoder.gated",
            ("gelu_erf", True),
        ),
        ("t5", {"scale_decoder_outputs": None}, "head_scale", False),
        ("bert tokens", {"classifier_dropout": 0.0}, "dropout.classifier", 0.0),
    ],
)
def test_what_settings_become(name, settings, fields, expected):
    """Where both forms could be read wrongly alike, and no gate has a model that would show it."""
    assert attrgetter(*fields.split())(read(name, **settings)) == expected


def test_activations_are_the_functions_of_these_names():
    x, names = np.linspace(-6, 6, 101), families.ACTIVATIONS
    ours = {name: np.asarray(activate(jnp.asarray(x), kind)) for name, kind in names.items()}
    compared("1 activations", ours, {name: ACT2FN[name](torch.from_numpy(x)).numpy() for name in names}).require()


REFUSED = [
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn' .* expected one of 'default'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "'linear' .*, and factor is missing"),
    ("llama", {"rope_parameters": {"rope_type": ["linear"]}}, "rope_type is"),
    ("llama", {"rope_parameters": "linear"}, "rope_parameters is 'linear' .* expected an object"),
    ("llama", {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16}, "is 16 .* and 24 by its rope_"),
    ("llama", {"num_hidden_layers": None, "hidden_size": "32"}, "hidden_size"),
    ("llama", {"num_attention_heads": 32, "head_dim": None}, "hidden_size / num_attention_heads is 1; "),
    ("llama", {"model_type": "mistral"}, "model_type is 'mistral' .* a class of type 'llama'; expected one type"),
    ("llama", {"layer_types": [FULL, WINDOWS]}, "layer_types is .* only 'full_attention'"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types is .* a list of num_hidden_layers, 3, of"),
    ("qwen2", {"layer_types": [WINDOWS] * 3}, "sliding_window is missing"),
    ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "rope_parameters has"),
    ("gemma3", {"rope_parameters": {WINDOWS: {"rope_type": "linear", "factor": 8.0}}}, "only 'default'"),
    ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim is 16 .* only hidden_size, 32"),
    ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.0}}, "rotary_pct is"),
    ("gpt_neox", {"head_dim": 8}, "head_dim is 8 .* hidden_size / num_attention_heads, 16, is supported"),
    ("gpt2", {"n_head": 5}, "n_embd is 32 and n_head is 5; .* divisible"),
    ("gpt2", {"num_hidden_layers": 12}, "n_layer is 3 and num_hidden_layers is 12 .* two names of one setting"),
    ("gpt2", {"scale_attn_weights": "yes"}, "expected one of True, False"),
    ("gpt2", {"architectures": None}, "expected a list of one class"),
    ("gpt2", {"architectures": ["T5Model"]}, "'T5Model', not a known"),
    ("bert tokens", {"num_labels": 7}, "id2label names 5 classes and num_labels is 7 .* expected one number"),
    ("bert tokens", {"id2label": ["no", "yes"]}, r"id2label is \['no', 'yes'\]"),
    ("roberta masked", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ("roberta", {"pad_token_id": "<pad>"}, "pad_token_id is '<pad>'"),
    ("roberta", {"pad_token_id": 600}, "max_position_embeddings is -559"),
    ("marian", {"decoder_vocab_size": 9}, "decoder_vocab_size is 9 in the Hugging Face config and vocab_size is"),
    ("t5", {"feed_forward_proj": "gated-gelu-new"}, "feed_forward_proj is 'gated-gelu-new'"),
]
ONE_VALUE = [(name, field, only) for name, family in FAMILIES.items() for field, only in family.fixed.items()]
"""Settings of which each class has one value, and no field of ours another."""


@pytest.mark.parametrize("name, change, message", REFUSED)
def test_settings_that_are_refused(name, change, message):
    with refused(message):
        config_from_huggingface(Oracle(name).json | change)


@pytest.mark.parametrize("architecture, field, only", ONE_VALUE)
def test_settings_of_one_value(architecture, field, only):
    for other in (not only, "other"):
        with refused(rf"{field} is {other!r} in the Hugging .* only {only!r} is supported"):
            config_from_huggingface({"architectures": [architecture], field: other})


@pytest.mark.parametrize(
    "name, change",
    [
        ("bert", {"is_causal": False, "sliding_window": 4}),
        ("bert", {"position_embedding_type": None, "hidden_act": None}),
        ("llama", {"is_causal": True, "layer_types": [FULL] * 3, "sliding_window": None}),
        ("llama", {"original_max_position_embeddings": 16}),
        ("gpt_neox", {"head_dim": 16}),
        ("t5", {"is_gated_act": None}),
        ("gpt2", {"n_head": None, "n_embd": None, "num_attention_heads": 4, "hidden_size": 32}),
        ("bart", {"d_model": None, "hidden_size": 32, "encoder_layers": None, "num_hidden_layers": 2}),
    ],
)
def test_what_changes_nothing(name, change):
    """Neutral values, null for the default, and other names of settings."""
    theirs = Oracle(name).json
    assert config_from_huggingface(theirs | change) == config_from_huggingface(theirs)


def changed(config, changes):
    """`config` with other fields, each by its path."""
    flat = traverse_util.flatten_dict(asdict(config), sep=".", keep_empty_nodes=True)
    values = {key: value for key, value in flat.items() if not any(key.startswith(f"{path}.") for path in changes)}
    return from_dict(TransformerConfig, traverse_util.unflatten_dict(values | changes, sep="."), where="the test")


@pytest.mark.parametrize(
    "name, config, change, message",
    [
        ("llama", None, {"decoder.window": 4}, "decoder.window: null -> 4"),
        ("llama", None, {"decoder.query_bias": True}, "decoder.key_bias: true -> false"),
        ("gemma2", None, {"decoder.attention_scale": 7.5}, "decoder.attention_scale: 7.0 -> 7.5"),
        ("bart", None, {"encoder.norm_placement": "pre"}, 'encoder.norm_placement: "post" -> "pre"'),
        ("bart", "gpt2", {}, "do not both have an encoder"),
        ("gpt2", "gpt2", {"decoder.positions": "rotary", "decoder.max_positions": None}, "positions"),
        ("bert", "bert-base", {}, 'head: "none" -> "transform"'),
        ("bert masked", "bert-base", {"encoder.token_types": 0}, "token_type_embeddings"),
    ],
)
def test_configs_that_a_family_cannot_express(name, config, change, message):
    config = changed(Oracle(name).config if config is None else CONFIGS[config], change)
    with refused(message):
        to_huggingface(ENTRIES[name].kind.__name__, config, weights_for(config, 0.02))


@pytest.mark.parametrize("scale, number", [("head_width", 12), ("model_width", 32), ("none", 1), (7, 7)])
def test_scales_of_gemma_are_written_as_numbers(scale, number):
    config = changed(Oracle("gemma2").config, {"decoder.attention_scale": scale})
    written, _ = to_huggingface("Gemma2ForCausalLM", config, weights_for(config, 0.02))
    assert written["query_pre_attn_scalar"] == number


# What the code of transformers reads.
REASONS = {
    "is no field of a file: the class makes it of others, or has it for all models": (
        "base_model_pp_plan base_model_tp_plan sub_configs sub_configs_defaults is_heterogeneous default_theta "
        "default_rope_type name_or_path"
    ),
    "is compared with others, and stops a model that would not run": (
        "ignore_keys_at_rope_validation embed_dim num_heads embedding_size"
    ),
    "changes where or how fast numbers are computed": (
        "distributed_config fusion_config gradient_checkpointing dtype chunk_size_feed_forward reorder_and_upcast_attn "
        "use_cache"
    ),
    "is read by `generate` (see origin.py), or marks a row of the token table that no output depends on": (
        "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id"
    ),
    "changes how arrays start that no file holds, and ours start by rules of their own": (
        "initializer_factor initializer_range init_std sinusoidal_pos_embds"
    ),
    "changes which results are returned, and in what": "output_attentions return_dict tie_last_hidden_states",
    "chooses the loss of transformers' own training; ours is the config's": "problem_type",
    "is of classes with a head": "num_labels id2label tie_word_embeddings classifier_dropout",
    "is of other classes: of a vision tower, say, or of an encoder that became a decoder": (
        "is_encoder_decoder mm_tokens_per_image text_config vision_config number_of_conv_states"
    ),
    "is of rotary positions": "head_dim rope_parameters",
    "is read before a warning about kernels; this class has its rate under another name": "attention_dropout",
    "is read beside one object of rotary positions; Gemma 3 has two": "gemma3:original_max_position_embeddings",
    "has another name in this class (rotary_emb_base, rotary_pct), or stands in rope_parameters": (
        "gpt_neox:rope_theta gpt_neox:partial_rotary_factor"
    ),
}
"""Why an attribute changes no number where it is not heeded -> such attributes, each behind the one model that is
meant if not all are."""
IDLE = " ".join(REASONS.values()).split()
ODD = ({"odd": 1}, 3, True, False)
"""One of these changes the model, or is refused, wherever an attribute is heeded."""
ROTARY = [name for name, entry in ENTRIES.items() if hasattr(entry.kind.config_class, "rope_parameters")]


@cache
def configs(name):
    """The config.json of a model: without settings, the reduced one, and its variants."""
    entry = ENTRIES[name]
    changes = [{}, *entry.variants.values()]
    if name in ROTARY and name != "gemma3":
        changes.append({"rope_parameters": LLAMA3})
    named = {"architectures": [entry.kind.__name__]}
    return [named, *({**entry.settings, **more, **named} for more in changes)]


def outcome(config):
    """Our config of a config.json, or the refusal."""
    try:
        return config_from_huggingface(config)
    except InputError as error:
        return str(error)


@pytest.mark.parametrize("name", ENTRIES)
def test_what_is_refused_has_the_name_of_the_file(name):
    entry = ENTRIES[name]
    theirs = entry.kind.config_class(**entry.settings).to_dict() | configs(name)[0]
    for key, value in product(theirs, (0, -1, "x", None, 1.5)):
        refusal = outcome(theirs | {key: value})
        # Where null means the default, that may be wrong beside another key.
        named = theirs if value is None else [key]
        assert isinstance(refusal, TransformerConfig) or re.search(rf"\b({'|'.join(named)})\b", refusal), refusal
        assert "\n" not in str(refusal)


def passed_over(name, attribute):
    """Whether no odd value of it makes any difference to any config.json of this model."""
    both = [(config, outcome(config)) for config in configs(name)]
    assert all(isinstance(plain, TransformerConfig) for _, plain in both)
    return all(outcome(config | {attribute: odd}) == plain for config, plain in both for odd in ODD)


@pytest.mark.parametrize("name", ENTRIES)
def test_what_transformers_reads_is_heeded(name):
    # Causal masks and caches are of decoders.
    encoder = config_from_huggingface(configs(name)[0]).decoder is None
    reasons = {attribute.removeprefix(f"{name}:") for attribute in IDLE} | (
        families.NEUTRAL_IN_DECODERS.keys() if encoder else set()
    )
    assert not [each for each in attributes(ENTRIES[name].kind) - reasons if passed_over(name, each)]


@pytest.mark.parametrize("idle", IDLE)
def test_a_reason_is_given_only_for_what_is_read_and_idle(idle):
    *names, attribute = idle.split(":")
    assert any(
        attribute in attributes(ENTRIES[name].kind) and passed_over(name, attribute) for name in names or ENTRIES
    )


@pytest.mark.parametrize("attribute", [*families.NEUTRAL, *families.NEUTRAL_IN_DECODERS])
def test_an_attribute_without_a_reader_is_found(attribute, monkeypatch):
    for table in ("NEUTRAL", "NEUTRAL_IN_DECODERS"):
        monkeypatch.setattr(families, table, {k: v for k, v in getattr(families, table).items() if k != attribute})
    with pytest.raises(AssertionError, match=attribute):
        test_what_transformers_reads_is_heeded("llama")


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3"])
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_parameters_are_heeded(name, rope_type):
    whole = {"rope_type": rope_type, "rope_theta": 50.0, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    whole |= {"original_max_position_embeddings": 24}

    def read_rope(rope):
        # A window of Gemma 3 turns without scaling.
        given = {FULL: rope, WINDOWS: {"rope_type": "default", "rope_theta": 50.0}} if name == "gemma3" else rope
        return outcome(configs(name)[1] | {"rope_parameters": given})

    assert isinstance(read_rope(whole), TransformerConfig)
    for field in rotary_parameters(ENTRIES[name].kind, rope_type):
        assert any(read_rope(whole | {field: odd}) != read_rope(whole) for odd in ODD), field
