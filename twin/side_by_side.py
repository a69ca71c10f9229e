"""Trains both sides from the same weights on the same batches: in turn in one process, then each alone in its own."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import jax

from jax_tformer.config import TransformerConfig
from jax_tformer.config.experiment import ExperimentConfig
from jax_tformer.data.pipeline import build_pipeline, check_batch_ids
from jax_tformer.data.tokenizers import check_vocabulary
from jax_tformer.runs.session import new_tokenizer
from jax_tformer.terminal import Interruption
from parity.differ.answer import Difference
from parity.gates.measure import ParityError
from twin.jax_side import JaxSide
from twin.machine import Neighbours
from twin.pair import Pair, where_they_part
from twin.progress import LiveView
from twin.record import SeedRecord, parameter_errors
from twin.sides import HUGE_PAGES, Alone, Masks, Setting, SideFailed, Tensors, require_same_step
from twin.torch_side import TorchSide, wide

ALONE_STEPS = 12
"""Steps of each side alone: the first, which also compiles, and those that are timed."""


class Batches:
    """Makes `steps` training batches for each seed, on demand, because a background thread would disturb the timing.

    Raises InputError if the text cannot be read or the tokenizer cannot be loaded.
    """

    def __init__(self, experiment: ExperimentConfig, steps: int) -> None:
        self._experiment, self._steps = experiment, steps
        self._tokenizer = new_tokenizer(experiment)
        self.vocab_size = experiment.model.vocab_size or self._tokenizer.vocab_size
        """Rows of the model's token table."""
        check_vocabulary(self._tokenizer, self.vocab_size)

    def __call__(self, seed: int) -> Iterator[Tensors]:
        """Yields the batches of one seed; raises InputError if the text is too short."""
        training = dataclasses.replace(self._experiment.training, seed=seed)
        batches = build_pipeline(self._experiment.data, training, self._tokenizer).train
        for number in range(self._steps):
            batch = batches[number]
            check_batch_ids(batch, self.vocab_size)
            yield batch


Sides = Mapping[str, JaxSide | TorchSide]
"""What is compared: "jax" and "torch"; the same model in "transformers", if it began as one of its checkpoints; and the
"truth", which trains in float64, if there is one."""


def compare_seed(
    record: SeedRecord,
    sides: Sides,
    config: TransformerConfig,
    batches: Iterable[Tensors],
    masks_of: Callable[[Tensors], Masks] | None,
    view: LiveView,
    stop: Interruption,
) -> None:
    """Trains on all `batches`, or until a signal comes; records every step and, once, the errors of parameters.

    JAX draws weights, and the others get them; all drop by the masks that `masks_of` draws for a batch, if any. The two
    take turns at going first, because the second finds the caches full of the other's numbers. Raises ParityError if
    they do not begin with the same bits, and ParityError or TrainingFailed for a step that cannot be compared; earlier
    steps stay recorded.
    """
    sides["jax"].start(record.seed, None)
    weights = sides["jax"].parameters()
    for name, side in sides.items():
        if name != "jax":
            side.start(record.seed, weights)
    errors = parameter_errors(config, weights, sides["torch"].parameters(), None)
    for name, error in errors.items():
        if error.difference != 0:
            raise ParityError(f"{name} differs before the first step, by {error.difference:.1e}")
    others = Neighbours()
    first, second, *rest = sides
    for number, batch in enumerate(batches, 1):
        masks = masks_of(batch) if masks_of else None
        taken = {name: sides[name].step(batch, masks) for name in (first, second)}
        require_same_step(number, taken["jax"], taken["torch"])
        record.add(taken | {name: sides[name].step(batch, masks) for name in rest})
        first, second = second, first
        if number == 1:
            others = Neighbours()  # starts here, because compilers run in processes of their own
        record.other_work = others.share()
        if (
            not record.parameters
            and config.compute.dtype == "float32"
            and "truth" in sides
            and record.judged() < number
        ):
            _compare_parameters(record, sides, config)
        view.update(record)
        if stop.signal is not None:
            break
    if not record.parameters:
        _compare_parameters(record, sides, config)


def _compare_parameters(record: SeedRecord, sides: Sides, config: TransformerConfig) -> None:
    found = {name: side.parameters() for name, side in sides.items() if name != "transformers"}
    record.parameters = parameter_errors(config, found["jax"], found["torch"], found.get("truth"))
    record.parameters_step = record.steps


SAME = (
    "On the first batch both compute the same loss and the same gradients in float64. So it is not the model that "
    "differs: it is the step of the optimizer, or rounding."
)


def where_sides_part(
    ours: JaxSide, theirs: TorchSide, model: TransformerConfig, batch: Tensors, seed: int, name: str
) -> Difference | str:
    """Finds where the two part with the weights of `seed`, or says in a sentence why it finds nothing."""
    ours.start(seed, None)
    weights = ours.parameters()
    with jax.enable_x64(True):
        pair = Pair(model, weights)
        pair.module = theirs.in_float64().eval()
        pair.load(weights)
        return where_they_part(pair, wide(batch), name) or SAME


Needs = dict[str, float | str | None]
"""What one framework needed alone, in bytes and seconds; or the `error` for which that is unknown:

- `peak_memory` of the process: interpreter, libraries, compiler, parameters, optimizer, activations
- `memory_before`: the same after importing the libraries, before building anything
- `device_memory`: the peak on the accelerator; None without one
- `step_seconds`: the median, without the first step
- `product_rate`: floating-point operations per second in one large square matrix product of the comparison's type
"""


def measure_alone(
    setting: Setting, weights: Tensors, batches: Iterable[Tensors], compiled: bool, stop: Interruption
) -> dict[str, Needs]:
    """Measures what "jax" and "torch" each need on the first of `batches`.

    In the comparing process both share memory and caches, so here each trains for a few steps in a process of its own.
    """
    makers: dict[str, tuple[Any, ...]] = {
        "jax": ("twin.jax_side:alone", setting),
        "torch": ("twin.torch_side:TorchSide", "PyTorch", setting, compiled),
    }
    first = list(islice(batches, ALONE_STEPS))
    found: dict[str, Needs] = {}
    for name, made in makers.items():
        side = Alone(*made, environment=HUGE_PAGES if setting.device == "cpu" else {})
        try:
            side.call("start", setting.training.seed, weights)
            seconds = []
            for batch in first:
                if stop.signal is not None:
                    raise SideFailed("interrupted")
                seconds.append(side.call("step", batch, None).seconds)
            found[name] = {
                "peak_memory": side.call("peak_memory"),
                "memory_before": side.call("libraries_memory"),
                "device_memory": side.call("device_memory"),
                "step_seconds": statistics.median(seconds[1:] or seconds),
                "product_rate": side.call("product_rate", 1024 if setting.device == "cpu" else 8192),
            }
        except SideFailed as error:
            found[name] = {"error": str(error)}
        finally:
            side.close()
    return found
