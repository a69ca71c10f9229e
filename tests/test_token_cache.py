"""The cache of tokenizers and ids: it saves the work, changes nothing, and never gives what was not put in."""

import os
import subprocess
import sys
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
from jax_tformer.data import token_cache
from jax_tformer.data.batches import Pipeline
from jax_tformer.data.pipelines import build_pipeline, build_tokenizer_for
from jax_tformer.data.token_cache import SMALLEST, cached_ids, cached_tokenizer
from jax_tformer.data.tokenizer_kinds import build_tokenizer
from jax_tformer.data.tokenizers import Role, Tokenizer
from jax_tformer.errors import InputError
from jax_tformer.experiment import MaskedTextData, PairData, TextData, TokenizerConfig, TrainingConfig
from jax_tformer.files import bound_cache, cache_folder
from jax_tformer.run import startup

ROOT = Path(__file__).parents[1]
TEXT = "".join(f"{n} bottles of beer on the wall, “Ça va”, 日本語, take {n * n} down.\n" for n in range(1000))
BPE = TokenizerConfig("bpe", 300)
BYTES = TokenizerConfig("bytes")
SPECIAL: dict[Role, str] = {"start": "<|endoftext|>", "end": "<|endoftext|>"}
TRAINING = TrainingConfig(batch_size=4, evaluate_batches=3, seed=5)
assert len(TEXT) > SMALLEST


def utf8(text: str) -> memoryview:
    return memoryview(text.encode())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of one test, named as a user names it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(token_cache, "cache_folder", cache_folder)
    return tmp_path / "xdg" / "jax-tformer"


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was trained and encoded, in order."""
    done: list[str] = []

    def noted(name: str, call: Callable) -> Callable:
        def run(*arguments: Any) -> Any:
            done.append(name)
            return call(*arguments)

        return run

    monkeypatch.setattr(token_cache, "build_tokenizer", noted("train", build_tokenizer))
    monkeypatch.setattr(Tokenizer, "encode_text", noted("encode", Tokenizer.encode_text))
    return done


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on there is no cache."""
    return lambda: monkeypatch.setattr(token_cache, "SMALLEST", sys.maxsize)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def content(pipeline: Pipeline) -> tuple:
    batches = [*(pipeline.train[number] for number in range(50)), *pipeline.evaluation]
    rows = [(name, rows.dtype, rows.tobytes()) for batch in batches for name, rows in sorted(batch.items())]
    return rows, pipeline.fingerprint, pipeline.bytes_per_token, pipeline.notes, pipeline.examples


@pytest.mark.parametrize("kind", ["text", "masked", "pairs"])
@pytest.mark.parametrize("config", [BPE, BYTES], ids=lambda config: config.kind)
def test_nothing_but_the_time_depends_on_the_cache(
    kind: str, config: TokenizerConfig, tmp_path: Path, work: list[str], without: Callable[[], None]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 8, encoding="utf-8")
    (tmp_path / "pairs.tsv").write_text("".join(f"the source {n}\tdas Ziel {n}\n" for n in range(3000)))
    data = {
        "text": TextData(path=str(tmp_path / "text.txt"), context_length=16, tokenizer=config),
        "masked": MaskedTextData(path=str(tmp_path / "text.txt"), context_length=16, tokenizer=config),
        "pairs": PairData(
            path=str(tmp_path / "pairs.tsv"), source_length=24, target_length=24, tokenizer=config, held_out=0.1
        ),
    }[kind]

    def start(folder: Path) -> tuple:
        tokenizer = build_tokenizer_for(data)
        tokenizer.save(folder)
        return content(build_pipeline(data, TRAINING, tokenizer)), tokenizer.to_json(), tokenizer.vocab_size

    cold = start(tmp_path / "cold")
    assert ("encode" in work) == (kind != "pairs")
    work.clear()
    warm = start(tmp_path / "warm")
    # Only BPE is trained, and only its tokenizer and its ids are kept.
    assert work == ([] if config.kind == "bpe" else ["train"] if kind == "pairs" else ["train", "encode", "encode"])
    without()
    assert start(tmp_path / "none") == cold == warm
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert len({(tmp_path / run / name).read_bytes() for run in ("cold", "warm", "none")}) == 1


def test_small_texts_bytes_and_characters_are_not_kept(folder: Path) -> None:
    small = ("some words that come again " * SMALLEST)[: SMALLEST - 1]
    cached_ids(cached_tokenizer(BPE, [small], {}), utf8(small))
    for kind in (TokenizerConfig("characters"), BYTES):
        cached_ids(cached_tokenizer(kind, [TEXT], {}), utf8(TEXT))
    assert not files(folder)
    cached_ids(cached_tokenizer(BPE, [small, "é"], {}), utf8(small + "é"))
    assert [path.parent.name for path in files(folder)] == ["tokenizers", "tokens"]


