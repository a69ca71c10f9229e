"""Both sides of a model with random weights."""

from twin.cases import weights_for
from twin.pair import Pair


def random_pair(config, std=0.2, **options):
    """Matrices are N(0, std^2); `options` are those of `Pair`."""
    return Pair(config, weights_for(config, std), **options)
