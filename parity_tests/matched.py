"""What the tests of `match_weights` share: shapes of our parameters, and what a match has to be."""

import jax
import jax.numpy as jnp

from parity import match_weights


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def linear_shapes(rows, columns):
    """Of a layer x @ kernel + bias."""
    return {"kernel": shape(rows, columns), "bias": shape(columns)}


def verified(params, module, ours, inputs):
    """The match, in which each of our parameters has its row, none is in doubt, and running both says so."""
    match = match_weights(params, module, ours=ours, inputs=inputs)
    assert match.verified, match.figures
    assert not match.unsure
    assert not match.unmatched_ours
    return match
