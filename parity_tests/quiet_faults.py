"""Faults on paths that no gate took: groups of heads, many accumulated parts, held-out batches of uneven size."""

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import jax
import numpy as np
from jax.experimental import pallas

from jax_tformer.model import attention, fast
from jax_tformer.runs import evaluation
from jax_tformer.training import step
from parity_tests.faults import call_fault
from parity_tests.library_faults import no_higher, uncapped

KERNELS_BAR = 1e-6
"""Relative: kernels compute softmax in float32, whatever they are given."""


@contextmanager
def kernels_on_a_cpu():
    """Inside, the TPU's kernel is interpreted, and XLA computes what cuDNN is asked for, from the same arguments."""
    by_default = jax.nn.dot_product_attention

    def by_xla(*arrays, implementation, **options):
        assert implementation == "cudnn"
        return by_default(*arrays, implementation="xla", **options)

    interpreted = patch.object(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    with interpreted, patch.object(jax.nn, "dot_product_attention", by_xla):
        yield


def tiled(right, query, key, *rest):
    """Query head h asks key/value head h mod K, where it should ask its group's, h div (H/K)."""
    order = np.arange(query.shape[2]).reshape(-1, key.shape[2]).T.ravel()
    output, weights = right(query[:, :, order], key, *rest)
    return output[:, :, np.argsort(order)], weights


def of_batch_means(right, *args):
    total, count = right(*args)
    return total / count, 1


GROUPED = {
    "einsum": call_fault("grouped heads tiled: einsum", attention, "attend", tiled),
    "blocks": call_fault("grouped heads tiled: blocks", fast, "attend_in_rows", tiled),
    "cache": call_fault("grouped heads tiled: cache", fast, "attend_in_rows", tiled),
    "cudnn": call_fault("grouped heads tiled: cuDNN", fast, "attend_by_cudnn", tiled),
    "pallas": call_fault("grouped heads tiled: Pallas", fast, "attend_by_pallas", tiled),
}
"""Gate 1, by what computes attention."""
ACCUMULATED = call_fault("gradients accumulated in the parameters' type", step, "accumulator", no_higher)
"""Gate 4."""
HELD_OUT = (
    call_fault("evaluation: the mean of batch means", evaluation, "batch_loss", of_batch_means),
    call_fault("evaluation: logits not capped", step, "linear_cross_entropy", uncapped),
)
"""Gate 1."""
