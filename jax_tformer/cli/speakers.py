"""Finds the model that generate.py asks: that of a run, or of a Hugging Face folder."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jax_tformer.cli.command_line import checkpoint_step
from jax_tformer.cli.generate_options import GenerateOptions
from jax_tformer.cli.texts import Reader, ReadText, Room
from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import TextData
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.files import shortened, user_path
from jax_tformer.runs.folder import RunFolder

if TYPE_CHECKING:
    from jax_tformer.config import TransformerConfig
    from jax_tformer.hub.origin import Origin
    from jax_tformer.runs.folder import Trained


@dataclass(frozen=True)
class Speaker:
    """A model that is not loaded yet, and how it is asked."""

    read: ReadText
    """Makes a Text of what is asked."""
    translates: bool
    tokenizer: Tokenizer
    decoding: DecodingConfig
    load: "Callable[[], Trained]"
    context: int | None
    """Where texts drop their older half and continue; None: they do not grow so long."""
    hear: Callable[[str], None] | None = None
    """Continues a conversation with the answer; None: texts are answered one by one."""
    notes: tuple[str, ...] = ()
    """Notes for the user, a line each."""

    @property
    def alone(self) -> bool:
        """Whether an answer is shown alone, and does not continue its text."""
        return self.translates or self.hear is not None


def find_speaker(options: GenerateOptions) -> Speaker:
    """Reads all but the weights of the model in `options.run`.

    Raises InputError if that is neither a run nor a Hugging Face folder, if the model cannot speak, if something is
    missing or damaged, or if options do not suit the model.
    """
    path = user_path(options.run)
    run = RunFolder(path)
    if run.holds_checkpoint():
        return _of_folder(options, path)
    experiment = run.read_config("a folder that train.py or save_pretrained has written")
    require(options.dtype is None, "--dtype is for Hugging Face folders; a run has the types of its config.json")
    tokenizer, step = run.read_tokenizer(experiment.model.vocab_size), checkpoint_step(options.checkpoint)

    def load() -> "Trained":
        from jax_tformer.runs.folder import load_trained

        trained = load_trained(run, step)
        notes = (*trained.skipped, *([] if step is None else [f"the checkpoint of step {trained.step}"]))
        return trained._replace(skipped=notes)

    if run.origin.exists():
        from jax_tformer.hub.origin import read_origin

        return _of_checkpoint(options, read_origin(run.origin), run.origin, experiment.model, tokenizer, load)
    require(not options.chat, f"{path} has no chat template; --chat is for checkpoints of Hugging Face that have one")
    data, exactly = experiment.data, options.decoding.max_new_tokens is not None
    decoding = options.decoding_of(data)
    read = Reader(Room.of_run(data), tokenizer, decoding.max_new_tokens, exactly=exactly, slide=options.slide)
    context = data.context_length if options.slide and isinstance(data, TextData) else None
    return Speaker(read, read.translates, tokenizer, decoding, load, context)


def _of_folder(options: GenerateOptions, path: Path) -> Speaker:
    from jax_tformer.data.tokenizer_sources import load_tokenizer
    from jax_tformer.hub.families import config_from_huggingface
    from jax_tformer.hub.loading import load_pretrained
    from jax_tformer.hub.origin import read_origin
    from jax_tformer.runs.folder import Trained
    from jax_tformer.runs.startup import set_up_jax

    require(options.checkpoint == "newest", f"{path} is a Hugging Face folder; --checkpoint is for runs")
    origin = read_origin(path)
    config = config_from_huggingface(origin.config)
    if not (path / "tokenizer.json").exists():
        raise InputError(
            f"{path} has no tokenizer.json; expected one, as save_pretrained of a fast tokenizer writes it"
        )
    tokenizer = load_tokenizer(path)

    def load() -> Trained:
        set_up_jax(config if options.dtype is None else config.with_dtype(options.dtype))
        net, params, _ = load_pretrained(path, dtype=options.dtype)
        return Trained(net, params, tokenizer, 0, ())

    return _of_checkpoint(options, origin, path, config, tokenizer, load)


def _of_checkpoint(
    options: GenerateOptions,
    origin: "Origin",
    folder: Path,
    config: "TransformerConfig",
    tokenizer: Tokenizer,
    load: "Callable[[], Trained]",
) -> Speaker:
    """Makes the speaker of a model that generates as the files in `folder` say."""
    from jax_tformer.hub.origin import defaults_of

    if config.decoder is None or config.head == "none":
        kind = "an encoder" if config.decoder is None else "a model without a head"
        raise InputError(
            f"{options.run} holds {kind} ({origin.architecture}); only decoder-only and encoder-decoder models "
            "generate text; give the folder of one"
        )
    translates = config.encoder is not None
    defaults, where = defaults_of(origin, folder, translates=translates, vocabulary=config.vocab_size)
    tokenizer = tokenizer.framed(defaults.start_id, defaults.end_ids or None)
    positions = config.decoder.max_positions
    decoding = options.decoding_of_checkpoint(defaults, str(where), positions if translates else None)
    room = Room(translates, positions, "the model's context")
    if config.encoder is not None:
        room = Room(translates, config.encoder.max_positions, "the model's positions")
    require(
        not options.slide or positions is not None,
        f"{options.run} has a model that knows texts of any length; leave --slide out",
    )
    exactly = options.decoding.max_new_tokens is not None
    longest = None if exactly or translates else defaults.longest
    read: Reader = Reader(
        room, tokenizer, decoding.max_new_tokens, longest=longest, exactly=exactly, slide=options.slide
    )
    notes = [f"not honoured, of {where}: {shortened(list(defaults.ignored), 8)}"] if defaults.ignored else []
    context = positions if options.slide else None
    speaker = Speaker(read, translates, tokenizer, decoding, load, context, notes=tuple(notes))
    return _conversing(speaker, read, options, folder) if options.chat else speaker


def _conversing(speaker: Speaker, read: Reader, options: GenerateOptions, folder: Path) -> Speaker:
    from jax_tformer.cli.chat import Conversation, read_chat_template
    from jax_tformer.data.tokenizer_sources import read_settings, special_tokens

    settings = read_settings(folder)
    template = read_chat_template(folder, settings, special_tokens(settings))
    if template is None:
        raise InputError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "leave --chat out, or take the checkpoint of a model that was trained to chat"
        )
    tokenizer = speaker.tokenizer
    # The template has the special tokens already.
    talk = Conversation(template, read, lambda text: tokenizer.encode(text).tolist(), options.system)
    return dataclasses.replace(speaker, read=talk, hear=talk.hear)
