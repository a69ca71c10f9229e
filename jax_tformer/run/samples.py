"""What a finished model says: samples of text, worked translations, restored words."""

import io
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jax_tformer.data.batches import Pipeline
from jax_tformer.data.ids import IGNORED
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.decoding.generation import generate
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.experiment import ExperimentConfig, MaskedTextData, PairData, TextData
from jax_tformer.models.transformer import Transformer
from jax_tformer.nn.arrays import Params
from jax_tformer.run.evaluation import Translator
from jax_tformer.training.step import apply_to_batch

_PROMPT = 8


def begin_with_data(data: TextData | PairData, tokenizer: Tokenizer) -> bool:
    """Whether samples begin with held-out data: all but those of language models that have a start token."""
    return isinstance(data, PairData | MaskedTextData) or tokenizer.start_id is None


def sample_text(
    net: Transformer, params: Params, experiment: ExperimentConfig, pipeline: Pipeline | None, tokenizer: Tokenizer
) -> str:
    """Samples as `experiment.sample` asks for them, ready to print; `pipeline` only where they begin with its data."""
    data, sample = experiment.data, experiment.sample
    if isinstance(data, TextData) and not begin_with_data(data, tokenizer):
        return _continuations(net, params, experiment, data, [], tokenizer)
    assert pipeline is not None
    if isinstance(data, PairData):
        return _translations(net, params, experiment, data, pipeline, tokenizer)
    if isinstance(data, MaskedTextData):
        return _restored(net, params, pipeline, tokenizer, sample.count)
    # A tokenizer without a start token has no way to say "begin": a few held-out tokens do.
    begun = pipeline.evaluation[0]["tokens"][: sample.count, :_PROMPT].tolist()
    return _continuations(net, params, experiment, data, begun, tokenizer)


def _continuations(
    net: Transformer,
    params: Params,
    experiment: ExperimentConfig,
    data: TextData,
    begun: list[list[int]],
    tokenizer: Tokenizer,
) -> str:
    sample = experiment.sample
    prompts = begun if tokenizer.start_id is None else [[tokenizer.start_id]]
    # Nothing is drawn at temperature 0, so that one sample of a prompt is as good as many.
    samples = -(-sample.count // len(prompts)) if sample.temperature else 1
    found = generate(
        net,
        params,
        prompts,
        DecodingConfig(
            max_new_tokens=sample.max_new_tokens,
            temperature=sample.temperature,
            top_k=sample.top_k if sample.temperature else None,
            num_return_sequences=samples,
        ),
        seed=experiment.training.seed,
        context=data.context_length,
    )
    rows = [[*prompt, *row] for number, prompt in enumerate(prompts) for row in found.rows(number)]
    texts = map(tokenizer.decode, rows[: sample.count])
    return "\n".join(f"--- sample {number} ---\n{text.strip()}\n" for number, text in enumerate(texts, 1))


def _translations(
    net: Transformer,
    params: Params,
    experiment: ExperimentConfig,
    data: PairData,
    pipeline: Pipeline,
    tokenizer: Tokenizer,
) -> str:
    sample = experiment.sample
    examples = (pipeline.examples or [])[: sample.count]
    translate = Translator(
        net,
        data,
        tokenizer,
        temperature=sample.temperature,
        top_k=sample.top_k,
        batch_size=max(len(examples), 1),
    )
    answers = translate(params, [source for source, _ in examples], experiment.training.seed)
    rows = [
        (source, answer, "" if answer == target else target)
        for (source, target), answer in zip(examples, answers, strict=True)
    ]
    title = f"held-out examples, {sum(not differs for *_, differs in rows)} of {len(rows)} exact"
    return _table(title, ("source", "model", "expected, where it differs"), rows)


def _restored(net: Transformer, params: Params, pipeline: Pipeline, tokenizer: Tokenizer, count: int) -> str:
    batch = pipeline.evaluation[0]
    logits = np.asarray(apply_to_batch(net, params, {name: jnp.asarray(x) for name, x in batch.items()}))
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
