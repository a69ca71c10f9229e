"""The tables of GPT-2 (Radford et al., 2019), `transformers.GPT2LMHeadModel`."""

from collections.abc import Mapping

from jax_tformer.config import TransformerConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.hub.families import ACTIVATIONS, CONV1D, Family, Row, Rows, Setting, head, modules, named


def _four_times_the_width(ours: Mapping[str, object]) -> object:
    width = ours["d_model"]
    return 4 * width if isinstance(width, int) else width


SETTINGS = (
    *named(
        vocab_size="vocab_size",
        n_embd="d_model",
        n_layer="decoder.num_layers",
        n_head="decoder.num_heads",
        n_positions="decoder.max_positions",
        layer_norm_epsilon="decoder.norm_eps",
        tie_word_embeddings="tied_head",
        initializer_range="initializer_std",
        embd_pdrop="dropout.embedding",
        attn_pdrop="dropout.attention",
        resid_pdrop="dropout.residual",
    ),
    Setting("n_inner", "decoder.feedforward_width", default=_four_times_the_width),
    Setting("activation_function", "decoder.activation", ACTIVATIONS),
    Setting("scale_attn_weights", "decoder.attention_scale", {True: "head_width", False: "none"}),
)

_LAYER = "transformer.h.*.", "decoder.blocks.*."
_FUSED = " ".join(f"self_attention.{name}" for name in ("query", "key", "value"))
ROWS = (
    *modules({"wte": "embedding.tokens", "wpe": "embedding.positions", "ln_f": "decoder.final_norm"}, "transformer."),
    *modules({"ln_1": "self_attention_norm", "ln_2": "feedforward_norm"}, *_LAYER),
    *modules(
        {
            "attn.c_attn": _FUSED,
            "attn.c_proj": "self_attention.output",
            "mlp.c_fc": "feedforward.up",
            "mlp.c_proj": "feedforward.down",
        },
        *_LAYER,
        CONV1D,
    ),
    # The causal mask and its large negative number, which older versions saved in every layer.
    Row("transformer.h.*.attn.bias", None),
    Row("transformer.h.*.attn.masked_bias", None),
)


def rows(config: TransformerConfig) -> Rows:
    """Returns the rows of a GPT2LMHeadModel; an untied head is an array of its own."""
    return *ROWS, head("lm_head.weight", config)


FAMILIES = {
    "GPT2LMHeadModel": Family(
        "gpt2",
        ARCHITECTURES["gpt2"],
        SETTINGS,
        rows,
        fixed={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        synonyms={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
    )
}
"""`reorder_and_upcast_attn` asks for a softmax in float32, the least precision of ours, so it changes nothing."""
