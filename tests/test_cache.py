"""What is kept between runs: it saves work, changes nothing, stays within its bound, and may be lost at any time."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_tformer import ARCHITECTURES
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import MaskedTextData, PairData, TextData, TokenizerConfig, TrainingConfig
from jax_tformer.data import text, tokenizer_sources
from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for
from jax_tformer.data.text import token_stream
from jax_tformer.data.tokenizer_sources import build_tokenizer
from jax_tformer.data.tokenizers import Role, Tokenizer
from jax_tformer.files import bound_cache, cache_folder, kept
from jax_tformer.runs import startup

TEXT = "".join(f"{n} bottles of beer on the wall, “Ça va”, 日本語, take {n * n} down.\n" for n in range(1000))
BPE = TokenizerConfig("bpe", 300)
SPECIAL: dict[Role, str] = {"start": "<|endoftext|>", "end": "<|endoftext|>"}


def utf8(string: str) -> memoryview:
    return memoryview(string.encode())


def uncached(_: object, make: Callable[[], Any]) -> memoryview:
    return memoryview(make())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of one test, named as a user names it; other tests have none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for module in (text, tokenizer_sources):
        monkeypatch.setattr(module, "kept", kept)
    return tmp_path / "xdg" / "jax-tformer"


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was trained and encoded, in order."""
    done: list[str] = []

    def noted(name: str, call: Callable) -> Callable:
        def run(*arguments: Any, **options: Any) -> Any:
            done.append(name)
            return call(*arguments, **options)

        return run

    monkeypatch.setattr(tokenizer_sources.trainers, "BpeTrainer", noted("train", tokenizer_sources.trainers.BpeTrainer))
    monkeypatch.setattr(Tokenizer, "encode_text", noted("encode", Tokenizer.encode_text))
    return done


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["text", "masked", "pairs"])
@pytest.mark.parametrize("config", [BPE, TokenizerConfig("bytes")], ids=lambda config: config.kind)
def test_nothing_but_the_time_depends_on_the_cache(
    kind: str, config: TokenizerConfig, folder: Path, work: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder.parent.parent
    (place / "text.txt").write_text(TEXT, encoding="utf-8")
    (place / "pairs.tsv").write_text("".join(f"the source {n}\tdas Ziel {n}\n" for n in range(300)))
    data = {
        "text": TextData(path=str(place / "text.txt"), context_length=16, tokenizer=config),
        "masked": MaskedTextData(path=str(place / "text.txt"), context_length=16, tokenizer=config),
        "pairs": PairData(path=str(place / "pairs.tsv"), source_length=24, target_length=24, tokenizer=config),
    }[kind]

    def start() -> tuple:
        tokenizer = build_tokenizer_for(data)
        pipeline = build_pipeline(data, TrainingConfig(batch_size=4, evaluate_batches=3), tokenizer)
        batches = [*(pipeline.train[number] for number in range(20)), *pipeline.evaluation]
        rows = [(name, rows.dtype, rows.tobytes()) for batch in batches for name, rows in sorted(batch.items())]
        return rows, pipeline.fingerprint, pipeline.bytes_per_token, pipeline.examples, tokenizer.to_json()

    cold = start()
    # Ids of bytes are made in less time than they are read, pairs are short.
    keeps = ["train", "encode", "encode"][: 1 if kind == "pairs" else 3] if config.kind == "bpe" else []
    assert len(files(folder)) == len(keeps)
    work.clear()
    warm = start()
    assert [name for name in work if name in keeps] == []
    for module in (text, tokenizer_sources):
        monkeypatch.setattr(module, "kept", uncached)
    assert start() == cold == warm


def test_kept_ids_begin_with_the_first_ones(work: list[str]) -> None:
    tokenizer = build_tokenizer(BPE, [TEXT], SPECIAL)
    expected = [299, *tokenizer.encode(TEXT).tolist()]
    work.clear()
    for _ in range(2):
        ids = token_stream(tokenizer, utf8(TEXT), [299])
        assert type(ids) is np.ndarray
        assert ids.dtype == np.uint16
        assert ids.tolist() == expected
    assert work == ["encode"]
    assert token_stream(tokenizer, utf8("")).tolist() == []


def test_whatever_decides_the_result_is_in_the_key(
    folder: Path, work: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [TEXT, "and more"]
    tokenizers = [
        build_tokenizer(BPE, texts, SPECIAL),
        build_tokenizer(BPE, [TEXT, "and m0re"], SPECIAL),
        build_tokenizer(BPE, [TEXT + "and", " more"], SPECIAL),
        build_tokenizer(replace(BPE, vocab_size=301), texts, SPECIAL),
    ]
    assert work == ["train"] * 4
    # The same training, with other tokens added to it.
    tokenizers.append(build_tokenizer(BPE, texts, {"start": "<|start|>", "end": "<|start|>"}))
    work.clear()
    a, b, c = tokenizers[0], tokenizers[3], tokenizers[4]
    for tokenizer, string, first in ((a, TEXT, []), (a, TEXT + ".", []), (a, TEXT, [5]), (b, TEXT, []), (c, TEXT, [])):
        assert token_stream(tokenizer, utf8(string), first).size
    assert work == ["encode"] * 5
    assert len(files(folder)) == 9
    monkeypatch.setattr("tokenizers.__version__", "0")
    work.clear()
    token_stream(build_tokenizer(BPE, texts, SPECIAL), utf8(TEXT))
    assert work == ["train", "encode"]


def made() -> bytes:
    return b"what was made"


def refuse(*_: object, **__: object) -> Any:
    raise OSError(28, "No space left on device")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "truncated by one": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "first byte": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "last byte": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_made_anew(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    kept(["key"], made)
    (path,) = files(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert kept(["key"], made) == made()
    assert path.read_bytes() == whole
    assert kept(["key"], refuse) == made()


@pytest.mark.parametrize("place", ["the cache", "its folder", "its file"])
def test_without_a_place_to_write_there_is_only_no_cache(folder: Path, place: str) -> None:
    blocked = {"the cache": folder.parent, "its folder": folder / "data"}.get(place)
    if blocked is None:
        kept(["key"], made)
        (path,) = files(folder)
        path.unlink()
        path.mkdir()
    else:
        blocked.parent.mkdir(parents=True, exist_ok=True)
        blocked.write_text("")
    for _ in range(2):
        assert kept(["key"], made) == made()
    assert not list(folder.parent.rglob("*.partial"))


def test_a_cache_that_may_only_be_read_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    kept(["key"], made)
    monkeypatch.setattr(os, "utime", refuse)
    assert kept(["key"], refuse) == made()


def test_without_a_home_there_is_only_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert kept(["key"], made) == made()
    with pytest.raises(InputError, match="no home folder for the cache; set XDG_CACHE_HOME"):
        cache_folder()


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", refuse)
    assert kept(["key"], made) == made()
    assert not files(folder)


@pytest.mark.parametrize("bound", [2**32, 1500], ids=["all has room", "one has room"])
def test_threads_at_once(folder: Path, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", str(bound))

    def start(number: int) -> bool:
        # Now and then somebody clears the cache.
        if number % 5 == 4:
            for path in files(folder):
                path.unlink(missing_ok=True)
        return kept([str(number % 2)], lambda: bytes([number % 2] * 1000)) == bytes([number % 2] * 1000)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(start, range(100)))
    assert not [path for path in files(folder) if path.suffix == ".partial"]
    assert sum(path.stat().st_size for path in files(folder)) <= bound


def test_what_was_used_longest_ago_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, size = folder / "jit_step-cache", 32 + len(made())
    for number in range(3):
        kept([str(number)], made)
    now = time.time()
    for age, path in enumerate(sorted(files(folder), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (now - 600 - age, now - 900))
    program.write_bytes(bytes(5000))
    os.utime(program, (now - 500, now - 900))
    # The third is used now, the second was used before the first, and the program after both.
    kept(["2"], refuse)
    # Noted by us: not every system keeps when a file was read.
    assert sum(path.stat().st_mtime > now - 60 for path in files(folder)) == 1
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", str(2 * size + 5000))
    kept(["3"], made)
    assert len(files(folder)) == 3
    assert program.exists()
    for number in (2, 3):
        kept([str(number)], refuse)
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", str(2 * size))
    bound_cache(folder)
    assert len(files(folder)) == 2
    assert not program.exists()


def test_what_is_larger_than_the_bound_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", "10")
    assert kept(["key"], made) == made()
    assert not files(folder)


def test_what_a_kill_left_half_written_goes_after_a_day(folder: Path) -> None:
    folder.mkdir(parents=True)
    now = time.time()
    for name, age in (("old.partial", 90_000), ("new.partial", 80_000), ("old-cache", 90_000)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (now - age, now - age))
    bound_cache(folder)
    assert [path.name for path in files(folder)] == ["new.partial", "old-cache"]


def test_programs_begin_within_the_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    (folder / "jit_step-cache").write_bytes(bytes(2000))
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", "1000")
    startup.set_up_jax(ARCHITECTURES["gpt2"])
    assert files(folder)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    startup.set_up_jax(ARCHITECTURES["gpt2"])
    assert not files(folder)


@pytest.mark.parametrize("given", ["1e9", "-1", "4 GB", "²"])
def test_a_bound_that_is_no_number_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", given)
    with pytest.raises(InputError, match=r"JAX_TFORMER_CACHE_BYTES is .*; expected a whole number of bytes"):
        kept(["key"], made)
