"""Let a trained model speak: `python generate.py RUN --prompt TEXT`, or `--source TEXT`; or a text a line, from a file
or on standard input."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from jax_tformer.errors import InputError
from jax_tformer.experiment import PairData
from jax_tformer.files import user_path
from jax_tformer.run.command_line import SMALLER_ANSWERS, parse, run_program
from jax_tformer.run.generate_options import GenerateOptions
from jax_tformer.run.lines import Line, batched, file_lines, references_of, standard_input
from jax_tformer.run.startup import restart_with_allocator
from jax_tformer.terminal import one_line

if TYPE_CHECKING:
    from jax_tformer.run.items import Item, Reader


def main(arguments: Sequence[str]) -> int:
    # 1. What is asked for, checked before anything heavy is imported.
    options = parse(GenerateOptions, arguments, prog="generate.py", description=__doc__ or "")
    options.check()

    from jax_tformer.run.items import reader_of
    from jax_tformer.run.run_folder import RunFolder

    run = RunFolder(user_path(options.run))
    experiment = run.read_config()
    data = experiment.data
    options.check_model(data)
    translates = isinstance(data, PairData)
    read = reader_of(data, run.read_tokenizer(experiment.model.vocab_size), options)

    # 2. The texts. Files are read to their end, standard input as it comes.
    lines, references = given(options)
    items = [read(line) for line in lines] if isinstance(lines, list) else read_on(read, lines, typed(options))

    from jax_tformer.decoding.translation_scores import translation_scores
    from jax_tformer.run.output import JsonOutput, TextOutput, speak_utf8
    from jax_tformer.run.speaker import load_speaker
    from jax_tformer.run.speed import Stopwatch

    # 3. The model.
    speaker = load_speaker(run, data, read, options)
    for note in speaker.notes:
        print(one_line(note), file=sys.stderr)

    # 4. Its answers, batch by batch or token by token.
    speak_utf8()
    output = (JsonOutput if options.json else TextOutput)(translates=translates)
    watch, tokens, answers = Stopwatch(), 0, list[str]()
    for batch in batched(items, 1 if options.stream or typed(options) else options.batch_size):
        if isinstance(output, TextOutput) and options.stream:
            with watch:
                pieces = output.stream(batch[0], speaker.stream(batch[0]))
            tokens += len(pieces) - 1
            answers += ["".join(pieces)] if references is not None else []
            continue
        try:
            with watch:
                found = speaker.answers(batch)
        except InputError as error:
            raise InputError(options.as_flags(str(error))) from None
        for item, completions in zip(batch, found, strict=True):
            output.answers(item, completions)
            tokens += sum(completion.made for completion in completions)
            answers += [completions[0].text] if references is not None else []

    # 5. How good they were, and how fast.
    if references is not None:
        output.scores(translation_scores(answers, references))
    print(watch.line(tokens), file=sys.stderr)
    return 0


def given(options: GenerateOptions) -> tuple[Iterable[Line], list[str] | None]:
    """The texts to answer, and their references; raises InputError for files that do not hold them."""
    only = options.source if options.prompt is None else options.prompt
    lines: Iterable[Line]
    if only is not None:
        lines = [Line(only, 1, None)]
    elif options.file is not None and str(options.file) != "-":
        lines = file_lines(options.file)
    else:
        if typed(options):
            print("a text a line; Ctrl-D ends", file=sys.stderr)
        lines = standard_input()
    if options.reference is None:
        return lines, None
    # What is to be scored is needed as a whole anyway.
    lines = list(lines)
    return lines, references_of(lines, options.reference)


def read_on(read: "Reader", lines: Iterable[Line], typed: bool) -> "Iterator[Item]":
    """Items as the lines come. Whoever types is told what the model cannot take, and goes on with the next line."""
    for line in lines:
        try:
            yield read(line)
        except InputError as error:
            if not typed:
                raise
            print(one_line(str(error)), file=sys.stderr)


def typed(options: GenerateOptions) -> bool:
    """Whether the texts come from somebody at a terminal, who waits for each answer."""
    flags = (options.prompt, options.source, None if str(options.file) == "-" else options.file)
    return all(flag is None for flag in flags) and sys.stdin is not None and sys.stdin.isatty()


if __name__ == "__main__":
    restart_with_allocator()
    run_program(main, "generate.py", smaller=SMALLER_ANSWERS)
