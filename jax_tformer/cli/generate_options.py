"""The options of generate.py: the texts to answer, the fields of DecodingConfig, and the form of the output."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, get_type_hints

import tyro

from jax_tformer.cli.command_line import checkpoint_step, parse
from jax_tformer.config import Dtype
from jax_tformer.config.errors import FieldError, InputError, require
from jax_tformer.config.experiment import MaskedTextData, PairData, TextData
from jax_tformer.decoding.settings import DecodingConfig

if TYPE_CHECKING:
    from jax_tformer.hub.origin import GenerationDefaults

_PROMPT_TEMPERATURE = 0.8
_DRAWING = ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class DecodingFlags(DecodingConfig):
    """How tokens are chosen; None: what suits the run."""

    # `GenerateOptions.decoding_of` makes a checked DecodingConfig of this once it knows the run.
    max_new_tokens: int | None = None  # type: ignore[assignment]
    """The most tokens of an answer. None: what a checkpoint says, else 200; fewer if the context or a translation's
    length allows only these."""
    temperature: float | None = None  # type: ignore[assignment]
    """Divides the logits; 0 is greedy. None: what a checkpoint says; for a run 0.8 for prompts, and 0 for translations
    and with --beam."""
    early_stopping: bool = False
    """End a beam search at as many finished answers as beams, instead of when no other can become better."""
    num_beams: Annotated[int, tyro.conf.arg(name="beam")] = 1
    num_return_sequences: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 1
    suppress_tokens: Annotated[tuple[int, ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()
    begin_suppress_tokens: Annotated[tuple[int, ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()
    bad_words_ids: Annotated[tuple[tuple[int, ...], ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()
    forced_bos_token_id: Annotated[int | None, tyro.conf.Fixed, tyro.conf.Suppress] = None
    forced_eos_token_id: Annotated[int | None, tyro.conf.Fixed, tyro.conf.Suppress] = None
    renormalize_logits: Annotated[bool, tyro.conf.Fixed, tyro.conf.Suppress] = False
    num_samples: int = 1
    """Samples for each text."""
    n_best: int = 1
    """Print the n best answers of a beam search."""

    def __post_init__(self) -> None:
        pass


_Given = TypedDict("_Given", get_type_hints(DecodingFlags, include_extras=True), total=False)  # type: ignore[misc]


@dataclass(frozen=True)
class GenerateOptions:
    """What to generate, and how. Without --prompt, --source or --file, reads texts from standard input."""

    run: Annotated[Path, tyro.conf.Positional]
    """The folder of a run, or of a Hugging Face model."""
    prompt: str | None = None
    """Text to continue, for a decoder-only model."""
    source: str | None = None
    """Text to translate, for an encoder-decoder."""
    file: Path | None = None
    """A file of prompts or sources, one per line; blank lines get no answer; -: standard input."""
    checkpoint: str = "newest"
    """newest, best (the lowest held-out loss), or the number of a step."""
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
    batch_size: int = 8
    """Lines of the file, or of standard input, that are processed together."""
    seed: int = 0
    """Random seed; the same seed gives the same tokens."""
    decoding: Annotated[DecodingFlags, tyro.conf.arg(name="")] = DecodingFlags()
    said: Annotated[frozenset[str], tyro.conf.Fixed, tyro.conf.Suppress] = frozenset()
    """The names of the fields that flags have set."""

    def check(self) -> None:
        """Raises InputError for options that exclude each other, and for invalid numbers."""
        given = [f"--{name}" for name in ("prompt", "source", "file") if getattr(self, name) is not None]
        require(len(given) <= 1, f"{' and '.join(given)} are both given; expected one of them")
        require(self.prompt != "", "the prompt is empty; give the text to continue with --prompt TEXT")
        require(self.source is None or bool(self.source.strip()), "the source is empty; give the text with --source")
        require(self.batch_size >= 1, f"--batch-size is {self.batch_size}; expected at least 1")
        require(0 <= self.seed < 2**32, f"--seed is {self.seed}; expected a whole number from 0 to 2^32 - 1")
        checkpoint_step(self.checkpoint)
        asked, beams = self.decoding, self.decoding.num_beams
        if beams > 1:
            require(
                asked.num_samples == 1,
                f"--num-samples is {asked.num_samples} and --beam is {beams}; expected one of them: "
                "a beam search draws nothing, and gives several answers with --n-best",
            )
            require(not self.slide, f"--slide is given and --beam is {beams}; expected one of them")
        else:
            best = asked.n_best
            require(best == 1, f"--n-best is {best}; expected a beam search, --beam {best} or more")
            for name in ("length_penalty", "length_penalty_form", "early_stopping"):
                idle = getattr(asked, name) == getattr(DecodingConfig, name)
                require(idle, f"{_flag(name)} is for a beam search; give --beam, or leave it out")
        others = {"--num-samples": asked.num_samples > 1, "--beam": beams > 1, "--json": self.json}
        require(self.chat or self.system is None, "--system is given without --chat; expected both, or neither")
        require(not self.chat or self.source is None, "--chat and --source are both given; say it with --prompt")
        require(not self.chat or self.reference is None, "--chat and --reference are both given; expected one of them")
        given = [flag for flag, is_given in others.items() if is_given and self.stream]
        told = f"--stream and {' and '.join(given)} are both given"
        require(not given, f"{told}; expected one of them: a stream is one plain text")

    def decoding_of(self, data: TextData | PairData) -> DecodingConfig:
        """Returns the DecodingConfig for a model that was trained on `data`.

        Raises InputError for invalid values, and for options that such a model cannot use.
        """
        self._check_model(data)
        chosen = {field.name: getattr(self.decoding, field.name) for field in fields(DecodingConfig)}
        searches, translates = self.decoding.num_beams > 1, isinstance(data, PairData)
        chosen["num_return_sequences"] = self.decoding.n_best if searches else self.decoding.num_samples
        if self.decoding.max_new_tokens is None:
            most = data.target_length if isinstance(data, PairData) else DecodingConfig.max_new_tokens
            chosen["max_new_tokens"] = most
        if self.decoding.temperature is None:
            chosen["temperature"] = 0.0 if translates or searches else _PROMPT_TEMPERATURE
        with self.flags_in_errors():
            return DecodingConfig(**chosen)

    def decoding_of_checkpoint(self, defaults: "GenerationDefaults", where: str, most: int | None) -> DecodingConfig:
        """Returns the DecodingConfig for a checkpoint with these `defaults` of the file `where`; flags overrule.

        `most`: the most new tokens of a translation; None: no translation, or any number. Raises InputError for invalid
        values, and for options that such a model cannot use.
        """
        self._check_kind(defaults.translates)
        asked = {field.name: getattr(self.decoding, field.name) for field in fields(DecodingConfig)}
        asked = {name: value for name, value in asked.items() if name in self.said}
        chosen = dict(defaults.decoding)
        draws = any(asked.get(name) for name in (*_DRAWING, "temperature")) or self.decoding.num_samples > 1
        searches = asked.get("num_beams", 1) > 1 or ("num_beams" in chosen and "num_beams" not in asked)
        if asked.get("num_beams", 1) == 1 and (draws or self.stream or self.slide):
            searches = False
        # What a flag asks for excludes what only the checkpoint asks for.
        for name in ("num_beams", "length_penalty", "early_stopping"):
            if not searches:
                chosen.pop(name, None)
        if searches or asked.get("temperature") == 0:
            chosen = {name: value for name, value in chosen.items() if name not in (*_DRAWING, "temperature")}
        elif draws:
            chosen = {"temperature": 1.0} | defaults.drawing | chosen
        if searches:
            chosen = {"length_penalty": 1.0, "length_penalty_form": "power", **chosen}
        chosen |= asked
        chosen["num_return_sequences"] = self.decoding.n_best if searches else self.decoding.num_samples
        chosen["max_new_tokens"] = self._most(defaults, most)
        if "min_new_tokens" in chosen.keys() - asked.keys():
            chosen["min_new_tokens"] = min(chosen["min_new_tokens"], chosen["max_new_tokens"])
        try:
            return DecodingConfig(**chosen)
        except FieldError as error:
            if error.field in defaults.decoding | defaults.drawing and error.field not in asked:
                raise InputError(f"{error}; {where} says so, and flags overrule it") from None
            with self.flags_in_errors():
                raise

    def _most(self, defaults: "GenerationDefaults", allowed: int | None) -> int:
        """Returns the most new tokens of an answer of a checkpoint, of which `allowed` are possible."""
        asked = self.decoding.max_new_tokens
        if asked is not None:
            told = f"--max-new-tokens is {asked}; expected at most {allowed}, the model's positions"
            require(allowed is None or asked <= allowed, told)
            return asked
        longest = None if defaults.longest is None else defaults.longest - defaults.translates
        most = max(defaults.most or longest or DecodingConfig.max_new_tokens, 1)
        return most if allowed is None else min(most, allowed)

    @contextmanager
    def flags_in_errors(self) -> Iterator[None]:
        """Inside, errors about a field of DecodingConfig name the flag instead."""
        try:
            yield
        except FieldError as error:
            several = "--n-best" if self.decoding.num_beams > 1 else "--num-samples"
            flags = {"num_beams": "--beam", "num_return_sequences": several}
            raise InputError(f"{flags.get(error.field, _flag(error.field))} {error.problem}") from None

    @property
    def typed(self) -> bool:
        """Whether somebody types the texts at a terminal and waits for each answer."""
        given = (self.prompt, self.source, None if str(self.file) == "-" else self.file)
        return all(each is None for each in given) and sys.stdin is not None and sys.stdin.isatty()

    @property
    def batch(self) -> int:
        """How many texts are processed together."""
        one_by_one = self.stream or self.chat or self.typed or self.prompt is not None or self.source is not None
        return 1 if one_by_one else self.batch_size

    def _check_model(self, data: TextData | PairData) -> None:
        if isinstance(data, MaskedTextData):
            raise InputError(
                f"{self.run} holds an encoder; only decoder-only and encoder-decoder models generate text; "
                "give the run of one"
            )
        self._check_kind(isinstance(data, PairData))
        if isinstance(data, PairData):
            most, length = self.decoding.max_new_tokens, data.target_length
            require(
                most is None or most <= length,
                f"--max-new-tokens is {most}; expected at most {length}, the run's data.target_length",
            )

    def _check_kind(self, translates: bool) -> None:
        if translates:
            require(self.prompt is None, f"{self.run} holds a translation model; give --source, not --prompt")
            require(not self.slide, f"{self.run} holds a translation model; --slide is for continuing texts")
            require(not self.chat, f"{self.run} holds a translation model; --chat is for continuing texts")
        else:
            require(self.source is None, f"{self.run} holds a language model; give --prompt, not --source")
            require(self.reference is None, f"{self.run} holds a language model; --reference is for translations")


@dataclass(frozen=True)
class _Asked(GenerateOptions):
    """The same options; of the decoding flags, those alone that are given."""

    # From a TypedDict that is not total, tyro leaves out what no flag sets.
    decoding: Annotated[_Given, tyro.conf.arg(name="")] = tyro.MISSING_NONPROP  # type: ignore[assignment]


def read_options(arguments: Sequence[str], description: str) -> GenerateOptions:
    """Parses the command line of generate.py; raises InputError for what does not fit, in one line."""
    options = parse(GenerateOptions, arguments, prog="generate.py", description=description)
    asked = parse(_Asked, arguments, prog="generate.py", description=description).decoding
    options = replace(options, said=frozenset(asked))
    options.check()
    return options


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"
