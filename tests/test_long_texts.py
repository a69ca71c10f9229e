"""Long texts go block by block: what comes out is that of the whole text, and little else is in memory beside it."""

import itertools
import json
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import TextData, TokenizerConfig, TrainingConfig
from jax_tformer.data import text_files, tokenizers
from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for
from jax_tformer.data.text import load_text, split_text
from jax_tformer.data.text_files import Pieces
from jax_tformer.data.tokenizer_sources import build_tokenizer, load_tokenizer
from jax_tformer.data.tokenizers import PIECE_END, WORD_END, Role, Tokenizer
from tests.test_tokenizers import backend_ids

SPECIAL: dict[Role, str] = {"pad": "<|e|>", "start": "<|e|>|", "end": "é<|"}
# One character of every class that GPT-2's pattern or Python knows, and what the pattern names.
CLASSES = "aé日१.'s \n\t\r\u00a0\u2028\x1c\u200b\u0301_"
TRICKY = "".join(random.Random(0).choices([*CLASSES, "<|e|>", "<|e|>|", "é<|", "<|", "🙂", "don't ", "  "], k=4000))


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the length of blocks and, a little more than that, of pieces."""

    def set_length(length: int) -> None:
        for module in (text_files, tokenizers):
            monkeypatch.setattr(module, "BLOCK", length)
        monkeypatch.setattr(text_files, "_PIECE_LENGTH", length + 2)

    return set_length


@pytest.fixture(scope="module", params=["bytes", "characters", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    size = 400 if request.param == "bpe" else None
    return build_tokenizer(TokenizerConfig(request.param, size), [TRICKY + "don't know what we'll see"], SPECIAL)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 4000])
def test_ids_of_blocks_are_those_of_the_whole_text(
    tokenizer: Tokenizer, length: int, block: Callable[[int], None]
) -> None:
    expected = backend_ids(tokenizer, TRICKY)
    block(length)
    ids = tokenizer.encode_text(memoryview(TRICKY.encode()), [7])
    assert ids.dtype == np.uint16
    assert ids.tolist() == [7, *expected]
    assert tokenizer.encode(TRICKY).tolist() == expected


def test_many_ids_take_four_bytes() -> None:
    corpus = "".join(chr(0x10000 + n) for n in range(2**16 + 1))
    ids = build_tokenizer(TokenizerConfig("characters"), [corpus], {}).encode_text(memoryview(corpus.encode()))
    assert ids.dtype == np.int32
    assert ids.tolist() == list(range(2**16 + 1))


def test_more_ids_than_bytes_have_room() -> None:
    backend = Backend(models.BPE({"b": 0}, []))
    backend.normalizer = normalizers.Replace("a", "b" * 9)
    assert Tokenizer(backend, {}).encode_text(memoryview(b"aaa"), [0]).tolist() == [0] * 28


def split_as(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    pattern += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])


SPLITTERS = {
    "GPT-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), PIECE_END),
    "BERT": (pre_tokenizers.BertPreTokenizer(), PIECE_END),
    "Llama 3": (split_as("{1,3}"), WORD_END),
    "Qwen 2": (split_as(""), WORD_END),
}


@pytest.mark.parametrize("name", SPLITTERS)
def test_the_pre_tokenizer_splits_wherever_a_text_is_cut(name: str) -> None:
    splitter, end = SPLITTERS[name]
    split = splitter.pre_tokenize_str
    # All texts of up to three characters, a class each, and of four of the classes that meet spaces: the parts are
    # split as the whole is.
    cuts = 0
    for classes, length in ((CLASSES, 2), (CLASSES, 3), ("as.' \n\t\x1c", 4)):
        for text in map("".join, itertools.product(classes, repeat=length)):
            for found in end.finditer(text):
                cuts += 1
                parts = split(text[: found.start()]) + split(text[found.start() :])
                assert [part for part, _ in parts] == [part for part, _ in split(text)], repr(text)
    assert cuts > 1000


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "GPT-2" else pytest.mark.deep) for name in SPLITTERS]
)
@pytest.mark.deep
def test_no_character_of_unicode_goes_on_beyond_a_cut(name: str) -> None:
    splitter, end = SPLITTERS[name]
    # Whatever version of Unicode the library knows.
    text = "".join(f"{chr(code)} " for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    places = np.array([found.start() for found in end.finditer(text)])
    spans = np.array([span for _, span in splitter.pre_tokenize_str(text)])
    within = spans[np.searchsorted(spans[:, 0], places, side="left") - 1]
    assert len(places) > 1_000_000
    assert (within[:, 1] <= places).all()


@pytest.fixture(scope="module", params=["Llama 3", "Qwen 2", "BERT"])
def of_hugging_face(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Trained on little, and built as the families build theirs."""
    splitter, _ = SPLITTERS[request.param]
    bert = request.param == "BERT"
    backend = Backend(models.WordPiece(unk_token="[UNK]") if bert else models.BPE())
    backend.pre_tokenizer = splitter
    trainer: Any = trainers.WordPieceTrainer if bert else trainers.BpeTrainer
    alphabet = [] if bert else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["[UNK]"], show_progress=False)
    if request.param != "Llama 3":
        backend.normalizer = normalizers.BertNormalizer() if bert else normalizers.NFC()
    backend.train_from_iterator([TRICKY + "don't know what we'll see"], trainer)
    backend.add_special_tokens([AddedToken("<|e|>", normalized=False)])
    return Tokenizer(backend, {"end": "<|e|>"})


