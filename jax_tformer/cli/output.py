"""What generate.py prints: answers, as text for people or as JSON lines for programs, their scores and their speed."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import jax.monitoring

from jax_tformer.cli.answers import Completion
from jax_tformer.cli.texts import Text
from jax_tformer.decoding.translation_scores import TranslationScores
from jax_tformer.terminal import say

_COMPILATION = "/jax/core/compile/"
"""What the names of JAX's events begin with: tracing, lowering, and XLA's work."""


class TextOutput:
    """Prints prompts with their continuations, or answers `alone`, one per line. Several answers get headings."""

    def __init__(self, kind: str, *, alone: bool) -> None:
        """`kind` is what the texts are called: "prompt"."""
        self._kind, self._alone = kind, alone

    def answers(self, text: Text, completions: Sequence[Completion]) -> None:
        """Prints the answers to one text."""
        for number, completion in enumerate(completions, 1):
            heading = [] if self._alone and len(completions) == 1 else self._of(text)
            if completion.score is not None and len(completions) > 1:
                heading.append(f"beam {number}, score {completion.score:.4f}")
            elif len(completions) > 1:
                heading.append(f"sample {number}")
            self._print(heading, text, [completion.text])

    def stream(self, text: Text, pieces: Iterable[str]) -> list[str]:
        """Prints the only answer to one text as it is made; returns the pieces."""
        return self._print([] if self._alone else self._of(text), text, pieces)

    def scores(self, scores: TranslationScores) -> None:
        """Prints scores to standard error."""
        print(*scores.lines, sep="\n", file=sys.stderr)

    def _of(self, text: Text) -> list[str]:
        """Which text is answered, where there may be several."""
        return [] if text.place is None else [f"{self._kind} {text.number}"]

    def _print(self, heading: Sequence[str], text: Text, pieces: Iterable[str]) -> list[str]:
        if heading:
            print(f"--- {', '.join(heading)} ---")
        say("" if self._alone else text.text, end="")
        printed = []
        try:
            for piece in pieces:
                say(piece, end="")
                printed.append(piece)
        except KeyboardInterrupt:
            print(flush=True)
            raise
        print(end="\n\n" if heading else "\n", flush=True)
        return printed


class JsonOutput:
    """Prints one JSON object per line, with the number of the line that it answers if there are several."""

    def __init__(self, kind: str) -> None:
        """`kind` is what the texts are called: "prompt"."""
        self._kind = kind

    def answers(self, text: Text, completions: Sequence[Completion]) -> None:
        """Prints the object of one text."""
        line = {} if text.place is None else {"line": text.number}
        answers = [
            {"text": each.text, "tokens": each.tokens, "finished": each.finished}
            | ({} if each.score is None else {"score": each.score})
            for each in completions
        ]
        self._print({**line, self._kind: text.text, "completions": answers})

    def scores(self, scores: TranslationScores) -> None:
        """Prints the last object, the scores."""
        why = {} if scores.no_bleu is None else {"no_bleu": scores.no_bleu}
        figures = {"exact_match": scores.exact_match, "bleu": scores.bleu, **why, "chrf": scores.chrf}
        self._print({**figures, "signatures": list(scores.signatures)})

    def _print(self, content: dict[str, object]) -> None:
        say(json.dumps(content, ensure_ascii=False, allow_nan=False))


class Stopwatch:
    """Times what runs inside `with stopwatch.running():`, and JAX's compilation within it."""

    def __init__(self) -> None:
        self._seconds = self._compilation = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """May be entered as often as there is something to time."""
        spans: list[tuple[float, float]] = []

        def listen(event: str, start_time: float, end_time: float, **_: str | int) -> None:
            if event.startswith(_COMPILATION):
                spans.append((start_time, end_time))

        jax.monitoring.register_event_time_span_listener(listen)
        # The clock of JAX's events.
        began = time.time()
        try:
            yield
        finally:
            self._seconds += time.time() - began
            jax.monitoring.unregister_event_time_span_listener(listen)
            # What is traced inside of something traced counts once.
            until = 0.0
            for start, end in sorted(spans):
                self._compilation += max(end - max(start, until), 0.0)
                until = max(until, end)

    def line(self, tokens: int) -> str:
        """The speed at which `tokens` were made, without compilation."""
        seconds = max(self._seconds - self._compilation, 0.0)
        speed = f"{tokens / seconds:,.0f}" if seconds else "?"
        made = f"{tokens:,} new tokens in {seconds:.2f} s"
        return f"{made}: {speed} tokens/s, and {self._compilation:.1f} s of compilation"
