"""The loop of a comparison: both sides from the same weights through the same batches."""

from collections.abc import Iterable
from typing import NamedTuple

from jax_tformer.config import TransformerConfig
from jax_tformer.terminal import Interruption
from jax_tformer_comparison.jax_side import JaxSide
from jax_tformer_comparison.live import LiveView
from jax_tformer_comparison.machine import Neighbours
from jax_tformer_comparison.record import SeedRecord, parameter_errors
from jax_tformer_comparison.sides import Tensors, require_same_step
from jax_tformer_comparison.torch_side import TorchSide
from parity_tests.measure import ParityError


class Sides(NamedTuple):
    """What is compared."""

    jax: JaxSide
    torch: TorchSide
    truth: TorchSide | None
    """The float64 training, where there is one."""


def start(sides: Sides, seed: int) -> dict[str, Tensors]:
    """Step 0 of every side: JAX draws weights, the others get them. Returns the parameters by side.

    Raises ParityError unless JAX and PyTorch then hold the same names, shapes, types and bits.
    """
    sides.jax.start(seed, None)
    weights = sides.jax.parameters()
    for side in (sides.torch, sides.truth):
        if side is not None:
            side.start(seed, weights)
    return {"jax": weights, "torch": sides.torch.parameters()}


def compare_seed(
    record: SeedRecord,
    sides: Sides,
    config: TransformerConfig,
    batches: Iterable[Tensors],
    shared_dropout: bool,
    view: LiveView,
    stop: Interruption,
) -> None:
    """Trains on all `batches`, or until a signal comes, and records every step, and the errors of parameters once.

    The sides take turns at going first, since whoever follows the other finds the caches full of the other's numbers.
    Raises ParityError or TrainingFailed for a step that cannot be compared; the steps before stay recorded.
    """
    begun = start(sides, record.seed)
    errors = parameter_errors(config, begun["jax"], begun["torch"], None)
    moved = [name for name, error in errors.items() if error.difference != 0]
    if moved:
        raise ParityError(f"{moved[0]} differs before the first step, by {errors[moved[0]].difference:.1e}")
    others = Neighbours()
    for number, batch in enumerate(batches, 1):
        masks = sides.jax.masks(batch) if shared_dropout else None
        if number % 2:
            ours = sides.jax.step(batch, masks)
            theirs = sides.torch.step(batch, masks)
        else:
            theirs = sides.torch.step(batch, masks)
            ours = sides.jax.step(batch, masks)
        require_same_step(number, ours, theirs)
        exact = None if sides.truth is None else sides.truth.step(batch, masks)
        record.jax.append(ours)
        record.torch.append(theirs)
        if exact is not None:
            record.truth.append(exact)
        if number == 1:
            others = Neighbours()  # not from before: compilers work in processes of their own
        record.other_work = others.share()
        if not record.parameters and config.compute.dtype == "float32" and record.truth and record.judged() < number:
            _compare_parameters(record, sides, config)
        view.update(record)
        if stop.signal is not None:
            break
    if not record.parameters:
        _compare_parameters(record, sides, config)


def _compare_parameters(record: SeedRecord, sides: Sides, config: TransformerConfig) -> None:
    truth = None if sides.truth is None else sides.truth.parameters()
    record.parameters = parameter_errors(config, sides.jax.parameters(), sides.torch.parameters(), truth)
    record.parameters_step = record.steps
