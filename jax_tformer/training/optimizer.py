"""AdamW, its schedule and its clipping, as PyTorch computes them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jaxtyping import Array

from jax_tformer.config.experiment import OptimizerConfig
from jax_tformer.functional import Params
from jax_tformer.model.parameters import accumulator, is_vector


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[Array], Array]:
    """Returns the learning rate of update n = 0, 1, ... of `steps`: linear warm-up, then the schedule.

    inverse_sqrt is the paper's (section 5.3), learning_rate * min(s / warmup, sqrt(warmup / s)) with s = n + 1; the
    paper's own peak is (d_model * warmup)^-0.5.
    """
    warmup = config.warmup_steps

    def schedule(n: Array) -> Array:
        # Uses the widest enabled float: after 50 float64 steps, a rate rounded to float32 shows.
        step = jnp.asarray(n, jnp.result_type(float)) + 1
        rise = jnp.minimum(step / max(warmup, 1), 1.0)
        if config.schedule == "inverse_sqrt":
            fall = jnp.sqrt(warmup / jnp.maximum(step, warmup))
        elif config.schedule == "cosine":
            progress = jnp.clip((step - warmup) / max(steps - warmup, 1), 0, 1)
            fall = config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        else:
            fall = jnp.ones_like(step)
        return config.learning_rate * rise * fall

    return schedule


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Scales gradients by min(1, limit / (norm + 1e-6)), the form of torch.nn.utils.clip_grad_norm_."""

    def clip(gradients: Params, _: Params | None) -> Params:
        factor = jnp.minimum(1.0, limit / (global_norm(gradients) + 1e-6))
        clipped: Params = jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradients)
        return clipped

    return optax.stateless(clip)


def global_norm(gradients: Params) -> Array:
    """Computes the Euclidean norm of all gradients together, in at least float32."""
    squares = [jnp.sum(jnp.square(g.astype(accumulator(g.dtype)))) for g in jax.tree.leaves(gradients)]
    return jnp.sqrt(jnp.stack(squares).sum())


def decay_mask(params: Params) -> Params:
    """Returns True for the leaves with weight decay: matrices, LoRA's A and B, and tables.

    Layers are stacked here, so that a bias has two axes: the name decides, and not, as in `torch_ref`, the axes.
    """
    flat = traverse_util.flatten_dict(params, sep=".")
    mask: Params = traverse_util.unflatten_dict({path: not is_vector(path) for path in flat}, sep=".")
    return mask


def optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Combines clipping, AdamW with decoupled decay (Loshchilov & Hutter, 2019), and the schedule."""
    adamw = optax.adamw(
        learning_rate(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        eps_root=0.0,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    return adamw if config.clip_norm is None else optax.chain(clip_by_global_norm(config.clip_norm), adamw)
