"""Loops side by side: training step by step, and decoding token by token."""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from parity import ParityError, check_decoding, check_training

pytestmark = pytest.mark.usefixtures("as_others_write")
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((16, 4)), RNG.standard_normal((16, 3))
WEIGHTS = {"up.kernel": ("0.weight", "o i -> i o"), "up.bias": "0.bias", "down": ("2.weight", "o i -> i o")}
RATE, DECAY = 1e-2, 0.1


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)).double()


def parameters():
    up, _, down = network()
    up, bias, down = (p.detach().numpy() for p in (up.weight.T, up.bias, down.weight.T))
    return {"up": {"kernel": up, "bias": bias}, "down": down}


def loss(params, x):
    return jnp.square(jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"]) @ params["down"] - Y).mean()


def ours(transformation, steps=4, average=None):
    """A loop as others write it."""
    params = mean = parameters()
    state = transformation.init(params)
    for _ in range(steps):
        value, gradient = jax.value_and_grad(loss)(params, X)
        updates, state = transformation.update(gradient, state, params)
        before, params = params, optax.apply_updates(params, updates)
        mean = params if average is None else jax.tree.map(average, mean, before, params)
        yield {"loss": value, "gradient": gradient, "state": state, "parameter": params, "average": mean}


def theirs(make, steps=4, average=lambda mean, parameter, number: parameter, schedule=lambda step: 1.0):
    module = network()
    optimizer, averaged = make(module.parameters()), AveragedModel(module, avg_fn=average)
    averaged.n_averaged += 1  # so that the first step is averaged as well
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for _ in range(steps):
        optimizer.zero_grad()
        value = (module(torch.from_numpy(X)) - torch.from_numpy(Y)).square().mean()
        value.backward()
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(module)
        yield {"loss": value, "module": module, "optimizer": optimizer, "average": averaged}


class Moments(NamedTuple):
    mu: dict
    nu: dict
    steps: int


def handwritten(correct=True, eps=lambda root: root + 1e-8, decayed="before"):
    """AdamW in the way of PyTorch, or nearly so."""

    def init(params):
        zero = jax.tree.map(jnp.zeros_like, params)
        return Moments(zero, zero, 0)

    def update(gradient, state, params):
        if decayed == "gradient":
            gradient = jax.tree.map(lambda g, p: g + DECAY * p, gradient, params)
        step = state.steps + 1
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mu, gradient)
        nu = jax.tree.map(lambda n, g: 0.999 * n + 0.001 * g * g, state.nu, gradient)
        first, second = (1 - 0.9**step, 1 - 0.999**step) if correct else (1, 1)

        def moved(m, n, p):
            taken = RATE * (m / first) / eps(jnp.sqrt(n / second))
            if decayed == "before":
                return -RATE * DECAY * p - taken
            return (p - taken) * (1 - RATE * DECAY) - p if decayed == "after" else -taken

        return jax.tree.map(moved, mu, nu, params), Moments(mu, nu, step)

    return optax.GradientTransformation(init, update)


ADAMW = partial(torch.optim.AdamW, lr=RATE, weight_decay=DECAY)
MOMENTUM = partial(torch.optim.SGD, lr=RATE, momentum=0.9)


def kept(mean, before, after):
    return 0.9 * mean + 0.1 * after


def their_kept(mean, parameter, number):
    return 0.9 * mean + 0.1 * parameter


@pytest.mark.parametrize(
    "here, there",
    [
        (ours(optax.adamw(RATE, weight_decay=DECAY)), theirs(ADAMW)),
        (ours(handwritten(), average=kept), theirs(ADAMW, average=their_kept)),
        (
            ours(optax.chain(optax.masked(optax.trace(0.9), {"up": True, "down": True}), optax.scale(-RATE))),
            theirs(MOMENTUM),
        ),
    ],
    ids=["optax", "handwritten", "momentum"],
)
def test_right_loops_are_the_same(here, there):
    figures = check_training(here, there, WEIGHTS)
    assert [figure.gate for figure in figures] == [f"training, step {n}" for n in range(1, 5)]


