"""A run of two steps on one line of text, the command that makes it, and what stands in a folder."""

import io
import shutil

from jax_tformer.runs.metrics import read_metrics

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 40

TINY = (
    "--model.d-model 16 --model.decoder.num-layers 1 --model.decoder.num-heads 2 --model.decoder.feedforward-width 16 "
    "--data.context-length 8 --data.tokenizer.kind characters --data.tokenizer.vocab-size None --training.steps 2 "
    "--training.batch-size 2 --training.evaluate-batches 1 --sample.max-new-tokens 4 --sample.count 1"
)


def succeed(program, command, *more):
    """Runs a program, such as train, in this process, as from a command line; it must end well."""
    assert program.main([*command.split(), *map(str, more)]) == 0


def as_input(typed):
    """A standard input that says `typed`, text or bytes."""
    return io.TextIOWrapper(io.BytesIO(typed.encode() if isinstance(typed, str) else typed))


def contents(folder):
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def losses(run):
    """Everything in metrics.jsonl that does not depend on the clock."""
    figures = ("step", "loss", "gradient_norm", "learning_rate", "val_loss", "exact_match")
    return [{name: row[name] for name in figures if name in row} for row in read_metrics(run / "metrics.jsonl")]


def lose(run, *steps):
    """As if the run had been killed before these checkpoints."""
    for step in steps:
        shutil.rmtree(run / "checkpoints" / str(step))
    (run / "summary.json").unlink()


def lose_checkpoints(run):
    """As if the run had been killed before its first checkpoint."""
    shutil.rmtree(run / "checkpoints")
    for name in ("saved.json", "summary.json"):
        (run / name).unlink(missing_ok=True)


def again(changes=""):
    """The command that made the run."""
    return f"text --data.path text.txt --run run {TINY} {changes}"
