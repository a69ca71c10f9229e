"""Let a trained model speak: `python generate.py RUN --prompt TEXT` or `python generate.py RUN --source TEXT`."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jax_tformer.command_line import parse, run_program
from jax_tformer.config import require, require_finite, require_positive
from jax_tformer.errors import InputError
from jax_tformer.experiment import MaskedTextData, PairData, TextData
from jax_tformer.paths import user_path

if TYPE_CHECKING:
    from jax_tformer.training.run_folder import RunFolder


@dataclass(frozen=True)
class GenerateOptions:
    """What to generate, and how."""

    run: Annotated[Path, tyro.conf.Positional]
    """A folder that train.py has written."""
    prompt: str | None = None
    """Text to continue, for a decoder-only model."""
    source: str | None = None
    """Text to translate, for an encoder-decoder; without it, every line of standard input."""
    max_new_tokens: int | None = None
    """Tokens to add to the prompt; 200 unless given."""
    temperature: float | None = None
    """Divides the logits; 0 is greedy. Unless given, 0.8 for prompts and 0 for translations."""
    top_k: int | None = None
    """Draw from the k most probable tokens only; None: from all."""
    seed: int = 0
    """The same seed gives the same tokens."""

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            require_positive(self, "max_new_tokens")
        require(self.prompt is None or self.source is None, "prompt and source are both given; expected one of them")
        if self.temperature is not None:
            require_finite(self, "temperature", minimum=0)
        if self.top_k is not None:
            require_positive(self, "top_k")
        require(0 <= self.seed < 2**32, f"seed is {self.seed}; expected a whole number from 0 to 2^32 - 1")


def main(arguments: Sequence[str]) -> int:
    options = parse(GenerateOptions, arguments, prog="generate.py", description=__doc__ or "")

    from jax_tformer.training.run_folder import RunFolder

    run = RunFolder(user_path(options.run))
    data = run.read_config().data
    if isinstance(data, MaskedTextData):
        raise InputError(f"{options.run} holds an encoder; only decoder-only and encoder-decoder models generate text")
    if isinstance(data, PairData):
        require(options.prompt is None, f"{options.run} holds a translation model; give --source, not --prompt")
        return translate(run, data, options)
    require(options.source is None, f"{options.run} holds a language model; give --prompt, not --source")
    return complete(run, data, options)


def complete(run: "RunFolder", data: TextData, options: GenerateOptions) -> int:
    """Prints the prompt and its continuation."""
    require(bool(options.prompt), "the prompt is empty; give the text to continue with --prompt TEXT")

    import jax
    import jax.numpy as jnp
    import numpy as np

    from jax_tformer.decoding import completer
    from jax_tformer.training.trained import load_trained

    trained = load_trained(run)
    prompt = trained.tokenizer.encode(options.prompt or "")
    room = data.context_length - (trained.tokenizer.start_id is not None)
    if len(prompt) > room:
        raise InputError(f"the prompt has {len(prompt)} tokens; expected at most {room}, the model's context")
    if trained.tokenizer.start_id is not None:
        prompt = np.concatenate([np.array([trained.tokenizer.start_id], prompt.dtype), prompt])
    continuation = completer(
        trained.net,
        context=data.context_length,
        new_tokens=options.max_new_tokens or 200,
        temperature=0.8 if options.temperature is None else options.temperature,
        top_k=options.top_k,
    )
    tokens = np.asarray(continuation(trained.params, jnp.asarray(prompt)[None], jax.random.key(options.seed)))[0]
    ends = np.flatnonzero(tokens == trained.tokenizer.end_id)
    tokens = tokens[: ends[0]] if len(ends) else tokens
    print(trained.tokenizer.decode([*prompt, *tokens]))
    return 0


def translate(run: "RunFolder", data: PairData, options: GenerateOptions) -> int:
    """Prints the translation of the source, or of each line of standard input as it comes."""
    require(options.source is None or bool(options.source.strip()), "the source is empty; give the text with --source")
    require(options.max_new_tokens is None, "max_new_tokens is for prompts; leave it out")
    require(options.top_k is None or bool(options.temperature), "top_k needs a temperature above 0, or it is greedy")

    from jax_tformer.training.evaluation import Translator
    from jax_tformer.training.trained import load_trained

    trained = load_trained(run)
    translator = Translator(
        trained.net,
        data,
        trained.tokenizer,
        temperature=options.temperature or 0.0,
        top_k=options.top_k,
        batch_size=1,
    )
    for number, source in enumerate(sources(options)):
        print(translator(trained.params, [source], options.seed + number)[0], flush=True)
    return 0


def sources(options: GenerateOptions) -> Iterator[str]:
    """The source of the command line, or the lines of standard input; raises InputError for an empty line."""
    if options.source is not None:
        yield options.source.strip()
        return
    try:
        for number, line in enumerate(sys.stdin, 1):
            require(bool(line.strip()), f"line {number} of standard input is empty; expected a text to translate")
            yield line.strip()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 (byte {error.start}); expected text") from error


if __name__ == "__main__":
    run_program(main, "generate.py")