@pytest.mark.parametrize(
    "here, there, first",
    [
        (ours(handwritten(correct=False)), theirs(ADAMW), "1: parameter 0.weight"),
        (ours(handwritten(eps=lambda root: jnp.sqrt(root**2 + 1e-8))), theirs(ADAMW), "1: parameter 0.weight"),
        (ours(handwritten(decayed="after")), theirs(ADAMW), "1: parameter 0.weight"),
        (ours(handwritten(decayed="gradient")), theirs(ADAMW), "1: mu 0.weight"),
        (ours(optax.inject_hyperparams(optax.adamw)(RATE, b2=0.99)), theirs(ADAMW), "1: nu 0.weight"),
        (
            ours(handwritten(), average=lambda mean, before, after: kept(mean, after, before)),
            theirs(ADAMW, average=their_kept),
            "1: average 0.weight",
        ),
        (
            ours(optax.sgd(optax.piecewise_constant_schedule(RATE, {3: 0.1}), momentum=0.9)),
            theirs(MOMENTUM, schedule=lambda step: 0.1 if step > 1 else 1.0),
            "3: parameter 0.weight",
        ),
        (
            ours(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(RATE, 0.9))),
            theirs(MOMENTUM),
            "1: trace 0.weight",
        ),
    ],
    ids=["bias", "epsilon", "decay after", "decay as gradient", "beta", "average", "schedule", "clipping"],
)
def test_the_first_step_and_quantity_that_part_are_named(here, there, first):
    with pytest.raises(ParityError) as caught:
        check_training(here, there, WEIGHTS)
    step, name = first.split(": ")
    assert re.match(rf"gate training, step {step}: \S+ >  1e-11 \({name}\); {name} is the first of", str(caught.value))


def test_a_weight_whose_gradient_is_zero_may_go_anywhere():
    far = optax.stateless(lambda updates, params: updates | {"down": 2 * updates["down"]})
    loops = [(ours(optax.chain(optax.sgd(RATE), far), 1), theirs(MOMENTUM, 1)) for _ in range(2)]
    check_training(*loops[0], WEIGHTS, zero_gradients=["2.weight"])
    with pytest.raises(ParityError, match=r"\(parameter 2.weight\)"):
        check_training(*loops[1], WEIGHTS)


LENGTH, WIDTH = 8, 6
TABLE = {name: RNG.standard_normal((12 if name == "e" else WIDTH, WIDTH)) for name in "eqkv"}
TOKENS = RNG.integers(0, 12, (2, LENGTH))


def decoded(xp, table, tokens, cache, position, fault=""):
    """One layer of attention with rotary positions, in NumPy's words, which both libraries understand."""
    x, n = table["e"][tokens], tokens.shape[1]
    at, late = 0 if fault == "slot" else position, fault == "rotary" and position > 0
    angle = (xp.arange(n) + position + late)[:, None] * xp.asarray(0.7 ** np.arange(WIDTH // 2))

    def turned(y):
        a, b, c, s = y[..., : WIDTH // 2], y[..., WIDTH // 2 :], xp.cos(angle), xp.sin(angle)
        return xp.concatenate([a * c - b * s, b * c + a * s], -1)

    new = turned(x @ table["k"]), x @ table["v"]
    cache = [xp.concatenate([old[:, :at], each, old[:, at + n :]], 1) for old, each in zip(cache, new, strict=True)]
    seen = xp.arange(LENGTH)[None] <= (xp.arange(n) + position + (fault == "mask"))[:, None]
    scores = xp.einsum("bnd,bmd->bnm", turned(x @ table["q"]), cache[0])
    weights = xp.exp(scores / WIDTH) * seen
    mixed = xp.einsum("bnm,bmd->bnd", weights / weights.sum(-1)[..., None], cache[1])
    return (x + mixed) @ table["e"].T, cache


def decoder(xp, fault="", table=TABLE):
    """(tokens -> logits, one step, an empty cache)."""
    make = torch.from_numpy if xp is torch else np.asarray
    step = partial(decoded, xp, {name: make(array) for name, array in table.items()})

    def empty():
        return [make(np.zeros((2, LENGTH, WIDTH)))] * 2

    return lambda tokens: step(make(tokens), empty(), 0)[0], partial(step, fault=fault), empty


OTHER = TABLE | {"v": TABLE["v"] * 1.01}


@pytest.mark.parametrize(
    "known, decoding, first",
    [
        (jnp, (torch, ""), None),
        (torch, (jnp, ""), None),
        (jnp, (jnp, "slot"), 1),
        (jnp, (torch, "rotary"), 1),
        (torch, (torch, "mask"), 0),
        (torch, (jnp, "", OTHER), 0),
    ],
    ids=["ours", "theirs", "a cache without position", "rotary off by one", "a mask too long", "another weight"],
)
def test_the_first_position_that_parts_is_named(known, decoding, first):
    """On one side, and across."""
    _, step, empty = decoder(*decoding)
    tokens = torch.from_numpy(TOKENS) if decoding[0] is torch else TOKENS
    with jax.enable_x64(True):
        logits = decoder(known)[0](TOKENS)
        if first is None:
            figures = check_decoding(tokens, logits, step, empty)
            assert [figure.gate for figure in figures] == ["decoding after 1", "decoding after 4"]
            return
        with pytest.raises(ParityError) as caught:
            check_decoding(tokens, logits, step, empty)
    said = rf"gate decoding after 1: \S+ >  1e-12 \(position {first}\); position {first} is the first of"
    assert re.match(said, str(caught.value))
