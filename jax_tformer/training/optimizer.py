"""Optimizers by name, their schedules and their clipping, as PyTorch computes them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jax_tformer.config.experiment import OptimizerConfig, RatesConfig
from jax_tformer.functional import Params
from jax_tformer.model.parameters import accumulator, as_matrix, is_vector, kind_of
from jax_tformer.training.sharding import by_path


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
        elif config.schedule == "constant":
            fall = jnp.ones_like(step)
        else:
            stable = config.schedule == "warmup_stable_decay"
            start = max(warmup, round(steps * (1 - config.decay_share))) if stable else warmup
            left = 1 - jnp.clip((step - start) / max(steps - start, 1), 0, 1)
            left = 0.5 * (1 - jnp.cos(jnp.pi * left)) if config.schedule == "cosine" else left
            fall = config.final_fraction + (1 - config.final_fraction) * left
        return config.learning_rate * rise * fall

    return schedule


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Scales gradients by min(1, limit / (norm + 1e-6)), the form of torch.nn.utils.clip_grad_norm_."""

    def clip(gradients: Params, _: Params | None) -> Params:
        factor = jnp.minimum(1.0, limit / (global_norm(gradients) + 1e-6))
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradients)

    return optax.stateless(clip)


def global_norm(gradients: Params) -> Array:
    """Computes the Euclidean norm of all gradients together, in at least float32."""
    squares = [jnp.sum(jnp.square(g.astype(accumulator(g.dtype)))) for g in jax.tree.leaves(gradients)]
    return jnp.sqrt(jnp.stack(squares).sum())


def has_decay(params: Params) -> Params:
    """Returns True for the leaves with weight decay: matrices, LoRA's A and B, and tables.

    Layers are stacked here, so that a bias has two axes: the name decides, and not, as in `torch_ref`, the axes.
    """
    return by_path(lambda path, _: not is_vector(path), params)


def orthogonalize(path: str, update: Array) -> Array:
    """Makes the singular values of an update's matrices about 1, by Newton and Schulz's iteration (Jordan, 2024).

    The factor gives updates the size that AdamW's have, so that they need no other learning rate (Liu et al., 2025).
    """
    x = as_matrix(path, update)
    inputs, outputs = x.shape[-2:]
    x = x.mT if inputs > outputs else x
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x.mT if inputs > outputs else x
    return (0.2 * max(inputs, outputs) ** 0.5 * x).reshape(update.shape)


class AdafactorState(NamedTuple):
    """The means of squared gradients."""

    steps: Array
    """Updates so far."""
    rows: Params
    """Of each row of a matrix, and of each number of a vector."""
    columns: Params
    """Of each column of a matrix; nothing of a vector."""


def scale_by_adafactor() -> optax.GradientTransformation:
    """Divides gradients by the root of their mean squares, of which a matrix has those of its rows and columns only.

    An update is at most 1 in root mean square, times that of the parameter (Shazeer & Stern, 2018, algorithms 4 and 5).
    Matrices are those of a layer: `optax.adafactor` would take the two longest axes of all layers together.
    """

    def init(params: Params) -> AdafactorState:
        def zeros(path: str, x: Array, axis: int) -> Any:
            if is_vector(path):
                return jnp.zeros_like(as_matrix(path, x)) if axis == -1 else optax.MaskedNode()
            return jnp.zeros_like(as_matrix(path, x).mean(axis, keepdims=True))

        rows, columns = (by_path(partial(zeros, axis=axis), params) for axis in (-1, -2))
        return AdafactorState(jnp.zeros((), jnp.int32), rows, columns)

    def update(grads: Params, state: AdafactorState, params: Params | None) -> tuple[Params, AdafactorState]:
        assert params is not None
        steps = state.steps + 1
        new = jnp.asarray(steps, jnp.result_type(float)) ** -0.8

        def scaled(path: str, grad: Array, param: Array, row: Array, column: Any) -> tuple[Array, Array, Any]:
            g = as_matrix(path, grad)
            square = jnp.square(g)

            def follow(mean: Array, newest: Array) -> Array:
                return (mean + new * (newest - mean)).astype(g.dtype)

            def rms(x: Array) -> Array:
                return jnp.sqrt(jnp.square(x).mean(-1 if is_vector(path) else (-2, -1), keepdims=True))

            if is_vector(path):
                row = v = follow(row, square)
            else:
                row = follow(row, square.mean(-1, keepdims=True))
                column = follow(column, square.mean(-2, keepdims=True))
                v = row * column / jnp.maximum(row.mean(-2, keepdims=True), 1e-15)
            u = g * jax.lax.rsqrt(jnp.maximum(v, 1e-30))
            u = u / jnp.maximum(1, rms(u)) * jnp.maximum(1e-3, rms(as_matrix(path, param)))
            return u.reshape(grad.shape), row, column

        made = by_path(scaled, grads, params, state.rows, state.columns)
        updates, rows, columns = (jax.tree.map(lambda _, three, n=n: three[n], grads, made) for n in range(3))
        return updates, AdafactorState(steps, rows, columns)

    return optax.GradientTransformation(init, update)


def optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Combines clipping, the optimizer that `config` names, and the schedule. Decay is decoupled, but for SGD."""
    rate = learning_rate(config, steps)
    decay = config.weight_decay
    decays = optax.add_decayed_weights(decay, has_decay)
    falls = optax.scale_by_learning_rate(rate)
    b1, b2 = config.beta1, config.beta2
    adamw = optax.adamw(rate, b1=b1, b2=b2, eps=config.eps, eps_root=0.0, weight_decay=decay, mask=has_decay)
    match config.name:
        case "adamw":
            chosen = adamw
        case "lion":
            chosen = optax.lion(rate, b1, b2, weight_decay=decay, mask=has_decay)
        case "adafactor":
            chosen = optax.chain(scale_by_adafactor(), decays, falls)
        case "sgd":
            chosen = optax.chain(decays, optax.sgd(rate, momentum=config.momentum, nesterov=True))
        case "muon":
            # As in PyTorch: `optax.contrib.muon` corrects the bias of its momentum, which turns the first updates.
            direction = optax.stateless(lambda updates, _: by_path(orthogonalize, updates))
            muon = optax.chain(optax.trace(config.momentum, nesterov=True), direction, decays, falls)
            kinds = partial(by_path, lambda path, _: kind_of(path))
            others = dict.fromkeys(("tables", "head", "vectors"), adamw)
            chosen = optax.partition({"matrices": muon, **others}, kinds)
    parts = [chosen] if config.clip_norm is None else [clip_by_global_norm(config.clip_norm), chosen]
    if config.rates != RatesConfig():
        factors = vars(config.rates)
        scale = optax.stateless(lambda updates, _: by_path(lambda path, x: factors[kind_of(path)] * x, updates))
        parts.append(scale)
    return optax.chain(*parts) if len(parts) > 1 else chosen
