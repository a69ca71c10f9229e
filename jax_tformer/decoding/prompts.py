"""What is given to a generation: checked, and brought into rectangular form."""

import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tformer.config import require
from jax_tformer.data.ids import check_ids
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.models.transformer import Transformer

Ids = Sequence[int] | np.ndarray
"""Token ids of one text."""
STEP = 32
"""Lengths are rounded up to a multiple of this, so that one compilation serves prompts of many lengths."""


class Prompts(NamedTuple):
    """The prompts as arrays, and how much room they and their continuations take."""

    tokens: np.ndarray
    """int32 `[B, P]`, padded on the left; for an encoder-decoder the start token, P = 1."""
    mask: np.ndarray
    """bool `[B, P]`, True at tokens."""
    source: tuple[np.ndarray, np.ndarray] | None
    """int32 and bool `[B, S]`, padded on the right: what an encoder-decoder translates."""
    limits: np.ndarray
    """int32 `[B]`, new tokens of each at most."""
    hashes: np.ndarray
    """uint32 `[B]`, of each prompt's tokens, for its own random numbers."""
    slots: int
    """Of the cache, padding included."""
    slides: bool
    """When the slots are full, the newer half is kept and the generation goes on."""

    def arrays(self) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None, jax.Array]:
        """Tokens, mask, source and limits on the device."""
        source = None if self.source is None else (jnp.asarray(self.source[0]), jnp.asarray(self.source[1]))
        return jnp.asarray(self.tokens), jnp.asarray(self.mask), source, jnp.asarray(self.limits)


class Request(NamedTuple):
    """What a caller of `generate` has asked for."""

    prompts: Sequence[Ids]
    limits: np.ndarray
    """int32 `[B]`, new tokens of each at most."""
    start_id: int | None
    context: int | None

    def part(self, rows: Sequence[int]) -> "Request":
        """Of these prompts alone."""
        return self._replace(prompts=[self.prompts[row] for row in rows], limits=self.limits[rows])

    @property
    def slides(self) -> bool:
        """Whether a text grows beyond the context."""
        lengths = [len(prompt) for prompt in self.prompts]
        return self.context is not None and any(np.add(lengths, self.limits) - 1 > self.context)

    def together(self) -> list[list[int]]:
        """Which prompts are generated from together: all; but where texts slide, those of about one length.

        Padding fills slots and so decides where a text slides, which must depend on nothing else in the batch.
        """
        groups: dict[int, list[int]] = {}
        for row, prompt in enumerate(self.prompts):
            groups.setdefault(rounded(len(prompt), step=self._step) if self.slides else 0, []).append(row)
        return list(groups.values())

    def prepared(self, net: Transformer) -> Prompts:
        """As arrays; of prompts that go together."""
        prompts, most = self.prompts, int(self.limits.max())
        hashes = np.array([zlib.crc32(np.asarray(prompt, "<i4").tobytes()) for prompt in prompts], np.uint32)
        longest, more = max(map(len, prompts)), rounded(most - 1)
        encoder, decoder = net.config.encoder, net.config.output_stack
        if encoder is not None:
            tokens = np.full((len(prompts), 1), self.start_id, np.int32)
            source = padded(prompts, rounded(longest, encoder.max_positions), side="right")
            return Prompts(tokens, np.ones(tokens.shape, bool), source, self.limits, hashes, 1 + more, False)
        if self.context is not None and self.slides:
            length = rounded(longest, self.context, step=self._step)
            return Prompts(*padded(prompts, length, side="left"), None, self.limits, hashes, self.context, True)
        length = rounded(longest, decoder.max_positions)
        return Prompts(*padded(prompts, length, side="left"), None, self.limits, hashes, length + more, False)

    @property
    def _step(self) -> int:
        """Less where texts slide, so that padding leaves most of a small context to them."""
        return STEP if self.context is None else max(min(STEP, self.context // 4), 1)


def request(
    net: Transformer,
    prompts: Sequence[Ids],
    decoding: DecodingConfig,
    *,
    limits: Sequence[int] | None,
    end_id: int | None,
    start_id: int | None,
    context: int | None,
) -> Request:
    """What `generate` is asked for; raises InputError for what it cannot work with."""
    config, vocabulary = net.config, net.config.vocab_size or 0
    require_speaker(net)
    require(len(prompts) > 0, "there are no prompts; expected one at least")
    for number, prompt in enumerate(prompts, 1):
        require(len(prompt) > 0, f"prompt {number} of {len(prompts)} has no tokens; expected one at least")
        check_ids(np.asarray(prompt), vocabulary)
    for token in (end_id, start_id):
        check_ids(np.asarray([] if token is None else [token]), vocabulary)
    most = decoding.max_new_tokens
    allowed = np.full(len(prompts), most) if limits is None else np.minimum(limits, most)
    require(len(allowed) == len(prompts), f"there are {len(allowed)} limits; expected one a prompt, {len(prompts)}")
    require(bool(allowed.min() >= 1), f"a limit is {allowed.min()}; expected at least 1 new token")
    longest, positions = max(map(len, prompts)), config.output_stack.max_positions
    if config.encoder is not None:
        require(context is None, f"context is {context}; expected none for an encoder-decoder, which has no long text")
        require(start_id is not None, "start_id is None; an encoder-decoder begins with a token that says so")
        require_positions(config.encoder.max_positions, longest, "a source")
        require_positions(positions, int(allowed.max()), "with the start token, a translation")
    elif context is None:
        # The last token is chosen and not read.
        together = int(max(np.add([len(prompt) for prompt in prompts], allowed - 1)))
        require_positions(positions, together, "with its new tokens but the last, which is not read, a text")
    else:
        require(context >= 2, f"context is {context}; expected at least 2 tokens")
        require_positions(positions, context, "the context")
        require(longest <= context, f"a prompt has {longest} tokens; expected at most {context}, the context")
    return Request(prompts, allowed.astype(np.int32), start_id, context)


def require_speaker(net: Transformer) -> None:
    """Raises InputError unless the model gives every next token a probability."""
    require(
        net.config.decoder is not None and net.config.head != "none",
        "the model has no decoder with a head on it; expected one that gives the next token a probability",
    )


def padded(rows: Sequence[Ids], length: int, *, side: Literal["left", "right"]) -> tuple[np.ndarray, np.ndarray]:
    """int32 and bool `[B, length]`: the rows with padding on `side`, and where they are not padding."""
    ids, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for number, row in enumerate(rows):
        place = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = row, True
    return ids, mask


def require_positions(limit: int | None, length: int, what: str) -> None:
    """Raises InputError where `what`, of `length` tokens, is longer than the learned positions of the model."""
    require(limit is None or length <= limit, f"{what} has {length} tokens; the model has {limit} learned positions")


def rounded(length: int, limit: int | None = None, *, step: int = STEP) -> int:
    """`length` rounded up to a multiple of `step`, or up to `limit`."""
    up = -(-length // step) * step
    return up if limit is None else min(up, limit)
