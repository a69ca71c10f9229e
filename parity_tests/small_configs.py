"""Small models that show the faults which are planted in them."""

from dataclasses import replace

from jax_tformer.config import StackConfig, TransformerConfig
from parity_tests.mask_faults import PAIR, TEXT
from twin.cases import VOCABULARY, Lengths, batch_for

STACK = StackConfig(
    num_layers=2,
    num_heads=4,
    feedforward_width=48,
    activation="gelu_erf",
    positions="rotary",
    norm_placement="pre",
    final_norm=True,
)
TWO_STACKS = TransformerConfig(
    vocab_size=VOCABULARY,
    d_model=32,
    encoder=replace(STACK, positions="sinusoidal_interleaved"),
    decoder=STACK,
    tied_head=True,
)
"""Rotation alone would not show a shift of all positions: it is relative."""

_WINDOWED = StackConfig(num_layers=1, num_heads=2, feedforward_width=12, positions="sinusoidal_interleaved", window=5)
_TEXT = TransformerConfig(vocab_size=VOCABULARY, d_model=8, decoder=_WINDOWED)
_PAIR = replace(_TEXT, encoder=replace(_WINDOWED, window=4))
MASKED_LENGTHS = Lengths(batch=3, source=14, target=11)
MASKED = {
    TEXT: (_TEXT, lambda: batch_for(_TEXT, "right segments prefix", 1, MASKED_LENGTHS)),
    PAIR: (_PAIR, lambda: batch_for(_PAIR, "none segments", 1, MASKED_LENGTHS)),
}
"""Windowed models that show faults of masks, with batches that have all masks. Rotation alone would not show where
positions begin: it is relative."""


def of_one_length():
    """For TWO_STACKS: swapped cross-attention is then no mere error of shapes. With the id that padding_idx names."""
    batch = batch_for(TWO_STACKS, "right", lengths=Lengths(source=9, target=9))
    batch["target"][0, 3] = 0
    return batch
