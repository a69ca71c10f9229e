"""The families of Hugging Face models that we are held against: one table, with a row for each class.

Every gate of the harness runs on every entry; see docs/adding-a-family.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from twin.cases import VOCABULARY

Settings = Mapping[str, Any]
"""Fields of a config.json."""
AUTOS = {
    "CausalLM": hf.AutoModelForCausalLM,
    "LMHeadModel": hf.AutoModelForCausalLM,
    "MaskedLM": hf.AutoModelForMaskedLM,
    "ForSequenceClassification": hf.AutoModelForSequenceClassification,
    "ForTokenClassification": hf.AutoModelForTokenClassification,
    "ConditionalGeneration": hf.AutoModelForSeq2SeqLM,
    "MTModel": hf.AutoModelForSeq2SeqLM,
    "Model": hf.AutoModel,
}
"""The end of a class's name -> the AutoModel that opens its folders."""


@dataclass(frozen=True)
class Entry:
    """One class of Hugging Face models: how it is built small, and where its parts are."""

    kind: type[PreTrainedModel]
    settings: Settings
    """Those of its reduced config: at most 32 wide, no token with a meaning of its own, no dropout that matters."""
    stacks: Mapping[str, str]
    """Side of ours -> where its layers are in their base model."""
    variants: Mapping[str, Settings]
    """Name -> changes of `settings`; each has to change our config."""
    first: bool = False
    """Whether it takes all gates in every run, because no other entry has all of its parts."""
    prepare: Callable[[PreTrainedModel], object] = lambda model: None
    """Does to a new or loaded model what its class does only on the way from a file, or only in float32."""
    islands: bool = False
    """Whether it computes some things in float32 whatever its type, so that the float64 oracle needs `Float64`."""
    position_tables: Mapping[str, str] = field(default_factory=dict)
    """Ids of the batch -> the position table that counts from the start of the row and has to be told otherwise; the
    model takes no positions then."""
    to_logits: Callable[[Any, Tensor], Tensor] = lambda model, output: output
    """Makes logits of the first output of a class without the head that ours has."""
    first_position: int = 0
    """The position that it gives to the first token."""
    unused_untied: Sequence[str] = ()
    """Arrays that it saves, and only a tied model uses; untied, they are written and not read."""
    no_longer_written: Sequence[str] = ()
    """Settings that we write and the installed version does not (no longer, or never did), or writes as null."""
    generation: Settings = field(default_factory=dict)
    """What `generate` has to be told, so that it does nothing which ours does not do."""

    @property
    def auto(self):
        """The AutoModel that opens its folders."""
        return next(auto for end, auto in AUTOS.items() if self.kind.__name__.endswith(end))


ENTRIES: dict[str, Entry] = {}

