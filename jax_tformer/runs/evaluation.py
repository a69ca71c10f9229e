"""Judges the model of a run while it trains, by figures on held-out data, and at its end, by samples and curves.

Where a step has failed, says what was not finite in it.
"""

import io
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from traceback import extract_tb
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import DecodingConfig, ExperimentConfig, MaskedTextData, PairData, TrainingConfig
from jax_tformer.data.order import Batch
from jax_tformer.data.pipeline import Pipeline, build_pipeline
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.decoding.generate import Answerer, generate
from jax_tformer.decoding.loop import layers_apart
from jax_tformer.decoding.texts import PromptReader, translation_scores
from jax_tformer.files import batched, named_errors, write_json, write_text
from jax_tformer.functional import AnyTransformer, Params, transformer
from jax_tformer.lora import join_adapters, split_adapters
from jax_tformer.model.parameters import DropoutKey, accumulator, flatten
from jax_tformer.runs.folder import RunFolder, load_trained
from jax_tformer.runs.metrics import Row, format_figures, read_metrics
from jax_tformer.startup import compiler_options
from jax_tformer.terminal import __version__
from jax_tformer.training.processes import ask_first
from jax_tformer.training.sharding import place_batch, replicate, use_mesh_of
from jax_tformer.training.step import (
    TrainState,
    average_of,
    batch_loss,
    count_right,
    dropout_keys,
    forward,
)

_SHOWN = 12
"""Tokens shown of a row, so that it can be found in the data."""
_PACKAGE = f"{Path(__file__).parents[1]}/"
_TOGETHER = 128
"""The most sources that are translated at once."""
_PROMPT = 8
"""Held-out tokens that a sample continues if the tokenizer has no start token."""
_SCORES = ("train_accuracy", "val_accuracy", "exact_match", "bleu", "no_bleu")
_FIGURES = ("loss", "val_loss", "average_val_loss", "val_perplexity", "val_bits_per_byte", *_SCORES)
_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain")


@dataclass
class Evaluator:
    """Computes the held-out loss and, for pairs, exact match and BLEU of greedy decoding, or why there is no BLEU."""

    net: AnyTransformer
    data: object
    pipeline: Pipeline
    tokenizer: Tokenizer
    mesh: Mesh

    def __post_init__(self) -> None:
        options = compiler_options(self.net.config.compute.dtype)
        self._loss = jax.jit(partial(batch_loss, self.net), compiler_options=options)
        self._right = jax.jit(partial(count_right, self.net))

    def of_state(self, state: TrainState) -> Row:
        """Returns the figures of the parameters, and average_val_loss ... of their average, if there is one."""
        figures = self(state.params)
        if state.average is not None:
            figures |= {f"average_{name}": x for name, x in self(average_of(state)).items() if not isinstance(x, str)}
        return figures

    def __call__(self, params: Params) -> Row:
        """Returns val_loss (nats per token, over all tokens), val_perplexity, val_bits_per_byte, exact_match and bleu.

        If the held-out targets are too short for BLEU, no_bleu, a sentence, replaces bleu.
        """
        total, count = self._sums(self._loss, params, self.pipeline.evaluation)
        loss = total / max(count, 1)
        figures: Row = {"val_loss": loss}
        if loss < 700:  # else it is larger than any float
            figures["val_perplexity"] = math.exp(loss)
        if self.pipeline.bytes_per_token is not None:
            figures["val_bits_per_byte"] = loss / math.log(2) / self.pipeline.bytes_per_token
        if self.pipeline.seen is not None:
            for name, batches in (("train", self.pipeline.seen), ("val", self.pipeline.evaluation)):
                right, labels = self._sums(self._right, params, batches)
                figures[f"{name}_accuracy"] = right / labels
        if isinstance(self.data, PairData) and self.pipeline.examples:
            sources, targets = zip(*self.pipeline.examples, strict=True)
            net = transformer(self.net.config.for_other_shapes())
            answers = _translate(net, params, self.data, self.tokenizer, sources, DecodingConfig())
            scores = translation_scores(answers, targets)
            figures["exact_match"] = scores.exact_match
            figures |= {"no_bleu": scores.no_bleu or ""} if scores.bleu is None else {"bleu": scores.bleu}
        return figures

    def _sums(
        self, compute: Callable[[Params, Any], Any], params: Params, batches: Sequence[Batch]
    ) -> tuple[float, int]:
        """Adds up what `compute` returns for each batch: a figure, and of how many labels it is."""
        # Dispatches all batches before waiting for the first.
        with jax.set_mesh(self.mesh):
            results = jax.device_get([compute(params, place_batch(self.mesh, batch)) for batch in batches])
        return sum(float(x) for x, _ in results), sum(int(count) for _, count in results)


