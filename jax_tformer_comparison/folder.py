"""The folder of a report, and the files in it."""

import csv
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_tformer.errors import InputError
from jax_tformer.files import write_json
from jax_tformer_comparison.figures import difference_figure, loss_figure, parameter_figure, save_png
from jax_tformer_comparison.record import Record

FILES = ("report.html", "report.json", "curves.csv", "loss.png", "difference.png", "parameters.png")


@dataclass(frozen=True)
class ReportFolder:
    """Where a report is written; an older report there is replaced."""

    path: Path

    def check(self) -> None:
        """Raises InputError if the folder is a file, holds anything but a report, or could not be written to."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; expected a folder: choose another --out")
        existing = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise InputError(f"cannot write to {existing}; choose another --out or change its permissions")
        others = (
            sorted(path.name for path in self.path.iterdir() if path.name not in FILES) if self.path.is_dir() else []
        )
        if others:
            raise InputError(
                f"{self.path} holds {others[0]}, which is no part of a report; choose an empty or new --out"
            )

    def write(self, record: Record, report: dict[str, Any], page: str) -> None:
        """Writes all files; raises InputError if the disk or the folder does not allow it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # What an older report had, this one may lack: an interrupted run has no parameters to show.
            for name in FILES:
                (self.path / name).unlink(missing_ok=True)
            write_curves(record, self.path / "curves.csv")
            save_png(loss_figure(record), self.path / "loss.png")
            save_png(difference_figure(record), self.path / "difference.png")
            if errors := record.parameters():
                save_png(parameter_figure(errors), self.path / "parameters.png")
            (self.path / "report.html").write_text(page, encoding="utf-8")
            write_json(self.path / "report.json", report)
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}; choose another --out") from error


def write_curves(record: Record, path: Path) -> None:
    """One line for each seed and step, with every digit."""
    columns = ["seed", "step", "tokens", "loss_jax", "loss_torch", "loss_truth"]
    columns += ["gradient_norm_jax", "gradient_norm_torch", "seconds_jax", "seconds_torch"]
    with open(path, "w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(columns)
        for seed in record.begun:
            truth = seed.losses("truth").tolist() or [""] * seed.steps
            for step, (jax, torch, exact) in enumerate(zip(seed.jax, seed.torch, truth, strict=False), 1):
                losses = [jax.loss, torch.loss, exact]
                norms = [jax.gradient_norm, torch.gradient_norm]
                rows.writerow([seed.seed, step, jax.tokens, *losses, *norms, jax.seconds, torch.seconds])
