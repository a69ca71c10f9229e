"""A fresh process of PyTorch up to its first step: `python -m benchmarks.first_torch_step CONFIG cpu|cuda RUN`.

CONFIG is a run folder's config.json. When the first step of its model is over, RUN/metrics.jsonl has a line.
"""

import sys
from pathlib import Path

import torch

from benchmarks.training_cases import BatchShape, draw_batch
from jax_tformer.config.experiment import ExperimentConfig, PairData
from jax_tformer.files import from_dict, read_json
from torch_ref import reference
from torch_ref.training import Trainer


def main(config: str, device: str, run: str) -> None:
    """Trains one eager step on random ids."""
    experiment = from_dict(ExperimentConfig, read_json(Path(config)), where=config)
    data, rows = experiment.data, experiment.training.batch_size
    if isinstance(data, PairData):
        shape = BatchShape(rows, data.target_length, data.source_length)
    else:
        shape = BatchShape(rows, data.context_length)
    trainer = Trainer(reference(experiment.model).to(device), experiment.optimizer, experiment.training)
    drawn = draw_batch(experiment.model, shape)
    batch = {name: torch.from_numpy(ids).long().to(device) for name, ids in drawn.items()}
    loss = float(trainer.step(batch).loss)
    Path(run).mkdir()
    (Path(run) / "metrics.jsonl").write_text(f'{{"step": 1, "train_loss": {loss}}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
