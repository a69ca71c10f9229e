"""What the gates are run on: reduced presets, weights of two regimes, batches that bite."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from jax_tformer.config import RotaryConfig, StackConfig, TransformerConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.functional import transformer
from jax_tformer.hub.names import Slot, reference_shape, slots
from parity.gates.pytrees import Tensors

REGIMES = {"std 0.02": 0.02, "std 0.2": 0.2}
"""Standard deviations of matrices: near initialisation, and large enough for sharp attention."""
OFF_CENTRE = 1.0
"""Added to token tables of standard deviation 0.02: rows whose mean is 50 times their spread, which a variance computed
as mean(x^2) - mean(x)^2 does not survive in float32."""
PADDINGS = ("none", "right", "left")
SEGMENTS = {"source": "source_segments", "target": "target_segments", "tokens": "segments"}
"""Which segments go with which ids of a batch."""
VOCABULARY = 61


def reduced(config: TransformerConfig) -> TransformerConfig:
    """`config` with every switch as it is, but a 16th as wide, at most 3 deep, and with 61 tokens."""

    def stack(old: StackConfig | None, layers: int) -> StackConfig | None:
        if old is None:
            return None
        heads = min(old.num_heads, 4)
        return replace(
            old,
            num_layers=min(old.num_layers, layers),
            num_heads=heads,
            feedforward_width=min(old.feedforward_width, 80),
            max_positions=old.max_positions and min(old.max_positions, 40),
        )

    return replace(
        config,
        vocab_size=min(config.vocab_size or VOCABULARY, VOCABULARY),
        d_model=config.d_model if config.d_model <= 32 else config.d_model // 16,
        # Depths that differ, so that a layer of one stack cannot stand for one of the other.
        encoder=stack(config.encoder, 2),
        decoder=stack(config.decoder, 3),
    )


_GATED = StackConfig(
    num_layers=2,
    num_heads=4,
    feedforward_width=48,
    key_value_heads=2,
    head_width=6,
    query_bias=True,
    activation="silu",
    gated=True,
    norm="rmsnorm",
    norm_bias=False,
    norm_placement="pre",
    final_norm=True,
    positions="rotary",
)
SWITCHES: dict[str, TransformerConfig] = {
    # Every switch that no preset sets.
    "switches-decoder-only": TransformerConfig(vocab_size=VOCABULARY, d_model=32, decoder=_GATED),
    "switches-encoder-decoder": TransformerConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder=replace(_GATED, attention_scale="none", positions="sinusoidal_half", embedding_scale=True),
        decoder=replace(_GATED, attention_scale="model_width", activation="gelu_erf", final_norm=False, key_bias=False),
        shared_embedding=True,
        head="transform",
        head_bias=True,
    ),
    # The architecture of modded-nanogpt's third track, with heads as wide as those of the first.
    "switches-bounded": TransformerConfig(
        vocab_size=VOCABULARY,
        d_model=24,
        decoder=replace(
            _GATED,
            key_value_heads=None,
            attention_scale=0.12**-2,
            query_key_norm=True,
            query_key_scale=False,
            activation="relu_squared",
            gated=False,
            embedding_norm=True,
            rotary=RotaryConfig(width=2),
        ),
        head_bias=True,
        logit_cap=1.5,
        logit_cap_form="root",
    ),
}
CONFIGS = {name: reduced(config) for name, config in ARCHITECTURES.items()} | SWITCHES


def windowed(config: TransformerConfig, encoder: int | None, decoder: int | None) -> TransformerConfig:
    """`config` with these windows in its stacks."""
    return replace(
        config,
        encoder=config.encoder and replace(config.encoder, window=encoder),
        decoder=config.decoder and replace(config.decoder, window=decoder),
    )


WINDOWED = {
    "decoder-only, window": windowed(SWITCHES["switches-decoder-only"], None, 5),
    "encoder-decoder, windows": windowed(SWITCHES["switches-encoder-decoder"], 4, 3),
}


@dataclass(frozen=True)
class Lengths:
    """Sizes of a batch."""

    batch: int = 3
    source: int = 11
    target: int = 7


def weights_for(config: TransformerConfig, std: float, seed: int = 0, *, offset: float = 0.0) -> Tensors:
    """Float64 weights by the reference's names: matrices N(0, std^2); biases and norms off their 0 and 1.

    Token tables are N(offset, std^2).
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, slot in _slots(config).items():
        shape = reference_shape(slot)
        if len(shape) > 1:
            weights[name] = rng.normal(offset if name.endswith("tokens.weight") else 0, std, shape)
        else:
            weights[name] = rng.normal(1.0 if slot.path.endswith(".scale") else 0.0, 0.1, shape)
    return weights


