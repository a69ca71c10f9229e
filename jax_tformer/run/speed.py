"""Tokens per second, with the time that compilation takes apart."""

import time
from types import TracebackType

import jax.monitoring

_COMPILATION = "/jax/core/compile/"
"""What the names of JAX's events begin with: tracing, lowering, and XLA's work."""


class Stopwatch:
    """Runs inside `with stopwatch:`, as often as that is entered; `line` reports."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Without compilation."""
        self.compilation = 0.0
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> "Stopwatch":
        self._spans.clear()
        jax.monitoring.register_event_time_span_listener(self._listen)
        # The clock of JAX's events.
        self._began = time.time()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        elapsed = time.time() - self._began
        jax.monitoring.unregister_event_time_span_listener(self._listen)
        compilation = _covered(self._spans)
        self.compilation += compilation
        self.seconds += max(elapsed - compilation, 0.0)

    def line(self, tokens: int) -> str:
        """The speed at which `tokens` were made."""
        speed = f"{tokens / self.seconds:,.0f}" if self.seconds else "?"
        made = f"{tokens:,} new tokens in {self.seconds:.2f} s"
        return f"{made}: {speed} tokens/s, and {self.compilation:.1f} s of compilation"

    def _listen(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        if event.startswith(_COMPILATION):
            self._spans.append((start_time, end_time))


def _covered(spans: list[tuple[float, float]]) -> float:
    """The seconds that at least one span covers: what is traced inside of something traced counts once."""
    seconds, until = 0.0, 0.0
    for start, end in sorted(spans):
        seconds += max(end - max(start, until), 0.0)
        until = max(until, end)
    return seconds
