"""What came of a run: samples, the picture, the summary at its end; the first two at any time."""

import platform
from importlib.metadata import version
from typing import Any

import jax

from jax_tformer import __version__
from jax_tformer.data.pipelines import build_pipeline
from jax_tformer.errors import InputError
from jax_tformer.experiment import ExperimentConfig
from jax_tformer.run.metrics import Row, described, draw_losses, read_metrics
from jax_tformer.run.run_folder import RunFolder
from jax_tformer.run.samples import begin_with_data, sample_text
from jax_tformer.run.trained import load_trained

_LOSSES = ("loss", "val_loss", "val_perplexity", "val_bits_per_byte", "exact_match", "bleu", "no_bleu")
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain")


def finish(run: RunFolder, steps: int, figures: dict[str, Any], samples: str) -> str:
    """Writes samples.txt, loss.png and summary.json; returns what to print.

    `figures` are those of the last session; losses are taken from metrics.jsonl, so that a run in several sessions
    ends with the same ones. Those whose lines are lost there are left out.
    """
    rows = read_metrics(run.metrics)
    trained = [row for row in rows if "loss" in row]
    evaluated = [row for row in rows if "val_loss" in row]
    summary = {
        "steps": steps,
        "train_loss": trained[-1]["loss"] if trained else None,
        **{name: value for row in evaluated if row["step"] == steps for name, value in row.items() if name != "step"},
        **figures,
        "devices": [str(device.device_kind) for device in jax.devices()],
        "versions": {"python": platform.python_version(), "jax-tformer": __version__}
        | {name: version(name) for name in PACKAGES},
    }
    if evaluated:
        best = _best(evaluated)
        summary |= {"best_step": best["step"], "best_val_loss": best["val_loss"]}
    run.samples.write_text(samples, encoding="utf-8")
    run.write_summary(summary)
    draw_losses(rows, run.picture, run.path.name)
    return samples + "\n" + "\n".join(_told(run, summary))


def report(run: RunFolder, experiment: ExperimentConfig) -> str:
    """Draws loss.png and writes samples.txt for a run in any state; returns what to print.

    Samples come from the newest checkpoint, as `experiment.sample` wants them. Raises InputError if the run has logged
    nothing yet. Samples that cannot be had, since there is no checkpoint or the data is gone, are a line.
    """
    notes = list[str]()
    rows = read_metrics(run.metrics, notes)
    if not rows:
        raise InputError(f"the run in {run.path} has logged nothing yet; expected lines in {run.metrics.name}")
    draw_losses(rows, run.picture, run.path.name)
    losses = {name: found[-1][name] for name in _LOSSES if (found := [row for row in rows if name in row])}
    told = [f"step {rows[-1]['step']} of {experiment.training.steps}  {described(losses)}"]
    if evaluated := [row for row in rows if "val_loss" in row]:
        told += _told_best(_best(evaluated)["step"], _best(evaluated)["val_loss"], evaluated[-1]["step"])
    told += [*notes, f"drawn: {run.picture}"]
    try:
        trained = load_trained(run)
        pipeline = None
        if begin_with_data(experiment.data, trained.tokenizer):
            pipeline = build_pipeline(experiment.data, experiment.training, trained.tokenizer)
    except InputError as error:
        return "\n".join([*told, f"no samples: {error}"])
    samples = sample_text(trained.net, trained.params, experiment, pipeline, trained.tokenizer)
    run.samples.write_text(samples, encoding="utf-8")
    return "\n".join([samples, *told, *trained.skipped, f"sampled at step {trained.step}: {run.samples}"])


def _best(evaluated: list[Row]) -> Row:
    """The evaluation whose checkpoint is kept as the best."""
    return min(evaluated, key=lambda row: row["val_loss"])


def _told_best(step: int, loss: float, last: int) -> list[str]:
    return [f"best: val_loss {loss:.4f} at step {step} (generate.py --checkpoint best)"] if step != last else []


def _told(run: RunFolder, summary: dict[str, Any]) -> list[str]:
    names = ("train_loss", *_LOSSES[1:])
    losses = described({name: summary[name] for name in names if summary.get(name) is not None})
    speed = f"{summary['tokens_per_second']:,.0f} tokens/s  " if summary["tokens_per_second"] else ""
    best = (summary["best_step"], summary["best_val_loss"], summary["steps"]) if "best_step" in summary else None
    return [
        f"{summary['steps']} steps  {losses}",
        *(_told_best(*best) if best else []),
        f"{summary['parameters']:,} parameters  {speed}{summary['wall_seconds']:.0f} s in all",
        f"everything is in {run.path}/: {run.picture.name}, {run.samples.name}, {run.summary.name}, checkpoints ...",
    ]
