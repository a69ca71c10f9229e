"""Faults on paths that no gate took: groups of heads, many accumulated parts, held-out batches of uneven size."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_tformer.model import attention
from jax_tformer.run import evaluation
from jax_tformer.training import step
from parity_tests.faults import code_fault
from parity_tests.library_faults import no_higher, uncapped


def tiled(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Query head h asks key/value head h mod K, where it should ask its group's, h div (H/K)."""

    def attend(query: jax.Array, key: jax.Array, *rest: Any, **options: Any) -> jax.Array:
        shared = options.get("heads") or key.shape[2]
        order = np.arange(query.shape[2]).reshape(-1, shared).T.ravel()
        return right(query[:, :, order], key, *rest, **options)[:, :, np.argsort(order)]

    return attend


def of_batch_means(right: Callable[..., Any]) -> Callable[..., Any]:
    def evaluation_step(net: Any) -> Callable[..., tuple[jax.Array, int]]:
        def mean(*args: Any) -> tuple[jax.Array, int]:
            total, count = right(net)(*args)
            return total / count, 1

        return mean

    return evaluation_step


GROUPED = {
    "einsum": code_fault("grouped heads tiled: einsum", attention, "attend", tiled),
    "blocks": code_fault("grouped heads tiled: blocks", attention, "attend_in_rows", tiled),
    "cache": code_fault("grouped heads tiled: cache", attention, "attend_in_rows", tiled),
}
"""Gate 1, by what computes attention."""
ACCUMULATED = code_fault("gradients accumulated in the parameters' type", step, "accumulator", no_higher)
"""Gate 4."""
HELD_OUT = (
    code_fault("evaluation: the mean of batch means", evaluation, "evaluation_step", of_batch_means),
    code_fault("evaluation: logits not capped", step, "linear_cross_entropy", uncapped),
)
"""Gate 1."""
