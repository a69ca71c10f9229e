"""Text to ids and back, for every kind of tokenizer; and the ids that the articles print."""

import dataclasses
import json
import os
import string
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_tformer.config.errors import InputError, require_ids
from jax_tformer.config.experiment import TokenizerConfig
from jax_tformer.data.pairs import shift_right
from jax_tformer.data.text import windows
from jax_tformer.data.text_files import Pieces
from jax_tformer.data.tokenizer_sources import build_tokenizer, load_tokenizer
from jax_tformer.data.tokenizers import PIECE_END, Role, Tokenizer, check_vocabulary

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data"
GPT2 = SHARED / "gpt2"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason="needs ../shared/data/gpt2")

# Long enough for several pieces; runs of spaces, blank lines, contractions, figures and several scripts.
CORPUS = string.printable + "".join(
    f"Line {n}: the model doesn't   know\n\n\n  that {n * n} != {n}!\t“Ça va”, 日本語 и русский 🙂\r\n"
    for n in range(400)
)
PAIR_TOKENS: dict[Role, str] = {"pad": "<|pad|>", "start": "<|start|>", "end": "<|end|>"}
END_OF_TEXT: dict[Role, str] = {"start": "<|endoftext|>", "end": "<|endoftext|>"}
BYTES = TokenizerConfig("bytes")
CHARACTERS = TokenizerConfig("characters")
BPE = TokenizerConfig("bpe", 400)


@pytest.fixture(scope="module", params=[BYTES, CHARACTERS, BPE], ids=lambda config: config.kind)
def made(request: pytest.FixtureRequest) -> Tokenizer:
    return build_tokenizer(request.param, [CORPUS], PAIR_TOKENS)


def pieces(text: str) -> list[str]:
    return list(Pieces(memoryview(text.encode()), PIECE_END))