def find_not_finite(
    net: AnyTransformer,
    mesh: Mesh,
    tokenizer: Tokenizer,
    training: TrainingConfig,
    state: TrainState,
    batch: Batch,
    *,
    operation: bool = False,
) -> str:
    """Describes the first parameter, layer or gradient that is not finite in a step of `batch`; "" if none is found.

    Runs the model again, as the step did, but for the parts of a batch that several processes have made: each is of
    other rows. `state` is that which `train_step` returned for the failed step, or the one
    whose evaluation failed. `operation`: says as well which one made the first NaN.
    """

    def finite_rows(params: Params, part: dict[str, Array], key: DropoutKey) -> dict[str, Bool[Array, " B"]]:
        """Returns for every layer in turn whether each row of its output is finite."""
        outputs = forward(net, params, part, dropout_key=key, capture=True)
        found = {}
        for stack, captured in (("encoder", outputs.encoder), ("decoder", outputs.decoder)):
            for layer, hidden in enumerate(() if captured is None else captured.hidden):
                found[f"the output of {stack}.blocks.{layer}"] = jnp.isfinite(hidden).all((1, 2))
        # Checks the input of the logits, which would be several times as large as all else.
        return replicate(found | {"what the vocabulary projection is given": jnp.isfinite(outputs.hidden).all((1, 2))})

    def squared_gradients(params: Params, part: dict[str, Array], key: DropoutKey) -> Params:
        """Returns the terms of the squared norm, because squares overflow before the numbers do."""
        trains, frozen = split_adapters(params)
        gradients = jax.grad(
            lambda trains: batch_loss(net, join_adapters(trains, frozen), part, training.loss, dropout_key=key)[0]
        )(trains)
        return jax.tree.map(lambda g: jnp.square(g.astype(accumulator(g.dtype))), gradients)

    def made_by(part: dict[str, Array], key: DropoutKey) -> str:
        return first_nan(squared_gradients, state.params, part, key) if operation else ""

    trains = not state.finite
    parts = training.accumulation if trains else 1
    keys = dropout_keys(net, state, parts) if trains else None
    ids = batch["source" if "source" in batch else "tokens"]
    rows = len(ids) // parts
    with jax.set_mesh(mesh):
        if name := _not_finite_in(state.params):
            return f"{name} was not finite before it"
        for number in range(parts):
            key = None if keys is None else keys[number]
            first = number * rows
            part = place_batch(mesh, {name: x[first : first + rows] for name, x in batch.items()})
            for name, finite in jax.device_get(jax.jit(finite_rows)(state.params, part, key)).items():
                if not finite.all():
                    found = f"{name} is the first that is not finite"
                    if len(finite) > rows:
                        # Another process may have made this row.
                        return found
                    row = first + int(np.argmin(finite))
                    begins = tokenizer.decode(ids[row, :_SHOWN])
                    return f"{found}, in row {row + 1} of {len(ids)}, which begins {begins!r}{made_by(part, key)}"
            if trains and (name := _not_finite_in(jax.jit(squared_gradients)(state.params, part, key))):
                return f"every layer's output is finite, the norm of the gradient of {name} is not{made_by(part, key)}"
    return ""


def first_nan(compute: Callable[..., object], *given: object) -> str:
    """Computes operation by operation; returns which one makes the first NaN, and its line, or "" if none does."""
    try:
        with jax.disable_jit(), jax.debug_nans(True):
            compute(*given)
    except FloatingPointError as error:
        # On the way back, the lines of the way there stand in the cause.
        frames = [frame for raised in (error, error.__cause__) if raised for frame in extract_tb(raised.__traceback__)]
        ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE) and frame.filename != __file__]
        told = "; " + str(error).partition(".")[0]
        if ours:
            told += f" in {ours[-1].filename.removeprefix(_PACKAGE)}, line {ours[-1].lineno}: {ours[-1].line}"
        return told
    return ""


def _not_finite_in(tree: Params) -> str | None:
    """Returns the name of the first array with a number that is not finite; checks each layer separately."""

    def flags(tree: Params) -> dict[str, Bool[Array, " L"]]:
        layers = {name: x if ".blocks." in name else x[None] for name, x in flatten(tree).items()}
        return replicate({name: jnp.isfinite(x).reshape(len(x), -1).all(1) for name, x in layers.items()})

    for name, finite in jax.device_get(jax.jit(flags)(tree)).items():
        if not finite.all():
            return name.replace(".blocks.", f".blocks.{int(np.argmin(finite))}.")
    return None


