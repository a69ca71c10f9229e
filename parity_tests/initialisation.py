"""How fresh parameters should be distributed, said a second time: by name and config, from what the sources say.

Nothing here reads what the library's modules declare, and shapes come from the config alone.

- The paper gives no initialiser. `xavier_uniform` is that of Glorot & Bengio (2010, equation 16) for the whole
  projection of a layer, all heads together, as tensor2tensor and torch.nn.MultiheadAttention's separate projections
  have it; token tables are N(0, 1/d), so that the scaling by sqrt(d) (section 3.4) brings them to unit size.
- GPT-2: N(0, 0.02^2), and projections that end a residual branch by 1/sqrt(N) smaller, N being the number of residual
  layers (Radford et al., 2019, section 2.3): two a layer. Its released code has 0.01 for positions; ours has 0.02 there
  too, as later implementations do.
- BERT: N(0, 0.02^2), in the original truncated at two deviations, which ours is not.
- LoRA (Hu et al., 2021, section 4.1): B starts at zero. A is normal in the paper, and uniform in PEFT and in ours.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

from parity_tests.draws import dependences, judged, largest


class Expected(NamedTuple):
    """How the numbers of a parameter are distributed."""

    kind: Literal["constant", "normal", "uniform"]
    size: float
    """The constant, or the standard deviation."""


ZEROS, ONES = Expected("constant", 0.0), Expected("constant", 1.0)


def expected(config, path):
    """The distribution of the parameter at `path`; raises KeyError for one that it does not know."""
    *place, layer, leaf = path.split(".")
    stack = config.stacks.get(path.split(".")[0])
    if leaf in ("bias", "scale"):
        return ZEROS if leaf == "bias" else ONES
    if layer == "lora":
        # PEFT's: nn.init.kaiming_uniform_(A, a=sqrt(5)), which is U(-a, a) with a = inputs^-0.5.
        return ZEROS if leaf == "b" else Expected("uniform", 1 / math.sqrt(3 * fans(config, stack, place[-1])[0]))
    glorot = config.initializer == "xavier_uniform"
    if leaf == "embedding":
        by_width = glorot and layer == "tokens"
        return Expected("normal", config.d_model**-0.5 if by_width else config.initializer_std)
    scale = 1.0
    if config.residual_init_scale and layer in ("output", "down"):
        crosses = place[0] == "decoder" and config.encoder is not None
        scale = 1 / math.sqrt((3 if crosses else 2) * stack.num_layers)
    if not glorot:
        return Expected("normal", scale * config.initializer_std)
    fan_in, fan_out = fans(config, stack, layer)
    # U(-a, a) with a = sqrt(6 / (in + out)) has this deviation.
    return Expected("uniform", scale * math.sqrt(2 / (fan_in + fan_out)))


def fans(config, stack, layer):
    """How many numbers go into a projection, and come out."""
    width = config.d_model
    if outputs := {"head": config.vocab_size, "classifier": config.classes, "dense": width}.get(layer):
        return width, outputs
    return config.projections(stack)[layer]


def gate(config, drawn):
    """Parameters `[draws, ...]` by path: mean, deviation and kind of each, layer by layer; all independent."""
    standardised, scores = {}, dict[str, float]()
    for path, numbers in drawn.items():
        kind, size = expected(config, path)
        if kind == "constant":
            scores[f"{path}: constant"] = 0.0 if (numbers == size).all() else np.inf
            continue
        layers = {path: numbers}
        if ".blocks." in path:
            layers = {f"{path}[{layer}]": numbers[:, layer] for layer in range(numbers.shape[1])}
        for name, layer in layers.items():
            standardised[name] = (layer / size).astype(np.float32)
            scores |= moments(name, layer / size, kind)
    return judged(largest(scores), *dependences(standardised))


def moments(name, numbers, kind):
    """The z of the mean, of the variance, and of the mean absolute value, which tells normal from uniform numbers."""
    absolute = math.sqrt(2 / math.pi) if kind == "normal" else math.sqrt(3) / 2
    fourth = 3.0 if kind == "normal" else 9 / 5
    statistics = {
        "mean": (numbers, 0.0, 1.0),
        "variance": (np.square(numbers), 1.0, fourth - 1),
        "absolute": (np.abs(numbers), absolute, 1 - absolute**2),
    }
    root = math.sqrt(numbers.size)
    return {
        f"{name}: {what}": float((values.mean(dtype=np.float64) - mean) * root / math.sqrt(variance))
        for what, (values, mean, variance) in statistics.items()
    }
