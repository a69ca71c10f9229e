"""What can be described: stacks, models, experiments and their presets. Nothing here imports jax or torch."""

from jax_tformer.config.model import (
    AttentionImplementation,
    ComputeConfig,
    DropoutConfig,
    Dtype,
    LoraConfig,
    LoraTarget,
    Remat,
    TransformerConfig,
)
from jax_tformer.config.stack import Activation, Positions, RotaryConfig, StackConfig

__all__ = [
    "Activation",
    "AttentionImplementation",
    "ComputeConfig",
    "DropoutConfig",
    "Dtype",
    "LoraConfig",
    "LoraTarget",
    "Positions",
    "Remat",
    "RotaryConfig",
    "StackConfig",
    "TransformerConfig",
]
