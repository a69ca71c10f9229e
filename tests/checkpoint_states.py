"""A small training state of many dtypes, saved under chosen steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_tformer.runs.checkpoints import Checkpoints

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.masked(optax.sgd(0.1), {"w": True, "b": False})
)
BITS = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)


def make_state(step):
    params = {"w": jnp.arange(600, dtype=jnp.float32).reshape(20, 30) + step, "b": jnp.full((7,), step, jnp.bfloat16)}
    bits = {
        "float32": jax.lax.bitcast_convert_type(jnp.asarray(BITS), jnp.float32),
        "bfloat16": jax.lax.bitcast_convert_type(jnp.asarray(BITS.view(np.uint16)), jnp.bfloat16),
        "int32": jnp.asarray(BITS.view(np.int32)),
        "scalar": jnp.float32(-0.0),
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params), "step": jnp.int32(step), "bits": bits, "average": ()}


ABSTRACT = jax.eval_shape(lambda: make_state(0))


def save_all(folder, *steps, keep=9, losses=None):
    with Checkpoints(folder, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"step": step, "val_loss": (losses or {}).get(step)})
