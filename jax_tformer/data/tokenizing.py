"""Writes shards: documents become ids on all cores, in their order, and a killed run goes on where it was.

Whatever the number of processes, the shards are the same, to the byte.
"""

import ctypes
import multiprocessing
import os
import signal
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_tformer.config.errors import Positive, Rate, checked, explained, require
from jax_tformer.config.experiment import TokenizerConfig
from jax_tformer.data.sources import FORMATS, HEADER_BYTES, MANIFEST, digest, documents, is_empty, seal
from jax_tformer.data.tokenizers import Pieces, Tokenizer, load_tokenizer
from jax_tformer.files import Json, locked, read_json, require_new_folder, sync, write_json

PARTS = ("train", "val")
_UNFINISHED = "unfinished.json"
_TOGETHER = 2**20
"""Characters that are encoded together."""
_SAVED_EVERY = 64


@checked
class ShardsConfig:
    """How documents become ids, and which are held out."""

    tokenizer: TokenizerConfig = TokenizerConfig("bytes")
    """How text becomes ids. The tokenizer is saved with the shards."""
    column: str = "text"
    """The field of JSON lines, or the column of Parquet, that holds the text."""
    held_out: Rate = 0.005
    """Fraction of the documents kept for evaluation; the hash of a document decides. 0: none."""
    shard_size: Positive = 100_000_000
    """Ids in a file."""

    def __post_init__(self) -> None:
        require(self.shard_size < 2**31, f"shard_size is {self.shard_size}; expected fewer than 2^31")


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Whether the document with this SHA-256 is among the `fraction` that is held out."""
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def read_documents(
    path: Path, config: ShardsConfig, *, gaps: bool = True
) -> Iterator[tuple[Iterable[str], bytes, int]]:
    """Yields the documents of a file, in pieces (see `Pieces`), each with its SHA-256 and its size in bytes (UTF-8).

    Raises InputError if the file cannot be read, or a document is empty.
    """
    for place, blocks in documents(path, config.column):
        require(not is_empty(blocks), f"{place}: the text is empty; expected text; remove it")
        hashed = sha256()
        size = 0
        for block in blocks:
            hashed.update(block)
            size += len(block)
        yield Pieces(blocks, gaps=gaps), hashed.digest(), size


class _Group(NamedTuple):
    """Texts that are encoded together."""

    texts: list[tuple[int, bool, str]]
    """The part of each, whether a document begins, and the text."""
    state: Json
    """A hash of all that has been read by now, and how many documents and bytes each part has of it."""


def _groups(
    files: Sequence[Path], config: ShardsConfig, tokenizer: Tokenizer, advance: Callable[[int], Any]
) -> Iterator[_Group]:
    """Yields the texts of `files` in groups, the last of which may be empty; says how much of the files it has read."""
    texts = list[tuple[int, bool, str]]()
    waiting = 0
    seen = sha256()
    counts = [[0, 0] for _ in PARTS]

    def group() -> _Group:
        return _Group(texts, {"seen": seen.hexdigest(), "counts": [*map(list, counts)]})

    for path in files:
        left = path.stat().st_size
        for pieces, hashed, size in read_documents(path, config, gaps=tokenizer.has_gaps):
            part = int(is_held_out(hashed, config.held_out))
            counts[part][0] += 1
            counts[part][1] += size
            for begin, piece in enumerate(pieces if tokenizer.can_be_cut else ["".join(pieces)]):
                texts.append((part, not begin, piece))
                seen.update(hashed)
                waiting += len(piece)
                if waiting >= _TOGETHER:
                    # Compressed text is longer than its file.
                    advance(read := min(left, waiting))
                    left -= read
                    yield group()
                    texts = []
                    waiting = 0
        advance(left)
    yield group()


_loaded = cache(load_tokenizer)


def _encode(folder: Path, texts: Sequence[tuple[int, bool, str]]) -> list[np.ndarray]:
    """Returns the ids of each part, `id_type`[N]; what separates documents stands before each."""
    tokenizer = _loaded(folder)
    begin = np.array(tokenizer.separator, np.int32)
    found = [[np.empty(0, np.int32)] for _ in PARTS]
    for (part, begins, _), ids in zip(texts, tokenizer.encode_batch([text for *_, text in texts]), strict=True):
        found[part] += [begin, ids] if begins else [ids]
    return [np.concatenate(ids, dtype=tokenizer.id_type, casting="unsafe") for ids in found]


def write_shards(out: Path, files: Sequence[Path], tokenizer: Tokenizer, config: ShardsConfig, workers: int) -> str:
    """Writes the documents of `files` to the folder `out`, with the tokenizer and a manifest; returns a line about it.

    Goes on where a killed call with the same settings and texts has stopped. Raises InputError if a document cannot be
    read or encoded, after what is before it has been written; if `out` holds something else; or if another process
    writes it.
    """
    from rich.console import Console
    from rich.progress import Progress

    out.mkdir(parents=True, exist_ok=True)
    # Each worker is one core; what the library starts beside would only be in its way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    waiting = deque[tuple[_Group, Future[list[np.ndarray]]]]()
    console = Console(stderr=True)
    with locked(out, out), Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        writer = _Writer(out, tokenizer, config)
        task = bar.add_task("tokenizing", total=sum(path.stat().st_size for path in files))
        groups = _groups(files, config, tokenizer, lambda size: bar.advance(task, size))
        require(
            # Takes the groups that are written already.
            not (seen := writer.state["seen"]) or any(group.state["seen"] == seen for group in groups),
            f"the texts are not those that {out} was begun with; restore them, or choose another folder",
        )

        def write() -> None:
            group, ids = waiting[0]
            writer.write(group, ids.result())
            waiting.popleft()

        ended = "a worker was ended, perhaps for want of memory; give fewer --workers; the same command goes on"
        try:
            with (
                explained(ended, BrokenProcessPool),
                ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _end_with_parent) as pool,
            ):
                try:
                    for group in groups:
                        waiting.append((group, pool.submit(_encode, out, group.texts)))
                        if len(waiting) > 2 * workers:
                            write()
                finally:
                    while waiting:
                        write()
        finally:
            writer.save()
        return writer.finish()


def _end_with_parent() -> None:
    """Makes Linux end a worker whose parent was killed; the parent alone answers Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        # It was killed before Linux knew.
        os._exit(1)


