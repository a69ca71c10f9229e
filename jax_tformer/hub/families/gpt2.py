"""The tables of GPT-2 (Radford et al., 2019), `transformers.GPT2LMHeadModel`."""

from collections.abc import Mapping

from jax_tformer.config import TransformerConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.hub.tables import ACTIVATIONS, CONV1D, VECTOR, Family, Row, Setting, named, pair


def _four_times_the_width(ours: Mapping[str, object]) -> object:
    width = ours["d_model"]
    return 4 * width if isinstance(width, int) else width


SETTINGS = (
    Setting("vocab_size", ("vocab_size",)),
    Setting("n_embd", ("d_model",), synonym="hidden_size"),
    Setting("n_layer", ("decoder.num_layers",), synonym="num_hidden_layers"),
    Setting("n_head", ("decoder.num_heads",), synonym="num_attention_heads"),
    Setting("n_positions", ("decoder.max_positions",), synonym="max_position_embeddings"),
    Setting("n_inner", ("decoder.feedforward_width",), default=_four_times_the_width),
    Setting("activation_function", ("decoder.activation",), ACTIVATIONS),
    Setting("layer_norm_epsilon", ("decoder.norm_eps",)),
    Setting("scale_attn_weights", ("decoder.attention_scale",), {True: "head_width", False: "none"}),
    *named(
        tie_word_embeddings="tied_head",
        initializer_range="initializer_std",
        embd_pdrop="dropout.embedding",
        attn_pdrop="dropout.attention",
        resid_pdrop="dropout.residual",
    ),
)

_BLOCK, _OURS = "transformer.h.*", "decoder.blocks.*"
_FUSED = tuple(f"{_OURS}.self_attention.{name}" for name in ("query", "key", "value"))
ROWS = (
    Row("transformer.wte.weight", ("embedding.tokens.weight",)),
    Row("transformer.wpe.weight", ("embedding.positions.weight",)),
    *pair(f"{_BLOCK}.ln_1", f"{_OURS}.self_attention_norm", VECTOR),
    Row(f"{_BLOCK}.attn.c_attn.weight", tuple(f"{name}.weight" for name in _FUSED), CONV1D),
    Row(f"{_BLOCK}.attn.c_attn.bias", tuple(f"{name}.bias" for name in _FUSED), VECTOR),
    *pair(f"{_BLOCK}.attn.c_proj", f"{_OURS}.self_attention.output", CONV1D),
    *pair(f"{_BLOCK}.ln_2", f"{_OURS}.feedforward_norm", VECTOR),
    *pair(f"{_BLOCK}.mlp.c_fc", f"{_OURS}.feedforward.up", CONV1D),
    *pair(f"{_BLOCK}.mlp.c_proj", f"{_OURS}.feedforward.down", CONV1D),
    *pair("transformer.ln_f", "decoder.final_norm", VECTOR),
    # The causal mask and its large negative number, which older versions saved in every layer.
    Row(f"{_BLOCK}.attn.bias", None),
    Row(f"{_BLOCK}.attn.masked_bias", None),
)


def rows(config: TransformerConfig) -> tuple[Row, ...]:
    """Returns the rows of a GPT2LMHeadModel; an untied head is an array of its own."""
    head = "embedding.tokens.weight" if config.tied_head else "head.weight"
    return (*ROWS, Row("lm_head.weight", (head,)))


FAMILIES = {
    "GPT2LMHeadModel": Family(
        model_type="gpt2",
        template=ARCHITECTURES["gpt2"],
        settings=SETTINGS,
        fixed={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        rows=rows,
    )
}
"""`reorder_and_upcast_attn` asks for a softmax in float32, the least precision of ours, so it changes nothing."""
