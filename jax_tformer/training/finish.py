"""The end of a run: samples, the picture, the summary."""

import platform
from importlib.metadata import version
from typing import Any

import jax

from jax_tformer import __version__
from jax_tformer.training.metrics import draw_losses, read_metrics
from jax_tformer.training.run_folder import RunFolder

PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain")


def finish(run: RunFolder, figures: dict[str, Any], samples: str) -> str:
    """Writes samples.txt, loss.png and summary.json; returns what to print.

    `figures` are those of the last session; losses are taken from metrics.jsonl, so that a run in several sessions
    ends with the same ones.
    """
    rows = read_metrics(run.metrics)
    trained = [row for row in rows if "loss" in row]
    evaluated = [row for row in rows if "val_loss" in row]
    summary = {
        "steps": evaluated[-1]["step"],
        "train_loss": trained[-1]["loss"] if trained else None,
        **{name: value for name, value in evaluated[-1].items() if name != "step"},
        **figures,
        "devices": [str(device.device_kind) for device in jax.devices()],
        "versions": {"python": platform.python_version(), "jax-tformer": __version__}
        | {name: version(name) for name in PACKAGES},
    }
    run.samples.write_text(samples, encoding="utf-8")
    run.write_summary(summary)
    draw_losses(rows, run.picture, run.path.name)
    return samples + "\n" + "\n".join(_told(run, summary))


def _told(run: RunFolder, summary: dict[str, Any]) -> list[str]:
    names = ("train_loss", "val_loss", "val_perplexity", "val_bits_per_byte", "exact_match")
    losses = "  ".join(f"{name} {summary[name]:.4f}" for name in names if summary.get(name) is not None)
    speed = f"{summary['tokens_per_second']:,.0f} tokens/s  " if summary["tokens_per_second"] else ""
    return [
        f"{summary['steps']} steps  {losses}",
        f"{summary['parameters']:,} parameters  {speed}{summary['wall_seconds']:.0f} s in all",
        f"everything is in {run.path}/: {run.picture.name}, {run.samples.name}, {run.summary.name}, checkpoints ...",
    ]
