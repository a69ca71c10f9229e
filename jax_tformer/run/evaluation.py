"""How good the model is on held-out data."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from jax_tformer.data.batches import Pipeline
from jax_tformer.data.pairs import pair_batcher
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.decoding.generation import generate
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.decoding.translation_scores import translation_scores
from jax_tformer.errors import InputError
from jax_tformer.experiment import PairData
from jax_tformer.models.transformer import Transformer, transformer
from jax_tformer.nn.arrays import Params
from jax_tformer.run.fitting import for_other_shapes
from jax_tformer.run.startup import compiler_options
from jax_tformer.sharding import place_batch
from jax_tformer.training.step import evaluation_step

Figures = dict[str, Any]
"""By name: numbers, and a sentence in place of one that would mean nothing."""


class Evaluator:
    """Held-out loss, and where there are pairs, exact match of greedy decoding and BLEU, or why there is no BLEU."""

    def __init__(
        self,
        net: Transformer,
        data: object,
        pipeline: Pipeline,
        tokenizer: Tokenizer,
        mesh: Mesh,
    ) -> None:
        self._step = jax.jit(evaluation_step(net), compiler_options=compiler_options(net.config.compute.dtype))
        self._pipeline, self._mesh = pipeline, mesh
        other = transformer(for_other_shapes(net.config))
        self._translate = Translator(other, data, tokenizer) if isinstance(data, PairData) else None

    def __call__(self, params: Params) -> Figures:
        """val_loss (nats a token, every token counting once), val_perplexity, val_bits_per_byte, exact_match, bleu.

        In place of bleu stands no_bleu, a sentence, where the held-out targets are too short for it.
        """
        # All are dispatched before the first is waited for.
        with jax.set_mesh(self._mesh):
            dispatched = [self._step(params, place_batch(self._mesh, batch)) for batch in self._pipeline.evaluation]
        results = jax.device_get(dispatched)
        total, count = (sum(column) for column in zip(*((float(x), int(n)) for x, n in results), strict=True))
        loss = total / max(count, 1)
        figures: Figures = {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700.0))}
        if self._pipeline.bytes_per_token is not None:
            figures["val_bits_per_byte"] = loss / math.log(2) / self._pipeline.bytes_per_token
        if self._translate is not None and self._pipeline.examples:
            sources, targets = zip(*self._pipeline.examples, strict=True)
            answers = self._translate(params, list(sources))
            scores = translation_scores(answers, targets)
            figures["exact_match"] = scores.exact_match
            if scores.bleu is None:
                figures["no_bleu"] = scores.no_bleu or ""
            else:
                figures["bleu"] = scores.bleu
        return figures


class Translator:
    """Texts in, texts out, by an encoder-decoder that reads and writes with one tokenizer."""

    def __init__(
        self,
        net: Transformer,
        data: PairData,
        tokenizer: Tokenizer,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        batch_size: int = 128,
    ) -> None:
        self._net, self._batcher, self._batch_size = net, pair_batcher(data, tokenizer), batch_size
        self._decoding = DecodingConfig(
            max_new_tokens=data.target_length, temperature=temperature, top_k=top_k if temperature else None
        )

    def __call__(self, params: Params, sources: list[str], seed: int = 0) -> list[str]:
        """The translation of each source; raises InputError for one that is too long or has unknown characters."""
        # Once, and not in every batch.
        params = self._net.unstacked(params)
        batcher, answers = self._batcher, list[str]()
        for first in range(0, len(sources), self._batch_size):
            part = sources[first : first + self._batch_size]
            # Always the same number of rows, so that one compilation serves all.
            encoded = batcher.encode([(source, "") for source in part + part[-1:] * (self._batch_size - len(part))])
            for text, pair in zip(part, encoded, strict=False):
                if not batcher.fits(pair):
                    raise InputError(
                        f"the source {text[:40]!r} has {len(pair[0])} tokens; expected at most "
                        f"{batcher.source_length - 1}"
                    )
            found = generate(
                self._net,
                params,
                [[*source.tolist(), batcher.end_id] for source, _ in encoded],
                self._decoding,
                end_id=batcher.end_id,
                start_id=batcher.start_id,
                seed=seed,
            )
            answers += [
                batcher.tokenizer.decode(_until(found.rows(row)[0], batcher.end_id)) for row in range(len(part))
            ]
        return answers


def _until(row: list[int], end_id: int) -> list[int]:
    """The ids before the first `end_id`."""
    return row[: row.index(end_id) if end_id in row else len(row)]
