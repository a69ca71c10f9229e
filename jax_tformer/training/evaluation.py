"""How good the model is on held-out data."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_tformer.data.batches import Batch as HostBatch
from jax_tformer.data.batches import Pipeline
from jax_tformer.data.pairs import pair_batcher
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.decoding import translator
from jax_tformer.errors import InputError
from jax_tformer.experiment import PairData
from jax_tformer.models.transformer import Transformer
from jax_tformer.nn.arrays import Params
from jax_tformer.training.step import Batch, evaluation_step


class Evaluator:
    """Held-out loss, and exact match of greedy decoding where there are pairs."""

    def __init__(
        self,
        net: Transformer,
        data: object,
        pipeline: Pipeline,
        tokenizer: Tokenizer,
        place: Callable[[HostBatch], Batch],
    ) -> None:
        self._step = jax.jit(evaluation_step(net))
        self._pipeline, self._place = pipeline, place
        self._translate = Translator(net, data, tokenizer) if isinstance(data, PairData) else None

    def __call__(self, params: Params) -> dict[str, float]:
        """val_loss (nats a token, every token counting once), val_perplexity, val_bits_per_byte, exact_match."""
        total, count = 0.0, 0
        for batch in self._pipeline.evaluation:
            loss, tokens = self._step(params, self._place(batch))
            total, count = total + float(loss), count + int(tokens)
        loss = total / max(count, 1)
        figures = {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700.0))}
        if self._pipeline.bytes_per_token is not None:
            figures["val_bits_per_byte"] = loss / math.log(2) / self._pipeline.bytes_per_token
        if self._translate is not None and self._pipeline.examples:
            sources, targets = zip(*self._pipeline.examples, strict=True)
            answers = self._translate(params, list(sources))
            figures["exact_match"] = float(np.mean([a == t for a, t in zip(answers, targets, strict=True)]))
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
        self._batcher, self._batch_size = pair_batcher(data, tokenizer), batch_size
        self._translate = translator(
            net,
            length=data.target_length,
            start_id=self._batcher.start_id,
            end_id=self._batcher.end_id,
            temperature=temperature,
            top_k=top_k,
        )

    def __call__(self, params: Params, sources: list[str], seed: int = 0) -> list[str]:
        """The translation of each source; raises InputError for one that is too long or has unknown characters."""
        answers: list[str] = []
        for first in range(0, len(sources), self._batch_size):
            part = sources[first : first + self._batch_size]
            # Always the same number of rows, so that one compilation serves all.
            rows = part + part[-1:] * (self._batch_size - len(part))
            encoded = self._batcher.encode([(source, "") for source in rows])
            for text, pair in zip(part, encoded, strict=False):
                if not self._batcher.fits(pair):
                    raise InputError(
                        f"the source {text[:40]!r} has {len(pair[0])} tokens; expected at most "
                        f"{self._batcher.source_length - 1}"
                    )
            batch = self._batcher.batch(encoded)
            key = jax.random.fold_in(jax.random.key(seed), first)
            source, mask = jnp.asarray(batch["source"]), jnp.asarray(batch["source_mask"])
            targets = np.asarray(self._translate(params, source, mask, key))
            decode = self._batcher.tokenizer.decode
            answers += [decode(_until(row, self._batcher.end_id)) for row in targets[: len(part)]]
        return answers


def _until(row: np.ndarray, end_id: int) -> list[int]:
    """The ids before the first `end_id`."""
    ends = np.flatnonzero(row == end_id)
    return row[: ends[0] if len(ends) else len(row)].tolist()
