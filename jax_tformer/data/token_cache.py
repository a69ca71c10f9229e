"""Trained tokenizers and encoded texts, kept between runs under the hash of all that decides them; no jax here.

Below the cache folder, tokenizers/ holds each BPE tokenizer as JSON, and tokens/ each encoded text as a NumPy array. A
file ends with the SHA-256 of its name and content, so that nothing else than what was kept under that name is ever
taken from it: a file that is damaged is made anew. Whatever goes wrong with the cache, the only loss is time. Where a
new file is too much, those go that were used longest ago: see `files.bound_cache`.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tokenizers

from jax_tformer.data.tokenizer_kinds import build_tokenizer
from jax_tformer.data.tokenizers import Role, Tokenizer
from jax_tformer.data.utf8 import BLOCK
from jax_tformer.errors import InputError
from jax_tformer.experiment import TokenizerConfig
from jax_tformer.files import bound_cache, cache_bytes, cache_folder

SMALLEST = 2**15
"""Bytes of the shortest text, in UTF-8, that is worth a file."""
# To be raised with every change to how tokenizers are trained, texts are encoded or files are laid out.
_FORMAT = 2
_DIGEST_BYTES = hashlib.sha256().digest_size


def cached_tokenizer(config: TokenizerConfig, texts: Iterable[str], special: Mapping[Role, str]) -> Tokenizer:
    """What `build_tokenizer` gives for the same arguments; BPE is trained only if it has not been on these texts.

    `texts` are read twice, and need not be in memory all at once.
    """
    if config.kind != "bpe":
        return build_tokenizer(config, texts, special)
    settings = json.dumps([config.kind, config.vocab_size, list(special.items())])
    # What is no valid Unicode is for the tokenizer to refuse.
    name, size = _name("tokenizer", settings, (text.encode("utf-8", "surrogatepass") for text in texts))
    path = _place("tokenizers", name + ".json") if size >= SMALLEST else None
    tokenizer = _read_tokenizer(path, special) if path else None
    if tokenizer is None:
        tokenizer = build_tokenizer(config, texts, special)
        content = json.dumps(json.loads(tokenizer.to_json())["tokenizer"]).encode()
        _write(path, lambda file: file.write(content), memoryview(content))
    return tokenizer


def cached_ids(tokenizer: Tokenizer, text: memoryview, first: Sequence[int] = ()) -> np.ndarray:
    """What `tokenizer.encode_text` gives for the same arguments, not to be written to.

    The ids may lie in a file that is read as they are used, so that a large text takes no memory.

    Raises InputError as `Tokenizer.encode` does.
    """
    path = None
    if not tokenizer.has_table and len(text) >= SMALLEST:
        name, _ = _name("ids", tokenizer.to_json(), [json.dumps(list(first)).encode(), text])
        path = _place("tokens", name + ".npy")
    ids = _read_ids(path) if path else None
    if ids is None:
        ids = tokenizer.encode_text(text, first)
        _write(path, lambda file: np.save(file, ids, allow_pickle=False), ids.data)
    ids.flags.writeable = False
    return ids


def _name(kind: str, settings: str, texts: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """The hash of all that decides a file's content, and the bytes of `texts`."""
    head = "\0".join((kind, str(_FORMAT), tokenizers.__version__, settings))
    digest = hashlib.sha256(head.encode())
    size = 0
    for text in texts:
        # Hashed one by one, so that moving text from the end of one to the start of the next shows.
        digest.update(hashlib.sha256(text).digest())
        size += len(text)
    return digest.hexdigest(), size


def _place(folder: str, name: str) -> Path | None:
    try:
        return cache_folder() / folder / name
    except InputError:  # there is no home
        return None


def _checksum(path: Path, content: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256(path.name.encode())
    for part in content:
        digest.update(part)
    return digest.digest()


def _read_tokenizer(path: Path, special: Mapping[Role, str]) -> Tokenizer | None:
    try:
        data = path.read_bytes()
        content = data[:-_DIGEST_BYTES]
        if data[-_DIGEST_BYTES:] == _checksum(path, [content]):
            _note_use(path)
            return Tokenizer(tokenizers.Tokenizer.from_str(content.decode()), special)
    except Exception:  # the library raises nothing narrower
        pass
    return None


def _note_use(path: Path) -> None:
    with suppress(OSError):  # of a cache that may only be read
        os.utime(path)


def _read_ids(path: Path) -> np.ndarray | None:
    try:
        # Bytes behind the array, such as the checksum, do not matter to NumPy.
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        with path.open("rb") as file:
            # Read, and not through the array: what is mapped counts as this program's memory once it was looked at.
            file.seek(ids.offset)
            places = range(0, ids.nbytes, BLOCK)
            found = _checksum(path, (file.read(min(BLOCK, ids.nbytes - place)) for place in places))
            expected = file.read()
        if ids.dtype in (np.uint16, np.int32) and ids.ndim == 1 and expected == found:
            _note_use(path)
            # As a plain array: every batch that is cut from a memmap would take NumPy's detour for its kind.
            return ids.view(np.ndarray)
    except Exception:  # a damaged header can make NumPy raise anything
        pass
    return None


def _write(path: Path | None, write: Callable[[BinaryIO], object], content: memoryview) -> None:
    """Writes a file so that other processes see none or all of it; does nothing where that is not possible."""
    if path is None or content.nbytes > cache_bytes():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(suffix=".partial", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file)
                file.write(_checksum(path, [content]))
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
        bound_cache(path.parent.parent)
    except OSError:
        pass