# Decoders: GPT-2, and the descendants of Llama and others.
NO_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
"""Of the waves of a head 8 wide one is kept, one is divided, and two are between."""
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5}}
SCALED = {"rope_parameters": LLAMA3}
_WIDE, _UNTIED = {"head_dim": 12}, {"tie_word_embeddings": False}
_SIZES = {
    **NO_IDS,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
_SETTINGS = _SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
_FULL, _WINDOW = "full_attention", "sliding_attention"
_ABOVE = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def _llama(kind, variants, settings=None, *unwritten, **more):
    """An entry of a descendant of Llama."""
    stacks = {"decoder": "layers"}
    given = kind, _SETTINGS | (settings or {}), stacks, variants
    return Entry(*given, islands=True, no_longer_written=unwritten, **more)


ENTRIES |= {
    "gpt2": Entry(
        hf.GPT2LMHeadModel,
        {
            "vocab_size": VOCABULARY,
            "n_positions": 40,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_inner": 80,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        {"decoder": "h"},
        {
            "another width, activation, epsilon and scale": {
                "n_inner": None,
                "activation_function": "gelu",
                "layer_norm_epsilon": 1e-2,
                "scale_attn_weights": False,
            },
            "untied": _UNTIED,
        },
        first=True,
    ),
    "llama": _llama(
        hf.LlamaForCausalLM,
        {
            "scaled linearly, all heads have keys": {"num_key_value_heads": 4, **LINEAR},
            "scaled as in Llama 3": SCALED,
            "tied, biases, wide heads": {
                "tie_word_embeddings": True,
                "attention_bias": True,
                "mlp_bias": True,
                **_WIDE,
            },
            "another base, activation and epsilon": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
                "hidden_act": "gelu",
                "rms_norm_eps": 1e-2,
            },
        },
        first=True,
    ),
    "mistral": _llama(
        hf.MistralForCausalLM,
        {"no window": {"sliding_window": None}},
        {"sliding_window": 4},
    ),
    "qwen2": _llama(
        hf.Qwen2ForCausalLM,
        {
            "window above the first layer": _ABOVE,
            "window in all layers, wide heads": _ABOVE | {"max_window_layers": 0} | _WIDE,
            "window in every other layer": _ABOVE | {"layer_types": [_WINDOW, _FULL, _WINDOW]},
        },
        None,
        "head_dim",
    ),
    "qwen3": _llama(
        hf.Qwen3ForCausalLM,
        {
            "window above the first layer": _ABOVE,
            "tied, biases, narrow heads": {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 8},
        },
        _WIDE,
    ),
    "starcoder2": _llama(
        hf.Starcoder2ForCausalLM,
        {
            "no window": {"sliding_window": None},
            "no biases, untied, another activation and epsilon": {
                "use_bias": False,
                "hidden_act": "gelu",
                "norm_epsilon": 1e-2,
                **_UNTIED,
            },
            "wide heads, scaled": _WIDE | LINEAR,
        },
        {"sliding_window": 4},
        "head_dim",
    ),
}

# Older versions, and some classes, have null for false.
_NULL = "use_bidirectional_attention"
_GEMMA = {"head_dim": 12, "sliding_window": 4, "query_pre_attn_scalar": 20}
ENTRIES |= {
    "gemma": _llama(
        hf.GemmaForCausalLM,
        {
            "untied, biases": {"attention_bias": True, **_UNTIED},
            "another activation and epsilon": {"hidden_act": "silu", "rms_norm_eps": 1e-2},
        },
        _WIDE,
        _NULL,
    ),
    "gemma2": _llama(
        hf.Gemma2ForCausalLM,
        {
            "no caps": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
            "untied, biases": {"attention_bias": True, **_UNTIED},
            "other layers, scaled": {"layer_types": [_FULL, _WINDOW, _WINDOW], **SCALED},
            "no window, another scale": {"layer_types": [_FULL] * 3, "query_pre_attn_scalar": 5},
        },
        # Caps that random logits and scores reach.
        _GEMMA | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5},
        _NULL,
    ),
    "gemma3": _llama(
        hf.Gemma3ForCausalLM,
        {
            "logits capped, scaled": {
                "final_logit_softcapping": 2.0,
                "rope_parameters": {
                    _FULL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                    _WINDOW: {"rope_type": "default", "rope_theta": 30.0},
                },
            },
            "every second layer": {"layer_types": [_WINDOW, _FULL, _WINDOW], **_UNTIED},
            "windows alone": {"layer_types": [_WINDOW] * 3},
            "no window": {"layer_types": [_FULL] * 3, "attention_bias": True},
        },
        _GEMMA | {"layer_types": [_WINDOW, _WINDOW, _FULL]},
        _NULL,
    ),
    "opt": Entry(
        hf.OPTForCausalLM,
        _SIZES | {"ffn_dim": 48},
        {"decoder": "decoder.layers"},
        {
            "post-norm": {"do_layer_norm_before": False},
            "no final norm, untied": {"_remove_final_layer_norm": True, **_UNTIED},
            "no biases": {"enable_bias": False, "activation_function": "gelu"},
        },
        islands=True,
    ),
    "gpt_neox": Entry(
        hf.GPTNeoXForCausalLM,
        _SIZES | {"intermediate_size": 48, "num_attention_heads": 2},
        {"decoder": "layers"},
        {
            "one after the other": {"use_parallel_residual": False},
            "no biases of attention, approximate GELU": {"attention_bias": False, "hidden_act": "gelu_new"},
            "all columns turn": {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 1.0}},
            "half turns, scaled, tied": {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
                "tie_word_embeddings": True,
                "layer_norm_eps": 1e-2,
            },
        },
        islands=True,
    ),
}

