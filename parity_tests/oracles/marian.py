"""Marian."""

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.marian import MarianMTModel

from parity_tests.oracles import bart
from parity_tests.oracles.entry import Entry

_BART = bart.ENTRIES["bart"]


def exact_table(rows: int, width: int) -> torch.Tensor:
    """A table of positions in float64."""
    angles = np.arange(rows)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))


def exact_positions(model: PreTrainedModel) -> None:
    """Computes the tables of positions in float64: the class rounds them to float32 whatever its type."""
    for side in ("encoder", "decoder"):
        table = model.get_submodule(f"model.{side}.embed_positions").weight
        exact = exact_table(*table.shape)
        assert (table.double() - exact).abs().max() < 1e-2
        table.data = exact


ENTRIES = {
    "marian": Entry(
        kind=MarianMTModel,
        auto=AutoModelForSeq2SeqLM,
        settings={
            **_BART.settings,
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
        stacks=_BART.stacks,
        prepare=exact_positions,
        # BART's, but for the positions.
        further=True,
        variants={
            "separate tables": {"share_encoder_decoder_embeddings": False},
            "GELU, unscaled": {"activation_function": "gelu", "scale_embedding": False},
            "other widths": {"encoder_ffn_dim": 24, "decoder_layers": 1, "vocab_size": 29},
        },
        position_tables=_BART.position_tables,
        unused_untied=_BART.unused_untied,
        no_longer_written=_BART.no_longer_written,
        generation=_BART.generation,
    )
}
