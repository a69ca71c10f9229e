"""Small certainties about token ids, on the host, before a device sees them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from jax_tformer.errors import InputError

if TYPE_CHECKING:
    from jax_tformer.data.tokenizers import Tokenizer

IGNORED = -100
"""The label of positions that do not count in the loss."""


def shift_right(ids: np.ndarray, start_id: int) -> np.ndarray:
    """Decoder input for the labels `ids`, int32[..., T]: the start token, then all of them but the last."""
    start = np.full((*ids.shape[:-1], 1), start_id, ids.dtype)
    return np.concatenate([start, ids[..., :-1]], axis=-1)


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raises InputError unless all `ids` are from 0 to below `vocab_size`.

    JAX has no such check: an id beyond the table silently gives NaN.
    """
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise InputError(
            f"a token has the id {int(wrong[0])}; expected ids from 0 to {vocab_size - 1}; "
            "use the tokenizer that the model was trained with"
        )


def check_batch_ids(batch: Mapping[str, np.ndarray], vocab_size: int | None) -> None:
    """`check_ids` for whatever the model will look up in a batch."""
    for name in ("tokens", "source", "target"):
        if name in batch:
            check_ids(batch[name], vocab_size or 0)


def check_vocabulary(tokenizer: "Tokenizer", vocab_size: int) -> None:
    """Raises InputError if the tokenizer has ids that a model of `vocab_size` has no rows for."""
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model a vocabulary of {vocab_size}; "
            f"expected at least {tokenizer.vocab_size}; leave --model.vocab-size out to have it follow the tokenizer"
        )