@pytest.mark.parametrize("length", [1, 5, 64])
def test_tokenizers_of_hugging_face_are_given_pieces_where_that_changes_nothing(
    of_hugging_face: Tokenizer, length: int, block: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = backend_ids(of_hugging_face, TRICKY)
    recorded = Recorded(of_hugging_face._backend)
    monkeypatch.setattr(of_hugging_face, "_backend", recorded)
    block(length)
    assert of_hugging_face.encode_text(memoryview(TRICKY.encode())).tolist() == expected
    assert len(recorded.sizes) > 20


def test_what_is_not_known_to_be_cut_is_given_whole(
    monkeypatch: pytest.MonkeyPatch, block: Callable[[int], None]
) -> None:
    backend = Backend(models.BPE({"a": 0, " ": 1, "a ": 2, "a a": 3}, [("a", " "), ("a ", "a")]))
    tokenizer = Tokenizer(backend, {})
    block(1)
    assert tokenizer.encode("a a" * 9).tolist() == [3] * 9


def test_a_text_without_letters_at_line_ends_has_pieces_too() -> None:
    text = "你好。\n" * 10_000
    pieces = list(Pieces(memoryview(text.encode()), PIECE_END))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 9000


@pytest.mark.parametrize("change", ["single_word", "lstrip", "rstrip"])
@pytest.mark.parametrize("kind", ["bytes", "bpe", "characters"])
def test_special_tokens_that_look_at_their_neighbours_are_found_as_in_the_whole_text(
    kind: str, change: str, block: Callable[[int], None], tmp_path: Path
) -> None:
    text = ("go on" * 4 + "go  on x on") * 5
    config = TokenizerConfig(kind, 300 if kind == "bpe" else None)  # type: ignore[arg-type]
    build_tokenizer(config, [text], {"mask": " on"}).save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["added_tokens"][0][change] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    loaded = load_tokenizer(tmp_path)
    block(3)
    assert loaded.encode(text).tolist() == backend_ids(loaded, text)


@pytest.mark.parametrize("length", [1, 3, 7])
def test_split_is_that_of_the_characters(length: int, block: Callable[[int], None]) -> None:
    block(length)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.text("aé日🙂", max_size=30), st.floats(0.01, 0.99))
    def same(text: str, held_out: float) -> None:
        end = int(len(text) * (1 - held_out))
        parts = split_text(memoryview(text.encode()), held_out)
        assert [bytes(part).decode() for part in parts] == [text[:end], text[end:]]

    same()