def sample_text(
    net: AnyTransformer,
    params: Params,
    experiment: ExperimentConfig,
    tokenizer: Tokenizer,
    held_out: Callable[[], Pipeline],
) -> str:
    """Makes samples of text, translations or predicted words, as `experiment.sample` describes, ready to print.

    Calls `held_out` if they need held-out data, which only texts with a start token do not.
    """
    data = experiment.data
    sample = experiment.sample
    seed = experiment.training.seed
    top_k = sample.top_k if sample.temperature else None
    decoding = DecodingConfig(sample.max_new_tokens, temperature=sample.temperature, top_k=top_k)
    if isinstance(data, MaskedTextData):
        return _predict_masked(net, params, held_out(), tokenizer, sample.count)
    if isinstance(data, PairData):
        examples = (held_out().examples or [])[: sample.count]
        answers = _translate(net, params, data, tokenizer, [source for source, _ in examples], decoding, seed)
        lines = [
            (source, answer, "" if answer == target else target)
            for (source, target), answer in zip(examples, answers, strict=True)
        ]
        title = f"held-out examples, {sum(not differs for *_, differs in lines)} of {len(lines)} exact"
        return _table(title, ("source", "model", "expected, where it differs"), lines)
    if tokenizer.start_id is not None:
        prompts = [[tokenizer.start_id]]
    else:
        prompts = ask_first(lambda: held_out().evaluation[0]["tokens"][: sample.count, :_PROMPT].tolist())
    # At temperature 0 nothing is drawn, so all samples of a prompt would be equal.
    several = -(-sample.count // len(prompts)) if sample.temperature else 1
    decoding = replace(decoding, num_return_sequences=several)
    apart = layers_apart(params, rows=len(prompts) * several)
    found = generate(net, apart, prompts, decoding, seed=seed, context=data.context_length)
    rows = [[*prompt, *new] for number, prompt in enumerate(prompts) for new in found.rows(number)]
    texts = map(tokenizer.decode, rows[: sample.count])
    return "\n".join(f"--- sample {number} ---\n{text.strip()}\n" for number, text in enumerate(texts, 1))


def _translate(
    net: AnyTransformer,
    params: Params,
    data: PairData,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    decoding: DecodingConfig,
    seed: int = 0,
) -> list[str]:
    """Translates `sources` as `decoding` says, but with translations as long as the model was trained on."""
    named = "the run's data.source_length"
    read = PromptReader(tokenizer, data.target_length, translates=True, max_length=data.source_length, named=named)
    decoding = replace(decoding, max_new_tokens=data.target_length)
    size = min(len(sources), _TOGETHER)
    answerer = Answerer(net, params, tokenizer, decoding, seed=seed, batch=size)
    return [found[0].text for batch in batched(map(read, sources), size) for found in answerer.answers(batch)]


def _predict_masked(net: AnyTransformer, params: Params, pipeline: Pipeline, tokenizer: Tokenizer, count: int) -> str:
    told = ask_first(lambda: {name: rows[:count].tolist() for name, rows in pipeline.evaluation[0].items()})
    batch = {name: np.asarray(rows) for name, rows in told.items()}
    with use_mesh_of(params):
        best = jax.jit(lambda params, batch: replicate(forward(net, params, batch).logits.argmax(-1)))(params, batch)
    rows = []
    for tokens, labels, answers in zip(batch["tokens"], batch["labels"], np.asarray(best), strict=True):
        for place in np.flatnonzero(labels != IGNORED)[:4]:
            before = tokenizer.decode(tokens[max(place - 8, 0) : place])
            after = tokenizer.decode(tokens[place + 1 :][:8])
            answer = tokenizer.decode([answers[place]])
            truth = tokenizer.decode([labels[place]])
            rows.append((f"{before} ___ {after}".replace("\n", " "), repr(answer), repr(truth)))
    return _table("held-out masked words", ("text", "model", "truth"), rows)


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(escape, row))
    text = io.StringIO()
    Console(width=110, file=text).print(table)
    return text.getvalue()


