"""A trained model that answers texts with texts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jax_tformer.data.text_stream import TextStream, added_text
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.decoding.generation import generate, stream
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.experiment import PairData, TextData
from jax_tformer.models.transformer import Transformer
from jax_tformer.nn.arrays import Params
from jax_tformer.run.command_line import checkpoint_step
from jax_tformer.run.generate_options import GenerateOptions
from jax_tformer.run.items import Item, Reader
from jax_tformer.run.run_folder import RunFolder
from jax_tformer.run.trained import load_trained


class Completion(NamedTuple):
    """One answer to a text."""

    text: str
    tokens: list[int]
    """Without the end token."""
    finished: bool
    """The end token came."""
    score: float | None
    """Of a beam search: the log-probability over the length penalty."""

    @property
    def made(self) -> int:
        """Tokens that the model made, the end token included."""
        return len(self.tokens) + self.finished


class Speaker:
    """Generates from items that `read` has made of texts, in batches or as a stream."""

    def __init__(
        self,
        net: Transformer,
        params: Params,
        tokenizer: Tokenizer,
        read: Reader,
        decoding: DecodingConfig,
        *,
        context: int | None,
        seed: int,
        notes: Sequence[str],
    ) -> None:
        """`params`: with their layers apart. `context`: where a text begins to slide; None where none does."""
        self.notes = notes
        """What the user should know of the model, a line each."""
        self._read = read
        self._net, self._params, self._tokenizer = net, params, tokenizer
        self._decoding, self._context, self._seed = replace(decoding, max_new_tokens=read.most), context, seed
        self._continues = net.config.encoder is None
        self._rows = {False: 1, True: 1}

    def answers(self, items: Sequence[Item]) -> list[list[Completion]]:
        """The completions of each item, best or first one first."""
        found: dict[int, list[Completion]] = {}
        for slides in (False, True):
            places = [place for place, item in enumerate(items) if self._slides(item) == slides]
            if not places:
                continue
            part = [items[place] for place in places]
            # As many rows as ever, so that the last batch needs no compilation of its own.
            self._rows[slides] = max(self._rows[slides], len(part))
            filled = part + part[-1:] * (self._rows[slides] - len(part))
            made = generate(
                self._net, self._params, [item.ids for item in filled], self._decoding, **self._options(filled)
            )
            for row, (place, item) in enumerate(zip(places, part, strict=True)):
                scores = [None] * len(made.lengths[row]) if made.scores is None else made.scores[row].tolist()
                pairs = zip(made.rows(row), scores, strict=True)
                found[place] = [self._completion(item, tokens, score) for tokens, score in pairs]
        return [found[place] for place in range(len(items))]

    def stream(self, item: Item) -> Iterator[str]:
        """The text of an item's only answer: a piece, perhaps empty, for every token, and one that concludes."""
        text = TextStream(self._tokenizer, item.ids if self._continues else ())
        tokens = stream(self._net, self._params, [item.ids], self._decoding, **self._options([item]))
        for token in map(np.ndarray.item, tokens):
            yield "" if token == self._tokenizer.end_id else text.push(token)
        yield text.finish()

    def _options(self, items: Sequence[Item]) -> dict[str, Any]:
        return {
            "limits": [item.limit for item in items],
            "end_id": self._tokenizer.end_id,
            "start_id": self._read.start_id,
            "seed": self._seed,
            "context": self._context if self._slides(items[0]) else None,
        }

    def _slides(self, item: Item) -> bool:
        return self._context is not None and len(item.ids) + item.limit > self._context

    def _completion(self, item: Item, tokens: list[int], score: float | None) -> Completion:
        end = self._tokenizer.end_id
        finished = end is not None and end in tokens
        tokens = tokens[: tokens.index(end)] if end is not None and finished else tokens
        before = item.ids if self._continues else []
        return Completion(added_text(self._tokenizer, before, tokens), tokens, finished, score)


def load_speaker(run: RunFolder, data: TextData | PairData, read: Reader, options: GenerateOptions) -> Speaker:
    """The model of a run, as `options` want it to speak; raises InputError if something of the run is missing."""
    decoding = options.decoding(isinstance(data, PairData))
    trained = load_trained(run, checkpoint_step(options.checkpoint))
    return Speaker(
        trained.net,
        # The stacked ones end with this function.
        trained.net.unstacked(trained.params, single=options.one_by_one),
        trained.tokenizer,
        read,
        decoding,
        context=data.context_length if options.slide and isinstance(data, TextData) else None,
        seed=options.seed,
        notes=[
            *trained.skipped,
            *([] if options.checkpoint == "newest" else [f"the checkpoint of step {trained.step}"]),
        ],
    )