DOCUMENTS = ["\n\nÇa\r\n va\r", " \u00a0\n", "\n \n日本", "🙂\n\n\n", "\r\n\r\nend\n", "\r"]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 100])
def test_documents_are_joined_as_if_they_were_read_whole(
    length: int, block: Callable[[int], None], tmp_path: Path
) -> None:
    block(length)
    for number, documents in enumerate(itertools.combinations_with_replacement(DOCUMENTS, 3)):
        folder = tmp_path / str(number)
        folder.mkdir()
        texts = []
        for name, document in zip(("a.txt", "b.txt", "c.jsonl"), documents, strict=True):
            content = "\ufeff" + document if name == "b.txt" else document
            if name == "c.jsonl":
                content = "".join(json.dumps({"text": line}) + "\r\n" for line in (document, "", "x" + document))
                texts += [document, "x" + document]
            else:
                texts.append(document.replace("\r\n", "\n"))
            (folder / name).write_bytes(content.encode())
        if not any(document.strip() and document.isascii() for document in documents[:2]):
            # Files of ASCII whitespace alone are refused.
            (folder / "a.txt").write_bytes(b"one")
            texts[0] = "one"
        if not documents[1].strip("\r\n\t "):
            (folder / "b.txt").unlink()
            del texts[1]
        if not documents[0].strip("\r\n\t ") and texts[0] != "one":
            (folder / "a.txt").unlink()
            del texts[0]
        kept = [text.strip("\n") for text in texts if text.strip()]
        assert bytes(load_text(TextData(path=str(folder)))).decode() == "\n\n".join(kept) + "\n"


def test_places_in_a_file_are_counted_over_blocks(block: Callable[[int], None], tmp_path: Path) -> None:
    block(4)
    for content, says in {
        "\ufeffäöü€".encode() + b"\xe9t\xe9": "byte 0xe9 at byte 12;",
        "äöü".encode() + b"\xe2\x82": "byte 0xe2 at byte 6;",
        "äöü€".encode() + b"\0": "a NUL byte at byte 9;",
    }.items():
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(InputError, match=says):
            load_text(TextData(path=str(tmp_path / "a.txt")))


@pytest.mark.parametrize("form", ["file", "folder", "json lines"])
@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_little_more_is_in_memory_than_the_text_and_its_ids(
    form: str, kind: Any, block: Callable[[int], None], tmp_path: Path
) -> None:
    block(2**12)
    part = "".join(f"{n} bottles of “beer” on the wall\n" for n in range(500))
    for number in range(20):
        name, content = f"{number}.txt", part
        if form == "json lines":
            name, content = f"{number}.jsonl", "".join(json.dumps({"text": line}) + "\n" for line in part.split("\n"))
        (tmp_path / name).write_text(content, encoding="utf-8")
    path = tmp_path
    if form == "file":
        path = tmp_path / "all.txt"
        path.write_text(part * 20, encoding="utf-8")
    data = TextData(path=str(path), context_length=16, tokenizer=TokenizerConfig(kind))
    training = TrainingConfig(batch_size=2, evaluate_batches=1)
    build_pipeline(data, training, build_tokenizer_for(data))  # what is imported and kept at the first time
    size = len(load_text(data))
    tracemalloc.start()
    try:
        build_pipeline(data, training, build_tokenizer_for(data))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A byte for each of the text, two for its id.
    assert peak < 1.1 * 3 * size + 200_000


class Recorded:
    """A tokenizer of the library that notes how much text it is given at once."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.sizes: list[int] = []

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.sizes.append(sum(map(len, texts)))
        return self._backend.encode_batch_fast(texts, **options)


def test_the_library_gets_little_text_at_once_and_none_of_bytes_and_characters(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, block: Callable[[int], None]
) -> None:
    recorded = Recorded(tokenizer._backend)
    monkeypatch.setattr(tokenizer, "_backend", recorded)
    block(500)
    tokenizer.encode_text(memoryview((TRICKY * 5).encode()))
    tokenizer.encode_batch([TRICKY[:50]] * 100)
    if tokenizer.has_table:
        assert not recorded.sizes
    else:
        assert len(recorded.sizes) > 20
        assert max(recorded.sizes) < 1200
