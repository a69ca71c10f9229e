"""Runs of tiny models that were never trained, and generate.py to speak with them, in this process."""

import json
from dataclasses import replace

import jax

from jax_tformer import transformer
from jax_tformer.config.experiment import ExperimentConfig, MaskedTextData, PairData, TextData, TokenizerConfig
from jax_tformer.data.pipeline import build_tokenizer_for
from jax_tformer.runs.checkpoints import Checkpoints
from jax_tformer.runs.folder import RunFolder
from tests.small_models import GPT, STACK

CONTEXT, SOURCE_LENGTH, TARGET_LENGTH = 32, 16, 12


def write_runs(folder):
    """The runs text and learned (positions) of decoders on bytes, pairs of an encoder-decoder, masked of an encoder."""
    pairs = folder / "pairs.tsv"
    pairs.write_text("".join(f"source {number}\ttarget {number} é\n" for number in range(20)), encoding="utf-8")
    text = TextData(context_length=CONTEXT)
    write_run(folder / "text", text)
    write_run(folder / "learned", text, positions="learned", max_positions=CONTEXT)
    write_run(folder / "pairs", PairData(path=str(pairs), source_length=SOURCE_LENGTH, target_length=TARGET_LENGTH))
    masked = MaskedTextData("python-docs", context_length=CONTEXT, tokenizer=TokenizerConfig("bytes"))
    write_run(folder / "masked", masked)


def write_run(path, data, **stack):
    layer = replace(STACK, num_layers=1, feedforward_width=16, **stack)
    tokenizer = build_tokenizer_for(data)
    model = replace(
        GPT,
        vocab_size=tokenizer.vocab_size,
        encoder=None if type(data) is TextData else layer,
        decoder=None if isinstance(data, MaskedTextData) else layer,
        initializer_std=0.5,
    )
    run = RunFolder(path)
    run.create(ExperimentConfig(model=model, data=data), tokenizer)
    with Checkpoints(run.checkpoints, 1) as checkpoints:
        checkpoints.save(0, {"params": transformer(model).init(jax.random.key(1))}, {})


class Program:
    """generate.py with the runs of a folder, in the current one; `end_of` is the fixture."""

    def __init__(self, runs, end_of):
        self._runs, self._end_of = runs, end_of
        self.errors = ""
        """What the last call said on standard error."""

    def say(self, command, *more, typed=""):
        """Standard output of a call that succeeds, with `typed` on standard input; a command begins with the run."""
        command = f"{self._runs}/{command}"
        status, output, self.errors = self._end_of(command, *more, program="generate.py", typed=typed)
        assert status == 0
        assert "tokens/s" in self.errors.splitlines()[-1]
        return output

    def answer(self, command, *more, typed=""):
        """The objects that a call prints with --json."""
        # Not splitlines: a JSON string may hold other separators of lines.
        lines = self.say(command, *more, "--json", typed=typed).removesuffix("\n").split("\n")
        return [json.loads(line) for line in lines]
