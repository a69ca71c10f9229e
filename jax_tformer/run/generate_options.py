"""The command line of generate.py."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jax_tformer.config import require
from jax_tformer.errors import InputError
from jax_tformer.experiment import MaskedTextData, PairData, TextData
from jax_tformer.run.command_line import checkpoint_step

if TYPE_CHECKING:
    from jax_tformer.decoding.settings import DecodingConfig

DEFAULT_NEW_TOKENS = 200
_PROMPT_TEMPERATURE = 0.8


@dataclass(frozen=True)
class GenerateOptions:
    """What to generate, and how. Without --prompt, --source or --file, texts are read from standard input."""

    run: Annotated[Path, tyro.conf.Positional]
    """The folder of a run."""
    prompt: str | None = None
    """Text to continue, for a decoder-only model."""
    source: str | None = None
    """Text to translate, for an encoder-decoder."""
    file: Path | None = None
    """A file of prompts or sources, one a line, blank lines left out; -: standard input."""
    checkpoint: str = "newest"
    """newest, best (the one with the lowest held-out loss), or the step of one."""
    max_new_tokens: int | None = None
    """Tokens of an answer at most; unless given 200, or what fits: into the context, or a translation's length."""
    slide: bool = False
    """A decoder-only model goes on beyond its context: whenever it is full, the older half is forgotten."""
    temperature: float | None = None
    """Divides the logits; 0 is greedy. Unless given, 0.8 for prompts, and 0 for translations and with --beam."""
    top_k: int | None = None
    """Draw from the k most probable tokens only; None: from all."""
    top_p: float | None = None
    """Draw from the most probable tokens only, as many as it takes for a sum of p."""
    min_p: float | None = None
    """Draw only tokens at least p times as probable as the most probable one."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that have occurred become less probable."""
    num_samples: int = 1
    """Samples for every text."""
    beam: int = 1
    """Width of a beam search; 1: no beam search."""
    n_best: int = 1
    """The n best answers of a beam search are given."""
    length_penalty: float = 0.6
    """Alpha: a beam's log-probability is divided by ((5 + tokens) / 6)^alpha; 0: as it is."""
    early_stopping: bool = False
    """A beam search ends with as many finished answers as beams; else when no other can become better."""
    stream: bool = False
    """Print the text as it is made, one prompt after the other."""
    json: bool = False
    """Print one JSON object a line: the text, and its completions with their tokens."""
    reference: Path | None = None
    """The sources' reference translations, one a line: exact match, BLEU and chrF are reported."""
    batch_size: int = 8
    """Lines of the file, or of standard input, that are worked on together."""
    seed: int = 0
    """The same seed gives the same tokens."""

    def check(self) -> None:
        """Raises InputError for options that exclude each other, and numbers that cannot be."""
        given = [f"--{name}" for name in ("prompt", "source", "file") if getattr(self, name) is not None]
        require(len(given) <= 1, f"{' and '.join(given)} are both given; expected one of them")
        require(self.prompt != "", "the prompt is empty; give the text to continue with --prompt TEXT")
        require(self.source is None or bool(self.source.strip()), "the source is empty; give the text with --source")
        require(self.batch_size >= 1, f"--batch-size is {self.batch_size}; expected at least 1")
        require(0 <= self.seed < 2**32, f"--seed is {self.seed}; expected a whole number from 0 to 2^32 - 1")
        # What concerns one of these alone is found by DecodingConfig.
        for name, number in (("num-samples", self.num_samples), ("n-best", self.n_best), ("beam", self.beam)):
            require(number >= 1, f"--{name} is {number}; expected a whole number of at least 1")
        if self.beam == 1:
            require(
                self.n_best == 1, f"--n-best is {self.n_best}; expected a beam search, --beam {self.n_best} or more"
            )
            require(
                self.length_penalty == GenerateOptions.length_penalty and not self.early_stopping,
                "--length-penalty and --early-stopping are for a beam search; give --beam, or leave them out",
            )
        else:
            require(
                self.num_samples == 1,
                f"--num-samples is {self.num_samples} and --beam is {self.beam}; expected one of them: "
                "a beam search draws nothing, and gives several answers with --n-best",
            )
            require(not self.slide, f"--slide is given and --beam is {self.beam}; expected one of them")
        checkpoint_step(self.checkpoint)
        alone = [
            *(["--num-samples"] if self.num_samples > 1 else []),
            *(["--beam"] if self.beam > 1 else []),
            *(["--json"] if self.json else []),
        ]
        require(
            not self.stream or not alone,
            f"--stream and {' and '.join(alone)} are both given; expected one of them: a stream is one plain text",
        )

    @property
    def one_by_one(self) -> bool:
        """Whether a single row is worked on at any time."""
        given = self.prompt is not None or self.source is not None
        return (given or self.stream or self.batch_size == 1) and self.num_samples == 1 and self.beam == 1

    def check_model(self, data: TextData | PairData) -> None:
        """Raises InputError for options that the model, trained on `data`, has no use for."""
        if isinstance(data, MaskedTextData):
            raise InputError(
                f"{self.run} holds an encoder; only decoder-only and encoder-decoder models generate text; "
                "give the run of one"
            )
        if isinstance(data, PairData):
            require(self.prompt is None, f"{self.run} holds a translation model; give --source, not --prompt")
            require(not self.slide, f"{self.run} holds a translation model; --slide is for continuing texts")
            length = data.target_length
            require(
                self.max_new_tokens is None or self.max_new_tokens <= length,
                f"--max-new-tokens is {self.max_new_tokens}; expected at most {length}, the run's data.target_length",
            )
        else:
            require(self.source is None, f"{self.run} holds a language model; give --prompt, not --source")
            require(self.reference is None, f"{self.run} holds a language model; --reference is for translations")

    def decoding(self, translates: bool) -> "DecodingConfig":
        """How tokens are chosen; raises InputError, in words of the command line, for what is impossible."""
        from jax_tformer.decoding.settings import DecodingConfig

        greedy = translates or self.beam > 1
        try:
            return DecodingConfig(
                max_new_tokens=DEFAULT_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens,
                temperature=self.temperature
                if self.temperature is not None
                else 0.0
                if greedy
                else _PROMPT_TEMPERATURE,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                num_return_sequences=max(self.num_samples, self.n_best),
                num_beams=self.beam,
                length_penalty=self.length_penalty,
                early_stopping=self.early_stopping,
            )
        except InputError as error:
            raise InputError(self.as_flags(str(error))) from None

    def as_flags(self, message: str) -> str:
        """A message of the library, with the names of the command line."""
        flags = {
            "num_return_sequences": "--n-best" if self.beam > 1 else "--num-samples",
            "num_beams": "--beam",
            **{name: f"--{name.replace('_', '-')}" for name in ("max_new_tokens", "top_k", "top_p", "min_p")},
            **{name: f"--{name.replace('_', '-')}" for name in ("repetition_penalty", "length_penalty", "temperature")},
        }
        return re.sub(rf"^({'|'.join(flags)})\b", lambda found: flags[found[0]], message)
