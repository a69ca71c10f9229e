"""What is trained: the models, and how much they are given at once."""

from dataclasses import dataclass, replace

from benchmarks.training_sides import BatchShape
from jax_tformer.config import DropoutConfig, Dtype, StackConfig, TransformerConfig
from jax_tformer.presets import ARCHITECTURES


@dataclass(frozen=True)
class TrainingCase:
    """One setting in which all sides train."""

    model: str
    config: TransformerConfig
    shape: BatchShape
    rounds: int
    steps: int
    """Updates that a side makes in one turn."""

    @property
    def name(self) -> str:
        """For people."""
        source = f"{self.shape.source} source and " if self.shape.source else ""
        return f"{self.model}, {self.shape.rows} x {source}{self.shape.length} tokens, {self.config.compute.dtype}"


def small_gpt(num_layers: int = 6, width: int = 384) -> TransformerConfig:
    """GPT-2's architecture on characters, with heads of width 64."""
    return without_dropout(
        replace(_resized("gpt2", num_layers, width, num_heads=width // 64), vocab_size=65),
    )


def without_dropout(config: TransformerConfig) -> TransformerConfig:
    """No implementation draws another's masks, so that the losses can agree."""
    return replace(config, dropout=DropoutConfig())


def full(device: str) -> tuple[TrainingCase, ...]:
    """The figures that are published."""
    if device == "cpu":
        return (
            TrainingCase("small gpt", small_gpt(), BatchShape(8, 256), rounds=3, steps=3),
            TrainingCase("gpt2", _named("gpt2"), BatchShape(2, 256), rounds=2, steps=2),
            TrainingCase("vaswani-base", _named("vaswani-base"), BatchShape(16, 64, 64), rounds=2, steps=2),
            TrainingCase("bert-base", _named("bert-base"), BatchShape(8, 128), rounds=2, steps=2),
        )
    wide = without_dropout(_resized("gpt2", 6, 1600, num_heads=25))
    half: Dtype = "bfloat16"
    return (
        TrainingCase("gpt2", _named("gpt2", half), BatchShape(16, 1024), rounds=5, steps=10),
        TrainingCase("gpt2 xl, 6 layers", _in(wide, half), BatchShape(8, 1024), rounds=5, steps=10),
        TrainingCase("vaswani-base", _named("vaswani-base", half), BatchShape(64, 256, 256), rounds=5, steps=10),
        TrainingCase("bert-base", _named("bert-base", half), BatchShape(32, 512), rounds=5, steps=10),
    )


def quick(device: str) -> tuple[TrainingCase, ...]:
    """The same program on models of no size: whether it runs, not how fast."""
    return tuple(replace(case, config=tiny(case.config), shape=_few(case.shape), steps=1) for case in full(device))


def tiny(config: TransformerConfig) -> TransformerConfig:
    """The same architecture with two layers of width 16."""

    def stack(given: StackConfig | None) -> StackConfig | None:
        return None if given is None else replace(given, num_layers=2, num_heads=2, feedforward_width=32)

    return replace(config, vocab_size=50, d_model=16, encoder=stack(config.encoder), decoder=stack(config.decoder))


def _few(shape: BatchShape) -> BatchShape:
    return BatchShape(rows=2, length=8, source=6 if shape.source else 0)


def _resized(name: str, num_layers: int, width: int, num_heads: int) -> TransformerConfig:
    config = ARCHITECTURES[name]
    stack = replace(config.output_stack, num_layers=num_layers, num_heads=num_heads, feedforward_width=4 * width)
    return replace(config, d_model=width, decoder=stack)


def _named(name: str, dtype: Dtype = "float32") -> TransformerConfig:
    return _in(without_dropout(ARCHITECTURES[name]), dtype)


def _in(config: TransformerConfig, dtype: Dtype) -> TransformerConfig:
    return replace(config, compute=replace(config.compute, dtype=dtype))
