"""What runs inside of the processes that are timed from the command on; so it imports nothing before it is called."""

import ast
import importlib
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).resolve().parents[2] / "jax_tformer" / "cli" / "train.py"
_LIBRARIES = ("jax", "flax.nnx", "optax", "orbax.checkpoint", "grain")
_FUNCTIONS = {"init_state": "initialisation", "step": "step"}


def chapters(arguments: Sequence[str]) -> None:
    """Runs train.py with `arguments` in this process; prints, as its last line, the seconds of its parts as JSON."""
    found: dict[str, float] = {}

    def timed(name: str, call: Any) -> Any:
        def run(*given: Any) -> Any:
            began = time.perf_counter()
            result = call(*given)
            found[name] = found.get(name, 0.0) + time.perf_counter() - began
            return result

        return run

    for library in _LIBRARIES:
        timed(f"import {library.partition('.')[0]}", importlib.import_module)(library)
    # What train.py imports inside of main, so that its own imports find everything there.
    inside = (node for node in ast.walk(ast.parse(_PROGRAM.read_text())) if isinstance(node, ast.ImportFrom))
    for module in sorted({node.module for node in inside if node.module}):
        timed("import the rest", importlib.import_module)(module)

    import jax.monitoring

    from jax_tformer.cli import train
    from jax_tformer.data import pipeline
    from jax_tformer.runs import huggingface, metrics

    compiled: list[tuple[float, str, float]] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        name = str(about.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
        kind = "compile or load" if "backend_compile" in event else "trace" if "jaxpr" in event else None
        if kind == "compile or load" or (kind and name in _FUNCTIONS):
            compiled.append((time.perf_counter(), f"{_FUNCTIONS.get(name, 'other functions')}: {kind}", duration_secs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    huggingface.new_tokenizer = timed("tokenizer", huggingface.new_tokenizer)
    pipeline.build_pipeline = timed("data", pipeline.build_pipeline)
    metrics.MetricsLog.__init__ = timed("metrics log", metrics.MetricsLog.__init__)  # type: ignore[method-assign]
    began = time.perf_counter()
    if train.main(arguments):
        raise SystemExit(1)
    summary = json.loads((Path(arguments[-1]) / "summary.json").read_text())
    whole = sum(taken for name, taken in found.items() if name.startswith("import")) + summary["seconds_to_first_step"]
    end = began + summary["seconds_to_first_step"]
    for at, name, seconds in compiled:
        if at <= end:
            found[name] = found.get(name, 0.0) + seconds
    found["the rest: two steps, folder, ..."] = max(whole - sum(found.values()), 0.0)
    print("\n" + json.dumps(found | {"in all": whole}))


def first_torch_step(config: str, device: str) -> None:
    """Prints when the first step of the model that a run folder's config.json describes was over, and its parts."""
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
