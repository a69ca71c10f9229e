"""Generate text with a trained model: `python generate.py RUN --prompt TEXT`, or `--source TEXT`, or one text per line
from a file or standard input."""

import sys
from collections.abc import Iterable, Sequence

from jax_tformer.experiment import TextData
from jax_tformer.files import user_path
from jax_tformer.run.command_line import SMALLER_ANSWERS, checkpoint_step, parse, run_program
from jax_tformer.run.startup import restart_with_allocator
from jax_tformer.terminal import one_line


def main(arguments: Sequence[str]) -> int:
    # 1. The options, checked before the slow imports.
    from jax_tformer.run.generate_options import GenerateOptions

    options = parse(GenerateOptions, arguments, prog="generate.py", description=__doc__ or "")
    options.check()

    from jax_tformer.run.run_folder import RunFolder
    from jax_tformer.run.texts import Reader, Text, batched, read_file, read_references, read_standard_input

    run = RunFolder(user_path(options.run))
    experiment = run.read_config()
    data, exactly = experiment.data, options.decoding.max_new_tokens is not None
    decoding = options.decoding_of(data)
    tokenizer = run.read_tokenizer(experiment.model.vocab_size)
    read = Reader(data, tokenizer, decoding.max_new_tokens, exactly=exactly, slide=options.slide)

    # 2. The texts. Files are read at once, standard input line by line.
    texts: Iterable[Text]
    only = options.source if options.prompt is None else options.prompt
    if only is not None:
        texts = [read(only)]
    elif options.file is not None and str(options.file) != "-":
        texts = read_file(options.file, read)
    else:
        # With references every line must count, so an unusable one is an error.
        texts = read_standard_input(read, typed=options.typed and options.reference is None)
    references = None
    if options.reference is not None:
        references = read_references(options.reference, texts := list(texts))

    from jax_tformer.decoding.translation_scores import translation_scores
    from jax_tformer.run.answers import Answerer
    from jax_tformer.run.output import JsonOutput, Stopwatch, TextOutput, speak_utf8
    from jax_tformer.run.restoring import load_trained

    # 3. The model.
    trained = load_trained(run, checkpoint_step(options.checkpoint))
    notes = [] if options.checkpoint == "newest" else [f"the checkpoint of step {trained.step}"]
    for note in (*trained.skipped, *notes):
        print(one_line(note), file=sys.stderr)
    answerer = Answerer(
        trained.net,
        trained.params,
        tokenizer,
        decoding,
        seed=options.seed,
        context=data.context_length if options.slide and isinstance(data, TextData) else None,
        single=options.batch == decoding.num_beams == decoding.num_return_sequences == 1,
    )
    # Frees the parameters; the Answerer has them in another layout.
    del trained

    # 4. The answers, batch by batch or token by token.
    speak_utf8()
    output = (JsonOutput if options.json else TextOutput)(translates=read.translates)
    watch, tokens, best = Stopwatch(), 0, list[str]()
    for batch in batched(texts, options.batch):
        if isinstance(output, TextOutput) and options.stream:
            with watch.running():
                pieces = output.stream(batch[0], answerer.stream(batch[0]))
            tokens += len(pieces) - 1
            best += ["".join(pieces)] if references is not None else []
            continue
        with watch.running(), options.flags_in_errors():
            found = answerer.answers(batch)
        for text, completions in zip(batch, found, strict=True):
            output.answers(text, completions)
            tokens += sum(completion.made for completion in completions)
            best += [completions[0].text] if references is not None else []

    # 5. Scores and speed.
    if references is not None:
        output.scores(translation_scores(best, references))
    print(watch.line(tokens), file=sys.stderr)
    return 0


if __name__ == "__main__":
    restart_with_allocator()
    run_program(main, "generate.py", smaller=SMALLER_ANSWERS)
