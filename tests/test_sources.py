"""Where text and pairs come from, and what is said about files that hold neither."""

import json
import re

import pytest

from jax_tformer.config.experiment import PairData, TextData
from jax_tformer.data.sources import load_pairs, load_text
from tests.damages import every, write
from tests.refusals import refused


def text_of(path):
    return bytes(load_text(TextData(path=str(path))).content).decode()


def pairs_of(path, target_path=None):
    texts = iter(load_pairs(PairData(path=str(path), target_path=None if target_path is None else str(target_path))))
    return list(zip(texts, texts, strict=True))


def test_one_file_is_its_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeff\nÇa  va\r\n\r\n\tbien".encode())
    assert text_of(tmp_path / "a.txt") == "\nÇa  va\n\n\tbien"


def test_folder_glob_and_json_lines_join_documents_by_a_blank_line(tmp_path):
    (tmp_path / "b.md").write_text("second\n")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    (tmp_path / "empty.md").write_text("\n")
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "nothing.jsonl").touch()
    (tmp_path / "ignored.py").write_text("code")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.JSONL").write_text('{"text": "third", "id": 3}\n{"text": "fourth\\n"}\n')
    assert text_of(tmp_path) == "first\n\nsecond\n\nthird\n\nfourth\n"
    assert text_of(tmp_path / "*.[mt]*") == "first\n\nsecond\n"
    assert text_of(tmp_path / "**" / "c.*") == "third\n\nfourth\n"


def test_a_file_whose_name_looks_like_a_pattern(tmp_path):
    (tmp_path / "a[1].txt").write_text("text\n")
    assert text_of(tmp_path / "a[1].txt") == "text\n"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", None, "a.txt does not exist"),
        ("a.txt", b" \n\n", "holds no text; expected at least one document"),
        ("a.txt", b"abc\0def", "a.txt is binary: a NUL byte at byte 3"),
        ("a.txt", "un été".encode("latin-1"), "a.txt is not UTF-8: byte 0xe9 at byte 3"),
        ("*.md", None, "matches no file"),
        (".", None, "is a folder without .txt, .md, .rst, .jsonl or .parquet files"),
        *((name, b'{"text": "x"}\n', f"{name} would be read with all its quotes") for name in ("a.json", "a.CSV")),
        ("a.jsonl", b'{"text": "\\n"}\n', "holds no text"),
    ],
)
def test_text_errors(tmp_path, name, content, message):
    if content is not None:
        write(name, content)(tmp_path)
    with refused(re.escape(message)):
        text_of(tmp_path / name)


@pytest.mark.parametrize(
    "line, says",
    {
        "{": "not JSON",
        "": "not JSON",
        '{"content": "x"}': 'no text under "text"',
        '{"text": 5}': 'no text under "text"',
        '"text"': 'no text under "text"',
        r'{"text": "half \ud83d"}': 'a lone surrogate under "text"',
    }.items(),
)
def test_json_lines_errors_name_the_line(tmp_path, line, says):
    lines = ['{"text": "fine"}'] * 1233 + [line, '{"text": "fine"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    with refused(f"a.jsonl, line 1,234: {says}"):
        text_of(tmp_path / "a.jsonl")


def test_pairs_in_three_forms(tmp_path):
    expected = [("ein Haus", "a house"), ("zwei\u2028Wörter", "two words")]
    (tmp_path / "a.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in expected), encoding="utf-8")
    records = [json.dumps({"source": s, "target": t}) for s, t in expected]
    (tmp_path / "a.JSONL").write_text("\n".join(records))
    # A separator inside a sentence (U+2028) is no line end: the files would drift apart.
    (tmp_path / "a.de").write_bytes("ein Haus\r\nzwei\u2028Wörter\r\n".encode())
    (tmp_path / "a.en").write_text("a house\ntwo words\n")
    assert pairs_of(tmp_path / "a.tsv") == expected
    assert pairs_of(tmp_path / "a.JSONL") == expected
    assert pairs_of(tmp_path / "a.de", tmp_path / "a.en") == expected


FINE = "a\tb\n" * 1233


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.tsv", None, "a.tsv does not exist"),
        ("folder.tsv", None, "is a folder"),
        ("a.tsv", "", "a.tsv is empty"),
        ("a.tsv", FINE + "alone\na\tb\n", "a.tsv, line 1,234: 1 column; expected 2"),
        ("a.tsv", FINE + "a\tb\tc\n", "a.tsv, line 1,234: 3 columns; expected 2"),
        ("a.tsv", FINE + "a\t \n", "a.tsv, line 1,234: the target is empty"),
        ("a.tsv", FINE + "\tb\n", "a.tsv, line 1,234: the source is empty"),
        ("a.jsonl", '{"source":"a","target":"b"}\n{"source":"a"}\n', 'line 2: no text under "target"'),
        ("a.txt", "a\nb\n", "--data.target-path"),
    ],
)
def test_pair_errors(tmp_path, name, content, message):
    (tmp_path / "folder.tsv").mkdir()
    if content is not None:
        write(name, content)(tmp_path)
    with refused(message):
        pairs_of(tmp_path / name)


@pytest.mark.parametrize(
    "source, target, message",
    [
        ("a\nb\n", "A\n", "b.txt has 1 lines and .*has more; expected as many targets as sources"),
        ("a\nb\nc\n", "A\n\nC\n", "b.txt, line 2: the target is empty"),
        ("a\n", None, "b.txt does not exist"),
    ],
)
def test_pair_errors_of_two_files(tmp_path, source, target, message):
    every(write("a.txt", source), write("b.txt", target))(tmp_path)
    with refused(message):
        pairs_of(tmp_path / "a.txt", tmp_path / "b.txt")
