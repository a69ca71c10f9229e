"""Train a transformer: `python train.py [EXPERIMENT] [--FIELD VALUE ...]`; `--help` lists the experiments.

`--run FOLDER` continues the run in a folder; with `--report` it only shows the run's results.
"""

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from jax_tformer.cli import train_options
from jax_tformer.config.errors import require
from jax_tformer.runs.startup import set_malloc
from jax_tformer.terminal import SMALLER_TRAINING, Interruption, say

if TYPE_CHECKING:
    from jax_tformer.data.batches import Pipeline
    from jax_tformer.data.tokenizers import Tokenizer
    from jax_tformer.runs.folder import RunFolder


def main(arguments: Sequence[str]) -> int:
    """Trains, or reports on a run, as the command line says; returns the exit status."""
    # 1. The config: a preset and the flags that change it, checked before the slow imports.
    started = time.perf_counter()
    set_malloc(M_ARENA_MAX=1)
    plan = train_options.train_options(arguments)

    from jax_tformer.data.pipeline import check_files
    from jax_tformer.runs.folder import RunFolder
    from jax_tformer.training import processes

    run = RunFolder(plan.run)
    if plan.report:
        from jax_tformer.runs.evaluation import report

        run.check()
        say(report(run, plan.experiment))
        return 0
    # Several processes run all of this; what one refuses, all refuse.
    with processes.joined(plan.distributed):
        with processes.together():
            run.check()
            check_files(plan.experiment.data)
            require(
                plan.export is None or processes.count() == 1,
                "one process exports a model, and several train it; leave --export out, and give the run to "
                "jax-tformer export afterwards",
            )
        return train(plan, run, started)


