"""What can be described: stacks, models, experiments and their presets. Nothing here imports jax or torch."""

from jax_tformer.config.model import (
    IGNORED,
    Activation,
    AttentionImplementation,
    ComputeConfig,
    DropoutConfig,
    Dtype,
    LoraConfig,
    LoraTarget,
    Positions,
    Remat,
    RotaryConfig,
    StackConfig,
    TransformerConfig,
)

__all__ = [
    "IGNORED",
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
