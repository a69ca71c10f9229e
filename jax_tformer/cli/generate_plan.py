"""What generate.py is to do: the model of a run or of a Hugging Face folder, not loaded yet, and how it is asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jax_tformer.cli.generate_options import GenerateOptions, Limit
from jax_tformer.cli.options import parse_checkpoint
from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import PairData, TextData
from jax_tformer.data.tokenizers import Tokenizer, load_tokenizer, read_settings, special_tokens
from jax_tformer.decoding.prompts import Prompt, PromptReader, data_length
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.files import shortened, user_path
from jax_tformer.hub.folder import GenerationDefaults, Origin, defaults_of, read_origin
from jax_tformer.runs.folder import RunFolder

if TYPE_CHECKING:
    from jax_tformer.runs.folder import Trained

_PROMPT_TEMPERATURE = 0.8


@dataclass(frozen=True)
class GenerationPlan:
    """What generate.py is to do: a model that is not loaded yet, and how it is asked."""

    read: Callable[..., Prompt]
    """Makes a Prompt of a text, its line number and its place."""
    translates: bool
    tokenizer: Tokenizer
    decoding: DecodingConfig
    load: "Callable[[], Trained]"
    context: int | None
    """Where texts drop their older half and continue; None: they do not grow so long."""
    hear: Callable[[str], None] | None = None
    """Continues a conversation with the answer; None: texts are answered one by one."""
    notes: Sequence[str] = ()
    """Notes for the user, a line each."""


def plan_generation(options: GenerateOptions) -> GenerationPlan:
    """Reads all but the weights of the model in `options.run`.

    Raises InputError if that is neither a run nor a Hugging Face folder, if the model does not generate, if something
    is missing or damaged, or if options do not suit the model.
    """
    path = user_path(options.run)
    run = RunFolder(path)
    folder, origin, data = path, None, None
    if run.holds_checkpoint():
        origin = read_origin(path)
        config, tokenizer, load = _open_checkpoint(options, path, origin)
    else:
        experiment = run.read_config("a folder that train.py or save_pretrained has written")
        config, data = experiment.model, experiment.data
        tokenizer, load = _open_run(options, run, config)
        if run.origin.exists():
            folder, origin = run.origin, read_origin(run.origin)
    if config.decoder is None or config.head == "none":
        kind = "an encoder" if config.decoder is None else "a model without a head"
        raise InputError(
            f"{options.run} holds {kind}{f' ({origin.architecture})' if origin else ''}; only decoder-only and "
            "encoder-decoder models generate text; give the folder of one"
        )
    translates, limit = config.encoder is not None, None
    options.check_model(translates)
    if origin is not None:
        defaults, where = defaults_of(origin, folder, translates=translates, vocabulary=config.vocab_size)
        tokenizer = tokenizer.framed(defaults.start_id, defaults.end_ids or None)
        length, named = config.decoder.max_positions, "the model's context"
        if config.encoder is not None:
            limit = None if length is None else (length, "the model's positions")
            length, named = config.encoder.max_positions, "the model's positions"
    else:
        assert data is not None
        (defaults, limit), where = _run_defaults(data), path
        length, named = data_length(data)
    decoding = options.decoding_config(defaults, str(where), limit)
    require(
        not options.slide or length is not None,
        f"{options.run} has a model that knows texts of any length; leave --slide out",
    )
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
    notes = [f"not honoured, of {where}: {shortened(list(defaults.ignored), 8)}"] if defaults.ignored else []
    context = length if options.slide else None
    plan = GenerationPlan(reader, translates, tokenizer, decoding, load, context, notes=notes)
    if not options.chat:
        return plan
    require(origin is not None, f"{path} has no chat template; --chat is for checkpoints of Hugging Face that have one")

    from jax_tformer.cli.chat import Conversation, read_chat_template

    settings = read_settings(folder)
    template = read_chat_template(folder, settings, special_tokens(settings))
    if template is None:
        raise InputError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "leave --chat out, or take the checkpoint of a model that was trained to chat"
        )
    # The template has the special tokens already.
    talk = Conversation(template, reader, lambda text: tokenizer.encode(text).tolist(), options.system)
    return replace(plan, read=talk, hear=talk.hear)


def _run_defaults(data: TextData | PairData) -> tuple[GenerationDefaults, Limit]:
    """Returns how the model of a run generates, and the largest number of new tokens of its translations."""
    translates = isinstance(data, PairData)
    decoding = {name: getattr(DecodingConfig, name) for name in ("length_penalty", "length_penalty_form")}
    decoding["temperature"] = 0.0 if translates else _PROMPT_TEMPERATURE
    limit = (data.target_length, "the run's data.target_length") if isinstance(data, PairData) else None
    return GenerationDefaults(decoding, {}, limit and limit[0], None, None, (), translates, ()), limit


def _open_run(
    options: GenerateOptions, run: RunFolder, config: TransformerConfig
) -> "tuple[Tokenizer, Callable[[], Trained]]":
    require(options.dtype is None, "--dtype is for Hugging Face folders; a run has the types of its config.json")
    tokenizer, step = run.read_tokenizer(config.vocab_size), parse_checkpoint(options.checkpoint)

    def load() -> "Trained":
        from jax_tformer.runs.folder import load_trained

        trained = load_trained(run, step)
        notes = (*trained.skipped, *([] if step is None else [f"the checkpoint of step {trained.step}"]))
        return trained._replace(skipped=notes)

    return tokenizer, load


def _open_checkpoint(
    options: GenerateOptions, path: Path, origin: Origin
) -> "tuple[TransformerConfig, Tokenizer, Callable[[], Trained]]":
    require(options.checkpoint == "newest", f"{path} is a Hugging Face folder; --checkpoint is for runs")

    from jax_tformer.hub.families import config_from_huggingface

    config = config_from_huggingface(origin.config)
    require(
        (path / "tokenizer.json").exists(),
        f"{path} has no tokenizer.json; expected one, as save_pretrained of a fast tokenizer writes it",
    )
    tokenizer = load_tokenizer(path)

    def load() -> "Trained":
        from jax_tformer.hub.pretrained import load_pretrained
        from jax_tformer.runs.folder import Trained
        from jax_tformer.runs.startup import set_up_jax

        set_up_jax(config if options.dtype is None else config.with_dtype(options.dtype))
        net, params, _ = load_pretrained(path, dtype=options.dtype)
        return Trained(net, params, tokenizer, 0, ())

    return config, tokenizer, load
