"""Evaluates a model on held-out data: figures during training, and samples."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jax_tformer.config import IGNORED
from jax_tformer.data.batches import Pipeline
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.decoding.score import translation_scores
from jax_tformer.config.experiment import ExperimentConfig, MaskedTextData, PairData
from jax_tformer.functional import AnyTransformer, Params, transformer
from jax_tformer.decoding.answers import Answerer
from jax_tformer.runs.startup import compiler_options, for_other_shapes
from jax_tformer.decoding.prompts import Prompt, PromptReader
from jax_tformer.training.sharding import place_batch
from jax_tformer.training.step import evaluation_step, forward

Figures = dict[str, Any]
"""Name -> number, or a sentence that says why there is none."""
_PROMPT = 8
"""Held-out tokens that a sample continues if the tokenizer has no start token."""


class Evaluator:
    """Computes the held-out loss and, for pairs, exact match and BLEU of greedy decoding, or why there is no BLEU."""

    def __init__(self, net: AnyTransformer, data: object, pipeline: Pipeline, tokenizer: Tokenizer, mesh: Mesh) -> None:
        self._step = jax.jit(evaluation_step(net), compiler_options=compiler_options(net.config.compute.dtype))
        self._data, self._pipeline, self._tokenizer, self._mesh = data, pipeline, tokenizer, mesh
        self._translator = transformer(for_other_shapes(net.config)) if isinstance(data, PairData) else None

    def __call__(self, params: Params) -> Figures:
        """Returns val_loss (nats per token, over all tokens), val_perplexity, val_bits_per_byte, exact_match and bleu.

        If the held-out targets are too short for BLEU, no_bleu, a sentence, replaces bleu.
        """
        # Dispatches all batches before waiting for the first.
        with jax.set_mesh(self._mesh):
            dispatched = [self._step(params, place_batch(self._mesh, batch)) for batch in self._pipeline.evaluation]
        results = jax.device_get(dispatched)
        total, count = (sum(column) for column in zip(*((float(x), int(n)) for x, n in results), strict=True))
        loss = total / max(count, 1)
        figures: Figures = {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700.0))}
        if self._pipeline.bytes_per_token is not None:
            figures["val_bits_per_byte"] = loss / math.log(2) / self._pipeline.bytes_per_token
        if self._translator and isinstance(self._data, PairData) and self._pipeline.examples:
            sources, targets = zip(*self._pipeline.examples, strict=True)
            read = PromptReader.of_run(self._data, self._tokenizer, self._data.target_length)
            greedy = DecodingConfig(max_new_tokens=self._data.target_length)
            answers = Answerer(self._translator, params, self._tokenizer, greedy).best(map(read, sources))
            scores = translation_scores(answers, targets)
            figures["exact_match"] = scores.exact_match
            figures |= {"no_bleu": scores.no_bleu or ""} if scores.bleu is None else {"bleu": scores.bleu}
        return figures


def sample_text(
    net: AnyTransformer,
    params: Params,
    experiment: ExperimentConfig,
    tokenizer: Tokenizer,
    held_out: Callable[[], Pipeline],
) -> str:
    """Makes samples of text, translations or restored words, as `experiment.sample` describes, ready to print.

    Calls `held_out` if they need held-out data, which only texts with a start token do not.
    """
    data, sample, seed = experiment.data, experiment.sample, experiment.training.seed
    top_k = sample.top_k if sample.temperature else None
    decoding = DecodingConfig(sample.max_new_tokens, temperature=sample.temperature, top_k=top_k)
    if isinstance(data, MaskedTextData):
        return _restored(net, params, held_out(), tokenizer, sample.count)
    if isinstance(data, PairData):
        examples = (held_out().examples or [])[: sample.count]
        read = PromptReader.of_run(data, tokenizer, data.target_length)
        decoding = replace(decoding, max_new_tokens=data.target_length)
        answerer = Answerer(net, params, tokenizer, decoding, seed=seed, batch=max(len(examples), 1))
        return _translations(examples, answerer.best(read(source) for source, _ in examples))
    if tokenizer.start_id is not None:
        prompts = [[tokenizer.start_id]]
    else:
        prompts = held_out().evaluation[0]["tokens"][: sample.count, :_PROMPT].tolist()
    # At temperature 0 nothing is drawn, so all samples of a prompt would be equal.
    several = -(-sample.count // len(prompts)) if sample.temperature else 1
    decoding = replace(decoding, num_return_sequences=several)
    answerer = Answerer(
        net, params, tokenizer, decoding, seed=seed, context=data.context_length, ends=False, batch=len(prompts)
    )
    found = answerer.answers([Prompt("", prompt, sample.max_new_tokens) for prompt in prompts])
    rows = [[*prompt, *each.tokens] for prompt, of_prompt in zip(prompts, found, strict=True) for each in of_prompt]
    texts = map(tokenizer.decode, rows[: sample.count])
    return "\n".join(f"--- sample {number} ---\n{text.strip()}\n" for number, text in enumerate(texts, 1))


def _translations(examples: Sequence[tuple[str, str]], answers: Sequence[str]) -> str:
    rows = [
        (source, answer, "" if answer == target else target)
        for (source, target), answer in zip(examples, answers, strict=True)
    ]
    title = f"held-out examples, {sum(not differs for *_, differs in rows)} of {len(rows)} exact"
    return _table(title, ("source", "model", "expected, where it differs"), rows)


def _restored(net: AnyTransformer, params: Params, pipeline: Pipeline, tokenizer: Tokenizer, count: int) -> str:
    batch = pipeline.evaluation[0]
    logits = np.asarray(forward(net, params, {name: jnp.asarray(x) for name, x in batch.items()}).logits)
    rows = []
    for tokens, labels, scores in zip(batch["tokens"][:count], batch["labels"], logits, strict=False):
        for place in np.flatnonzero(labels != IGNORED)[:4]:
            before = tokenizer.decode(tokens[max(place - 8, 0) : place])
            after = tokenizer.decode(tokens[place + 1 :][:8])
            answer, truth = tokenizer.decode([scores[place].argmax()]), tokenizer.decode([labels[place]])
            rows.append((f"{before} ___ {after}".replace("\n", " "), repr(answer), repr(truth)))
    return _table("held-out words to restore", ("text", "model", "truth"), rows)


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(escape, row))
    text = io.StringIO()
    Console(width=110, file=text).print(table)
    return text.getvalue()