def finish(run: RunFolder, steps: int, figures: Row, samples: str) -> str:
    """Writes samples.txt, loss.png and summary.json; returns the text to print.

    `figures` are those of the last session. Losses come from metrics.jsonl, so that a run in several sessions ends with
    the same ones; those whose lines are lost are left out.
    """
    rows = read_metrics(run.metrics)
    losses = [row["loss"] for row in rows if "loss" in row]
    last = [row for row in rows if row["step"] == steps and "val_loss" in row]
    summary = {
        "steps": steps,
        "train_loss": losses[-1] if losses else None,
        **{name: value for row in last for name, value in row.items() if name != "step"},
        **figures,
        "devices": [str(device.device_kind) for device in jax.devices()],
        "versions": {"python": platform.python_version(), "jax-tformer": __version__}
        | {name: version(name) for name in _PACKAGES},
    }
    best, told_best = _find_best(rows)
    write_text(run.samples, samples)
    write_json(run.summary, summary | best)
    draw_losses(rows, run)
    shown = {name: summary[name] for name in ("train_loss", *_FIGURES[1:]) if summary.get(name) is not None}
    speed = f"{summary['tokens_per_second']:,.0f} tokens/s  " if summary["tokens_per_second"] else ""
    told = [
        f"{steps} steps  {format_figures(shown)}",
        *told_best,
        f"{summary['parameters']:,} parameters  {speed}{summary['wall_seconds']:.0f} s in all",
        f"everything is in {run.path}/: {run.picture.name}, {run.samples.name}, {run.summary.name}, checkpoints ...",
    ]
    return "\n".join([samples, *told])


def report(run: RunFolder, experiment: ExperimentConfig) -> str:
    """Draws loss.png and writes samples.txt for a run in any state; returns the text to print.

    Samples come from the newest checkpoint, as `experiment.sample` describes. If there is no checkpoint or the data is
    gone, a line says why there are none. Raises InputError if the run has logged nothing yet.
    """
    notes = list[str]()
    rows = read_metrics(run.metrics, notes)
    require(rows, f"the run in {run.path} has logged nothing yet; expected lines in {run.metrics.name}")
    draw_losses(rows, run)
    losses = {name: found[-1][name] for name in _FIGURES if (found := [row for row in rows if name in row])}
    told = [
        f"step {rows[-1]['step']} of {experiment.training.steps}  {format_figures(losses)}",
        *_find_best(rows)[1],
        *notes,
        f"drawn: {run.picture}",
    ]

    def held_out() -> Pipeline:
        pipeline = build_pipeline(experiment.data, experiment.training, trained.tokenizer)
        # The config of a stranger's run may name any file of the user's.
        require(
            pipeline.fingerprint == trained.fingerprint,
            "the data is not that of the run, so that nothing of it is shown; restore it, or its path",
        )
        return pipeline

    try:
        trained = load_trained(run)
        samples = sample_text(trained.net, trained.params, experiment, trained.tokenizer, held_out)
    except InputError as error:
        return "\n".join([*told, f"no samples: {error}"])
    write_text(run.samples, samples)
    return "\n".join([samples, *told, *trained.notes, f"sampled at step {trained.step}: {run.samples}"])


def _find_best(rows: list[Row]) -> tuple[Row, list[str]]:
    """Returns the figures of the best evaluation, whose checkpoint is kept, and a line about it unless it is the last.

    Both are empty where there is none.
    """
    evaluated = [(row["val_loss"], row["step"]) for row in rows if "val_loss" in row]
    if not evaluated:
        return {}, []
    loss, step = min(evaluated)
    told = f"best: val_loss {loss:.4f} at step {step} (generate.py --checkpoint best)"
    return {"best_step": step, "best_val_loss": loss}, [told] if step != evaluated[-1][1] else []


def draw_losses(rows: list[Row], run: RunFolder) -> None:
    """Draws the training and held-out losses over steps as loss.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=144, layout="constrained")
    axes = figure.subplots()
    trained, held_out = ([(row["step"], row[name]) for row in rows if name in row] for name in ("loss", "val_loss"))
    if trained:
        axes.plot(*zip(*trained, strict=True), color="#9db8d9", linewidth=1.2, label="training batch")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#b3471d", markersize=4, label="held out")
        step, loss = held_out[-1]
        axes.annotate(f"{loss:.3f}", (step, loss), xytext=(0, 8), textcoords="offset points", ha="right")
    axes.set_title(run.path.name, parse_math=False)
    axes.set(xlabel="step", ylabel="cross-entropy, nats per token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if trained or held_out:
        axes.legend(frameon=False)
    with named_errors(run.picture):
        figure.savefig(run.picture)
