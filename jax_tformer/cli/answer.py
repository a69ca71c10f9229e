"""Answers the texts of generate.py.

`answer_texts` is the whole way, in four parts. Where each of them leads, for a prompt:

    1. the texts       open_model here, and GenerateOptions (generate.py): defaults, and flags over them; PromptReader
                       (decoding/texts.py) makes ids of texts
    2. the model       load_trained (runs/folder.py)
    3. the answers     Answerer (decoding/generate.py), by the loop (decoding/loop.py) over a cache (cache.py); choose
                       (decoding/sampling.py) draws a token, decode_added (decoding/texts.py) makes text
    4. the scores      translation_scores (decoding/texts.py)
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jax_tformer.config import Dtype, TransformerConfig
from jax_tformer.config.errors import WHY, InputError, explained, require
from jax_tformer.config.experiment import DecodingConfig, MeshConfig, PairData
from jax_tformer.data.tokenizers import load_tokenizer
from jax_tformer.decoding.texts import Completion, Prompt, PromptReader, TranslationScores, translation_scores
from jax_tformer.files import batched, shortened, user_path
from jax_tformer.hub.folder import GenerationDefaults, Origin, defaults_of, read_origin
from jax_tformer.runs.folder import RunFolder, Trained, load_trained, parse_checkpoint
from jax_tformer.terminal import one_line, say
from jax_tformer.training import processes

if TYPE_CHECKING:
    from jax_tformer.cli.generate import GenerateOptions

_PROMPT_TEMPERATURE = 0.8
Line = tuple[str, int, str]
"""A text, its line number (from 1), and its place for messages."""
_COMPILATION = "/jax/core/compile/"
"""What the names of JAX's events begin with: tracing, lowering, and XLA's work."""


def answer_texts(options: "GenerateOptions") -> int:
    """Answers the texts of `options` with its model; returns the exit status. Several processes run all of this."""
    # 1. The model except for its weights, and the texts: checked before the slow imports. A file is read at once,
    # standard input line by line, and so is a conversation.
    with processes.together():
        require(
            processes.count() == 1 or not options.piped,
            "standard input is of one process, and there are several; give the texts with --file",
        )
        model = open_model(options)
        reader = model.reader
        talk = None
        if options.chat:
            from jax_tformer.cli.chat import Conversation, read_chat_template

            if model.folder is None:
                raise InputError(
                    f"{options.run} has no chat template; --chat is for checkpoints of Hugging Face that have one"
                )
            talk = Conversation(read_chat_template(model.folder), reader, options.system)
        prompts: Iterable[Prompt] = read_prompts(options, talk or reader)
        references = None
        if options.reference is not None:
            references = read_references(options.reference, prompts := list(prompts))
        elif not options.piped and talk is None:
            prompts = list(prompts)

    from jax_tformer.decoding.generate import Answerer

    # 2. The model.
    trained = load_model(options, model)
    context = reader.max_length if options.slide else None
    answerer = Answerer(
        trained.net,
        trained.params,
        reader.tokenizer,
        model.decoding,
        seed=options.seed,
        context=context,
        batch=options.batch,
    )
    _print_notes(trained.notes)

    # 3. The answers, batch by batch or token by token.
    kind = "source" if reader.translates else "prompt"
    output = JsonOutput(kind) if options.json else TextOutput(kind, alone=reader.translates or options.chat)
    watch = Stopwatch()
    tokens = 0
    answers = []
    for batch in batched(prompts, options.batch):
        if isinstance(output, TextOutput) and options.stream:
            with watch.running():
                pieces = output.stream(batch[0], answerer.stream(batch[0]))
            best = ["".join(pieces)]
            tokens += len(pieces) - 1
        else:
            with watch.running(), options.flags_in_errors():
                found = answerer.answers(batch)
            for prompt, completions in zip(batch, found, strict=True):
                output.answers(prompt, completions)
                tokens += sum(completion.new_tokens for completion in completions)
            best = [completions[0].text for completions in found]
        if references is not None:
            answers += best
        if talk is not None:
            talk.hear(best[0])

    # 4. Scores and speed.
    if references is not None and processes.is_first():
        output.scores(translation_scores(answers, references, split_compounds=options.split_compounds))
    _print_notes([watch.line(tokens)])
    return 0


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes if processes.is_first() else ():
        print(one_line(note), file=sys.stderr)


class Opened(NamedTuple):
    """A model that is not loaded yet, and how it generates as the options say."""

    config: TransformerConfig
    decoding: DecodingConfig
    reader: PromptReader
    folder: Path | None
    """What Hugging Face says of it; None if nothing."""
    notes: list[str]
    """For the user, a line each."""


def open_model(options: "GenerateOptions") -> Opened:
    """Reads all but the weights of the model in `options.run`.

    Raises InputError if that is neither a run nor a Hugging Face folder, if the model does not generate, if something
    is missing or damaged, or if options do not suit the model.
    """
    folder = path = user_path(options.run)
    run = RunFolder(path)
    data = None
    if run.holds_checkpoint():
        from jax_tformer.hub.families import config_from_huggingface

        require(options.checkpoint == "newest", f"{path} is a Hugging Face folder; --checkpoint is for runs")
        origin: Origin | None = (found := read_origin(path))
        config = config_from_huggingface(found.config)
        tokenizer = load_tokenizer(path)
    else:
        experiment = run.read_config("a folder that train.py or save_pretrained has written")
        require(options.dtype is None, "--dtype is for Hugging Face folders; a run has the types of its config.json")
        config = experiment.model
        tokenizer = run.read_tokenizer(config.vocab_size)
        folder = run.origin
        origin = read_origin(folder) if folder.exists() else None
        data = experiment.data if origin is None else None
    if config.decoder is None or config.head == "none":
        kind = "an encoder" if config.decoder is None else "a model without a head"
        raise InputError(
            f"{options.run} holds {kind}{f' ({origin.architecture})' if origin else ''}; only decoder-only and "
            "encoder-decoder models generate text; give the folder of one"
        )
    options.check_model(translates := config.encoder is not None)
    # The most tokens of a source, or of a text with its answer (None: any number), and of an answer, each with the name
    # by which the user knows it: those of a run's data, or the model's positions.
    most = sys.maxsize, ""
    length, named = config.decoder.max_positions, "the model's context"
    if isinstance(data, PairData):
        length, named = data.source_length, "the run's data.source_length"
        most = data.target_length, "the run's data.target_length"
    elif data is not None:
        length = data.context_length
    elif config.encoder is not None:
        most = length or sys.maxsize, "the model's positions"
        length, named = config.encoder.max_positions, "the model's positions"
    if origin is not None:
        defaults, path = defaults_of(origin, folder, translates=translates, vocabulary=config.vocab_size)
        tokenizer = tokenizer.framed(defaults.start_id, defaults.end_ids)
    elif translates:
        defaults = GenerationDefaults({"temperature": 0.0}, most=most[0])
    else:
        defaults = GenerationDefaults({"temperature": _PROMPT_TEMPERATURE})
    require(
        not options.slide or length is not None,
        f"{options.run} has a model that knows texts of any length; leave --slide out",
    )
    decoding = options.decoding_config(defaults, str(path), most)
    exactly = options.decoding.max_new_tokens is not None
    reader = PromptReader(
        tokenizer,
        decoding.max_new_tokens,
        translates=translates,
        max_length=length,
        named=named,
        checkpoint_length=None if exactly or translates else defaults.longest,
        exactly=exactly,
        slide=options.slide,
    )
    ignored = shortened(list(defaults.ignored), 8)
    notes = [f"not honoured, of {path}: {ignored}"] if ignored else []
    return Opened(config, decoding, reader, None if origin is None else folder, notes)


def load_model(options: "GenerateOptions", model: Opened) -> Trained:
    """Loads the weights of `model`; its notes say which checkpoint was asked for."""
    run = RunFolder(user_path(options.run))
    # None: one device of one process has all of it.
    devices = None if options.mesh == MeshConfig(data=1) and processes.count() == 1 else options.mesh
    if not run.holds_checkpoint():
        step = parse_checkpoint(options.checkpoint)
        trained = load_trained(run, step, devices=devices)
        named = isinstance(step, int) or step in ("best", "average")
        notes = [f"the checkpoint of step {trained.step}"] if named else []
        return trained._replace(notes=(*model.notes, *trained.notes, *notes))

    from jax_tformer.hub.pretrained import load_pretrained
    from jax_tformer.startup import set_up_jax
    from jax_tformer.training.sharding import make_mesh

    said = read_origin(run.path).config
    stored: Dtype = "float64" if "float64" in (said.get("dtype"), said.get("torch_dtype")) else "float32"
    set_up_jax(model.config.with_dtype(options.dtype or stored))
    mesh = None if devices is None else make_mesh(devices)
    net, params, _ = load_pretrained(run.path, dtype=options.dtype, mesh=mesh)
    return Trained(net, params, model.reader.tokenizer, 0, tuple(model.notes))


def read_prompts(options: "GenerateOptions", read: Callable[..., Prompt]) -> Iterator[Prompt]:
    """Yields a Prompt that `read` makes of the only text, or of each line that is not blank, as lines arrive.

    Who types at a terminal is told why the model cannot take a line, and goes on. With references every line must
    count. Raises InputError as `read` and `read_lines` do.
    """
    if options.only is not None:
        yield read(options.only)
        return
    typed = options.typed and options.reference is None
    if typed:
        print("one text per line; Ctrl-D ends", file=sys.stderr)
    for line in read_lines(None if options.piped else options.file):
        try:
            if line[0].strip():
                yield read(*line)
        except InputError as error:
            if not typed:
                raise
            print(one_line(str(error)), file=sys.stderr)


def read_references(path: Path, sources: Sequence[Prompt]) -> list[str]:
    """Returns the line of `path` for each of the sources; raises InputError unless the files match line by line."""
    lines = list(read_lines(path))
    per_line = "expected a reference for each source, line by line"
    asked = {source.number for source in sources}
    last = max(asked)
    lonely = min({number for text, number, _ in lines if text.strip()} - asked, default=0)
    require(
        len(lines) >= last >= lonely,
        f"the sources end at line {last:,} and {path} at line {len(lines):,}; {per_line}",
    )
    require(not lonely, f"line {lonely:,} of {path} belongs to a blank line of the sources; {per_line}")
    return [lines[source.number - 1][0] for source in sources]


def read_lines(path: Path | None) -> Iterator[Line]:
    """Yields the lines of a file, or of standard input (None), as they arrive.

    Raises InputError if it cannot be read, if a line is not UTF-8, and at the end if all lines are blank.
    """
    name = "standard input" if path is None else str(path)
    empty = True
    with (
        explained(f"{name} cannot be read ({WHY}); expected a file of text; check the path"),
        nullcontext(sys.stdin and sys.stdin.buffer) if path is None else open(user_path(path), "rb") as stream,
    ):
        for number, line in enumerate(stream or (), 1):
            place = f"line {number:,} of {name}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{place} is not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1:,} of the line; "
                    "expected text; convert it to UTF-8"
                ) from error
            empty = empty and not text.strip()
            yield text.removesuffix("\n").removesuffix("\r"), number, place
    elsewhere = ", or --prompt, --source or --file" if path is None else ""
    require(not empty, f"{name} is empty; expected a text on each line{elsewhere}")


class TextOutput(NamedTuple):
    """Prints prompts with their continuations, or answers `alone`, one per line. Several answers get headings."""

    kind: str
    """What the texts are called: "prompt"."""
    alone: bool

    def answers(self, prompt: Prompt, completions: Sequence[Completion]) -> None:
        """Prints the answers to one prompt."""
        for number, (text, *_, score) in enumerate(completions, 1):
            name = f"sample {number}" if score is None else f"beam {number}, score {score:.4f}"
            self.stream(prompt, [text], [name] if len(completions) > 1 else [])

    def stream(self, prompt: Prompt, pieces: Iterable[str], names: Sequence[str] = ()) -> list[str]:
        """Prints an answer as it is made; `names` says which one, where there are several. Returns the pieces."""
        # Says which text is answered, where there may be several.
        numbered = prompt.place is not None and (names or not self.alone)
        heading = [*([f"{self.kind} {prompt.number}"] if numbered else []), *names]
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

    def scores(self, scores: TranslationScores) -> None:
        """Prints scores to standard error."""
        print(*scores.lines, sep="\n", file=sys.stderr)


class JsonOutput(NamedTuple):
    """Prints one JSON object per line, with the number of the line that it answers if there are several."""

    kind: str
    """What the texts are called: "prompt"."""

    def answers(self, prompt: Prompt, completions: Sequence[Completion]) -> None:
        """Prints the object of one prompt."""
        line = {} if prompt.place is None else {"line": prompt.number}
        answers = [{name: x for name, x in each._asdict().items() if x is not None} for each in completions]
        self._print({**line, self.kind: prompt.text, "completions": answers})

    def scores(self, scores: TranslationScores) -> None:
        """Prints the last object, the scores."""
        figures = scores._asdict()
        del figures["lines"]
        if scores.no_bleu is None:
            del figures["no_bleu"]
        self._print(figures)

    def _print(self, content: dict[str, object]) -> None:
        say(json.dumps(content, ensure_ascii=False, allow_nan=False))


@dataclass
class Stopwatch:
    """Times what runs inside `with stopwatch.running():`, and JAX's compilation within it."""

    seconds: float = 0.0
    spans: Sequence[tuple[float, float]] = ()
    """When JAX was compiling."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """May be entered as often as there is something to time."""
        import jax.monitoring  # imported here, so that texts are checked first

        jax.monitoring.register_event_time_span_listener(self._listen)
        # The clock of JAX's events.
        began = time.time()
        try:
            yield
        finally:
            self.seconds += time.time() - began
            jax.monitoring.unregister_event_time_span_listener(self._listen)

    def _listen(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        if event.startswith(_COMPILATION):
            # What is traced inside of something traced counts once, and is told first.
            self.spans = [*(span for span in self.spans if span[0] < start_time), (start_time, end_time)]

    def line(self, tokens: int) -> str:
        """The speed at which `tokens` were made, without compilation."""
        compilation = sum(end - start for start, end in self.spans)
        seconds = max(self.seconds - compilation, 0.0)
        speed = f"{tokens / seconds:,.0f}" if seconds else "?"
        return f"{tokens:,} new tokens in {seconds:.2f} s: {speed} tokens/s, and {compilation:.1f} s of compilation"
