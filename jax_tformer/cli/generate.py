"""Generate text with the model of a run or of a Hugging Face folder: `python generate.py FOLDER --prompt TEXT`, or
`--source TEXT`, or one text per line from a file or standard input; `--chat` converses."""

import sys
from collections.abc import Sequence

from jax_tformer.terminal import one_line


def main(arguments: Sequence[str]) -> int:
    # 1. The options, the model except for its weights, and the texts: checked before the slow imports. A file is read
    # at once, standard input line by line.
    from jax_tformer.cli.generate_options import read_options

    options = read_options(arguments, __doc__ or "")

    from jax_tformer.cli.generate_plan import plan_generation
    from jax_tformer.cli.texts import JsonOutput, Stopwatch, TextOutput, open_prompts, read_references

    plan = plan_generation(options)
    _print_notes(plan.notes)
    only = options.source if options.prompt is None else options.prompt
    # With references every line must count, so an unusable one is an error.
    typed, references = options.typed and options.reference is None, None
    prompts = open_prompts(only, options.file, plan.read, typed=typed, at_once=plan.hear is None)
    if options.reference is not None:
        references = read_references(options.reference, prompts := list(prompts))

    from jax_tformer.decoding.generate import Answerer, batched
    from jax_tformer.decoding.score import translation_scores

    # 2. The model. Its parameters are freed, because the Answerer has them in another layout.
    trained = plan.load()
    _print_notes(trained.skipped)
    answerer = Answerer(
        trained.net,
        trained.params,
        plan.tokenizer,
        plan.decoding,
        seed=options.seed,
        context=plan.context,
        batch=options.batch,
    )
    del trained

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
    if references is not None:
        output.scores(translation_scores(answers, references))
    print(watch.line(tokens), file=sys.stderr)
    return 0


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(one_line(note), file=sys.stderr)