# Encoders: each without a head, as a masked language model, and with the heads of texts and of tokens.
# As the padding_idx of the token table, a pad_token_id would take token 0 its gradient.
_BERT = _SIZES | {"num_hidden_layers": 2, "intermediate_size": 80}
_LAYERS = {"encoder": "encoder.layer"}
_ONE_KIND = ("position_embedding_type",)
bert = Entry(
    hf.BertModel,
    _BERT,
    _LAYERS,
    {
        "approximate GELU, large epsilon, narrow": {
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-2,
            "intermediate_size": 24,
        },
        "three token types": {"type_vocab_size": 3},
    },
    first=True,
    no_longer_written=_ONE_KIND,
)
roberta = Entry(
    hf.RobertaModel,
    # Positions count from the row behind that of the padding token.
    _BERT | {"max_position_embeddings": 42, "type_vocab_size": 1, "pad_token_id": 1},
    _LAYERS,
    {"two token types, short": {"type_vocab_size": 2, "max_position_embeddings": 13}},
    first_position=2,
    no_longer_written=_ONE_KIND,
)
distilbert = Entry(
    hf.DistilBertModel,
    {
        "vocab_size": VOCABULARY,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 80,
        "max_position_embeddings": 40,
        "pad_token_id": None,
    },
    {"encoder": "transformer.layer"},
    {},
)


def _heads(name, bare, masked, tokens, *unused, first=()):
    """Adds an encoder and its three heads.

    `masked` are variants of the masked language model, whose arrays `unused` nothing uses if it is untied; `tokens` is
    a variant of the classifier of tokens. `first` are the heads that take all gates in every run.
    """

    def with_head(kind, head, **changes):
        of = getattr(hf, bare.kind.__name__.replace("Model", f"For{kind}"))
        ENTRIES[f"{name} {head}"] = replace(bare, kind=of, first=head in first, **changes)

    def labels(count):
        return bare.settings | {"num_labels": count}

    ENTRIES[name] = bare
    with_head("MaskedLM", "masked", variants=masked, unused_untied=unused)
    with_head("SequenceClassification", "texts", settings=labels(3), variants={"other": {"num_labels": 2}})
    with_head("TokenClassification", "tokens", settings=labels(5), variants={"other": tokens})


_heads(
    "bert",
    bert,
    {"ReLU, untied": {"hidden_act": "relu", **_UNTIED}},
    {"num_labels": 2},
    "cls.predictions.bias",
    first=("masked", "texts"),
)
_heads(
    "roberta",
    roberta,
    {"untied, large epsilon": {"layer_norm_eps": 1e-2, **_UNTIED}},
    {"hidden_act": "gelu_new"},
    "lm_head.bias",
    first=("masked",),
)
_heads("distilbert", distilbert, {"ReLU, untied": {"activation": "relu", **_UNTIED}}, {"activation": "gelu_new"})


# Encoder-decoders.
def _bart_logits(model, output):
    """As AutoModelForSeq2SeqLM does with such a file; untied it would draw a head, and we have none."""
    return F.linear(output, model.shared.weight) if model.config.tie_word_embeddings else output


def exact_table(rows, width):
    """A table of positions in float64."""
    angles = np.arange(rows)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))


def _exact_positions(model):
    """Computes Marian's tables of positions in float64: the class rounds them to float32 whatever its type."""
    for side in ("encoder", "decoder"):
        table = model.get_submodule(f"model.{side}.embed_positions").weight
        exact = exact_table(*table.shape)
        assert (table.double() - exact).abs().max() < 1e-2
        table.data = exact


