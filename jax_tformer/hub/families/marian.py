"""The tables of Marian's translation models (Junczys-Dowmunt et al., 2018), `transformers.MarianMTModel`.

Translations begin with the padding token, and its row trains by these look-ups, unlike there (docs/known-issues.md).
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.hub.families import ACTIVATIONS, Family, Fields, Row, Rows, Setting, Settings, bart, named
from jax_tformer.hub.names import Views, WeightsError, read
from jax_tformer.model.embedding import sinusoidal

_STACK = replace(bart.STACK, embedding_norm=False, positions="sinusoidal_half", position_offset=0)
LARGE = replace(bart.LARGE, vocab_size=58101, encoder=_STACK, decoder=_STACK)
_OTHER = ("activation_function", "tie_word_embeddings")
SETTINGS = (
    *(setting for setting in bart.SETTINGS if setting.theirs not in _OTHER),
    # Their files say swish, which is therefore written.
    Setting("activation_function", "encoder.activation decoder.activation", {"swish": "silu", **ACTIVATIONS}),
    *named(tie_word_embeddings="tied_head", share_encoder_decoder_embeddings="shared_embedding"),
)
FIXED = {**bart.FIXED, "normalize_embedding": False, "static_position_embeddings": True}
_TABLES = {side: f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}


def flatten(config: Settings) -> Settings:
    """Says of untied tables that they are not shared; refuses two vocabularies of different sizes."""
    size = config.get("vocab_size") or LARGE.vocab_size
    if (target := config.get("decoder_vocab_size")) not in (None, size):
        raise InputError(
            f"decoder_vocab_size is {target!r} in the Hugging Face config and vocab_size is {size!r}; only models with "
            "as many ids on both sides are supported"
        )
    # Without ties, the encoder's and the decoder's tables are apart, whatever this says.
    untied = config.get("tie_word_embeddings") is False
    return {**config, "share_encoder_decoder_embeddings": False} if untied else config


def nest(written: Settings) -> Fields:
    """Adds the size of the decoder's vocabulary, which is the encoder's, and says of untied tables what files say."""
    shared = written["share_encoder_decoder_embeddings"] or written["tie_word_embeddings"] is False
    return {**written, "decoder_vocab_size": written["vocab_size"], "share_encoder_decoder_embeddings": shared}


def checked(config: TransformerConfig, weights: Views) -> TransformerConfig:
    """Returns `config`; raises WeightsError if the file has a table of positions that are not these sinusoids."""
    for side, name in _TABLES.items():
        if name not in weights:
            continue
        stack = getattr(config, side)
        # The shape comes first: config.json may say any number.
        fits = weights[name].shape == (stack.max_positions, config.d_model)
        if fits:
            positions = jnp.arange(stack.max_positions)[None]
            expected = sinusoidal(positions, config.d_model, stack.position_base, False, jnp.dtype("float32"))[0]
            # float16 and bfloat16 keep three and two digits.
            fits = bool(np.abs(read(weights[name]).astype(np.float32) - expected).max() < 1e-2)
        if not fits:
            raise WeightsError(
                f"{name} is not the table of sines and cosines that a Marian computes for {stack.max_positions} "
                "positions; only models with these positions are supported"
            )
    return config


def rows(config: TransformerConfig) -> Rows:
    """Returns the rows of a MarianMTModel: BART's, without norms of embeddings, and with computed positions."""
    computed = {name: Row(name, None) for name in _TABLES.values()}
    if config.tied_head and not config.shared_embedding:
        # Unlike BART it has no third table then.
        computed["model.shared.weight"] = Row("model.shared.weight", None)
    return tuple(computed.get(row.theirs, row) for row in bart.rows(config) if "layernorm_embedding" not in row.theirs)


FAMILIES = {
    "MarianMTModel": Family("marian", LARGE, SETTINGS, rows, FIXED, flatten, nest, checked, bart.SYNONYMS),
}
