"""Write documents as shards of ids, on all cores: of text or JSON lines (.gz and .zst too), Parquet, or a data set."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from jax_tformer.config.errors import Positive, check_fields, require
from jax_tformer.config.experiment import TextData
from jax_tformer.data.pipeline import special_tokens_for
from jax_tformer.data.sources import KINDS, text_files
from jax_tformer.data.tokenizers import build_tokenizer
from jax_tformer.data.tokenizing import ShardsConfig, is_held_out, read_documents, write_shards
from jax_tformer.files import hub_folder, user_path
from jax_tformer.terminal import parse


@dataclass(frozen=True)
class TokenizeOptions:
    """What is written where."""

    sources: tyro.conf.Positional[tuple[str, ...]]
    """Files, folders, globs, or names of data sets on the Hugging Face hub."""
    out: Path
    """A new or empty folder, or one that a killed run has begun; --data.path of train.py then names it."""
    data: ShardsConfig = ShardsConfig()
    workers: Positive | None = None
    """Processes that encode; None: one for each core."""
    revision: str | None = None
    """Commit of the data set on the hub, because a name's files may change."""


@dataclass(frozen=True)
class _Texts(Iterable[str]):
    """The documents that a tokenizer is made of: BPE learns from none that is held out."""

    files: Sequence[Path]
    data: ShardsConfig

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            for pieces, digest, _ in read_documents(path, self.data):
                if self.data.tokenizer.kind != "bpe" or not is_held_out(digest, self.data.held_out):
                    yield from pieces


def main(arguments: Sequence[str]) -> int:
    options = parse(TokenizeOptions, arguments, prog="jax-tformer tokenize", description=__doc__ or "")
    check_fields(options)
    require(options.sources, "no source was named; expected files, folders, globs or names of data sets")
    files = []
    for source in options.sources:
        if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not user_path(source).exists():
            patterns = [f"*{kind}" for kind in KINDS]
            source = str(hub_folder("data set", source, options.revision, "--revision", patterns))
        files += text_files(TextData(path=source))
    tokenizer = options.data.tokenizer
    built = build_tokenizer(tokenizer, _Texts(files, options.data), special_tokens_for(TextData(tokenizer=tokenizer)))
    workers = options.workers or len(os.sched_getaffinity(0))
    print(write_shards(user_path(options.out), files, built, options.data, workers))
    return 0
