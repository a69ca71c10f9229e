"""A trained model that answers texts with texts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jax_tformer.data.text_stream import TextStream, added_text
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.decoding import DecodingConfig, generate, stream
from jax_tformer.experiment import PairData, TextData
from jax_tformer.generating.items import Item, PromptReader, Reader, SourceReader
from jax_tformer.generating.options import GenerateOptions
from jax_tformer.models.transformer import Transformer
from jax_tformer.nn.arrays import Params
from jax_tformer.training.run_folder import RunFolder
from jax_tformer.training.trained import load_trained


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
    """Generates from items, in batches or as a stream; `read` makes items of texts."""

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
    ) -> None:
        """`params`: with their layers apart. `context`: where a text begins to slide; None where none does."""
        self.read = read
        self._net, self._params, self._tokenizer = net, params, tokenizer
        self._decoding, self._context, self._seed = decoding, context, seed
        self._continues = net.config.encoder is None
        self._rows = 1

    def answers(self, items: Sequence[Item]) -> list[list[Completion]]:
        """The completions of each item, best or first one first."""
        found: dict[int, list[Completion]] = {}
        for places, new in self._parts(items):
            part = [items[place] for place in places]
            context = self._context if self._slides(part[0]) else None
            prompts = [item.ids for item in part]
            if context is None:
                # As many rows as ever, so that the last batch needs no compilation of its own.
                self._rows = max(self._rows, len(part))
                prompts += prompts[-1:] * (self._rows - len(prompts))
            made = generate(
                self._net, self._params, prompts, self._with(new), **self._ids, seed=self._seed, context=context
            )
            for row, (place, item) in enumerate(zip(places, part, strict=True)):
                scores = [None] * len(made.lengths[row]) if made.scores is None else made.scores[row].tolist()
                pairs = zip(made.rows(row), scores, strict=True)
                found[place] = [self._completion(item, tokens, score) for tokens, score in pairs]
        return [found[place] for place in range(len(items))]

    def stream(self, item: Item) -> Iterator[str]:
        """The text of an item's only answer: a piece, perhaps empty, for every token, and one that concludes."""
        context = self._context if self._slides(item) else None
        text = TextStream(self._tokenizer, item.ids if self._continues else ())
        tokens = stream(
            self._net, self._params, [item.ids], self._with(item.limit), **self._ids, seed=self._seed, context=context
        )
        for token in map(np.ndarray.item, tokens):
            yield "" if token == self._tokenizer.end_id else text.push(token)
        yield text.finish()

    @property
    def _ids(self) -> dict[str, int | None]:
        return {"end_id": self._tokenizer.end_id, "start_id": self.read.start_id}

    def _with(self, new: int) -> DecodingConfig:
        return replace(self._decoding, max_new_tokens=new)

    def _parts(self, items: Sequence[Item]) -> list[tuple[list[int], int]]:
        """Which items are generated from together, and how many tokens.

        All, as far as possible, up to the largest limit of all texts, so that all batches are alike: what a text has
        too much is cut off. But a beam search depends on the limit, learned positions end where they end, and texts
        that slide are another program.
        """
        parts: dict[tuple[bool, int], list[int]] = {}
        longest = max(len(item.ids) for item in items)
        positions = self._net.config.output_stack.max_positions if self._continues else None
        beyond = positions is not None and longest + self.read.most > positions
        apart = beyond or self._decoding.num_beams > 1 or items[0].line.place is None
        for place, item in enumerate(items):
            parts.setdefault((self._slides(item), item.limit if apart else self.read.most), []).append(place)
        return [(places, new) for (_, new), places in parts.items()]

    def _slides(self, item: Item) -> bool:
        return self._context is not None and len(item.ids) + item.limit > self._context

    def _completion(self, item: Item, tokens: list[int], score: float | None) -> Completion:
        tokens, end = tokens[: item.limit], self._tokenizer.end_id
        finished = end is not None and end in tokens
        tokens = tokens[: tokens.index(end)] if end is not None and finished else tokens
        before = item.ids if self._continues else []
        return Completion(added_text(self._tokenizer, before, tokens), tokens, finished, score)


def load_speaker(run: RunFolder, data: TextData | PairData, options: GenerateOptions) -> Speaker:
    """The model of a run, as `options` want it to speak; raises InputError if something of the run is missing."""
    decoding = options.decoding(isinstance(data, PairData))
    trained = load_trained(run)
    read: Reader
    if isinstance(data, PairData):
        read = SourceReader(data, trained.tokenizer, options.max_new_tokens)
    else:
        read = PromptReader(data, trained.tokenizer, options.max_new_tokens, options.slide)
    return Speaker(
        trained.net,
        # The stacked ones end with this function.
        trained.net.unstacked(trained.params),
        trained.tokenizer,
        read,
        decoding,
        context=data.context_length if options.slide and isinstance(data, TextData) else None,
        seed=options.seed,
    )
