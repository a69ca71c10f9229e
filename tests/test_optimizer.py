"""The schedules are the papers' formulas, worked by hand; gate 5 holds optimizers and clipping to PyTorch's."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config.experiment import OptimizerConfig
from jax_tformer.training.optimizer import learning_rate

STEPS = np.arange(1, 201)
PAPER = 512**-0.5 * np.minimum(STEPS**-0.5, STEPS * 40**-1.5)
"""Section 5.3: d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), steps counted from 1."""
WARM, FALL = [0.5, 1.0, 1.5], [1.75, 1.5, 1.25, 1.0]
COSINE = 2.0 * (0.1 + 0.9 * (1 + np.cos(np.pi * np.arange(101) / 100)) / 2)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"schedule": "inverse_sqrt", "learning_rate": (512 * 40) ** -0.5, "warmup_steps": 40}, PAPER),
        ({"schedule": "cosine", "final_fraction": 0.1}, [*WARM, *COSINE]),
        ({"schedule": "linear"}, [*WARM, 2.0, *FALL]),
        ({"schedule": "warmup_stable_decay", "decay_share": 0.2}, [*WARM, *[2.0] * 13, *FALL]),
        ({"schedule": "constant", "warmup_steps": 0}, [2.0] * 3),
    ],
)
def test_the_rates_of_a_schedule(settings, expected):
    config = OptimizerConfig(**{"learning_rate": 2.0, "warmup_steps": 4, "final_fraction": 0.5, **settings})
    rates = learning_rate(config, len(expected))(jnp.arange(len(expected)))
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
