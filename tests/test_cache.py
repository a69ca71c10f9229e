"""What is kept between runs: it saves work, changes nothing, stays within its bound, and may be lost at any time."""

import os
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jax_tformer import ARCHITECTURES, startup
from jax_tformer.config.experiment import PairData, TextData, TokenizerConfig
from jax_tformer.data import sources, tokenizers
from jax_tformer.data.tokenizers import Tokenizer, build_tokenizer
from jax_tformer.files import bound_cache, cache_folder, kept
from tests.refusals import refused
from tests.test_pipelines import build, first

TEXT = "".join(f"{n} bottles of beer on the wall, “Ça va”, 日本語, take {n * n} down.\n" for n in range(1000))
BPE = TokenizerConfig("bpe", 300)
SPECIAL = {"start": "<|endoftext|>", "end": "<|endoftext|>"}
KEEPERS = (sources, tokenizers)


def encoded(tokenizer, string, begin=()):
    return tokenizer.encode_texts([memoryview(string.encode())], begin)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The cache of one test, named as a user names it; other tests have none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for module in KEEPERS:
        monkeypatch.setattr(module, "kept", kept)
    monkeypatch.setattr(startup, "bound_cache", bound_cache)
    return tmp_path / "xdg" / "jax-tformer"


@pytest.fixture
def work(monkeypatch):
    """What was trained and encoded, in order."""
    done = []

    def noted(name, call):
        def run(*arguments, **options):
            done.append(name)
            return call(*arguments, **options)

        return run

    monkeypatch.setattr(tokenizers.trainers, "BpeTrainer", noted("train", tokenizers.trainers.BpeTrainer))
    monkeypatch.setattr(Tokenizer, "_encode_texts", noted("encode", Tokenizer._encode_texts))
    return done


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "data, config, keeps",
    [
        (TextData(path="text.txt", context_length=16), BPE, ["train", "encode", "encode"]),
        # Pairs are short, and ids of bytes are made in less time than they are read.
        (PairData(path="pairs.tsv", source_length=24, target_length=24), BPE, ["train"]),
        (TextData(path="text.txt", context_length=16), TokenizerConfig("bytes"), []),
    ],
)
def test_nothing_but_the_time_depends_on_the_cache(data, config, keeps, folder, work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    Path("pairs.tsv").write_text("".join(f"the source {n}\tdas Ziel {n}\n" for n in range(300)))

    def start():
        made, tokenizer = build(replace(data, tokenizer=config))
        batches = [*first(made, 20), *made.evaluation]
        rows = [(name, rows.dtype, rows.tobytes()) for batch in batches for name, rows in sorted(batch.items())]
        return rows, made.fingerprint, made.bytes_per_token, made.examples, tokenizer.as_json

    cold = start()
    assert len(files(folder)) == len(keeps)
    work.clear()
    assert start() == cold
    assert not set(work) & set(keeps)
    for module in KEEPERS:
        monkeypatch.setattr(module, "kept", lambda _, make: memoryview(make()))
    assert start() == cold


def test_whatever_decides_the_result_is_in_the_key(folder, work, monkeypatch):
    texts = [TEXT, "and more"]
    made = [
        build_tokenizer(BPE, texts, SPECIAL),
        build_tokenizer(BPE, [TEXT, "and m0re"], SPECIAL),
        build_tokenizer(BPE, [TEXT + "and", " more"], SPECIAL),
        build_tokenizer(replace(BPE, vocab_size=301), texts, SPECIAL),
    ]
    assert work == ["train"] * 4
    # The same training, with other tokens added to it.
    made.append(build_tokenizer(BPE, texts, {"start": "<|start|>", "end": "<|start|>"}))
    work.clear()
    one, larger, other = made[0], made[3], made[4]
    asked = [(one, TEXT, []), (one, TEXT + ".", []), (one, TEXT, [5]), (larger, TEXT, []), (other, TEXT, [])]
    for tokenizer, string, begin in asked:
        assert encoded(tokenizer, string, begin).size
    assert work == ["encode"] * 5
    assert len(files(folder)) == 9
    monkeypatch.setattr("tokenizers.__version__", "0")
    work.clear()
    encoded(build_tokenizer(BPE, texts, SPECIAL), TEXT)
    assert work == ["train", "encode"]


def test_a_digest_is_kept_until_its_file_changes(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(b"before")
    before, then = sources.digest(path), path.stat()
    with monkeypatch.context() as patch:
        patch.setattr(sources, "file_digest", refuse)
        assert sources.digest(path) == before
    time.sleep(0.05)  # the clock of a file system has ticks
    path.write_bytes(b"behind")
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert sources.digest(path) != before


MADE = b"what was made"


def refuse(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[:-1], lambda whole: b"x" + whole[1:]])
def test_a_damaged_file_is_made_anew(folder, damage):
    kept(["key"], lambda: MADE)
    (path,) = files(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert kept(["key"], lambda: MADE) == MADE
    assert path.read_bytes() == whole
    assert kept(["key"], refuse) == MADE


@pytest.mark.parametrize("place", ["xdg", "xdg/jax-tformer/data", "its file", "the disk", "the bound", "no home"])
def test_without_a_place_to_write_there_is_only_no_cache(place, folder, tmp_path, monkeypatch):
    if place == "the disk":
        monkeypatch.setattr(os, "replace", refuse)
    elif place == "the bound":
        monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", "10")
    elif place == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
        with refused("no home folder for the cache; set XDG_CACHE_HOME"):
            cache_folder()
    elif place == "its file":
        kept(["key"], lambda: MADE)
        (path,) = files(folder)
        path.unlink()
        path.mkdir()
    else:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    for _ in range(2):
        assert kept(["key"], lambda: MADE) == MADE
    assert not [path for path in files(folder) if path.stat().st_size]


def test_a_cache_that_may_only_be_read_is_read(monkeypatch):
    kept(["key"], lambda: MADE)
    monkeypatch.setattr(os, "utime", refuse)
    assert kept(["key"], refuse) == MADE


def test_what_was_used_longest_ago_goes_first(folder, monkeypatch):
    program, size, now = folder / "jit_step-cache", 32 + len(MADE), time.time()
    for number in range(3):
        kept([str(number)], lambda: MADE)
    # The first was used last, then the second, and a compiled program after both.
    for age, path in enumerate(sorted(files(folder), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (now - 600 - age, now - 900))
    program.write_bytes(bytes(5000))
    os.utime(program, (now - 500, now - 900))
    kept(["2"], refuse)
    # Noted by us: not every system keeps when a file was read.
    assert sum(path.stat().st_mtime > now - 60 for path in files(folder)) == 1
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", str(2 * size + 5000))
    kept(["3"], lambda: MADE)
    assert (len(files(folder)), program.exists()) == (3, True)
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", str(2 * size))
    bound_cache(folder)
    assert (len(files(folder)), program.exists()) == (2, False)
    for number in (2, 3):
        kept([str(number)], refuse)


@pytest.mark.parametrize("bound, looks", [(1000 * len(MADE), 0), (1000 * len(MADE) - 1, 1)])
def test_a_small_file_is_no_reason_to_look_at_all_others(bound, looks, monkeypatch):
    looked = []
    monkeypatch.setattr("jax_tformer.files.bound_cache", looked.append)
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", str(bound))
    kept(["key"], lambda: MADE)
    assert len(looked) == looks


def test_programs_begin_within_the_bound(folder, monkeypatch):
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
def test_a_bound_that_is_no_number_is_refused(given, monkeypatch):
    monkeypatch.setenv("JAX_TFORMER_CACHE_BYTES", given)
    with refused(r"JAX_TFORMER_CACHE_BYTES is .*; expected a whole number of bytes"):
        kept(["key"], lambda: MADE)
