"""Generate text with the model of a run or of a Hugging Face folder: `python generate.py FOLDER --prompt TEXT`, or
`--source TEXT`, or one text per line from a file or standard input; `--chat` converses.

This file is the command line; `answer_texts` (answer.py) is the whole way from there to the answers.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import tyro

from jax_tformer.config import Dtype
from jax_tformer.config.errors import FieldError, InputError, Positive, Seed, TokenIds, Words, check_fields, require
from jax_tformer.config.experiment import DecodingConfig, DistributedConfig, MeshConfig
from jax_tformer.files import Json
from jax_tformer.terminal import given_flags, parse

if TYPE_CHECKING:
    from jax_tformer.hub.folder import GenerationDefaults

_ONE_DEVICE = MeshConfig(data=1)
_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_SEARCHING = ("num_beams", "length_penalty", "length_penalty_form", "early_stopping")
"""Settings of a beam search alone."""
_EXCLUSIVE = (
    ("--prompt", "--file"),
    ("--source", "--file"),
    ("--beam", "--num-samples"),
    ("--beam", "--slide"),
    ("--stream", "--num-samples"),
    ("--stream", "--beam"),
    ("--stream", "--json"),
)
_NEEDS = {
    "--system": "--chat",
    "--n-best": "--beam",
    "--early-stopping": "--beam",
    "--length-penalty": "--beam",
    "--length-penalty-form": "--beam",
}
T = TypeVar("T")
Hidden = Annotated[T, tyro.conf.Fixed, tyro.conf.Suppress]
"""A field that no flag sets."""


def main(arguments: Sequence[str]) -> int:
    options = read_options(arguments, __doc__ or "")

    from jax_tformer.cli.answer import answer_texts
    from jax_tformer.training.processes import joined

    with joined(options.distributed):
        return answer_texts(options)


@dataclass(frozen=True)
class DecodingFlags(DecodingConfig):
    """How tokens are chosen; None: what suits the run."""

    # `GenerateOptions.decoding_config` makes a checked DecodingConfig of this once it knows the model.
    max_new_tokens: int | None = None  # type: ignore[assignment]
    """The most tokens of an answer. None: what a checkpoint says, else 200; fewer if the context or a translation's
    length allows only these."""
    temperature: float | None = None  # type: ignore[assignment]
    """Divides the logits; 0 is greedy. None: what a checkpoint says; for a run 0.8 for prompts, and 0 for translations
    and with --beam."""
    early_stopping: bool = False
    """End a beam search at as many finished answers as beams, instead of when no other can become better."""
    num_beams: Annotated[int, tyro.conf.arg(name="beam")] = 1
    num_return_sequences: Hidden[int] = 1
    suppress_tokens: Hidden[TokenIds] = ()
    begin_suppress_tokens: Hidden[TokenIds] = ()
    bad_words_ids: Hidden[Words] = ()
    forced_bos_token_id: Hidden[int | None] = None
    forced_eos_token_id: Hidden[int | None] = None
    renormalize_logits: Hidden[bool] = False
    num_samples: int = 1
    """Samples for each text."""
    n_best: int = 1
    """Print the n best answers of a beam search."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class GenerateOptions:
    """What to generate, and how. Without --prompt, --source or --file, reads texts from standard input."""

    run: tyro.conf.Positional[Path]
    """The folder of a run, or of a Hugging Face model."""
    prompt: str | None = None
    """Text to continue, for a decoder-only model."""
    source: str | None = None
    """Text to translate, for an encoder-decoder."""
    file: Path | None = None
    """A file of prompts or sources, one per line; blank lines get no answer; -: standard input."""
    checkpoint: str = "newest"
    """newest, best (the lowest held-out loss), the number of a step, average (of all steps, in runs with
    --training.average), or last-N (the mean of the newest N)."""
    chat: bool = False
    """Converse: the model's chat template frames what you say, and each line is your next message."""
    system: str | None = None
    """With --chat, the system message that the conversation begins with."""
    dtype: Dtype | None = None
    """Type of parameters and arithmetic for a Hugging Face folder; None: as stored."""
    slide: bool = False
    """Let a decoder-only model write beyond its context: whenever that is full, it forgets the older half."""
    stream: bool = False
    """Print each token as it is generated, one prompt after the other."""
    json: bool = False
    """Print one JSON object per line: the text, and its completions with their tokens."""
    reference: Path | None = None
    """A file of reference translations, one per line; reports exact match, BLEU and chrF."""
    split_compounds: bool = False
    """Score texts that Moses has divided into words, and their compounds at hyphens, as the paper does."""
    batch_size: Positive = 8
    """Lines of the file, or of standard input, that are processed together."""
    mesh: MeshConfig = _ONE_DEVICE
    distributed: DistributedConfig = DistributedConfig()
    seed: Seed = 0
    """Random seed; the same seed gives the same tokens."""
    decoding: Annotated[DecodingFlags, tyro.conf.arg(name="")] = DecodingFlags()
    given: Hidden[frozenset[str]] = frozenset()
    """The fields of `decoding` that flags have set."""

    def check(self) -> None:
        """Raises InputError for options that exclude each other, and for invalid numbers."""
        require(self.prompt != "", "the prompt is empty; give the text to continue with --prompt TEXT")
        require(self.source is None or self.source.strip(), "the source is empty; give the text with --source")
        with self.flags_in_errors():
            check_fields(self)
        # Imported here, so that --help is fast.
        from jax_tformer.runs.folder import parse_checkpoint

        parse_checkpoint(self.checkpoint)
        parts = [(part, field) for part in (self, self.decoding) for field in fields(part)]
        given = {_flag(field.name) for part, field in parts if getattr(part, field.name) != field.default}
        for first, second in _EXCLUSIVE:
            require(not {first, second} <= given, f"{first} and {second} are both given; expected one of them")
        for flag, needed in _NEEDS.items():
            require(
                flag not in given or needed in given, f"{flag} is given without {needed}; expected both, or neither"
            )

    def decoding_config(
        self, defaults: "GenerationDefaults", where: str, most: tuple[int, str] = (sys.maxsize, "")
    ) -> DecodingConfig:
        """Returns the DecodingConfig of a model with these `defaults` of the file `where`; flags overrule them.

        `most` is the largest number of new tokens, and what the user knows it as. Raises InputError for invalid values,
        and for options that such a model cannot use.
        """
        asked: Json = {name: getattr(self.decoding, name) for name in self.given}
        draws = any(asked.get(name) for name in _DRAWING) or self.decoding.num_samples > 1
        # What a flag asks for excludes what only the checkpoint asks for.
        beams = {} if draws or self.stream or self.slide else defaults.decoding
        searches = {"num_beams": 1, **beams, **asked}["num_beams"] > 1
        unused = _DRAWING if searches or asked.get("temperature") == 0 else ()
        unused = unused if searches else (*unused, *_SEARCHING)
        found = ({"temperature": 1.0, **defaults.drawing} if draws else {}) | defaults.decoding
        settings = {name: value for name, value in found.items() if name not in unused} | asked
        settings["num_return_sequences"] = self.decoding.n_best if searches else self.decoding.num_samples
        largest, named = most
        new = self.decoding.max_new_tokens
        require((new or 0) <= largest, f"--max-new-tokens is {new}; expected at most {largest}, {named}")
        usual = max(defaults.most or defaults.longest or DecodingConfig.max_new_tokens, 1)
        settings["max_new_tokens"] = min(usual, largest) if new is None else new
        if "min_new_tokens" in settings.keys() - asked.keys():
            settings["min_new_tokens"] = min(settings["min_new_tokens"], settings["max_new_tokens"])
        with self.flags_in_errors():
            try:
                return DecodingConfig(**settings)
            except FieldError as error:
                if error.field in asked or error.field not in defaults.decoding | defaults.drawing:
                    raise
                raise InputError(f"{error}; {where} says so, and flags overrule it") from None

    def check_model(self, translates: bool) -> None:
        """Raises InputError for options that are for models that translate, or for those that do not."""
        kind = f"{self.run} holds a {'translation' if translates else 'language'} model"
        if translates:
            require(self.prompt is None, f"{kind}; give --source, not --prompt")
            require(not self.slide, f"{kind}; --slide is for continuing texts")
            require(not self.chat, f"{kind}; --chat is for continuing texts")
        else:
            require(self.source is None, f"{kind}; give --prompt, not --source")
            require(self.reference is None, f"{kind}; --reference is for translations")

    @contextmanager
    def flags_in_errors(self) -> Iterator[None]:
        """Inside, errors about a field of DecodingConfig name the flag instead."""
        try:
            yield
        except FieldError as error:
            several = "n_best" if self.decoding.num_beams > 1 else "num_samples"
            name = several if error.field == "num_return_sequences" else error.field
            raise InputError(f"{_flag(name)} {error.problem}") from None

    @property
    def only(self) -> str | None:
        """The only text; None: there is a line for each."""
        return self.source if self.prompt is None else self.prompt

    @property
    def piped(self) -> bool:
        """Whether the texts come from standard input."""
        return self.only is None and str(self.file or "-") == "-"

    @property
    def typed(self) -> bool:
        """Whether somebody types the texts at a terminal and waits for each answer."""
        return self.piped and sys.stdin is not None and sys.stdin.isatty()

    @property
    def batch(self) -> int:
        """How many texts are processed together."""
        return 1 if self.stream or self.chat or self.typed or self.only is not None else self.batch_size


def read_options(arguments: Sequence[str], description: str) -> GenerateOptions:
    """Parses the command line of generate.py; raises InputError for what does not fit, in one line."""
    options = parse(GenerateOptions, arguments, prog="generate.py", description=description)
    names = {_flag(field.name): field.name for field in fields(DecodingConfig)}
    names["--no-early-stopping"] = "early_stopping"
    options = replace(options, given=frozenset(names[flag] for flag in given_flags(arguments).keys() & names.keys()))
    options.check()
    return options


def _flag(field: str) -> str:
    return "--beam" if field == "num_beams" else f"--{field.replace('_', '-')}"
