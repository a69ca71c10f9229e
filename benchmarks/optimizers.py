"""The optimizers on `python-docs`, at equal steps: loss, time a step, memory: `python -m benchmarks.optimizers`."""

import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.session import Options, Report, Session, by_turns, make_table, run_benchmark, spread
from benchmarks.startup import TINY
from jax_tformer.config.errors import Positive, require
from jax_tformer.config.experiment import ExperimentConfig, OptimizerName
from jax_tformer.config.presets import EXPERIMENTS

_RATES: dict[OptimizerName, tuple[float, ...]] = {
    "muon": (3e-3, 1e-2, 3e-2),
    "adamw": (1e-3, 3e-3, 1e-2),
    "adafactor": (3e-2, 1e-1, 3e-1),
    "lion": (3e-4, 1e-3, 3e-3),
    "sgd": (1e-2, 3e-2, 1e-1),
}
"""Learning rates; for each optimizer as many, a factor of about 3 apart."""
_TOGETHER = 10
_NOTES = (
    "loss: held-out, nats a token, of one run for each learning rate; model, batches, schedule and decay are those of "
    "the experiment, and so are the weights at the start.",
    f"processor ms a step: of all threads, in turns of {_TOGETHER} steps, which neighbours change less than the clock; "
    "in brackets min..max.",
    "state: of the optimizer, in times of the parameters. MiB: of parameters, optimizer and batch; beside them: what "
    "else a step takes, by the compiler.",
)


@dataclass(frozen=True)
class OptimizerOptions(Options):
    """The options of this benchmark."""

    steps: Positive = 400
    """Of each run."""


def _measure(session: Session) -> Report:
    from jax_tformer.startup import set_malloc
    from jax_tformer.terminal import parse

    require(session.device == "cpu", "--device is 'gpu'; expected cpu: this benchmark measures the processor's time")
    set_malloc(M_ARENA_MAX=1)
    experiment, steps = EXPERIMENTS["python-docs"].config, session.options.steps
    if session.quick:
        flags = f"{TINY} --training.evaluate-batches 1".split()
        experiment, steps = parse(ExperimentConfig, flags, prog="", description="", default=experiment), 2
    experiment = replace(experiment, training=replace(experiment.training, steps=steps))
    rows: dict[str, dict[str, Any]] = {}
    trainings: dict[OptimizerName, _Training] = {}
    for name, rates in _RATES.items():
        session.say(f"{name} ...")
        losses = {}
        for rate in rates[:1] if session.quick else rates:
            trainings[name] = _Training(experiment, name, rate)
            losses[rate] = trainings[name].to_the_end()
        tried = ", ".join(f"{loss:.3f} ({rate:g})" for rate, loss in losses.items())
        rows[name] = {"loss": min(losses.values()), "by learning rate": tried}
    session.say("steps, by turns ...")
    turns = by_turns({name: run.turn for name, run in trainings.items()}, session.rounds(1 if session.quick else 9))
    for name, run in trainings.items():
        rows[name] |= {"processor ms a step": spread(turns[name], 1000)} | run.memory()
    ours = {name: spread(taken) for name, taken in turns.items()}
    return Report({"optimizers": rows}, ours, [make_table(f"python-docs, {steps} steps", rows)], _NOTES)


class _Training:
    """A training as train.py does it, of which nothing is written."""

    def __init__(self, experiment: ExperimentConfig, name: OptimizerName, rate: float) -> None:
        from jax_tformer.runs import session
        from jax_tformer.runs.evaluation import Evaluator
        from jax_tformer.runs.folder import RunFolder
        from jax_tformer.startup import keep_freed_memory
        from jax_tformer.training.sharding import place_batch

        chosen = replace(experiment.optimizer, name=name, learning_rate=rate)
        began = session.Session(RunFolder(Path("runs/optimizers")), replace(experiment, optimizer=chosen), None, 0.0)
        self._step: Any = began.prepared.step.compile()
        keep_freed_memory(self._step)
        self._state, self._steps = began.prepared.first_state(None), experiment.training.steps
        self._place, self._batches = partial(place_batch, began.mesh), began.pipeline.train
        self._evaluate = Evaluator(began.net, experiment.data, began.pipeline, began.tokenizer, began.mesh)

    def to_the_end(self) -> float:
        """Takes all steps; returns the held-out loss."""
        self._take(self._steps)
        return self._evaluate(self._state.params)["val_loss"]

    def turn(self) -> float:
        """Returns the processor's seconds of a step."""
        began = time.process_time()
        self._take(_TOGETHER)
        return (time.process_time() - began) / _TOGETHER

    def _take(self, steps: int) -> None:
        import jax

        for number in range(steps):
            self._state, _ = self._step(self._state, self._place(self._batches[number]))
        jax.block_until_ready(self._state)

    def memory(self) -> dict[str, float]:
        """Returns what the table says of memory."""
        import jax

        needs = self._step.memory_analysis()
        sizes = [
            sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (self._state.opt_state, self._state.params)
        ]
        return {
            "state": sizes[0] / sizes[1],
            "MiB": needs.argument_size_in_bytes / 2**20,
            "beside them": needs.temp_size_in_bytes / 2**20,
        }


main = partial(run_benchmark, "optimizers", __doc__, measure=_measure, kind=OptimizerOptions)
"""Status 1 where a run fails."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
