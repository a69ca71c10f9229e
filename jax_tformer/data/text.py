"""Reads text files, and makes batches of text: one stream of ids, cut into windows, predicted or masked.

A wrong file is told exactly. Texts stay UTF-8, because one emoji would make a Python string take four bytes for every
character.
"""

import glob
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import MaskedTextData, TextData, TrainingConfig
from jax_tformer.data.batches import Batch, MakeBatch, Pipeline, fingerprint, shuffled, thinned_out
from jax_tformer.data.tokenizers import Framing, Pieces, Tokenizer
from jax_tformer.files import kept, user_path

_SUFFIXES = (".txt", ".md", ".rst", ".jsonl")
_TABLES = (".json", ".csv")
"""Their texts would have to be taken out; as they are, a model learns quotes and commas."""


def check_file(path: Path) -> None:
    """Raises InputError unless `path` is a readable file; does not open it."""
    try:
        require(path.exists(), f"{path} does not exist; expected a file; check the path")
        require(path.is_file(), f"{path} is not a file; expected a file of text")
        require(os.access(path, os.R_OK), f"{path} cannot be read; expected a readable file; change its permissions")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); expected a readable file") from error


def read_utf8(path: Path) -> bytes:
    """Reads a text file as UTF-8, with "\\n" as line ends; raises InputError if it is empty or not UTF-8."""
    check_file(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); expected a readable file") from error
    nul = data.find(b"\0")
    require(nul < 0, f"{path} is binary: a NUL byte at byte {nul:,}; expected UTF-8 text")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{data[error.start]:02x} at byte {error.start:,}"
        raise InputError(f"{path} is not UTF-8: {byte}; convert it to UTF-8") from error
    require(bool(data) and not data.isspace(), f"{path} is empty; expected text")
    return data.removeprefix("\ufeff".encode()).replace(b"\r\n", b"\n")


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file; raises InputError as `read_utf8` does."""
    # str.splitlines would also split at separators inside sentences, and put parallel files out of step.
    for line in io.BytesIO(read_utf8(path)):
        yield line.decode().removesuffix("\n")


def read_json_lines(path: Path, fields: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Yields the objects of a file, one per line; raises InputError if one has no text in one of the `fields`."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number:,}: not JSON ({error}); expected one JSON object a line") from error
        for field in fields:
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                raise InputError(
                    f'{path}, line {number:,}: no text under "{field}"; expected an object with a string under '
                    + " and ".join(f'"{name}"' for name in fields)
                )
            try:
                record[field].encode()
            except UnicodeEncodeError as error:  # JSON escapes can spell half of a surrogate pair
                raise InputError(
                    f'{path}, line {number:,}: a lone surrogate under "{field}"; expected valid Unicode'
                ) from error
        yield record


def text_files(data: TextData) -> list[Path]:
    """Finds the files that `data.path` names; raises InputError if there are none, or for one .json or .csv file."""
    path = data.path
    if path is None:
        raise InputError(
            "no text was named; give --data.path a text file, a folder of them, a glob or JSON lines with a text field"
        )
    place = user_path(path)
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
        if not files:
            others = Counter(file.suffix for file in place.rglob("*.*") if file.is_file())
            most = others.most_common(1)[0][0] if others else ".log"
            raise InputError(
                f"{path} is a folder without {', '.join(_SUFFIXES)} files; expected at least one; "
                f"other kinds of text are named by a pattern: --data.path '{path}/**/*{most}'"
            )
        return files
    if glob.has_magic(path) and not place.exists():
        files = sorted(file for file in map(Path, glob.glob(str(place), recursive=True)) if file.is_file())
        if not files:
            raise InputError(f"{path} matches no file; expected at least one; check the pattern")
        return files
    require(
        not place.is_file() or place.suffix.lower() not in _TABLES,
        f"{path} would be read with all its quotes and commas; expected text, or .jsonl with a text field in every "
        "line; convert it, or name a copy .txt to train on it as it is",
    )
    return [place]


def load_text(data: TextData) -> memoryview:
    """Reads the text that `data` names, as UTF-8, with a blank line between documents.

    The blank line keeps the last word of a document apart from the first of the next, in characters that every corpus
    with paragraphs has.

    Raises InputError if the files do not exist, cannot be read, hold no text, or are not UTF-8 or JSON lines.
    """
    written = (document for document in _documents(data) if document.decode().strip())
    first, second = next(written, None), next(written, None)
    if first is None:
        raise InputError(f"{data.path} holds no text; expected at least one document that is not empty")
    if second is None:
        return memoryview(first)
    # Joined in one array, so that the text is in memory only once.
    text = bytearray(first.strip(b"\n"))
    for document in chain([second], written):
        text += b"\n\n"
        text += document.strip(b"\n")
    text += b"\n"
    return memoryview(text)


def _documents(data: TextData) -> Iterator[bytes]:
    """Yields the documents as UTF-8, always in the same order."""
    if data.source == "python-docs":
        yield from _python_docs()
        return
    for path in text_files(data):
        if path.suffix.lower() == ".jsonl":
            yield from (record["text"].encode() for record in read_json_lines(path, ("text",)))
        else:
            yield read_utf8(path)


def _python_docs() -> Iterator[bytes]:
    """Yields the topics of the language reference that ships inside CPython."""
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise InputError("this Python comes without pydoc_data; install all of its standard library") from error
    # Some texts are there under two names.
    return (text.encode() for text in dict.fromkeys(topics.topics[name] for name in sorted(topics.topics)))


def split_text(text: memoryview, held_out: float) -> tuple[memoryview, memoryview]:
    """Splits `text` (UTF-8) into a training part and, at its end, the fraction `held_out` of its characters.

    Random windows would overlap with training windows, so that the model would be tested on text that it has read.
    """
    rest = int(sum(map(len, Pieces(text))) * (1 - held_out))
    end = 0
    for piece in Pieces(text):
        part = piece[:rest]
        end += len(part.encode())
        rest -= len(part)
    return text[:end], text[end:]


def windows(stream: np.ndarray, length: int, stride: int) -> np.ndarray:
    """Returns all windows of `stream`, [N, length], as a view; each begins `stride` ids after the previous one."""
    if len(stream) < length:
        return np.empty((0, length), stream.dtype)
    return np.lib.stride_tricks.sliding_window_view(stream, length)[::stride]


def token_stream(tokenizer: Tokenizer, text: memoryview, first: Sequence[int] = ()) -> np.ndarray:
    """Returns `first` and then the ids of `text`, as `Tokenizer.encode_text` does; caches ids that are slow to make."""
    if tokenizer.has_table:
        return tokenizer.encode_text(text, first)
    key = ("ids of pieces", tokenizers.__version__, tokenizer.to_json(), str(list(first)), text)
    return np.frombuffer(kept(key, lambda: tokenizer.encode_text(text, first).data), tokenizer.id_type)


def text_pipeline(data: TextData, training: TrainingConfig, tokenizer: Tokenizer, rows: np.ndarray) -> Pipeline:
    """Makes `rows` of batches {"tokens": int32[B, T], "labels": int32[B, T]} of windows of text.

    For language models the label of a token is the next token, and the text begins with the start token if the
    tokenizer has one. For masked data the label is the original token, or IGNORED where nothing was masked. The seed
    masks each window differently in every epoch; held-out windows are masked alike for all seeds. Held-out windows do
    not overlap. If there are more than the evaluation batches hold, they are taken at even distances.

    Raises InputError if either part of the text is too short for one window, or if a tokenizer for masked data has no
    mask token.
    """
    masking = None
    if isinstance(data, MaskedTextData):
        masking = data.masked, tokenizer.require("mask", "to mask text with"), tokenizer.ordinary_ids
    framing, around = tokenizer.framing, 0
    if masking:
        # Every window of a checkpoint's tokenizer is framed, like the texts that the checkpoint has read.
        around, first = 0 if framing is None else framing.size, list[int]()
    elif framing is not None:
        first = list(framing.before)
    else:
        first = [] if tokenizer.start_id is None else [tokenizer.start_id]
    require(
        around < data.context_length,
        f"context_length is {data.context_length}; expected more than the {around} special tokens of every window",
    )
    length = data.context_length - around if masking else data.context_length + 1
    text = load_text(data)
    training_text, held_out_text = split_text(text, data.held_out)
    ids, held_out_ids = token_stream(tokenizer, training_text, first), token_stream(tokenizer, held_out_text, first)
    for name, part in (("training", ids), ("held-out", held_out_ids)):
        require(
            len(part) >= length,
            f"the {name} part of the text has {len(part):,} tokens; expected at least {length:,}, for one window; "
            "give more text, a smaller --data.context-length or another --data.held-out",
        )
    counts = Counter(path.suffix.lower() for path in text_files(data)) if data.source == "files" else Counter[str]()
    notes = [f"{counts[kind]:,} {kind} files are read as plain text" for kind in _TABLES if counts[kind]]
    train, held_out = windows(ids, length, data.stride), windows(held_out_ids, length, data.context_length - around)

    def batches_of(windows: np.ndarray) -> MakeBatch:
        def make_batch(items: np.ndarray, generator: np.random.Generator, rows: np.ndarray) -> Batch:
            chosen = windows[items[rows]].astype(np.int32)
            if not masking:
                return _next_tokens(chosen)
            batch = mask_tokens(chosen, generator, *masking, rows=rows, of=len(items))
            return batch if framing is None else _framed(batch, framing)

        return make_batch

    return Pipeline(
        train=shuffled(batches_of(train), len(train), training, rows),
        evaluation=thinned_out(batches_of(held_out), len(held_out), training, rows),
        fingerprint=fingerprint([text], tokenizer, data, training),
        bytes_per_token=None if masking else len(held_out_text) / (len(held_out_ids) - len(first)),
        notes=notes,
    )


def _framed(batch: Batch, framing: Framing) -> Batch:
    """Puts special tokens around each row, which nobody has to restore."""

    def around(rows: np.ndarray, *sides: Sequence[int]) -> np.ndarray:
        before, after = (np.tile(np.array(ids, np.int32), (len(rows), 1)) for ids in sides)
        return np.concatenate([before, rows, after], axis=1)

    nothing = ([IGNORED] * len(framing.before), [IGNORED] * len(framing.after))
    return {
        "tokens": around(batch["tokens"], framing.before, framing.after),
        "labels": around(batch["labels"], *nothing),
    }


def _next_tokens(rows: np.ndarray) -> Batch:
    """Makes a batch of `rows`, int32[B, T + 1]: each token but the first is predicted from those before it."""
    return {"tokens": np.ascontiguousarray(rows[:, :-1]), "labels": np.ascontiguousarray(rows[:, 1:])}


def mask_tokens(
    windows: np.ndarray,
    generator: np.random.Generator,
    fraction: float,
    mask_id: int,
    ordinary_ids: np.ndarray,
    *,
    rows: np.ndarray,
    of: int,
) -> Batch:
    """Masks a `fraction` of each of the `windows`, int32[R, T], at least one token; the labels are the original tokens.

    Of those tokens, 80% become the mask token, 10% become a random one of `ordinary_ids`, int32[N], and 10% stay (BERT,
    section 3.1). The windows are the `rows`, int[R], of a batch `of` B, and all of that is drawn.
    """
    length = windows.shape[1]
    order, fate = generator.random((of, length))[rows], generator.random((of, length))[rows]
    chosen = order.argsort(axis=1) < max(1, round(fraction * length))
    tokens = np.where(chosen & (fate < 0.8), np.int32(mask_id), windows)
    random_ids = generator.choice(ordinary_ids, (of, length))[rows]
    tokens = np.where(chosen & (fate >= 0.8) & (fate < 0.9), random_ids, tokens)
    return {"tokens": tokens, "labels": np.where(chosen, windows, np.int32(IGNORED))}