class _Writer:
    """Writes ids to a folder, and in `state` how far it is; begins where a killed one has stopped."""

    def __init__(self, out: Path, tokenizer: Tokenizer, config: ShardsConfig) -> None:
        self._out = out
        self._size = config.shard_size
        self._unsaved = set[Path]()
        fits = (known for known in FORMATS.items() if tokenizer.vocab_size <= np.iinfo(known[1][1]).max + 1)
        self._format, (self._version, self._kind) = next(fits)
        settings = {**asdict(config), "tokenizer": sha256(tokenizer.as_json.encode()).hexdigest()}
        self.state: Json = {"settings": settings, "groups": 0, "seen": "", "tokens": [0, 0]}
        if (out / _UNFINISHED).exists():
            self.state = read_json(out / _UNFINISHED)
        else:
            require_new_folder(out)
        require(
            self.state["settings"] == settings,
            f"{out} was begun with another tokenizer or other settings; give the same, or choose another folder",
        )
        self.save()
        tokenizer.save(out)

    def write(self, group: _Group, found: Sequence[np.ndarray]) -> None:
        """Writes the ids of each part after those before them."""
        for part, tokens, ids in zip(PARTS, before := self.state["tokens"], found, strict=True):
            for first in range(tokens - tokens % self._size, tokens + len(ids), self._size):
                now = ids[max(first - tokens, 0) : first + self._size - tokens].astype(self._kind)
                used = max(tokens - first, 0)
                header = struct.pack("<3i", self._format, self._version, used + len(now))
                with open(path := self._path(part, first), "r+b" if used else "wb") as file:
                    file.write(header.ljust(HEADER_BYTES, b"\0"))
                    file.seek(used * now.itemsize, os.SEEK_CUR)
                    file.write(now.tobytes())
                    file.truncate()
                self._unsaved.add(path)
        after = [tokens + len(ids) for tokens, ids in zip(before, found, strict=True)]
        self.state = {**self.state, **group.state, "tokens": after, "groups": self.state["groups"] + 1}
        if self.state["groups"] % _SAVED_EVERY == 0:
            self.save()

    def save(self) -> None:
        """Makes all that is written outlast a power cut."""
        for path in self._unsaved:
            sync(path)
        self._unsaved.clear()
        write_json(self._out / _UNFINISHED, self.state)

    def finish(self) -> str:
        """Writes the manifest; returns a line about the shards."""
        files = [self._out / "tokenizer.json", self._out / "tokenizer_config.json"]
        parts = {}
        told = []
        for part, tokens, (count, size) in zip(PARTS, self.state["tokens"], self.state["counts"], strict=True):
            files += [self._path(part, first) for first in range(0, tokens, self._size)]
            parts[part] = {"documents": count, "tokens": tokens, "text_bytes": size}
            told.append(f"{count:,} documents, {tokens:,} tokens")
        digests = {path.name: digest(path) for path in files}
        manifest = {"files": digests, "settings": self.state["settings"], **parts}
        write_json(self._out / MANIFEST, {**manifest, "checksum": seal(manifest)})
        (self._out / _UNFINISHED).unlink()
        return f"{self._out}: {told[0]} to train on; {told[1]} held out"

    def _path(self, part: str, first: int) -> Path:
        return self._out / f"{part}_{first // self._size:06}.bin"