def backend_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """What Hugging Face's own reading of the saved tokenizer gives for the whole text at once."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_json())["tokenizer"]))
    return backend.encode(text, add_special_tokens=False).ids


def test_round_trip(made: Tokenizer) -> None:
    ids = made.encode(CORPUS)
    assert ids.dtype == np.int32
    assert made.decode(ids) == CORPUS
    assert ids.min() >= 0
    assert ids.max() < made.vocab_size - len(PAIR_TOKENS)


def test_pieces_give_the_ids_of_the_whole_text(made: Tokenizer) -> None:
    text = CORPUS[:5000] + "<|end|>" + CORPUS[5000:] + "x <|start|>\n\n\n"
    assert len(pieces(text)) > 2
    assert "".join(pieces(text)) == text
    assert made.encode(text).tolist() == backend_ids(made, text)


def test_a_text_is_not_cut_inside_an_added_token(tmp_path: Path) -> None:
    build_tokenizer(BYTES, [], {"mask": "a mask"}).save(tmp_path)
    text = "a mask" * 3000
    assert any(piece.endswith("a") for piece in pieces(text))
    assert set(load_tokenizer(tmp_path).encode(text).tolist()) == {256}


@pytest.mark.parametrize("config", [BYTES, BPE], ids=lambda config: config.kind)
def test_bytes_and_bpe_round_trip_any_text(config: TokenizerConfig) -> None:
    tokenizer = build_tokenizer(config, [CORPUS], PAIR_TOKENS)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.text())
    def round_trip(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids.tolist() == backend_ids(tokenizer, text)

    round_trip()


def test_batch_gives_the_ids_of_each_text(made: Tokenizer) -> None:
    # Joined, the third and fourth text would spell a special token.
    texts = ["the model", "", "know <|end", "|> that<|pad|>", "日本語"]
    for text, ids in zip(texts, made.encode_batch(texts), strict=True):
        assert ids.tolist() == backend_ids(made, text) == made.encode(text).tolist()


def test_special_tokens_in_text_are_recognised_and_left_out_of_decoding(made: Tokenizer) -> None:
    ids = made.encode("know<|end|>that")
    assert ids.tolist().count(made.end_id) == 1
    assert made.decode(ids) == "knowthat"


def test_sizes() -> None:
    assert build_tokenizer(BYTES, [], END_OF_TEXT).vocab_size == 257
    assert build_tokenizer(BYTES, [], {}).encode("Az\n").tolist() == [65, 122, 10]
    assert build_tokenizer(CHARACTERS, ["banana\n"], {}).vocab_size == 4
    assert build_tokenizer(CHARACTERS, ["banana\n"], {}).encode("ab\nn").tolist() == [1, 2, 0, 3]
    assert build_tokenizer(CHARACTERS, ["banana\n"], PAIR_TOKENS).vocab_size == 7
    assert build_tokenizer(BPE, [CORPUS], END_OF_TEXT).vocab_size == 400
    assert build_tokenizer(BPE, [CORPUS], PAIR_TOKENS).vocab_size == 400
    assert 257 < build_tokenizer(TokenizerConfig("bpe", 5000), ["too small for that"], END_OF_TEXT).vocab_size < 300


def test_bpe_training_is_deterministic() -> None:
    assert build_tokenizer(BPE, pieces(CORPUS), {}).to_json() == build_tokenizer(BPE, [CORPUS], {}).to_json()


def test_ordinary_ids_are_all_but_the_special_ones(made: Tokenizer) -> None:
    assert made.ordinary_ids.tolist() == list(range(made.vocab_size - 3))
    assert {made.pad_id, made.start_id, made.end_id} == set(range(made.vocab_size - 3, made.vocab_size))
    assert made.mask_id is None


def test_save_and_load_keep_ids_and_roles(made: Tokenizer, tmp_path: Path) -> None:
    made.save(tmp_path / "run")
    loaded = load_tokenizer(tmp_path / "run")
    assert loaded.to_json() == made.to_json()
    assert loaded.encode(CORPUS).tolist() == made.encode(CORPUS).tolist()
    for role in ("pad_id", "start_id", "end_id", "mask_id", "vocab_size"):
        assert getattr(loaded, role) == getattr(made, role)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_one_token_may_begin_end_and_pad(tmp_path: Path) -> None:
    build_tokenizer(BYTES, [], END_OF_TEXT).save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.start_id, loaded.end_id, loaded.pad_id, loaded.mask_id) == (256, 256, 256, None)


def test_roles_as_hugging_face_writes_them(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(BYTES, [], {"start": "[CLS]", "end": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"})
    tokenizer.save(tmp_path)
    settings_path = tmp_path / "tokenizer_config.json"
    settings_path.write_text(json.dumps({"cls_token": {"content": "[CLS]", "lstrip": False}, "add_bos_token": True}))
    names = {"sep_token": "[SEP]", "pad_token": {"content": "[PAD]"}, "mask_token": "[MASK]", "bos_token": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.start_id, loaded.end_id, loaded.pad_id, loaded.mask_id) == (256, 257, 258, 259)


def test_truncation_and_padding_of_a_saved_tokenizer_are_switched_off(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(
        json.dumps(json.loads(build_tokenizer(BYTES, [], {}).to_json())["tokenizer"])
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("abcdef").tolist() == [97, 98, 99, 100, 101, 102]


def test_unknown_character_is_named() -> None:
    tokenizer = build_tokenizer(CHARACTERS, ["abc"], PAIR_TOKENS)
    for text in ("ab€", "<|end|>€", "\U0010ffff"):
        with pytest.raises(InputError, match=r"U\+(20AC|10FFFF)\) is not in the tokenizer's vocabulary"):
            tokenizer.encode(text)


def test_input_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="lone surrogate \\(U\\+D83D\\) at character 2"):
        build_tokenizer(BYTES, [], {}).encode("ab\ud83d")
    with pytest.raises(InputError, match="the text is empty"):
        build_tokenizer(CHARACTERS, [""], {})
    with pytest.raises(InputError, match="without a name"):
        build_tokenizer(TokenizerConfig("huggingface"), [], {})


REVISION = "0123456789abcdef" * 2 + "01234567"


def test_a_tokenizer_of_the_hub_is_that_of_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tokenizer(BYTES, [], END_OF_TEXT).save(tmp_path)
    asked = []

    def download(name: str, **options: object) -> str:
        asked.append((name, options["revision"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.model_info", lambda name: SimpleNamespace(sha=REVISION))
    hub = TokenizerConfig("huggingface", name="someone/tokenizer", revision=REVISION)
    assert build_tokenizer(hub, [], {}).end_id == 256
    with pytest.raises(InputError, match=rf"the newest is --data\.tokenizer\.revision {REVISION}$"):
        build_tokenizer(dataclasses.replace(hub, revision=None), [], {})
    with pytest.raises(InputError, match="is a folder, which has no revision"):
        build_tokenizer(dataclasses.replace(hub, name=str(tmp_path)), [], {})
    assert asked == [("someone/tokenizer", REVISION)]
    for wrong in ("main", REVISION[1:], REVISION.upper()):
        with pytest.raises(InputError, match=r"revision is '.*'; expected the commit of a hub name, 40 hex"):
            dataclasses.replace(hub, revision=wrong)
    with pytest.raises(InputError, match="expected the commit of a hub name"):
        TokenizerConfig("bytes", revision=REVISION)


@pytest.mark.parametrize("revision", [REVISION, None])
def test_a_hub_that_does_not_answer_is_said_in_one_line(revision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("first line\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr("huggingface_hub.model_info", refuse)
    with pytest.raises(InputError, match=r"hub did not give it \(ConnectionError\)") as caught:
        build_tokenizer(TokenizerConfig("huggingface", name="someone/tokenizer", revision=revision), [], {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["", "{", '{"version": "1.0"}', "[]", "\0\0", '{"model":\n\n{"type": "BPE"}}'])
def test_damaged_tokenizer_is_named_in_one_line(tmp_path: Path, damage: str) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_damaged_roles(tmp_path: Path) -> None:
    build_tokenizer(BYTES, [], END_OF_TEXT).save(tmp_path)
    settings_path = tmp_path / "tokenizer_config.json"
    for damage in ("{", "[1]", "7"):
        settings_path.write_text(damage)
        with pytest.raises(InputError, match=r"tokenizer_config\.json is (damaged: it is not JSON|not a JSON object)"):
            load_tokenizer(tmp_path)
    settings_path.write_text('{"eos_token": "</s>"}')
    with pytest.raises(InputError, match="end token '</s>' has no id"):
        load_tokenizer(tmp_path)


def test_require_ids_and_vocabulary() -> None:
    require_ids(np.array([[0, 9]], np.int32), 10)
    for wrong in (10, -1):
        with pytest.raises(InputError, match=f"the id {wrong}; expected ids from 0 to 9"):
            require_ids(np.array([[0, wrong]], np.int32), 10)
    tokenizer = build_tokenizer(BYTES, [], {})
    check_vocabulary(tokenizer, 256)
    with pytest.raises(InputError, match="256 ids and the model a vocabulary of 255"):
        check_vocabulary(tokenizer, 255)


def test_shift_right() -> None:
    assert shift_right(np.array([5, 6, 7]), 1).tolist() == [1, 5, 6]
    assert shift_right(np.array([[5, 6], [8, 9]]), 1).tolist() == [[1, 5], [1, 8]]


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_tinyshakespeare_has_65_characters() -> None:
    text = (SHARED / "tinyshakespeare.txt").read_text(encoding="utf-8")
    tokenizer = build_tokenizer(CHARACTERS, [text], {})
    assert tokenizer.vocab_size == 65
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return build_tokenizer(TokenizerConfig("huggingface", name=str(GPT2)), [], {})


class TestArticle:
    """The ids and windows that the article prints (SOURCES.md, 000), under the GPT-2 tokenizer."""

    pytestmark = needs_gpt2
    text = "Chapter 1\n\n\n\nIt was a bright cold day in April"
    ids = (14126, 352, 628, 198, 198, 1026, 373, 257, 6016, 4692, 1110, 287, 3035)

    def test_ids(self, gpt2: Tokenizer) -> None:
        assert tuple(gpt2.encode(self.text)) == self.ids
        start = gpt2.encode("<|endoftext|> machine learning using PyTorch")
        assert start.tolist() == [50256, 4572, 4673, 1262, 9485, 15884, 354]
        assert gpt2.decode(start) == " machine learning using PyTorch"
        assert gpt2.vocab_size == 50257
        assert (gpt2.start_id, gpt2.end_id, gpt2.pad_id, gpt2.mask_id) == (50256, 50256, 50256, None)

    def test_windows_of_encoder_and_decoder(self, gpt2: Tokenizer) -> None:
        ids = gpt2.encode(self.text)
        encoder = windows(ids, 10, 1)[:4]
        assert encoder.tolist() == [
            [14126, 352, 628, 198, 198, 1026, 373, 257, 6016, 4692],
            [352, 628, 198, 198, 1026, 373, 257, 6016, 4692, 1110],
            [628, 198, 198, 1026, 373, 257, 6016, 4692, 1110, 287],
            [198, 198, 1026, 373, 257, 6016, 4692, 1110, 287, 3035],
        ]
        assert gpt2.start_id is not None
        assert windows(shift_right(ids, gpt2.start_id), 10, 1)[:4].tolist() == [
            [50256, 14126, 352, 628, 198, 198, 1026, 373, 257, 6016],
            [14126, 352, 628, 198, 198, 1026, 373, 257, 6016, 4692],
            [352, 628, 198, 198, 1026, 373, 257, 6016, 4692, 1110],
            [628, 198, 198, 1026, 373, 257, 6016, 4692, 1110, 287],
        ]

    def test_pieces_of_a_long_text(self, gpt2: Tokenizer) -> None:
        assert gpt2.encode(CORPUS).tolist() == backend_ids(gpt2, CORPUS)


def test_what_is_saved_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    build_tokenizer(TokenizerConfig("characters"), ["ab"], {}).save(tmp_path)
    names = ("tokenizer_config.json", "tokenizer.json")
    assert synced == [place for name in names for place in (f"{tmp_path}/{name}.partial", str(tmp_path))]
