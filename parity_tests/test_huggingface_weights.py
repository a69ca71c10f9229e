"""Gate 9 for Hugging Face models: weights and configs go there and back, and whatever does not fit is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.models.bart import BartConfig, BartForConditionalGeneration, BartModel
from transformers.models.bert import BertConfig, BertForMaskedLM, BertModel
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.models.marian import MarianConfig, MarianMTModel
from transformers.models.t5 import T5Config, T5ForConditionalGeneration

from jax_tformer.config import DropoutConfig, Dtype, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.functional import transformer
from jax_tformer.hub.families import FAMILIES, config_from_huggingface, from_huggingface, to_huggingface
from jax_tformer.hub.names import WeightsError, from_reference, to_reference
from jax_tformer.hub.tables import CONV1D, Row, read_rows
from parity.gates.measure import Measured, compared, worst
from parity.gates.pair import Tensors
from parity_tests.huggingface import Oracle, config_json
from parity_tests.oracles import ENTRIES
from parity_tests.oracles.decoders import LLAMA3
from twin.cases import CONFIGS, weights_for

Record = Callable[[str, Measured], None]


FULL_SIZE = [
    (GPT2LMHeadModel, GPT2Config, ARCHITECTURES["gpt2"], 124_439_808, 0),
    (BertForMaskedLM, BertConfig, ARCHITECTURES["bert-base"], 109_514_298, 0),
    (BertModel, BertConfig, None, 109_482_240, 0),
    (BartModel, BartConfig, None, 406_291_456, 0),
    # With the bias of logits, a buffer there.
    (BartForConditionalGeneration, BartConfig, None, 406_291_456, 50_265),
    # That, and without the two tables of computed positions.
    (MarianMTModel, MarianConfig, None, 414_307_328, 58_101 - 2 * 1024 * 1024),
    (T5ForConditionalGeneration, T5Config, None, 60_506_624, 0),
]


@pytest.mark.parametrize(
    ("kind", "config", "preset", "count", "more"), FULL_SIZE, ids=lambda value: getattr(value, "__name__", "")
)
def test_default_configs_are_our_presets(
    kind: Any, config: Any, preset: TransformerConfig | None, count: int, more: int
) -> None:
    """`count` parameters of theirs, and how many `more` ours has."""
    with torch.device("meta"):
        model = kind(config())
    ours = config_from_huggingface(config_json(model))
    assert preset in (ours, None)
    assert sum(p.numel() for p in model.parameters()) == count
    assert sum(leaf.size for leaf in jax.tree.leaves(transformer(ours).shapes)) == count + more
    # All settings have Hugging Face's defaults.
    assert config_from_huggingface({"architectures": [kind.__name__]}) == ours


@pytest.mark.parametrize("name", ENTRIES)
def test_absent_settings_have_hugging_faces_defaults(name: str) -> None:
    kind = ENTRIES[name].kind
    architecture = {"architectures": [kind.__name__]}
    assert config_from_huggingface(architecture) == config_from_huggingface(
        kind.config_class().to_dict() | architecture
    )


def saved(name: str, folder: Path, dtype: Dtype, **settings: Any) -> tuple[dict[str, Any], Tensors]:
    """config.json and the arrays, as Hugging Face saves them."""
    oracle = Oracle(name, dtype, **settings)
    oracle.load(oracle.random_weights(0.02, 3))
    oracle.model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def bytes_lost(first: Tensors, second: Tensors) -> Measured:
    """How many bytes differ, or stand on one side only, of any array."""

    def differing(a: np.ndarray | None, b: np.ndarray | None) -> float:
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            return float(max(0 if array is None else array.nbytes for array in (a, b)))
        return float(np.sum(a.reshape(-1).view("u1") != b.reshape(-1).view("u1")))

    names = first.keys() | second.keys()
    return worst("9 bytes lost", {name: differing(first.get(name), second.get(name)) for name in names}, 0.0)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ENTRIES)
def test_there_and_back(name: str, tied: bool, dtype: Dtype, tmp_path: Path, record: Record) -> None:
    """From the file that Hugging Face writes, through our parameters, into one that it reads, bit for bit."""
    theirs, weights = saved(name, tmp_path, dtype, tie_word_embeddings=tied)
    config, reference = from_huggingface(theirs, weights)
    config = config.with_dtype(dtype)
    params = from_reference(reference, transformer(config).shapes)
    entry = ENTRIES[name]
    architecture = entry.kind.__name__
    written, back = to_huggingface(architecture, config, to_reference(params))
    # What only ties use has other numbers.
    idle = frozenset() if tied else entry.unused_untied
    kept, back = ({key: array for key, array in side.items() if key not in idle} for side in (weights, back))
    record(f"huggingface {name}", bytes_lost(back, kept))
    # The installed version knows one value of these only, and no longer writes it.
    assert written == written | {key: theirs[key] for key in written.keys() - entry.no_longer_written}
    assert config_from_huggingface(written).with_dtype(dtype) == config


UNTIED = [(name, {"tie_word_embeddings": False}) for name, entry in ENTRIES.items() if entry.unused_untied]


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in ENTRIES), *UNTIED])
def test_hugging_face_loads_what_we_write(name: str, settings: dict[str, Any], tmp_path: Path, record: Record) -> None:
    """Its own AutoModel, no key missing or unexpected, with the config and the output of the model that it was."""
    oracle, entry = Oracle(name, **settings), ENTRIES[name]
    raw = oracle.random_weights(0.02, 0)
    oracle.load(raw)
    weights = from_huggingface(oracle.json, raw)[1]
    config, arrays = to_huggingface(entry.kind.__name__, oracle.config, weights)
    # Ids of special tokens, which we do not read. The defaults may be beyond so small a vocabulary.
    ids = {key: id for key, id in oracle.json.items() if key.endswith("_token_id")}
    (tmp_path / "config.json").write_text(json.dumps(ids | config))
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with oracle.whole():
        model, report = entry.auto.from_pretrained(
            tmp_path, dtype=torch.float64, output_loading_info=True, attn_implementation="eager"
        )
        entry.prepare(model)
    assert type(model) is entry.kind
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    state = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    assert bytes_lost(from_huggingface(config_json(model), state)[1], weights).passed

    read, known = config_json(model), oracle.json
    equal = {key for key in known if not key.endswith(("_token_id", "dtype", "_name_or_path"))}
    equal -= entry.no_longer_written
    assert {key: read[key] for key in equal} == {key: known[key] for key in equal}
    batch = oracle.batch("left", 0)
    before = {"logits": oracle.run(batch).activations["logits"]}
    oracle.model = model
    after = {"logits": oracle.run(batch).activations["logits"]}
    # Not to the bit: where an array lies in memory decides how it is multiplied.
    record(f"huggingface {name}", compared("1 activations", after, before))


@lru_cache(maxsize=1)
def gpt2() -> tuple[dict[str, Any], Tensors]:
    oracle = Oracle("gpt2")
    return oracle.json, oracle.random_weights(0.02, 0)


def broken(change: Callable[[Tensors], object]) -> str:
    """The message about weights that `change` has damaged."""
    config, weights = gpt2()
    weights = dict(weights)
    change(weights)
    with pytest.raises(WeightsError) as error:
        from_huggingface(config, weights)
    assert "\n" not in str(error.value)
    return str(error.value)


NAME = "transformer.h.1.attn.c_attn.weight"


def test_missing_and_unexpected() -> None:
    message = broken(lambda w: w.update(surplus=w.pop(NAME)))
    assert f"1 missing ({NAME})" in message
    assert "1 unexpected (surplus)" in message


def test_a_layer_too_many() -> None:
    message = broken(lambda w: w.update({"transformer.h.3.ln_1.bias": w["transformer.h.2.ln_1.bias"]}))
    assert "1 unexpected (transformer.h.3.ln_1.bias)" in message


def test_misshaped() -> None:
    assert f"{NAME} is [32, 95], expected [32, 96]" in broken(lambda w: w.update({NAME: w[NAME][:, :95]}))


def test_doubled() -> None:
    config, weights = gpt2()
    pairs = list(weights.items())
    with pytest.raises(WeightsError, match=r"1 given twice \(transformer\.wpe\.weight\)"):
        from_huggingface(config, [*pairs, pairs[1]])


def test_ties() -> None:
    config, weights = gpt2()
    table = weights["transformer.wte.weight"]
    tied = from_huggingface(config, weights | {"lm_head.weight": table.copy()})[1]
    assert bytes_lost(tied, from_huggingface(config, weights)[1]).passed
    assert "lm_head.weight should repeat" in broken(lambda w: w.update({"lm_head.weight": table + 1}))
    assert "lm_head.weight is [61, 31]" in broken(lambda w: w.update({"lm_head.weight": table[:, 1:]}))


def test_what_older_versions_saved_is_dropped() -> None:
    config, weights = gpt2()
    mask = {f"transformer.h.{layer}.attn.bias": np.ones((1, 1, 40, 40), bool) for layer in range(3)}
    assert bytes_lost(from_huggingface(config, weights | mask)[1], from_huggingface(config, weights)[1]).passed


def test_writing_weights_that_do_not_fit() -> None:
    config, weights = from_huggingface(*gpt2())
    bias = "decoder.blocks.0.self_attention.key.bias"
    for change, message in (
        ({"surplus": weights[bias]}, r"1 unexpected \(surplus\)"),
        ({bias: weights[bias][:3]}, r"key\.bias is \[3\], expected \[32\]"),
        ({bias: weights[bias].astype(np.float32)}, "one type"),
    ):
        with pytest.raises(WeightsError, match=message):
            to_huggingface("GPT2LMHeadModel", config, weights | change)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "only False is supported"),
        ("gpt2", {"add_cross_attention": True}, "only False is supported"),
        ("gpt2", {"activation_function": "quick_gelu"}, "expected one of 'gelu'"),
        ("gpt2", {"activation_function": ["gelu"]}, "expected one of 'gelu'"),
        ("gpt2", {"n_layer": "3"}, "n_layer"),
        ("gpt2", {"n_head": 5}, "n_embd is 32 and n_head is 5; .* divisible"),
        ("gpt2", {"num_hidden_layers": 12}, "n_layer is 3 and num_hidden_layers is 12 .* two names of one setting"),
        ("bert tokens", {"num_labels": 7}, "id2label names 5 classes and num_labels is 7 .* expected one number"),
        ("gpt2", {"architectures": None}, "expected a list of one class"),
        ("gpt2", {"architectures": ["T5Model"]}, "'T5Model' is not a known"),
        ("gpt2", {"scale_attn_weights": "yes"}, "expected one of True, False"),
        ("bert", {"position_embedding_type": "relative_key"}, "only 'absolute' is supported"),
        ("bert", {"is_decoder": True}, "only False is supported"),
        ("bert masked", {"hidden_dropout_prob": 1.5}, "from 0 to below 1"),
        ("llama", {"is_causal": False}, "is_causal is False in .* only True is supported"),
        ("llama", {"num_attention_heads": 32, "head_dim": None}, "hidden_size / num_attention_heads is 1; "),
        ("llama", {"is_causal": None}, "is_causal is None in .* only True is supported"),
        ("bart", {"is_causal": False}, "is_causal is False in .* only True is supported"),
        ("t5", {"is_causal": False}, "is_causal is False in .* only True is supported"),
        ("llama", {"model_type": "mistral"}, "model_type is 'mistral' .* a class of type 'llama'; expected one type"),
        ("llama", {"sliding_window": 4}, "sliding_window is 4 .* only None is supported"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .* only 'full_attention'"),
        ("bert", {"per_layer_config": {"0": {"hidden_act": "relu"}}}, "per_layer_config is .* only None"),
        ("bert", {"transformers_weights": "other.safetensors"}, "transformers_weights is .* only None"),
        ("llama", {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16}, "is 16 .* and 24 by its rope_"),
        ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16}, "is 16 .* and 24 by its rope_"),
        ("gpt_neox", {"head_dim": 8}, "head_dim is 8 .* hidden_size / num_attention_heads, 16, is supported"),
        ("gemma3", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5 .* only 1\.0 is supported"),
        ("bart", {"activation_function": "tanh"}, "expected one of 'gelu'"),
        ("bart", {"decoder_layerdrop": 0.1}, r"only 0\.0 is supported"),
        ("bart", {"normalize_before": True}, "only False is supported"),
        ("bart", {"normalize_embedding": False}, "only True is supported"),
        ("bart", {"static_position_embeddings": True}, "only False is supported"),
        ("bart", {"add_final_layer_norm": True}, "only False is supported"),
        ("bart", {"is_encoder_decoder": False}, "only True is supported"),
        ("bart", {"scale_embedding": 2}, "scale_embedding"),
        ("bart", {"decoder_attention_heads": 5}, "divisible"),
        ("bart", {"architectures": ["BartForQuestionAnswering"]}, "'BartForQuestionAnswering' is not a known"),
    ],
)
def test_settings_that_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        config_from_huggingface(Oracle(name).json | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bert", {"is_causal": False, "sliding_window": 4}),
        ("llama", {"is_causal": True, "layer_types": ["full_attention"] * 3, "sliding_window": None}),
        ("llama", {"original_max_position_embeddings": 16}),
        ("gpt_neox", {"head_dim": 16}),
    ],
)
def test_what_changes_nothing_is_passed_over(name: str, change: dict[str, Any]) -> None:
    theirs = Oracle(name).json
    assert config_from_huggingface(theirs | change) == config_from_huggingface(theirs)


def test_null_means_false_where_transformers_says_so() -> None:
    theirs = Oracle("t5").json
    assert config_from_huggingface(theirs).head_scale
    assert not config_from_huggingface(theirs | {"scale_decoder_outputs": None}).head_scale
    assert config_from_huggingface(theirs | {"is_gated_act": None}) == config_from_huggingface(theirs)


def test_null_means_the_default() -> None:
    config = config_from_huggingface(
        {"architectures": ["BertModel"], "position_embedding_type": None, "hidden_act": None}
    )
    assert config == config_from_huggingface({"architectures": ["BertModel"]})


def test_a_lost_byte_shows() -> None:
    x = np.arange(3.0)
    for other, lost in (
        ({"x": x}, 0),
        ({"x": x + np.array([0, 0, 2**-51])}, 1),
        ({"x": x.astype("f4")}, 24),
        ({"y": x}, 24),
    ):
        assert bytes_lost({"x": x}, other).worst == lost


def test_the_other_names_of_settings() -> None:
    config, _ = gpt2()
    renamed = {key: value for key, value in config.items() if key not in ("n_head", "n_embd")}
    with_synonyms = renamed | {"num_attention_heads": 4, "hidden_size": 32}
    assert config_from_huggingface(with_synonyms) == config_from_huggingface(config)
    theirs = Oracle("bart").json
    names = {"d_model": "hidden_size", "encoder_layers": "num_hidden_layers"}
    names["encoder_attention_heads"] = "num_attention_heads"
    renamed = {names.get(key, key): value for key, value in theirs.items()}
    assert renamed.keys() != theirs.keys()
    assert config_from_huggingface(renamed) == config_from_huggingface(theirs)


@pytest.mark.parametrize(
    ("architecture", "preset", "change", "message"),
    [
        ("GPT2LMHeadModel", "bert-base", {}, "do not both have an encoder"),
        ("GPT2LMHeadModel", "gpt2", {"stack": {"positions": "rotary", "max_positions": None}}, "positions"),
        ("GPT2LMHeadModel", "gpt2", {"stack": {"attention_scale": "model_width"}}, "attention_scale"),
        ("GPT2LMHeadModel", "gpt2", {"head_bias": True}, "head_bias: false -> true"),
        ("BertModel", "bert-base", {}, 'head: "none" -> "transform"'),
        ("BertForMaskedLM", "bert-base", {"dropout": DropoutConfig(embedding=0.1)}, r"residual: 0\.1 -> 0\.0"),
        ("BertForMaskedLM", "bert-base", {"stack": {"token_types": 0}}, "token_type_embeddings"),
        ("BartForConditionalGeneration", "gpt2", {}, "do not both have an encoder"),
        ("BartForConditionalGeneration", "vaswani-base", {}, "decoder.positions"),
    ],
)
def test_configs_that_a_family_cannot_express(
    architecture: str, preset: str, change: dict[str, Any], message: str
) -> None:
    config, changes = CONFIGS[preset], dict(change)
    if stack := changes.pop("stack", None):
        side = "decoder" if config.decoder else "encoder"
        changes[side] = replace(config.output_stack, **stack)
    config = replace(config, **changes)
    with pytest.raises(InputError, match=message) as error:
        to_huggingface(architecture, config, weights_for(config, 0.02))
    assert "\n" not in str(error.value)


def test_a_table_with_a_gap_or_a_row_too_many() -> None:
    config, weights = gpt2()
    ours = config_from_huggingface(config)
    rows = FAMILIES["GPT2LMHeadModel"].rows(ours)
    with pytest.raises(WeightsError, match=r"nothing that becomes embedding\.positions\.weight"):
        read_rows(tuple(row for row in rows if "wpe" not in row.theirs), ours, weights)
    with pytest.raises(WeightsError, match=r"becomes mystery\.weight, which a model of this config does not have"):
        read_rows((*rows, Row("x", ("mystery.weight",), CONV1D)), ours, weights)
