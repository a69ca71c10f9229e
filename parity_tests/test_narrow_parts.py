"""Gate 4 on each part by itself, where one rounding too many is seen."""

import jax
import jax.numpy as jnp
import numpy as np

from parity_tests.narrow_parts import drawn, judged
from twin.pair import EVERY_ROUNDING


def test_gate_4_part_by_part(record):
    for figure in judged():
        record("parts", figure)


def test_the_program_rounds_where_it_says_so():
    """In a softmax the compiler left the rounding out, by either of two ways: so that no gate could see it."""

    def lost(x):
        return jax.nn.softmax(x.astype(jnp.bfloat16).astype(x.dtype), axis=-1) - jax.nn.softmax(x, axis=-1)

    x = jnp.asarray(drawn(0)["query"] / 3, jnp.float32)
    assert np.abs(jax.jit(lost, compiler_options=EVERY_ROUNDING)(x)).max() > 1e-4
