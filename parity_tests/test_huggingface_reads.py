"""What transformers reads from a config.json is read here too, refused, or listed with the reason why it is idle."""

import re
from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.hub import tables
from jax_tformer.hub.families import config_from_huggingface
from parity_tests.oracles import ENTRIES
from parity_tests.oracles.decoders import LLAMA3
from parity_tests.transformers_reads import attributes, rotary_parameters

_MADE = "is no field of a file: the class makes it of others, or has it for all models"
_SPEED = "changes where or how fast numbers are computed"
_IDS = "is read by `generate` (see origin.py), or marks a row of the token table that no output depends on"
_START = "changes how arrays start that no file holds, and ours start by rules of their own"
_OUTPUT = "changes which results are returned, and in what"
_NO_HEAD = "is of classes with a head"
_OTHER_CLASS = "is of other classes: of a vision tower, say, or of an encoder that became a decoder"
_CHECKED = "is compared with others, and stops a model that would not run"
IDLE: dict[str, str] = {
    **dict.fromkeys(("base_model_pp_plan", "base_model_tp_plan", "sub_configs", "sub_configs_defaults"), _MADE),
    **dict.fromkeys(("is_heterogeneous", "default_theta", "default_rope_type", "name_or_path"), _MADE),
    **dict.fromkeys(("ignore_keys_at_rope_validation",), _CHECKED),
    **dict.fromkeys(("embed_dim", "num_heads", "embedding_size"), _CHECKED),
    **dict.fromkeys(("distributed_config", "fusion_config", "gradient_checkpointing", "dtype"), _SPEED),
    **dict.fromkeys(("chunk_size_feed_forward", "reorder_and_upcast_attn", "use_cache"), _SPEED),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"), _IDS),
    **dict.fromkeys(("initializer_factor", "initializer_range", "init_std", "sinusoidal_pos_embds"), _START),
    **dict.fromkeys(("output_attentions", "return_dict", "tie_last_hidden_states"), _OUTPUT),
    "problem_type": "chooses the loss of transformers' own training; ours is the config's",
    **dict.fromkeys(("num_labels", "id2label", "tie_word_embeddings", "classifier_dropout"), _NO_HEAD),
    **dict.fromkeys(
        ("is_encoder_decoder", "mm_tokens_per_image", "text_config", "vision_config", "number_of_conv_states"),
        _OTHER_CLASS,
    ),
    **dict.fromkeys(("head_dim", "rope_parameters"), "is of rotary positions"),
    "attention_dropout": "is read before a warning about kernels; this class has its rate under another name",
    "gemma3 original_max_position_embeddings": "is read beside one object of rotary positions; Gemma 3 has two",
    "gpt_neox rope_theta": "has the name rotary_emb_base in this class, or stands in rope_parameters",
    "gpt_neox partial_rotary_factor": "has the name rotary_pct in this class, or stands in rope_parameters",
}
"""Attribute, behind the one model that is meant if not all are -> why it changes no number where it is not heeded."""
ODD = ({"odd": 1}, 3, True, False)
"""One of these changes the model, or is refused, wherever an attribute is heeded."""
ROTARY = [name for name, entry in ENTRIES.items() if hasattr(entry.kind.config_class, "rope_parameters")]


@cache
def configs(name: str) -> list[dict[str, Any]]:
    """The config.json of a model: without settings, the reduced one, and its variants."""
    entry = ENTRIES[name]
    changes = [{}, *entry.variants.values()]
    if name in ROTARY and name != "gemma3":
        changes.append({"rope_parameters": LLAMA3})
    named = {"architectures": [entry.kind.__name__]}
    return [named, *({**entry.settings, **more, **named} for more in changes)]


def outcome(config: Mapping[str, Any]) -> TransformerConfig | str:
    try:
        return config_from_huggingface(config)
    except InputError as error:
        return str(error)


@pytest.mark.parametrize("name", ENTRIES)
def test_what_is_refused_has_the_name_of_the_file(name: str) -> None:
    entry = ENTRIES[name]
    theirs = entry.kind.config_class(**entry.settings).to_dict() | configs(name)[0]
    for key, value in product(theirs, (0, -1, "x", None, 1.5)):
        refusal = outcome(theirs | {key: value})
        # Where null means the default, that may be wrong beside another key.
        named = theirs if value is None else [key]
        assert isinstance(refusal, TransformerConfig) or re.search(rf"\b({'|'.join(named)})\b", refusal), refusal
        assert "\n" not in str(refusal)


def passed_over(name: str, attribute: str) -> bool:
    """Whether no odd value of it makes any difference to any config.json of this model."""
    both = [(config, outcome(config)) for config in configs(name)]
    assert all(isinstance(plain, TransformerConfig) for _, plain in both)
    return all(outcome(config | {attribute: odd}) == plain for config, plain in both for odd in ODD)


@pytest.mark.parametrize("name", ENTRIES)
def test_what_transformers_reads_is_heeded(name: str) -> None:
    # Causal masks and caches are of decoders.
    encoder = config_from_huggingface(configs(name)[0]).decoder is None
    reasons = {attribute.removeprefix(f"{name} ") for attribute in IDLE} | (
        tables.NEUTRAL_IN_DECODERS.keys() if encoder else set()
    )
    assert not [each for each in attributes(ENTRIES[name].kind) - reasons if passed_over(name, each)]


@pytest.mark.parametrize("reason", IDLE)
def test_a_reason_is_given_only_for_what_is_read_and_idle(reason: str) -> None:
    *names, attribute = reason.split()
    assert any(
        attribute in attributes(ENTRIES[name].kind) and passed_over(name, attribute) for name in names or ENTRIES
    )


@pytest.mark.parametrize("attribute", [*tables.NEUTRAL, *tables.NEUTRAL_IN_DECODERS])
def test_an_attribute_without_a_reader_is_found(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_what_transformers_reads_is_heeded("llama")
    for table in ("NEUTRAL", "NEUTRAL_IN_DECODERS"):
        monkeypatch.setattr(tables, table, {k: v for k, v in getattr(tables, table).items() if k != attribute})
    with pytest.raises(AssertionError, match=attribute):
        test_what_transformers_reads_is_heeded("llama")


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3"])
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_parameters_are_heeded(name: str, rope_type: str) -> None:
    whole = {"rope_type": rope_type, "rope_theta": 50.0, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    whole |= {"original_max_position_embeddings": 24}
    nested = name == "gemma3"

    def read(rope: dict[str, Any]) -> TransformerConfig | str:
        # A window of Gemma 3 turns without scaling.
        plain = {"rope_type": "default", "rope_theta": 50.0}
        given = {"full_attention": rope, "sliding_attention": plain} if nested else rope
        return outcome(configs(name)[1] | {"rope_parameters": given})

    assert isinstance(read(whole), TransformerConfig)
    for field in rotary_parameters(ENTRIES[name].kind, rope_type):
        assert any(read(whole | {field: odd}) != read(whole) for odd in ODD), field