def _untie(model):
    """Unties the head of a new T5 1.1, which it gets only from a file that has one."""
    head = model.get_output_embeddings()
    if not model.config.scale_decoder_outputs and head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(torch.ones_like(head.weight))


_POSITIONS = {"source": "encoder.embed_positions", "target": "decoder.embed_positions"}
bart = Entry(
    hf.BartForConditionalGeneration,
    {
        **NO_IDS,
        "vocab_size": VOCABULARY,
        "d_model": 32,
        # Nothing of one stack fits the other.
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 80,
        "decoder_ffn_dim": 72,
        "max_position_embeddings": 40,
        "decoder_start_token_id": None,
        "forced_eos_token_id": None,
    },
    {"encoder": "encoder.layers", "decoder": "decoder.layers"},
    {
        "scaled embedding, approximate GELU": {"scale_embedding": True, "activation_function": "gelu_new"},
        "untied": _UNTIED,
    },
    first=True,
    position_tables={side: f"model.{table}" for side, table in _POSITIONS.items()},
    unused_untied=("model.shared.weight",),
    no_longer_written=("normalize_before", "normalize_embedding", "add_final_layer_norm", "static_position_embeddings"),
    generation={
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "no_repeat_ngram_size": 0,
        "encoder_no_repeat_ngram_size": 0,
        "min_length": 0,
    },
)
marian = replace(
    bart,
    kind=hf.MarianMTModel,
    settings={
        **bart.settings,
        "activation_function": "swish",
        "scale_embedding": True,
        # Narrow, because wider random models answer with one token over and over.
        "d_model": 16,
        "decoder_attention_heads": 1,
        # The cache of `generate` has as many layers as the encoder.
        "encoder_layers": 3,
        "decoder_layers": 2,
        # The class takes no null for this id, which only `generate` reads.
        "decoder_start_token_id": 0,
    },
    variants={
        "separate tables": {"share_encoder_decoder_embeddings": False},
        "GELU, unscaled": {"activation_function": "gelu", "scale_embedding": False},
    },
    first=False,
    prepare=_exact_positions,
)
t5 = Entry(
    hf.T5ForConditionalGeneration,
    {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        # Not a quarter of the width.
        "d_kv": 10,
        "d_ff": 80,
        # The cache of `generate` has as many layers as the encoder.
        "num_layers": 3,
        "num_decoder_layers": 2,
        "num_heads": 4,
        # Sequences are as long as it takes to reach every bucket.
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 8,
        "pad_token_id": None,
        "eos_token_id": None,
        "decoder_start_token_id": None,
    },
    {"encoder": "encoder.block", "decoder": "decoder.block"},
    {
        "gated SiLU, other buckets": {
            "feed_forward_proj": "gated-silu",
            "relative_attention_num_buckets": 4,
            "relative_attention_max_distance": 5,
        },
        "exact GELU": {"feed_forward_proj": "gelu"},
    },
    first=True,
    prepare=_untie,
    islands=True,
    # The installed version writes true, and goes by the arrays when it reads.
    no_longer_written=("tie_word_embeddings",),
)
ENTRIES |= {
    "bart": bart,
    "bart bare": replace(
        bart,
        kind=hf.BartModel,
        first=False,
        variants={"scaled embedding": {"scale_embedding": True}},
        to_logits=_bart_logits,
        position_tables=_POSITIONS,
        unused_untied=("shared.weight",),
    ),
    "marian": marian,
    "t5": t5,
    # Gated and untied.
    "t5 1.1": replace(
        t5,
        settings={**t5.settings, "d_kv": 8, "feed_forward_proj": "gated-gelu", **_UNTIED},
        variants={"ungated": {"feed_forward_proj": "gelu_new"}},
        first=False,
    ),
}
VARIANTS = [(name, variant) for name, entry in ENTRIES.items() for variant in entry.variants]