@cache
def _slots(config: TransformerConfig) -> dict[str, Slot]:
    """Where each of the reference's weights lies; asked for hundreds of times, and as long as a step to find out."""
    return slots(transformer(config).shapes)


def kinds(config: TransformerConfig) -> tuple[str, ...]:
    """The kinds of batches that `config` takes: padding, segments and prefix, in every combination that there is."""
    masks = ("", " segments") if config.encoder is not None else ("", " segments", " prefix", " segments prefix")
    return tuple(padding + rest for rest in masks for padding in PADDINGS)


def batch_for(config: TransformerConfig, kind: str, seed: int = 1, lengths: Lengths | None = None) -> Tensors:
    """A batch for `config`: some labels ignored, rows of different length where there is padding.

    `kind` is one of PADDINGS, behind which may stand "segments" (several texts in a row) and "prefix" (what each text
    begins with is seen in both directions).
    """
    padding, *masks = kind.split()
    rng = np.random.default_rng(seed)
    lengths = lengths or Lengths()
    stack = config.output_stack
    limit = stack.max_positions or lengths.source
    if config.encoder is not None and config.decoder is not None:
        batch = _side(rng, config, lengths.batch, lengths.source, padding, "source")
        batch |= _side(rng, config, lengths.batch, lengths.target, padding, "target")
        labels, mask = batch["target"], batch.get("target_mask")
    else:
        batch = _side(rng, config, lengths.batch, min(lengths.source, limit), padding, "tokens")
        if "tokens_mask" in batch:
            batch["mask"] = batch.pop("tokens_mask")
        if stack.token_types:
            batch["token_types"] = rng.integers(0, stack.token_types, batch["tokens"].shape).astype(np.int32)
        labels, mask = batch["tokens"], batch.get("mask")
    labels = rng.permuted(labels, axis=1).astype(np.int64)
    if config.classes is not None:
        labels %= config.classes
    labels[rng.random(labels.shape) < 0.2] = -100
    if mask is not None:
        labels[~mask] = -100
    if config.head == "classify_text":
        labels = rng.integers(0, config.classes or 1, (lengths.batch, 1))
        if mask is not None:
            labels[~mask.any(axis=1)] = -100
    for side, name in SEGMENTS.items() if "segments" in masks else ():
        if side in batch:
            batch[name] = _segments(rng, *batch[side].shape)
    if "prefix" in masks:
        batch["prefix"] = _prefix(rng, batch.get("segments", np.zeros_like(batch["tokens"])))
    return batch | {"labels": labels}


def _side(
    rng: np.random.Generator, config: TransformerConfig, rows: int, length: int, padding: str, name: str
) -> Tensors:
    ids = rng.integers(0, config.vocab_size, (rows, length)).astype(np.int32)
    if padding == "none":
        return {name: ids}
    # From a whole row to a row of padding alone, which may attend to nothing and yields zeros.
    real = np.array([length, *rng.integers(1, length, rows - 2), 0])[:, None]
    places = np.arange(length)[None]
    mask = places < real if padding == "right" else places >= length - real
    return {name: ids, f"{name}_mask": mask}


def _latest(begins: np.ndarray) -> np.ndarray:
    """The place where the text that each place belongs to begins; `begins` is True there."""
    return np.maximum.accumulate(np.where(begins, np.arange(begins.shape[1])[None], 0), axis=1)


def _segments(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """The numbers of several texts in each row, wherever its padding is; a number may come again further on.

    Those of sources and targets are drawn by themselves, so that some targets find no source.
    """
    numbers, begins = rng.integers(0, 5, (rows, length)), rng.random((rows, length)) < 0.3
    return np.take_along_axis(numbers, _latest(begins), axis=1).astype(np.int32)


def _prefix(rng: np.random.Generator, segments: np.ndarray) -> np.ndarray:
    """True from the beginning of each text up to somewhere, which may be nowhere, or its end."""
    length = segments.shape[1]
    begins = np.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    latest = _latest(begins)
    sizes = np.take_along_axis(rng.integers(0, length + 1, segments.shape), latest, axis=1)
    return np.arange(length)[None] - latest < sizes
