"""A fresh process of PyTorch up to its first step: `python -m benchmarks.first_torch_step CONFIG cpu|cuda`.

CONFIG is a run folder's config.json. Nothing is imported here before the clock runs.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path


def main(config: str, device: str) -> None:
    """Prints when the first step of the described model was over, and the seconds of its parts."""
    clock = [time.perf_counter()]
    import torch

    from benchmarks.training_cases import BatchShape, draw_batch
    from jax_tformer.config.experiment import ExperimentConfig, PairData
    from jax_tformer.files import from_dict, read_json
    from torch_ref import reference
    from torch_ref.training import Trainer

    clock.append(time.perf_counter())
    experiment = from_dict(ExperimentConfig, read_json(Path(config)), where=config)
    data, rows = experiment.data, experiment.training.batch_size
    if isinstance(data, PairData):
        shape = BatchShape(rows, data.target_length, data.source_length)
    else:
        shape = BatchShape(rows, data.context_length)
    trainer = Trainer(reference(experiment.model).to(device), experiment.optimizer, experiment.training)
    drawn = draw_batch(experiment.model, shape)
    batch = {name: torch.from_numpy(ids).long().to(device) for name, ids in drawn.items()}
    clock.append(time.perf_counter())
    float(trainer.step(batch).loss)
    clock.append(time.perf_counter())
    imports, model, step = (late - early for early, late in pairwise(clock))
    print(json.dumps({"at": time.time(), "imports": imports, "model": model, "step": step}))


if __name__ == "__main__":
    main(*sys.argv[1:])
