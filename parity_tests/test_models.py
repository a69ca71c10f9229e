"""Gates 1, 2 and 3: every preset, both weight regimes, without and with padding on either side."""

from collections.abc import Callable
from functools import lru_cache
from itertools import product

import numpy as np
import pytest

from jax_tformer.config import Dtype
from jax_tformer.presets import ARCHITECTURES
from parity_tests.bridge import Pair, Result, Tensors, known_zeros
from parity_tests.cases import CONFIGS, PADDINGS, REGIMES, Lengths, batch_for, weights_for
from parity_tests.measure import Measured, Sample, compared, quality

Record = Callable[[str, Measured], None]


@lru_cache(maxsize=2)
def pair(name: str, dtype: Dtype) -> Pair:
    """Both models of one config; the compiled function is kept while the parameters change."""
    weights = weights_for(CONFIGS[name], 0.02)
    # float64 shows what function it is, whatever the compiler does; float32 shows how the optimised code rounds.
    return Pair(CONFIGS[name], weights, dtype, optimised=dtype == "float32")


def results(name: str, weights: Tensors, batch: Tensors, dtype: Dtype) -> tuple[Result, Result]:
    """(JAX, PyTorch) on one case."""
    models = pair(name, dtype)
    models.load(weights)
    return models.run_jax(batch), models.run_torch(batch)


@pytest.mark.parametrize("name", CONFIGS)
def test_gates_1_2_and_3(name: str, record: Record) -> None:
    # One test a config, so that one process compiles its functions once.
    config = CONFIGS[name]
    for std in REGIMES.values():
        samples = []
        for padding, seed in product(PADDINGS, range(2)):
            weights, batch = weights_for(config, std, seed), batch_for(config, padding, seed)
            ours, theirs = results(name, weights, batch, "float64")
            zeros = known_zeros(config, theirs.gradients)
            record(name, compared("1 activations", ours.activations, theirs.activations))
            record(name, compared("2 gradients", ours.gradients, theirs.gradients, zero=zeros))

            ours32, theirs32 = results(name, weights, batch, "float32")
            truth = theirs.activations | theirs.gradients
            scales = {tensor: float(np.linalg.norm(array)) for tensor, array in truth.items()} | zeros
            samples.append(
                Sample(ours32.activations | ours32.gradients, theirs32.activations | theirs32.gradients, truth, scales)
            )
        record(name, quality("3 float32 / allowed", samples))


@pytest.mark.parametrize("name", ["gpt2", "vaswani-base"])
def test_gates_1_and_2_at_full_size(name: str, record: Record) -> None:
    config = ARCHITECTURES[name]
    models = Pair(config, weights_for(config, 0.02), "float64", optimised=True)
    lengths = Lengths(batch=2, source=33, target=21)
    batch = batch_for(config, "right", lengths=lengths)
    ours, theirs = models.run_jax(batch), models.run_torch(batch)
    record(f"{name}, full size", compared("1 activations", ours.activations, theirs.activations))
    zeros = known_zeros(config, theirs.gradients)
    record(f"{name}, full size", compared("2 gradients", ours.gradients, theirs.gradients, zero=zeros))


def test_source_and_target_lengths_differ() -> None:
    batch = batch_for(CONFIGS["vaswani-base"], "none")
    assert batch["source"].shape[1] != batch["target"].shape[1]


@pytest.mark.parametrize("name", ["vaswani-base", "switches-decoder-only", "switches-encoder-decoder"])
def test_positions_far_from_the_start(name: str, record: Record) -> None:
    """Rotation and sinusoids over 520 positions: rounding of large angles would show there first."""
    config = CONFIGS[name]
    models = Pair(config, weights_for(config, 0.2), "float64", optimised=False)
    batch = batch_for(config, "none", lengths=Lengths(batch=1, source=520, target=515))
    ours, theirs = models.run_jax(batch), models.run_torch(batch)
    record(f"{name}, 520 positions", compared("1 activations", ours.activations, theirs.activations))
