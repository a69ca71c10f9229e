"""Where text and pairs come from, and what is said about files that hold neither."""

import json
from itertools import compress
from pathlib import Path

import pytest

from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import PairData, TextData
from jax_tformer.data.order import held_out_items
from jax_tformer.data.sources import load_pairs, load_text
from tests.refusals import refused


def text_of(path):
    return bytes(load_text(TextData(path=str(path))).content).decode()


def pairs_of(path, target_path=None):
    texts = iter(load_pairs(PairData(path=str(path), target_path=None if target_path is None else str(target_path))))
    return list(zip(texts, texts, strict=True))


def complaint(path, content=None):
    """The error that loading `path` as text raises, after writing `content` there."""
    if content is not None:
        Path(path).write_bytes(content)
    with pytest.raises(InputError) as caught:
        text_of(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def pair_complaint(path, content=None, target_path=None):
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        pairs_of(path, target_path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_python_docs_are_english_text_in_a_fixed_order():
    text = bytes(load_text(TextData("python-docs")).content).decode()
    assert len(text) > 300_000
    assert 'The "assert" statement\n' in text
    assert text.index('The "assert" statement\n') < text.index('The "yield" statement\n')
    assert text.encode() == load_text(TextData("python-docs")).content
    assert "\0" not in text


def test_one_file_is_its_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeff\nÇa  va\r\n\r\n\tbien".encode())
    assert text_of(tmp_path / "a.txt") == "\nÇa  va\n\n\tbien"


def test_folder_glob_and_json_lines_join_documents_by_a_blank_line(tmp_path):
    (tmp_path / "b.md").write_text("second\n")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    (tmp_path / "ignored.py").write_text("code")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.JSONL").write_text('{"text": "third", "id": 3}\n{"text": "fourth\\n"}\n')
    assert text_of(tmp_path) == "first\n\nsecond\n\nthird\n\nfourth\n"
    assert text_of(tmp_path / "*.[mt]*") == "first\n\nsecond\n"
    assert text_of(tmp_path / "**" / "c.*") == "third\n\nfourth\n"


def test_a_file_whose_name_looks_like_a_pattern(tmp_path):
    (tmp_path / "a[1].txt").write_text("text\n")
    assert text_of(tmp_path / "a[1].txt") == "text\n"


def test_text_errors(tmp_path):
    with refused(r"give --data\.path"):
        load_text(TextData("files"))
    file = tmp_path / "a.txt"
    assert "a.txt does not exist" in complaint(file)
    assert "a.txt is empty" in complaint(file, b" \n\n")
    assert "a.txt is binary: a NUL byte at byte 3" in complaint(file, b"abc\0def")
    assert "a.txt is not UTF-8: byte 0xe9 at byte 3" in complaint(file, "un été".encode("latin-1"))
    assert "matches no file" in complaint(tmp_path / "*.md")
    assert "is a folder without .txt, .md, .rst, .jsonl or .parquet files" in complaint(_folder(tmp_path / "folder"))
    for name in ("a.json", "a.CSV"):
        assert f"{name} would be read with all its quotes" in complaint(tmp_path / name, b'{"text": "x"}\n')
    assert "holds no text" in complaint(tmp_path / "a.jsonl", b'{"text": "\\n"}\n')


def _folder(path):
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ('{"content": "x"}', 'no text under "text"'),
        ('{"text": 5}', 'no text under "text"'),
        ('"text"', 'no text under "text"'),
        (r'{"text": "half \ud83d"}', 'a lone surrogate under "text"'),
    ],
)
def test_json_lines_errors_name_the_line(tmp_path, line, says):
    lines = ['{"text": "fine"}'] * 1233 + [line, '{"text": "fine"}']
    message = complaint(tmp_path / "a.jsonl", ("\n".join(lines) + "\n").encode())
    assert f"a.jsonl, line 1,234: {says}" in message


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


def test_pair_errors(tmp_path):
    with refused(r"give --data\.path"):
        load_pairs(PairData("files"))
    fine = "a\tb\n" * 1233
    tsv = tmp_path / "a.tsv"
    assert "a.tsv does not exist" in pair_complaint(tsv)
    assert "is not a file" in pair_complaint(_folder(tmp_path / "folder.tsv"))
    assert "a.tsv is empty" in pair_complaint(tsv, "")
    assert "a.tsv, line 1,234: 1 column; expected 2" in pair_complaint(tsv, fine + "alone\na\tb\n")
    assert "a.tsv, line 1,234: 3 columns; expected 2" in pair_complaint(tsv, fine + "a\tb\tc\n")
    assert "a.tsv, line 1,234: the target is empty" in pair_complaint(tsv, fine + "a\t \n")
    assert "a.tsv, line 1,234: the source is empty" in pair_complaint(tsv, fine + "\tb\n")
    json_lines = tmp_path / "a.jsonl"
    assert 'line 2: no text under "target"' in pair_complaint(
        json_lines, '{"source":"a","target":"b"}\n{"source":"a"}\n'
    )
    text = tmp_path / "a.txt"
    assert "--data.target-path" in pair_complaint(text, "a\nb\n")
    (tmp_path / "b.txt").write_text("A\n")
    assert "has 2 lines and" in pair_complaint(text, "a\nb\n", tmp_path / "b.txt")
    assert "b.txt has 1;" in pair_complaint(text, "a\nb\n", tmp_path / "b.txt")
    (tmp_path / "b.txt").write_text("A\n\nC\n")
    assert "line 2: the target is empty" in pair_complaint(text, "a\nb\nc\n", tmp_path / "b.txt")
    assert "c.txt does not exist" in pair_complaint(text, "a\n", tmp_path / "c.txt")


def test_held_out_items_are_a_function_of_the_items():
    def chosen(items, fraction):
        items = list(items)
        return set(compress(items, held_out_items(items, fraction)))

    items = [f"item {n}" for n in range(1000)]
    few = chosen(items, 0.1)
    assert len(few) == 100
    assert chosen(reversed(items * 2), 0.1) == few
    assert held_out_items(items * 2, 0.1).sum() == 200
    assert len(chosen(["only", "two"], 0.01)) == 1
    # Fixed for ever: a later release must not move pairs that a run has trained on to the held-out side.
    assert sorted(chosen("abcdefghij", 0.3)) == ["d", "f", "j"]