def train(plan: train_options.TrainPlan, run: "RunFolder", started: float) -> int:
    """Trains the experiment of `plan` in the folder of `run`; `started` is when the program was, by perf_counter."""
    import jax

    from jax_tformer.data.batches import check_batch_ids
    from jax_tformer.data.pipeline import build_pipeline
    from jax_tformer.functional import transformer
    from jax_tformer.lora import merge_lora, trained
    from jax_tformer.memory import describe_compute, fit_to_devices, require_room_for_batches
    from jax_tformer.runs.checkpoints import Checkpoints
    from jax_tformer.runs.diagnosis import find_not_finite
    from jax_tformer.runs.evaluation import Evaluator, finish, sample_text
    from jax_tformer.runs.huggingface import export_pretrained, given_parameters, new_tokenizer
    from jax_tformer.runs.metrics import MetricsLog, ProgressLine, Reporter
    from jax_tformer.runs.resume import Resumption, compile_beside, permitted_changes, prepare, require_same_run
    from jax_tformer.runs.startup import for_other_shapes, keep_freed_memory, set_up_jax
    from jax_tformer.training import processes
    from jax_tformer.training.optimizer import optimizer
    from jax_tformer.training.processes import ask_first, is_first, together
    from jax_tformer.training.sharding import (
        abstract_batch,
        describe_shards,
        local_rows,
        make_mesh,
        on_this_process,
        place_batch,
    )
    from jax_tformer.training.step import batch_loss

    experiment, training = plan.experiment, plan.experiment.training
    with together():
        set_up_jax(experiment.model)
        require_room_for_batches(experiment.data, training, SMALLER_TRAINING)
        checkpoints = Checkpoints(run.checkpoints, training.keep_checkpoints, run.saved)

        # 2. The mesh: one device is the mesh 1 x 1 x 1 x 1.
        mesh = make_mesh(experiment.mesh, training.batch_size // training.accumulation)
    before = plan.before if ask_first(checkpoints.saved_before) else None

    # 3. The data, of which each process makes the rows that its devices hold. A continued run keeps its tokenizer.
    def build_data() -> "tuple[Tokenizer, Pipeline]":
        tokenizer = new_tokenizer(experiment) if before is None else run.read_tokenizer(experiment.model.vocab_size)
        rows = local_rows(mesh, training.batch_size)
        return tokenizer, build_pipeline(experiment.data, training, tokenizer, rows)

    tokenizer, pipeline = processes.first_then_others(build_data)
    experiment = dataclasses.replace(experiment, model=experiment.model.with_vocab_size(tokenizer.vocab_size))
    require_same_run(experiment, tokenizer, pipeline.fingerprint)
    changes, notes = permitted_changes(before, experiment)
    batches, held_out = pipeline.train_iterator(), abstract_batch(mesh, pipeline.evaluation[0])

    # 4. The model, its optimizer and their step. Whatever does not fit is refused before anything is written.
    net = transformer(fit_to_devices(experiment.model, batch_loss, held_out, mesh, training.accumulation))
    with together():
        prepared = prepare(net, optimizer(experiment.optimizer, training.steps), mesh, training, held_out)
        given = given_parameters(experiment, mesh) if before is None else None

    # 5. The run: from its newest checkpoint, or from step 0.
    resumption = Resumption(run, checkpoints, pipeline.fingerprint, experiment, started)
    state = None if before is None else resumption.restore(prepared.abstract, batches)
    if plan.before is not None and state is None:
        notes.append("the run was stopped before its first checkpoint, so it starts again at step 0")
    if moved := ask_first(lambda: run.take(plan.resume, plan.before)):
        say(f"the run that was in {run.path} is now in {moved}")
    if state is not None and int(state.step) == training.steps == run.ended_at():
        run.unlock()
        other = "--steps N continues it, --run FOLDER or --resume no starts another"
        say(export_pretrained(run, plan.export) if plan.export else f"the run in {run.path} is complete; {other}")
        return 0
    compiling = compile_beside(prepared.step)
    if state is None:
        ask_first(lambda: run.create(experiment, tokenizer))
        state = prepared.first_state(given)
    number = start = int(state.step)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    devices = f"{mesh.size} {jax.devices()[0].device_kind} device(s)"
    ask_first(lambda: run.record_session(experiment, name=plan.name, step=start, devices=devices, changed=changes))

    # 6. The loop: dispatch a step, then report the previous one.
    evaluate = Evaluator(net, experiment.data, pipeline, tokenizer, mesh)
    diagnosis = partial(find_not_finite, net, mesh, tokenizer, training.accumulation)
    log, signals = MetricsLog(run, start), processes.Signals(mesh)
    with Interruption() as stop, ProgressLine(start, training.steps, stop.unheard) as line, checkpoints:
        line.say(f"{run.path}: {parameters:,} parameters, steps {start} to {training.steps}, {devices}")
        if net.config.lora is not None:
            adapters = sum(leaf.size for leaf in jax.tree.leaves(trained(state.params)))
            line.say(f"{adapters:,} of them train: adapters of rank {net.config.lora.rank} (LoRA)")
        line.say(f"computed with {describe_compute(net.config, mesh, held_out['labels'].shape[1])}")
        for note in (*plan.notes, *notes, *pipeline.notes, *resumption.notes, *log.notes):
            line.say(note)
        reporter = Reporter(experiment, log, line, started, diagnosis=diagnosis, confirm=resumption.confirm)
        with line.during("compiling"):
            step = compiling.result()
        keep_freed_memory(step)
        for note in describe_shards(mesh, prepared.abstract, prepared.abstract.params, step.as_text() or ""):
            line.say(note)
        processes.wait_for_all()
        for number in range(start + 1, training.steps + 1):
            batch = next(batches)
            check_batch_ids(batch, net.config.vocab_size)
            state, metrics = step(state, place_batch(mesh, batch))
            reporter.step(number, metrics, state, batch)
            signal = signals(stop.signal)
            last = number == training.steps or signal is not None
            held_out_loss = None
            if number == training.steps or number % training.evaluate_every == 0:
                with line.during("evaluating"):
                    figures = evaluate(state.params)
                reporter.evaluation(number, figures, pipeline.evaluation[0])
                held_out_loss = figures["val_loss"]
            if last or number % training.checkpoint_every == 0 or resumption.improves(held_out_loss):
                reporter.flush()
                log.sync()
                resumption.save(state, batches, held_out_loss)
            if last:
                break
        if number < training.steps:
            # Its numbers do not count: it shows whether those of the step before it do (see `Resumption`).
            state, metrics = step(state, place_batch(mesh, batch := next(batches)))
            reporter.step(number + 1, metrics, state, batch)
            reporter.flush(discard=True)
        else:
            # The last step has no next one, but a finite held-out loss.
            resumption.confirm(number + 1)
    log.close()
    run.unlock()
    if number < training.steps:
        say(f"stopped at step {number}; the same command continues the run, as train.py --run {run.path} does")
        return 128 + (signal or 0)

    # 7. The results.
    params = on_this_process(mesh, state.params)
    if not is_first():
        return 0
    speaker, params = merge_lora(transformer(for_other_shapes(net.config)), params)
    samples = sample_text(speaker, params, experiment, tokenizer, lambda: pipeline)
    figures = {**reporter.speed, "wall_seconds": resumption.seconds, "parameters": parameters}
    say(finish(run, number, figures, samples))
    if plan.export is not None:
        say(export_pretrained(run, plan.export))
    return 0
