"""The tables of T5 (Raffel et al., 2020), 1.0 and 1.1, and Flan: `transformers.T5ForConditionalGeneration`."""

from dataclasses import replace

from jax_tformer.config import DropoutConfig, TransformerConfig
from jax_tformer.config.errors import require
from jax_tformer.config.presets import NO_BIASES
from jax_tformer.hub.families import ACTIVATIONS, Family, Fields, Row, Rows, Setting, Settings, modules, named
from jax_tformer.hub.names import Views, same_bytes

_STACK = replace(
    NO_BIASES,
    num_layers=6,
    num_heads=8,
    head_width=64,
    feedforward_width=2048,
    attention_scale="none",
    norm="rmsnorm",
    norm_placement="pre",
    norm_eps=1e-6,
    final_norm=True,
    positions="relative",
)
RATES = ("embedding", "attention", "residual", "feedforward", "final")
SMALL = TransformerConfig(
    vocab_size=32128,
    d_model=512,
    encoder=_STACK,
    decoder=_STACK,
    shared_embedding=True,
    tied_head=True,
    head_scale=True,
    dropout=DropoutConfig(**dict.fromkeys(RATES, 0.1)),
)


def both(field: str) -> str:
    """Returns the names of a field of both stacks."""
    return f"encoder.{field} decoder.{field}"


SETTINGS = (
    *named(
        vocab_size="vocab_size",
        d_model="d_model",
        d_kv=both("head_width"),
        d_ff=both("feedforward_width"),
        num_layers="encoder.num_layers",
        num_heads=both("num_heads"),
        relative_attention_num_buckets=both("relative_buckets"),
        relative_attention_max_distance=both("relative_max_distance"),
        layer_norm_epsilon=both("norm_eps"),
        is_gated_act=both("gated"),
        tie_word_embeddings="tied_head",
        dropout_rate=" ".join(f"dropout.{rate}" for rate in RATES),
    ),
    Setting("num_decoder_layers", "decoder.num_layers", default=lambda ours: ours["encoder.num_layers"]),
    Setting("dense_act_fn", both("activation"), ACTIVATIONS),
    # Versions before 5 have no such field: there, the head's input is scaled if the head is tied.
    Setting("scale_decoder_outputs", "head_scale", default=lambda ours: ours["tied_head"]),
)
FIXED = {"is_encoder_decoder": True, "is_decoder": False}
"""`initializer_factor` is not read: ours draws parameters by another rule, whatever it is."""
TABLES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""The token table, and the copies of it that older versions saved."""
_GATED_GELU = "gated-gelu"
"""Their one name of an activation that means GELU with tanh, the others' "gelu" being exact."""


def flatten(config: Settings) -> Fields:
    """Brings the two parts of `feed_forward_proj` into the fields that newer versions save beside it."""
    given = config.get("feed_forward_proj") or "relu"
    gate, _, name = str(given).rpartition("-")
    require(
        gate in ("", "gated"),
        f"feed_forward_proj is {given!r} in the Hugging Face config; expected an activation, or 'gated-' and one",
    )
    parts = {"dense_act_fn": "gelu_new" if given == _GATED_GELU else name, "is_gated_act": gate == "gated"}
    # Their models take null for false, where the field is there.
    said = {name: False for name in ("is_gated_act", "scale_decoder_outputs") if config.get(name, "absent") is None}
    return {**parts, **{name: value for name, value in config.items() if value is not None}, **said}


def nest(written: Settings) -> Fields:
    """Adds `feed_forward_proj`, which older versions read alone."""
    name = written["dense_act_fn"]
    gated = written["is_gated_act"]
    exact = "gelu_python" if gated and name == "gelu" else name
    whole = _GATED_GELU if gated and name == "gelu_new" else f"gated-{exact}" if gated else name
    return {**written, "dense_act_fn": exact, "feed_forward_proj": whole}


def adapted(config: TransformerConfig, weights: Views) -> TransformerConfig:
    """Returns `config` with the head tied, unless the file has a head that differs from the token table.

    Newer versions save "tie_word_embeddings": true whatever the model is, and go by the arrays when they load it.
    """
    head = weights.get("lm_head.weight")
    table = next((weights[name] for name in TABLES if name in weights), None)
    return replace(config, tied_head=head is None or table is None or same_bytes(head, table))


_ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "output"}


def _stack(side: str, gated: bool) -> Rows:
    first = f"{side}.block.*.layer.0."
    ours = f"{side}.blocks.*."
    last = f"{side}.block.*.layer.{1 if side == 'encoder' else 2}."
    projections = {"wi_0": "gate", "wi_1": "up"} if gated else {"wi": "up"}
    relative = {"block.0.layer.0.SelfAttention.relative_attention_bias": "relative_positions"}
    return (
        *modules(_ATTENTION, f"{first}SelfAttention.", f"{ours}self_attention."),
        *modules({"layer_norm": "self_attention_norm"}, first, ours),
        *modules({**relative, "final_layer_norm": "final_norm"}, f"{side}.", f"{side}."),
        *modules({**projections, "wo": "down"}, f"{last}DenseReluDense.", f"{ours}feedforward."),
        *modules({"layer_norm": "feedforward_norm"}, last, ours),
    )


def rows(config: TransformerConfig) -> Rows:
    """Returns the rows of a T5ForConditionalGeneration."""
    assert config.encoder is not None  # as in the template
    table = "source_embedding.tokens.weight"
    cross = "decoder.block.*.layer.1."
    ours = "decoder.blocks.*."
    return (
        *(Row(name, table) for name in TABLES),
        Row("lm_head.weight", table if config.tied_head else "head.weight"),
        *_stack("encoder", config.encoder.gated),
        *_stack("decoder", config.encoder.gated),
        *modules(_ATTENTION, f"{cross}EncDecAttention.", f"{ours}cross_attention."),
        *modules({"layer_norm": "cross_attention_norm"}, cross, ours),
        # A table that nothing reads, in files from Mesh TensorFlow.
        Row("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", None),
    )


FAMILIES = {
    "T5ForConditionalGeneration": Family(
        "t5",
        SMALL,
        SETTINGS,
        rows,
        FIXED,
        flatten,
        nest,
        adapted,
        synonyms={
            "hidden_size": "d_model",
            "head_dim": "d_kv",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
        },
    )
}
