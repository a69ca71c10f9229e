"""The tables of BERT (Devlin et al., 2018), `transformers.BertModel` and `transformers.BertForMaskedLM`."""

from dataclasses import replace

from jax_tformer.config import TransformerConfig
from jax_tformer.presets import ARCHITECTURES
from jax_tformer.weights.huggingface.tables import ACTIVATIONS, VECTOR, Family, Row, Setting, pair

SETTINGS = (
    Setting("vocab_size", ("vocab_size",)),
    Setting("hidden_size", ("d_model",)),
    Setting("num_hidden_layers", ("encoder.num_layers",)),
    Setting("num_attention_heads", ("encoder.num_heads",)),
    Setting("intermediate_size", ("encoder.feedforward_width",)),
    Setting("max_position_embeddings", ("encoder.max_positions",)),
    Setting("type_vocab_size", ("encoder.token_types",)),
    Setting("hidden_act", ("encoder.activation",), ACTIVATIONS),
    Setting("layer_norm_eps", ("encoder.norm_eps",)),
    Setting("initializer_range", ("initializer_std",)),
    Setting("hidden_dropout_prob", ("dropout.embedding", "dropout.residual")),
    Setting("attention_probs_dropout_prob", ("dropout.attention",)),
)
FIXED = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}
"""`pad_token_id` is not read: PyTorch does not train that row of the token table, but no output depends on it."""

_LAYER, _OURS = "encoder.layer.*", "encoder.blocks.*"
ROWS = (
    Row("embeddings.word_embeddings.weight", ("embedding.tokens.weight",)),
    Row("embeddings.position_embeddings.weight", ("embedding.positions.weight",)),
    Row("embeddings.token_type_embeddings.weight", ("embedding.token_types.weight",)),
    *pair("embeddings.LayerNorm", "embedding.norm", VECTOR),
    *pair(f"{_LAYER}.attention.self.query", f"{_OURS}.self_attention.query"),
    *pair(f"{_LAYER}.attention.self.key", f"{_OURS}.self_attention.key"),
    *pair(f"{_LAYER}.attention.self.value", f"{_OURS}.self_attention.value"),
    *pair(f"{_LAYER}.attention.output.dense", f"{_OURS}.self_attention.output"),
    *pair(f"{_LAYER}.attention.output.LayerNorm", f"{_OURS}.self_attention_norm", VECTOR),
    *pair(f"{_LAYER}.intermediate.dense", f"{_OURS}.feedforward.up"),
    *pair(f"{_LAYER}.output.dense", f"{_OURS}.feedforward.down"),
    *pair(f"{_LAYER}.output.LayerNorm", f"{_OURS}.feedforward_norm", VECTOR),
    # 0, 1, 2 ..., which older versions saved.
    Row("embeddings.position_ids", None),
    # The pooled first token is for next-sentence prediction, a head that we do not have.
    Row("pooler.dense.weight", None),
    Row("pooler.dense.bias", None),
)


def masked_rows(config: TransformerConfig) -> tuple[Row, ...]:
    """Returns the rows of a BertForMaskedLM; an untied head has arrays of its own, and `predictions.bias` is unused."""
    head, tied = "cls.predictions", config.tied_head
    encoder = tuple(row._replace(theirs=f"bert.{row.theirs}") for row in ROWS)
    return (
        *encoder,
        *pair(f"{head}.transform.dense", "head.dense"),
        *pair(f"{head}.transform.LayerNorm", "head.norm", VECTOR),
        Row(f"{head}.bias", ("head.bias",) if tied else None, VECTOR),
        Row(f"{head}.decoder.weight", ("embedding.tokens.weight" if tied else "head.weight",)),
        Row(f"{head}.decoder.bias", ("head.bias",), VECTOR),
        Row("cls.seq_relationship.weight", None),
        Row("cls.seq_relationship.bias", None),
    )


_BERT = Family(
    model_type="bert",
    template=replace(ARCHITECTURES["bert-base"], head="none", tied_head=False, head_bias=False),
    settings=SETTINGS,
    fixed=FIXED,
    rows=lambda config: ROWS,
)
_MASKED_BERT = Family(
    model_type="bert",
    template=ARCHITECTURES["bert-base"],
    settings=(*SETTINGS, Setting("tie_word_embeddings", ("tied_head",))),
    fixed=FIXED,
    rows=masked_rows,
)
FAMILIES = {"BertModel": _BERT, "BertForMaskedLM": _MASKED_BERT}
