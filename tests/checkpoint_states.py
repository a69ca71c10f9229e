"""A small training state of many dtypes, saved under chosen steps."""

from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_tformer.runs.checkpoints import Checkpoints

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.masked(optax.sgd(0.1), {"w": True, "b": False})
)


def make_state(step: int) -> dict:
    params = {"w": jnp.arange(600, dtype=jnp.float32).reshape(20, 30) + step, "b": jnp.full((7,), step, jnp.bfloat16)}
    return {
        "params": params,
        "opt_state": OPTIMIZER.init(params),
        "step": jnp.int32(step),
        "dropout_key": jnp.array([step, 2**32 - 1], jnp.uint32),
        "average": (),
    }


def abstract(state: dict) -> dict:
    return jax.eval_shape(lambda: state)


ABSTRACT = abstract(make_state(0))


def assert_same_bits(left: object, right: object) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, two in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def save_all(folder: Path, *steps: int, keep: int = 9) -> None:
    with closing(Checkpoints(folder, keep)) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"step": step})


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [folder, *folder.rglob("*")]}
