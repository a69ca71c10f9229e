"""Generate text with the model of a run or of a Hugging Face folder: `python generate.py FOLDER --prompt TEXT`, or
`--source TEXT`, or one text per line from a file or standard input; `--chat` converses."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from jax_tformer.config.errors import InputError, require
from jax_tformer.files import user_path
from jax_tformer.terminal import one_line, say
from jax_tformer.training import processes

if TYPE_CHECKING:
    from jax_tformer.cli.generate_options import GenerateOptions
    from jax_tformer.decoding.score import TranslationScores
    from jax_tformer.decoding.texts import Completion, Prompt

Line = tuple[str, int, str]
"""A text, its line number (from 1), and its place for messages."""
ReadPrompt = Callable[..., "Prompt"]
"""Makes a Prompt of a text, its line number and its place."""
_COMPILATION = "/jax/core/compile/"
"""What the names of JAX's events begin with: tracing, lowering, and XLA's work."""


def main(arguments: Sequence[str]) -> int:
    # 1. The options, the model except for its weights, and the texts: checked before the slow imports. A file is read
    # at once, standard input line by line.
    from jax_tformer.cli.generate_options import read_options

    options = read_options(arguments, __doc__ or "")
    with processes.joined(options.distributed):
        return generate(options)


def generate(options: "GenerateOptions") -> int:
    """Answers the texts of `options` with its model; returns the exit status. Several processes run all of this."""
    from jax_tformer.cli.generate_options import plan_generation

    with processes.together():
        several = "standard input is of one process, and there are several; give the texts with --file"
        require(processes.count() == 1 or not options.piped, several)
        plan = plan_generation(options)
        only = options.source if options.prompt is None else options.prompt
        # With references every line must count, so an unusable one is an error.
        typed, references = options.typed and options.reference is None, None
        prompts = open_prompts(only, options.file, plan.read, typed=typed, at_once=plan.hear is None)
        if options.reference is not None:
            references = read_references(options.reference, prompts := list(prompts))
    _print_notes(plan.notes)

    from jax_tformer.decoding.generate import batched
    from jax_tformer.decoding.score import translation_scores

    # 2. The model.
    answerer, notes = plan.load()
    _print_notes(notes)

    # 3. The answers, batch by batch or token by token.
    kind = "source" if plan.translates else "prompt"
    alone = plan.translates or plan.hear is not None
    output = JsonOutput(kind) if options.json else TextOutput(kind, alone=alone)
    watch, tokens, answers = Stopwatch(), 0, list[str]()
    for batch in batched(prompts, options.batch):
        if isinstance(output, TextOutput) and options.stream:
            with watch.running():
                pieces = output.stream(batch[0], answerer.stream(batch[0]))
            best, tokens = ["".join(pieces)], tokens + len(pieces) - 1
        else:
            with watch.running(), options.flags_in_errors():
                found = answerer.answers(batch)
            for prompt, completions in zip(batch, found, strict=True):
                output.answers(prompt, completions)
                tokens += sum(completion.new_tokens for completion in completions)
            best = [completions[0].text for completions in found]
        if references is not None:
            answers += best
        if plan.hear is not None:
            plan.hear(best[0])

    # 4. Scores and speed.
    if references is not None and processes.is_first():
        output.scores(translation_scores(answers, references))
    _print_notes([watch.line(tokens)])
    return 0


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes if processes.is_first() else ():
        print(one_line(note), file=sys.stderr)


def open_prompts(
    only: str | None, file: Path | None, read: ReadPrompt, *, typed: bool = False, at_once: bool = True
) -> "Iterable[Prompt]":
    """Makes prompts of `only`, else of the lines of `file`, else of standard input (None, or "-") line by line.

    A file is read `at_once`, or else line by line as its prompts are asked for. Leaves out blank lines. Raises
    InputError if there are no others, or if `read` refuses one.
    """
    if only is not None:
        return [read(only)]
    if file is None or str(file) == "-":
        return read_standard_input(read, typed=typed)
    lines = [line for line in _file_lines(file) if line[0].strip()]
    prompts = (read(*line) for line in lines)
    return list(prompts) if at_once else prompts


def read_standard_input(read: ReadPrompt, *, typed: bool = False) -> "Iterator[Prompt]":
    """Yields the lines of standard input that are not blank as they arrive; raises InputError as `open_prompts`.

    With `typed`, prints the error for a text that the model cannot take, and continues with the next line.
    """
    if typed:
        print("one text per line; Ctrl-D ends", file=sys.stderr)
    lines = (line for line in _decode(sys.stdin.buffer if sys.stdin else (), "standard input") if line[0].strip())
    first = next(lines, None)
    if first is None:
        raise InputError("standard input is empty; expected a text on each line, or --prompt, --source or --file")
    for line in chain([first], lines):
        try:
            yield read(*line)
        except InputError as error:
            if not typed:
                raise
            print(one_line(str(error)), file=sys.stderr)


def read_references(path: Path, sources: "Sequence[Prompt]") -> list[str]:
    """Returns the line of `path` for each of the sources; raises InputError unless the files match line by line."""
    lines, per_line = _file_lines(path), "expected a reference for each source, line by line"
    asked = {source.number for source in sources}
    last, lonely = max(asked), min({number for text, number, _ in lines if text.strip()} - asked, default=0)
    ends = f"the sources end at line {last:,} and {path} at line {len(lines):,}"
    require(len(lines) >= last >= lonely, f"{ends}; {per_line}")
    require(not lonely, f"line {lonely:,} of {path} belongs to a blank line of the sources; {per_line}")
    return [lines[source.number - 1][0] for source in sources]


def _file_lines(path: Path) -> list[Line]:
    try:
        with open(user_path(path), "rb") as stream:
            lines = list(_decode(stream, str(path)))
    except OSError as error:
        told = f"{path} cannot be read ({error.strerror}); expected a file of text; check the path"
        raise InputError(told) from error
    require(any(text.strip() for text, *_ in lines), f"{path} is empty; expected a text on each line")
    return lines


def _decode(lines: Iterable[bytes], name: str) -> Iterator[Line]:
    for number, line in enumerate(lines, 1):
        place = f"line {number:,} of {name}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{place} is not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1:,} of the line; "
                "expected text; convert it to UTF-8"
            ) from error
        yield text.removesuffix("\n").removesuffix("\r"), number, place


@dataclass(frozen=True)
class TextOutput:
    """Prints prompts with their continuations, or answers `alone`, one per line. Several answers get headings."""

    kind: str
    """What the texts are called: "prompt"."""
    alone: bool

    def answers(self, prompt: "Prompt", completions: Sequence["Completion"]) -> None:
        """Prints the answers to one prompt."""
        for number, completion in enumerate(completions, 1):
            heading = [] if self.alone and len(completions) == 1 else self._number(prompt)
            if len(completions) > 1:
                score = completion.score
                heading.append(f"sample {number}" if score is None else f"beam {number}, score {score:.4f}")
            self._print(heading, prompt, [completion.text])

    def stream(self, prompt: "Prompt", pieces: Iterable[str]) -> list[str]:
        """Prints the only answer to one prompt as it is made; returns the pieces."""
        return self._print([] if self.alone else self._number(prompt), prompt, pieces)

    def scores(self, scores: "TranslationScores") -> None:
        """Prints scores to standard error."""
        print(*scores.lines, sep="\n", file=sys.stderr)

    def _number(self, prompt: "Prompt") -> list[str]:
        """Says which text is answered, where there may be several."""
        return [] if prompt.place is None else [f"{self.kind} {prompt.number}"]

    def _print(self, heading: Sequence[str], prompt: "Prompt", pieces: Iterable[str]) -> list[str]:
        if heading:
            print(f"--- {', '.join(heading)} ---")
        say("" if self.alone else prompt.text, end="")
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


@dataclass(frozen=True)
class JsonOutput:
    """Prints one JSON object per line, with the number of the line that it answers if there are several."""

    kind: str
    """What the texts are called: "prompt"."""

    def answers(self, prompt: "Prompt", completions: Sequence["Completion"]) -> None:
        """Prints the object of one prompt."""
        line = {} if prompt.place is None else {"line": prompt.number}
        answers = [{name: x for name, x in each._asdict().items() if x is not None} for each in completions]
        self._print({**line, self.kind: prompt.text, "completions": answers})

    def scores(self, scores: "TranslationScores") -> None:
        """Prints the last object, the scores."""
        figures = scores._asdict()
        del figures["lines"]
        if scores.no_bleu is None:
            del figures["no_bleu"]
        self._print(figures)

    def _print(self, content: dict[str, object]) -> None:
        say(json.dumps(content, ensure_ascii=False, allow_nan=False))


class Stopwatch:
    """Times what runs inside `with stopwatch.running():`, and JAX's compilation within it."""

    def __init__(self) -> None:
        self._seconds = self._compilation = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """May be entered as often as there is something to time."""
        import jax.monitoring  # imported here, so that texts are checked first

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
        return (
            f"{tokens:,} new tokens in {seconds:.2f} s: {speed} tokens/s, and {self._compilation:.1f} s of compilation"
        )
