"""Trained tokenizers and encoded texts, kept between runs under the hash of all that decides them; no jax here.

Below the cache folder, tokenizers/ holds each BPE tokenizer as JSON, and tokens/ each encoded text as a NumPy array. A
file ends with the SHA-256 of its name and content, so that nothing else than what was kept under that name is ever
taken from it: a file that is damaged is made anew. Whatever goes wrong with the cache, the only loss is time.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tokenizers

from jax_tformer.data.tokenizer_kinds import build_tokenizer
from jax_tformer.data.tokenizers import Role, Tokenizer
from jax_tformer.experiment import TokenizerConfig
from jax_tformer.paths import cache_folder

SMALLEST = 2**15
"""Characters of the shortest text that is worth a file."""
# To be raised with every change to how tokenizers are trained, texts are encoded or files are laid out.
_FORMAT = 1
_DIGEST_BYTES = hashlib.sha256().digest_size


def cached_tokenizer(config: TokenizerConfig, texts: Iterable[str], special: Mapping[Role, str]) -> Tokenizer:
    """What `build_tokenizer` gives for the same arguments; BPE is trained only if it has not been on these texts."""
    if config.kind != "bpe":
        return build_tokenizer(config, texts, special)
    texts = list(texts)
    if sum(map(len, texts)) < SMALLEST:
        return build_tokenizer(config, texts, special)
    name = _name("tokenizer", json.dumps([config.kind, config.vocab_size, list(special.items())]), texts) + ".json"
    path = _place("tokenizers", name)
    tokenizer = _read_tokenizer(path, special) if path else None
    if tokenizer is None:
        tokenizer = build_tokenizer(config, texts, special)
        content = json.dumps(json.loads(tokenizer.to_json())["tokenizer"]).encode()
        _write(path, lambda file: file.write(content), memoryview(content))
    return tokenizer


def cached_ids(tokenizer: Tokenizer, text: str, first: Sequence[int] = ()) -> np.ndarray:
    """int32[N], the ids `first` and then those of `text`, not to be written to.

    They may lie in a file that is read as they are used, so that a large text takes no memory.

    Raises InputError as `Tokenizer.encode` does.
    """
    path = None
    if not tokenizer.has_table and len(text) >= SMALLEST:
        path = _place("tokens", _name("ids", tokenizer.to_json(), [json.dumps(list(first)), text]) + ".npy")
    ids = _read_ids(path) if path else None
    if ids is None:
        ids = np.concatenate([np.array(first, np.int32), tokenizer.encode(text)])
        _write(path, lambda file: np.save(file, ids, allow_pickle=False), ids.data)
    ids.flags.writeable = False
    return ids


def _name(kind: str, settings: str, texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in (kind, str(_FORMAT), tokenizers.__version__, settings, *texts):
        # Hashed one by one, so that moving text from the end of one to the start of the next shows. What is no valid
        # Unicode is for the tokenizer to refuse.
        digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()


def _place(folder: str, name: str) -> Path | None:
    try:
        return cache_folder() / folder / name
    except RuntimeError:  # there is no home
        return None


def _checksum(path: Path, content: memoryview) -> bytes:
    digest = hashlib.sha256(path.name.encode())
    digest.update(content)
    return digest.digest()


def _read_tokenizer(path: Path, special: Mapping[Role, str]) -> Tokenizer | None:
    try:
        data = path.read_bytes()
        content = data[:-_DIGEST_BYTES]
        if data[-_DIGEST_BYTES:] == _checksum(path, memoryview(content)):
            return Tokenizer(tokenizers.Tokenizer.from_str(content.decode()), special)
    except Exception:  # the library raises nothing narrower
        pass
    return None


def _read_ids(path: Path) -> np.ndarray | None:
    try:
        # Bytes behind the array, such as the checksum, do not matter to NumPy.
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        with path.open("rb") as file:
            file.seek(-_DIGEST_BYTES, os.SEEK_END)
            expected = file.read()
        if ids.dtype == np.int32 and ids.ndim == 1 and expected == _checksum(path, ids.data):
            # As a plain array: every batch that is cut from a memmap would take NumPy's detour for its kind.
            return ids.view(np.ndarray)
    except Exception:  # a damaged header can make NumPy raise anything
        pass
    return None


def _write(path: Path | None, write: Callable[[BinaryIO], object], content: memoryview) -> None:
    """Writes a file so that other processes see none or all of it; does nothing where that is not possible."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(suffix=".partial", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file)
                file.write(_checksum(path, content))
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError:
        pass