def test_kept_ids_begin_with_the_first_ones_and_cannot_be_written_to(work: list[str]) -> None:
    tokenizer = build_tokenizer(BPE, [TEXT], SPECIAL)
    expected = [299, *tokenizer.encode(TEXT).tolist()]
    for _ in range(2):
        ids = cached_ids(tokenizer, utf8(TEXT), [299])
        assert type(ids) is np.ndarray
        assert ids.dtype == np.uint16
        assert ids.tolist() == expected
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 1
    assert work == ["encode"]


def test_whatever_decides_the_result_is_in_the_name(
    folder: Path, work: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [TEXT, "and more"]
    tokenizers = [
        cached_tokenizer(BPE, texts, SPECIAL),
        cached_tokenizer(BPE, [TEXT, "and m0re"], SPECIAL),
        cached_tokenizer(BPE, [TEXT + "and", " more"], SPECIAL),
        cached_tokenizer(replace(BPE, vocab_size=301), texts, SPECIAL),
        cached_tokenizer(BPE, texts, SPECIAL | {"end": "<|end|>"}),
        cached_tokenizer(BPE, texts, {"pad": "<|endoftext|>"}),
    ]
    assert work == ["train"] * 6
    work.clear()
    a, b, c = tokenizers[0], tokenizers[3], tokenizers[4]
    for tokenizer, text, first in ((a, TEXT, []), (a, TEXT + ".", []), (a, TEXT, [5]), (b, TEXT, []), (c, TEXT, [])):
        assert cached_ids(tokenizer, utf8(text), first).tolist() == [*first, *tokenizer.encode(text).tolist()]
    assert work == ["encode"] * 5
    assert len(files(folder)) == 11
    monkeypatch.setattr("tokenizers.__version__", "0")
    work.clear()
    cached_ids(cached_tokenizer(BPE, texts, SPECIAL), utf8(TEXT))
    assert work == ["train", "encode"]


def flip(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place:][1:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "truncated by one": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "first byte": flip(0),
    "middle byte": flip(5000),
    "last byte": flip(-1),
    "a pickle": lambda data: b"\x80\x04K\x01.",
    "a zip": lambda data: b"PK\x03\x04" + data,
    "other type": lambda data: data.replace(b"<u2", b"<f2").replace(b"vocab", b"vacob"),
    "other order": lambda data: data.replace(b"<u2", b">u2").replace(b"merges", b"mergse"),
    "other shape": lambda data: data.replace(b"(", b"(2").replace(b"{", b"["),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_files_are_made_anew(folder: Path, work: list[str], damage: Callable[[bytes], bytes]) -> None:
    tokenizer = cached_tokenizer(BPE, [TEXT], SPECIAL)
    ids = cached_ids(tokenizer, utf8(TEXT)).tolist()
    whole = {path: path.read_bytes() for path in files(folder)}
    assert len(whole) == 2
    for path, data in whole.items():
        assert damage(data) != data
        path.unlink()
        path.write_bytes(damage(data))
    work.clear()
    for _ in range(2):
        again = cached_tokenizer(BPE, [TEXT], SPECIAL)
        assert again.to_json() == tokenizer.to_json()
        assert cached_ids(again, utf8(TEXT)).tolist() == ids
    assert work == ["train", "encode"]
    assert {path: path.read_bytes() for path in files(folder)} == whole


def test_every_damaged_byte_of_a_header_is_noticed_or_harmless(folder: Path) -> None:
    tokenizer = build_tokenizer(BPE, [TEXT], {})
    ids = cached_ids(tokenizer, utf8(TEXT)).tolist()
    (path,) = files(folder)
    data = path.read_bytes()
    for place in range(128):
        path.unlink()
        path.write_bytes(flip(place)(data))
        read = token_cache._read_ids(path)
        assert read is None or read.tolist() == ids, place


def test_a_file_under_another_name_is_not_taken(folder: Path) -> None:
    tokenizer = build_tokenizer(BPE, [TEXT], {})
    cached_ids(tokenizer, utf8(TEXT))
    (one,) = files(folder)
    cached_ids(tokenizer, utf8(TEXT + "!"))
    (other,) = set(files(folder)) - {one}
    one.replace(other)
    assert cached_ids(tokenizer, utf8(TEXT + "!")).tolist() == tokenizer.encode(TEXT + "!").tolist()


@pytest.mark.parametrize("place", ["the cache", "its folders", "its files"])
def test_without_a_place_to_write_there_is_only_no_cache(folder: Path, work: list[str], place: str) -> None:
    if place == "its files":
        tokenizer = cached_tokenizer(BPE, [TEXT], SPECIAL)
        cached_ids(tokenizer, utf8(TEXT))
        for path in files(folder):
            path.unlink()
            path.mkdir()
    elif place == "its folders":
        folder.mkdir(parents=True)
        (folder / "tokenizers").write_text("")
        (folder / "tokens").write_text("")
    else:
        folder.parent.write_text("")
    work.clear()
    for _ in range(2):
        tokenizer = cached_tokenizer(BPE, [TEXT], SPECIAL)
        assert cached_ids(tokenizer, utf8(TEXT)).tolist() == build_tokenizer(BPE, [TEXT], SPECIAL).encode(TEXT).tolist()
    assert work == ["train", "encode"] * 2
    assert not [path for path in folder.parent.rglob("*.partial")]


def test_without_a_home_there_is_only_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", refuse)
    assert cached_ids(cached_tokenizer(BPE, [TEXT], {}), utf8(TEXT)).size
    with pytest.raises(InputError, match="no home to keep compiled programs in; set XDG_CACHE_HOME"):
        cache_folder()


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert cached_ids(build_tokenizer(BPE, [TEXT], {}), utf8(TEXT)).size
    assert not files(folder)


@pytest.mark.parametrize("bound", [2**32, 60_000], ids=["all has room", "one has room"])
def test_threads_at_once(folder: Path, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", str(bound))
    expected = build_tokenizer(BPE, [TEXT], SPECIAL)

    def start(number: int) -> bool:
        # Now and then somebody clears the cache.
        if number % 5 == 4:
            for path in files(folder):
                path.unlink(missing_ok=True)
        tokenizer = cached_tokenizer(BPE, [TEXT], SPECIAL)
        ids = cached_ids(tokenizer, utf8(TEXT))
        return tokenizer.to_json() == expected.to_json() and np.array_equal(ids, expected.encode(TEXT))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(start, range(10)))
    assert not [path for path in files(folder) if path.suffix == ".partial"]
    assert sum(path.stat().st_size for path in files(folder)) <= bound


def test_what_was_used_longest_ago_goes_first(folder: Path, work: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer(BPE, [TEXT], SPECIAL)
    program = folder / "jit_step-cache"
    for number in range(3):
        cached_ids(tokenizer, utf8(TEXT), [number])
    now = time.time()
    for age, path in enumerate(sorted(files(folder), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (now - 600 - age, now - 900))
    program.write_bytes(bytes(5000))
    os.utime(program, (now - 500, now - 900))
    size = (folder / "tokens").iterdir().__next__().stat().st_size
    # The third is used now, the second was used before the first, and the program after both.
    cached_ids(tokenizer, utf8(TEXT), [2])
    # Noted by us: not every system keeps when a file was read.
    assert sum(path.stat().st_mtime > now - 60 for path in files(folder)) == 1
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", str(2 * size + 5000))
    cached_ids(tokenizer, utf8(TEXT), [3])
    assert len(files(folder)) == 3
    work.clear()
    for number in (2, 3):
        cached_ids(tokenizer, utf8(TEXT), [number])
    assert work == []
    assert program.exists()
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", str(2 * size))
    bound_cache(folder)
    assert len(files(folder)) == 2
    assert not program.exists()


def test_what_is_larger_than_the_bound_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer(BPE, [TEXT], SPECIAL)
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", "1000")
    monkeypatch.setattr(np, "save", None)
    assert cached_ids(tokenizer, utf8(TEXT)).size
    assert not files(folder)


def test_ids_that_are_in_use_outlive_their_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer(BPE, [TEXT], SPECIAL)
    expected = cached_ids(tokenizer, utf8(TEXT)).tolist()
    ids = cached_ids(tokenizer, utf8(TEXT))
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", "0")
    bound_cache(folder)
    assert not files(folder)
    assert ids.tolist() == expected


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
        cached_ids(build_tokenizer(BPE, [TEXT], SPECIAL), utf8(TEXT))


PROCESS = """
import sys
from jax_tformer.data.token_cache import cached_ids, cached_tokenizer
from jax_tformer.experiment import TokenizerConfig
assert "jax" not in sys.modules
text = sys.stdin.read()
tokenizer = cached_tokenizer(TokenizerConfig("bpe", 300), [text], {})
print(hash(tuple(cached_ids(tokenizer, memoryview(text.encode())).tolist())))
"""


def test_processes_at_once_without_jax(folder: Path, work: list[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    command = [sys.executable, "-X", "utf8", "-c", PROCESS]
    started = []
    for _ in range(3):
        with (tmp_path / "text.txt").open() as text:
            started.append(subprocess.Popen(command, cwd=ROOT, stdin=text, stdout=subprocess.PIPE, text=True))
    printed = {process.communicate()[0] for process in started}
    assert [process.returncode for process in started] == [0] * 3
    ids = cached_ids(cached_tokenizer(BPE, [TEXT], {}), utf8(TEXT))
    assert work == []
    assert printed == {f"{hash(tuple(ids.tolist()))}\n"}
    assert len(files(folder)) == 2
