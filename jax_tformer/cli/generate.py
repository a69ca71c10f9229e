"""Generate text with the model of a run or of a Hugging Face folder: `python generate.py FOLDER --prompt TEXT`, or
`--source TEXT`, or one text per line from a file or standard input; `--chat` converses."""

import sys
from collections.abc import Sequence

from jax_tformer.terminal import one_line


def main(arguments: Sequence[str]) -> int:
    # 1. The options, checked before the slow imports.
    from jax_tformer.cli.generate_options import read_options

    options = read_options(arguments, __doc__ or "")

    from jax_tformer.cli.speakers import find_speaker
    from jax_tformer.cli.texts import batched, open_texts, read_references

    # 2. Who is asked what. A file is read at once, standard input line by line.
    speaker = find_speaker(options)
    for note in speaker.notes:
        print(one_line(note), file=sys.stderr)
    only = options.source if options.prompt is None else options.prompt
    # With references every line must count, so an unusable one is an error.
    typed = options.typed and options.reference is None
    texts = open_texts(only, options.file, speaker.read, typed=typed, at_once=speaker.hear is None)
    references = None
    if options.reference is not None:
        references = read_references(options.reference, texts := list(texts))

    from jax_tformer.cli.answers import Answerer
    from jax_tformer.cli.output import JsonOutput, Stopwatch, TextOutput
    from jax_tformer.decoding.translation_scores import translation_scores

    # 3. The model.
    trained = speaker.load()
    for note in trained.skipped:
        print(one_line(note), file=sys.stderr)
    decoding = speaker.decoding
    answerer = Answerer(
        trained.net,
        trained.params,
        speaker.tokenizer,
        decoding,
        seed=options.seed,
        context=speaker.context,
        batch=options.batch,
    )
    # Frees the parameters; the Answerer has them in another layout.
    del trained

    # 4. The answers, batch by batch or token by token.
    kind = "source" if speaker.translates else "prompt"
    output = JsonOutput(kind) if options.json else TextOutput(kind, alone=speaker.alone)
    watch, tokens, best = Stopwatch(), 0, list[str]()
    for batch in batched(texts, options.batch):
        if isinstance(output, TextOutput) and options.stream:
            with watch.running():
                pieces = output.stream(batch[0], answerer.stream(batch[0]))
            tokens += len(pieces) - 1
            best += ["".join(pieces)] if references is not None else []
            if speaker.hear is not None:
                speaker.hear("".join(pieces))
            continue
        with watch.running(), options.flags_in_errors():
            found = answerer.answers(batch)
        for text, completions in zip(batch, found, strict=True):
            output.answers(text, completions)
            tokens += sum(completion.made for completion in completions)
            best += [completions[0].text] if references is not None else []
            if speaker.hear is not None:
                speaker.hear(completions[0].text)

    # 5. Scores and speed.
    if references is not None:
        output.scores(translation_scores(best, references))
    print(watch.line(tokens), file=sys.stderr)
    return 0
