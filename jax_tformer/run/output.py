"""Answers on standard output, as text for people or as JSON lines for programs."""

import io
import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jax_tformer.run.items import Item
from jax_tformer.terminal import say

if TYPE_CHECKING:
    from jax_tformer.decoding.translation_scores import TranslationScores
    from jax_tformer.run.speaker import Completion


def speak_utf8() -> None:
    """Whatever the locale says, the output is UTF-8: a model may say any character."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


class TextOutput:
    """Prompts go before their continuations; translations stand alone, one a line. Several answers have headings."""

    def __init__(self, *, translates: bool) -> None:
        self._translates = translates

    def answers(self, item: Item, completions: Sequence["Completion"]) -> None:
        """Prints the answers to one text."""
        for number, completion in enumerate(completions, 1):
            heading = [] if self._translates and len(completions) == 1 else self._of(item)
            if completion.score is not None and len(completions) > 1:
                heading.append(f"beam {number}, score {completion.score:.4f}")
            elif len(completions) > 1:
                heading.append(f"sample {number}")
            self._print(heading, item, [completion.text])

    def stream(self, item: Item, pieces: Iterable[str]) -> list[str]:
        """Prints the only answer to one text as it is made; returns the pieces."""
        return self._print([] if self._translates else self._of(item), item, pieces)

    def scores(self, scores: "TranslationScores") -> None:
        """Prints scores to standard error."""
        print(*scores.lines, sep="\n", file=sys.stderr)

    def _of(self, item: Item) -> list[str]:
        """Which text is answered, where there may be several."""
        return [] if item.line.place is None else [f"{'source' if self._translates else 'prompt'} {item.line.number}"]

    def _print(self, heading: Sequence[str], item: Item, pieces: Iterable[str]) -> list[str]:
        if heading:
            print(f"--- {', '.join(heading)} ---")
        say("" if self._translates else item.line.text, end="")
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
    """One object a line, with the number of the line that it answers where there are several."""

    def __init__(self, *, translates: bool) -> None:
        self._kind = "source" if translates else "prompt"

    def answers(self, item: Item, completions: Sequence["Completion"]) -> None:
        """Prints the object of one text."""
        line = {} if item.line.place is None else {"line": item.line.number}
        answers = [self._completion(each) for each in completions]
        self._print({**line, self._kind: item.line.text, "completions": answers})

    def scores(self, scores: "TranslationScores") -> None:
        """Prints the last object, the scores."""
        why = {} if scores.no_bleu is None else {"no_bleu": scores.no_bleu}
        figures = {"exact_match": scores.exact_match, "bleu": scores.bleu, **why, "chrf": scores.chrf}
        self._print({**figures, "signatures": list(scores.signatures)})

    def _completion(self, completion: "Completion") -> dict[str, object]:
        score = {} if completion.score is None else {"score": completion.score}
        return {"text": completion.text, "tokens": completion.tokens, "finished": completion.finished, **score}

    def _print(self, content: dict[str, object]) -> None:
        say(json.dumps(content, ensure_ascii=False, allow_nan=False))
