"""What the tests of `match_weights` share: shapes of our parameters, and what a match has to be."""

import jax
import jax.numpy as jnp


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def linear_shapes(rows, columns):
    """Of a layer x @ kernel + bias."""
    return {"kernel": shape(rows, columns), "bias": shape(columns)}


def require_verified(match):
    """Each of our parameters has its row, of which none is in doubt, and running both says that they are right."""
    assert match.verified, match.figures
    assert not match.unsure
    assert not match.unmatched_ours
