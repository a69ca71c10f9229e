"""Both sides of a model with random weights, and the first two gates of what they compute."""

from parity.gates.measure import compared
from twin.cases import weights_for
from twin.pair import Pair, known_zeros


def random_pair(config, std=0.2, **options):
    """Matrices are N(0, std^2); `options` are those of `Pair`."""
    return Pair(config, weights_for(config, std), **options)


def gates_1_and_2(config, ours, theirs, nearly_zero=None):
    """Activations, and gradients; `nearly_zero` are gradients that another scale is for."""
    zeros = (nearly_zero or {}) | known_zeros(config, theirs.gradients)
    return [
        compared("1 activations", ours.outputs, theirs.outputs),
        compared("2 gradients", ours.gradients, theirs.gradients, zero=zeros),
    ]
