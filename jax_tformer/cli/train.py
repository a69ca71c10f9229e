"""Train a transformer: `python train.py [EXPERIMENT] [--FIELD VALUE ...]`; `--help` lists the experiments.

`--run FOLDER` continues the run in a folder; with `--report` it only shows the run's results.
"""

import dataclasses
import time
from collections.abc import Sequence
from functools import partial

from jax_tformer.runs.startup import require_one_process
from jax_tformer.terminal import Interruption, say


def main(arguments: Sequence[str]) -> int:
    # 1. The experiment: a preset and the flags that change it, checked before the slow imports.
    from jax_tformer.cli.train_options import train_options

    started = time.perf_counter()
    plan = train_options(arguments)

    from jax_tformer.data.pipeline import check_files
    from jax_tformer.runs.folder import RunFolder

    experiment, run = plan.experiment, RunFolder(plan.run)
    run.check()
    if plan.report:
        from jax_tformer.runs.results import report

        say(report(run, experiment))
        return 0
    require_one_process()
    check_files(experiment.data)

    import jax

    from jax_tformer.data.batches import check_batch_ids
    from jax_tformer.data.pipeline import build_pipeline
    from jax_tformer.data.tokenizers import check_vocabulary, load_run_tokenizer
    from jax_tformer.functional import transformer
    from jax_tformer.lora import merge_lora, trained
    from jax_tformer.runs.checkpoints import Checkpoints
    from jax_tformer.runs.evaluation import Evaluator, sample_text
    from jax_tformer.runs.huggingface import export_pretrained, given_parameters, new_tokenizer
    from jax_tformer.runs.preparing import (
        compile_beside,
        describe_compute,
        fit_to_devices,
        prepare,
        require_room_for_batches,
    )
    from jax_tformer.runs.progress import ProgressLine, Reporter, first_not_finite
    from jax_tformer.runs.results import MetricsLog, finish
    from jax_tformer.runs.resume import Resumption, permitted_changes
    from jax_tformer.runs.startup import for_other_shapes, set_up_jax
    from jax_tformer.training.optimizer import optimizer
    from jax_tformer.training.sharding import make_mesh, place_batch

    set_up_jax(experiment.model)
    training = experiment.training
    require_room_for_batches(experiment.data, training)
    checkpoints = Checkpoints(run.checkpoints, training.keep_checkpoints, run.saved)
    continues = plan.before is not None and checkpoints.saved_before()

    # 2. The mesh: one device is the mesh 1 x 1 x 1.
    mesh = make_mesh(experiment.mesh, training.batch_size // training.accumulation)

    # 3. The data. A continued run keeps its tokenizer.
    tokenizer = load_run_tokenizer(run.path) if continues else new_tokenizer(experiment)
    model = experiment.model.with_vocab_size(tokenizer.vocab_size)
    experiment = dataclasses.replace(experiment, model=model)
    changes, notes = permitted_changes(plan.before if continues else None, experiment)
    check_vocabulary(tokenizer, model.vocab_size or tokenizer.vocab_size)
    pipeline = build_pipeline(experiment.data, training, tokenizer)
    shape = pipeline.evaluation[0]

    # 4. The model, its optimizer and their step, and the weights of its checkpoint. Whatever does not fit is refused
    # before anything is written.
    net = transformer(fit_to_devices(model, shape, mesh, training.accumulation))
    prepared = prepare(net, optimizer(experiment.optimizer, training.steps), mesh, training, shape)
    given = None if continues else given_parameters(experiment, mesh)

    # 5. The run: from its newest checkpoint, or from step 0.
    batches = pipeline.train_iterator()
    resumption = Resumption(run, checkpoints, pipeline.fingerprint, experiment, started)
    state = resumption.restore(prepared.abstract, batches) if continues else None
    if plan.before is not None and state is None:
        notes.append("the run was stopped before its first checkpoint, so it starts again at step 0")
    if moved := run.take(plan.resume, plan.before):
        say(f"the run that was in {run.path} is now in {moved}")
    if state is not None and int(state.step) == training.steps == run.ended_at():
        run.unlock()
        if plan.export is not None:
            say(export_pretrained(run, plan.export))
            return 0
        say(f"the run in {run.path} is complete; --steps N continues it, --run FOLDER or --resume no starts another")
        return 0
    compiling = compile_beside(prepared.step)
    if state is None:
        run.create(experiment, tokenizer)
        state = prepared.first_state(given)
    number = start = int(state.step)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    devices = f"{mesh.size} {jax.devices()[0].device_kind} device(s)"
    run.record_session(experiment, name=plan.name, step=start, devices=devices, changed=changes)

    # 6. The loop: dispatch a step, then report the previous one.
    evaluate = Evaluator(net, experiment.data, pipeline, tokenizer, mesh)
    log = MetricsLog(run, start)
    with Interruption() as stop, ProgressLine(start, training.steps, stop.unheard) as line, checkpoints:
        line.say(f"{run.path}: {parameters:,} parameters, steps {start} to {training.steps}, {devices}")
        if model.lora is not None:
            adapters = sum(leaf.size for leaf in jax.tree.leaves(trained(state.params)))
            line.say(f"{adapters:,} of them train: adapters of rank {model.lora.rank} (LoRA)")
        line.say(f"computed with {describe_compute(net.config, mesh, shape['labels'].shape[1])}")
        for note in (*plan.notes, *notes, *pipeline.notes, *resumption.notes, *log.notes):
            line.say(note)
        with line.during("compiling"):
            step = compiling.result()
        diagnosis = partial(first_not_finite, net, mesh, tokenizer, training.accumulation)
        reporter = Reporter(experiment, log, line, started, diagnosis=diagnosis, finite=resumption.finite)
        for number in range(start + 1, training.steps + 1):
            batch = next(batches)
            check_batch_ids(batch, net.config.vocab_size)
            state, metrics = step(state, place_batch(mesh, batch))
            reporter.step(number, metrics, state, batch)
            last = number == training.steps or stop.signal is not None
            held_out_loss = None
            if number == training.steps or number % training.evaluate_every == 0:
                with line.during("evaluating"):
                    figures = evaluate(state.params)
                reporter.evaluation(number, figures, shape)
                held_out_loss = figures["val_loss"]
            if last or number % training.checkpoint_every == 0 or resumption.improves(held_out_loss):
                reporter.flush()
                log.sync()
                resumption.save(state, batches, held_out_loss)
            if last:
                break
        # A checkpoint is kept once the next step was finite. The last one has no next step, but a finite held-out loss.
        if number == training.steps:
            resumption.finite(number + 1)
        else:
            state, metrics = step(state, place_batch(mesh, batch := next(batches)))
            reporter.unreported(number + 1, metrics, state, batch)
    log.close()
    run.unlock()
    if stop.signal is not None and number < training.steps:
        say(f"stopped at step {number}; the same command continues the run, as train.py --run {run.path} does")
        return stop.status

    # 7. The results.
    speaker, params = merge_lora(transformer(for_other_shapes(net.config)), state.params)
    samples = sample_text(speaker, params, experiment, tokenizer, lambda: pipeline)
    figures = {**reporter.speed, "wall_seconds": resumption.seconds, "parameters": parameters}
    say(finish(run, number, figures, samples))
    if plan.export is not None:
        say(export_pretrained(run, plan.export))
    return 0
