"""What is measured: the models, and how much they are given."""

from dataclasses import dataclass, replace

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.presets import ARCHITECTURES


@dataclass(frozen=True)
class Case:
    """One setting in which all sides decode."""

    batch: int
    prompt: int
    """Tokens of each prompt, or of each source."""
    new_tokens: int
    rounds: int
    reference_tokens: int
    """Tokens that the side without a cache decodes; 0: it has no part in this case."""
    beams: int = 1

    @property
    def name(self) -> str:
        """For people."""
        return f"batch {self.batch}, {f'beam search, {self.beams} beams' if self.beams > 1 else 'greedy'}"


@dataclass(frozen=True)
class Windows:
    """The time of a token early and late: `count` tokens after each of `prompts`, in a cache of `slots`."""

    prompts: tuple[int, int]
    count: int
    slots: int
    rounds: int


@dataclass(frozen=True)
class Suite:
    """One model and its cases, in the order of their needs."""

    model: str
    config: TransformerConfig
    cases: tuple[Case, ...]
    windows: Windows | None = None


def full() -> tuple[Suite, ...]:
    """The figures that are published."""
    return (
        Suite(
            "gpt2",
            ARCHITECTURES["gpt2"],
            (
                Case(batch=1, prompt=128, new_tokens=128, rounds=4, reference_tokens=8),
                Case(batch=8, prompt=128, new_tokens=128, rounds=3, reference_tokens=3),
            ),
            Windows(prompts=(96, 864), count=64, slots=1024, rounds=2),
        ),
        Suite(
            "vaswani-base",
            ARCHITECTURES["vaswani-base"],
            (
                Case(batch=1, prompt=64, new_tokens=64, rounds=5, reference_tokens=8),
                Case(batch=8, prompt=64, new_tokens=64, rounds=5, reference_tokens=4),
                Case(batch=1, prompt=64, new_tokens=64, rounds=5, reference_tokens=0, beams=4),
                Case(batch=8, prompt=64, new_tokens=64, rounds=3, reference_tokens=0, beams=4),
            ),
        ),
    )


def quick() -> tuple[Suite, ...]:
    """The same program on models of no size: whether it runs, not how fast."""
    case = Case(batch=2, prompt=4, new_tokens=4, rounds=2, reference_tokens=2)
    return (
        Suite("gpt2", _tiny("gpt2"), (case,), Windows(prompts=(4, 8), count=2, slots=16, rounds=1)),
        Suite("vaswani-base", _tiny("vaswani-base"), (case, replace(case, beams=2, reference_tokens=0))),
    )


def _tiny(name: str) -> TransformerConfig:
    config = ARCHITECTURES[name]
    return replace(
        config, vocab_size=50, d_model=16, encoder=_tiny_stack(config.encoder), decoder=_tiny_stack(config.decoder)
    )


def _tiny_stack(stack: StackConfig | None) -> StackConfig | None:
    return None if stack is None else replace(stack, num_layers=1, num_heads=2, feedforward_width=32)
