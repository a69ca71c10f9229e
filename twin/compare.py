"""JAX and PyTorch side by side: `python compare.py [EXPERIMENT] [--steps N] [--out FOLDER] [--FIELD VALUE ...]`."""

import dataclasses
import math
import os
from collections.abc import Sequence

from jax_tformer.config.errors import InputError, TrainingFailed
from jax_tformer.terminal import Interruption, say
from jax_tformer.training.processes import require_alone


def main(arguments: Sequence[str]) -> int:
    # 1. The plan: a preset, the flags that change it, and how to compare; checked before the slow imports.
    from twin.options import read_plan

    plan = read_plan(arguments)
    require_alone("compare.py")

    # XLA would reserve three quarters of a GPU's memory, but both frameworks need some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    try:
        import torch  # training needs no torch, so it may be missing
    except ImportError as error:
        raise InputError("a comparison needs PyTorch; in the repository, pip install '.[parity]' adds it") from error

    from jax_tformer.startup import set_up_jax
    from parity.gates.measure import ParityError
    from parity.machine import jax_device
    from twin.jax_side import JaxSide, full_precision
    from twin.machine import common_device, describe_machine
    from twin.progress import LiveView
    from twin.record import Record, SeedRecord
    from twin.report import Findings
    from twin.report_page import ReportFolder
    from twin.side_by_side import Batches, compare_seed, measure_alone, where_sides_part
    from twin.sides import Setting
    from twin.torch_side import TorchSide
    from twin.transformers_side import checkpoint_weights, transformers_side

    # 2. Both frameworks, on the same device and with the same precision.
    folder = ReportFolder(plan.out)
    folder.check()
    set_up_jax(plan.experiment.model)
    device = common_device()
    full_precision()

    # 3. The data: batches by number, made on demand.
    batches = Batches(plan.experiment, plan.steps)
    model = plan.experiment.model.with_vocab_size(batches.vocab_size)
    setting = Setting(model, plan.experiment.optimizer, plan.experiment.training, device)

    # 4. The sides: the JAX library, the PyTorch reference, transformers, and the reference in float64 as the truth.
    theirs = TorchSide("PyTorch", setting, plan.torch_compile)
    ours = JaxSide(setting, checkpoint_weights(plan))
    sides: dict[str, JaxSide | TorchSide] = {"jax": ours, "torch": theirs}
    if third := transformers_side(plan, setting):
        sides["transformers"] = third
    parameters = sum(math.prod(shape) for shape in theirs.shapes().values())
    if plan.needs_truth(parameters):
        sides["truth"] = TorchSide("the float64 truth", setting._replace(model=model.with_dtype("float64")))

    # 5. The loop, seed by seed; then memory, with each framework alone.
    record, stopped, alone = Record(plan.dtype), None, {}
    with Interruption() as stop, LiveView(plan.steps, len(plan.seeds), ours, theirs) as view:
        *names, last = (side.name for side in sides.values())
        view.say(f"{plan.name}: {parameters:,} parameters, {', '.join(names)} and {last} in {plan.dtype} on {device}")
        if model.lora is not None:
            view.say(f"{ours.numbers_that_train():,} of them train: adapters of rank {model.lora.rank} (LoRA)")
        masks_of = ours.masks if plan.dropout == "shared" else None
        failure: Exception | None = None
        try:
            for seed in plan.seeds:
                record.seeds.append(SeedRecord(seed))
                compare_seed(record.seeds[-1], sides, model, batches(seed), masks_of, view, stop)
                if stop.signal is not None:
                    break
        except (ParityError, TrainingFailed) as error:
            failure, stopped = error, str(error)
        planned = plan.steps * len(plan.seeds)
        if stop.signal is not None and record.steps < planned:
            stopped = f"interrupted after {record.steps} of {planned} steps"
        if plan.memory and not stopped:
            view.say("measuring each framework alone ...")
            ours.start(plan.seeds[0], None)
            weights = ours.parameters()
            alone = measure_alone(setting, weights, batches(plan.seeds[0]), plan.torch_compile, stop)

    # 6. The report.
    machine = describe_machine(jax_device())
    findings = Findings(plan, record, parameters, machine, torch.get_num_threads(), alone, stopped)
    if record.begun:
        folder.write(findings)
    if findings.passed is False:
        say("beyond the bar: looking for where the two part ...")
        first_batch = next(iter(batches(plan.seeds[0])))
        where = where_sides_part(ours, theirs, model, first_batch, plan.seeds[0], plan.name)
        findings = dataclasses.replace(findings, where=where)
        folder.write(findings)
        say(str(where))
    if record.begun:
        say("\n".join([*map(str, findings.statements()), f"the report is {folder.path}/report.html"]))
    if failure is not None:
        raise TrainingFailed(str(failure))
    if stopped:
        return stop.status
    return 1 if findings.passed is False else 0
