"""Text to ids and back, for every kind of tokenizer, long texts too; and the ids that the articles print."""

import json
import random
import string
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from jax_tformer.config.experiment import TextData, TokenizerConfig, TrainingConfig
from jax_tformer.data import tokenizers as ours
from jax_tformer.data.sources import load_text
from jax_tformer.data.tokenizers import Pieces, Tokenizer, build_tokenizer, load_tokenizer
from jax_tformer.files import read_json, write_json
from tests.damages import write
from tests.memory import traced_peak
from tests.refusals import refused
from tests.test_pipelines import build

GPT2 = Path(__file__).resolve().parents[2] / "shared" / "data" / "gpt2"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason="needs ../shared/data/gpt2")

# Long enough for several pieces; runs of spaces, blank lines, contractions, figures and several scripts.
CORPUS = string.printable + "".join(
    f"Line {n}: the model doesn't   know\n\n\n  that {n * n} != {n}!\t“Ça va”, 日本語 и русский 🙂\r\n"
    for n in range(400)
)
PAIR_TOKENS = {"pad": "<|pad|>", "start": "<|start|>", "end": "<|end|>"}
END_OF_TEXT = {"start": "<|endoftext|>", "end": "<|endoftext|>"}
BYTES = TokenizerConfig("bytes")
CHARACTERS = TokenizerConfig("characters")
BPE = TokenizerConfig("bpe", 400)


@pytest.fixture(scope="module", params=[BYTES, CHARACTERS, BPE], ids=lambda config: config.kind)
def made(request):
    return build_tokenizer(request.param, [CORPUS], PAIR_TOKENS)


def backend_of(tokenizer):
    """Hugging Face's own reading of the saved tokenizer."""
    return tokenizers.Tokenizer.from_str(json.dumps(json.loads(tokenizer.as_json)["tokenizer"]))


def backend_ids(tokenizer, text):
    """What that gives for the whole text at once."""
    return backend_of(tokenizer).encode(text, add_special_tokens=False).ids


def test_any_text_comes_back(made):
    """Whatever characters there are, or those that the tokenizer is made of."""
    letters = sorted(set(CORPUS)) if made.vocab_size < 256 else None

    @settings(max_examples=100, deadline=None, derandomize=True)
    @example(CORPUS)
    @given(st.text(letters or st.characters(codec="utf-8")))
    def round_trip(text):
        ids = made.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == backend_ids(made, text)
        assert made.decode(ids) == text

    round_trip()


def test_batch_gives_the_ids_of_each_text(made):
    # Joined, the third and fourth text would spell a special token.
    plain = ["the model", "", "know <|end", "|> that", "日本語"]
    for texts in (plain, [*plain, "x<|pad|><|end|> y"], []):
        batch = made.encode_batch(texts)
        assert [ids.tolist() for ids in batch] == [backend_ids(made, text) for text in texts]


@pytest.mark.parametrize("change", ["single_word", "lstrip", "rstrip"])
@pytest.mark.parametrize("config", [BYTES, CHARACTERS, BPE], ids=lambda config: config.kind)
def test_special_tokens_may_look_at_their_neighbours(config, change, tmp_path):
    text = ("go on" * 4 + "go  on x on") * 5
    build_tokenizer(config, [text], {"mask": " on"}).save(tmp_path)
    saved = read_json(tmp_path / "tokenizer.json")
    saved["added_tokens"][0][change] = True
    write_json(tmp_path / "tokenizer.json", saved)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(text).tolist() == backend_ids(loaded, text)


def test_the_ids_of_bytes_and_characters():
    assert build_tokenizer(BYTES, [], {}).encode("Az\n").tolist() == [65, 122, 10]
    assert build_tokenizer(CHARACTERS, ["banana\n"], {}).encode("ab\nn").tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize("kind, text", [("characters", "fog\n"), ("words", "fog of war")])
def test_what_is_put_around_a_text_is_known_whatever_the_vocabulary(kind, text):
    """Other words and characters than these are refused."""
    tokenizer = build_tokenizer(TokenizerConfig(kind), [text], END_OF_TEXT)
    assert tokenizer.framed().framing.before == ()
    framed = tokenizer.adding(ours.Framing((tokenizer.end_id,), (tokenizer.end_id,))).framed().framing
    assert (framed.before, framed.after) == ((tokenizer.end_id,), (tokenizer.end_id,))


def test_bpe_training_is_deterministic():
    pieces = Pieces([CORPUS.encode()])
    assert len(list(pieces)) > 2
    assert build_tokenizer(BPE, pieces, {}).as_json == build_tokenizer(BPE, [CORPUS], {}).as_json


def test_ordinary_ids_are_all_but_the_special_ones(made):
    assert made.ordinary_ids.tolist() == list(range(made.vocab_size - 3))
    assert {made.pad_id, made.start_id, made.end_id} == set(range(made.vocab_size - 3, made.vocab_size))
    assert made.mask_id is None


def roles(tokenizer):
    return tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id, tokenizer.mask_id


def test_roles_as_hugging_face_writes_them(tmp_path):
    build_tokenizer(BYTES, [], END_OF_TEXT).save(tmp_path)
    assert roles(load_tokenizer(tmp_path)) == (256, 256, 256, None)
    build_tokenizer(BYTES, [], {"start": "[CLS]", "end": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}).save(tmp_path)
    config = {"cls_token": {"content": "[CLS]", "lstrip": False}, "add_bos_token": True}
    write_json(tmp_path / "tokenizer_config.json", config)
    # The first name of a role counts.
    names = {
        "eos_token": "[SEP]",
        "sep_token": "[PAD]",
        "pad_token": {"content": "[PAD]"},
        "mask_token": "[MASK]",
        "bos_token": None,
    }
    write_json(tmp_path / "special_tokens_map.json", names)
    assert roles(load_tokenizer(tmp_path)) == (256, 257, 258, 259)


def test_truncation_and_padding_of_a_saved_tokenizer_are_switched_off(tmp_path):
    backend = backend_of(build_tokenizer(BYTES, [], {}))
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("abcdef").tolist() == [97, 98, 99, 100, 101, 102]


# Long texts


def split_as(digits):
    pattern = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    pattern += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])


FAMILIES = {
    "GPT-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    "BERT": (pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
    "Llama 3": (split_as("{1,3}"), None),
    "Qwen 2": (split_as(""), normalizers.NFC()),
    "Llama 2": (None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "T5": (pre_tokenizers.Metaspace(), None),
}
TRICKY = "".join(random.Random(0).choices([*"aé日१.'s \n\t\r_", "<|e|>", "<|", "🙂", "don't ", "  "], k=4000))


@pytest.fixture(scope="module", params=["bytes", "characters", *FAMILIES])
def tricky(request):
    """A tokenizer trained on little, and built as the families build theirs."""
    if request.param not in FAMILIES:
        return build_tokenizer(TokenizerConfig(request.param), [TRICKY + "。"], {"end": "<|e|>"})
    splitter, normalizer = FAMILIES[request.param]
    bert = request.param == "BERT"
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]") if bert else models.BPE())
    backend.pre_tokenizer, backend.normalizer = splitter, normalizer
    settings = {"vocab_size": 400, "special_tokens": ["[UNK]"], "show_progress": False}
    bpe = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **settings)
    trainer = trainers.WordPieceTrainer(**settings) if bert else bpe
    backend.train_from_iterator([TRICKY + "don't know what we'll see"], trainer)
    backend.add_special_tokens([AddedToken("<|e|>", normalized=False)])
    return Tokenizer(backend, {"end": "<|e|>"})


@pytest.mark.parametrize("size", [64, 200])
@pytest.mark.parametrize("spaces", [True, False])
def test_ids_of_pieces_are_those_of_the_whole_text(tricky, spaces, size, monkeypatch):
    monkeypatch.setattr(ours, "_PIECE_BYTES", size)
    written = TRICKY if spaces else TRICKY.replace(" ", "日").replace("é", "。")
    text = written.encode()
    assert "".join(Pieces([text])) == written
    assert len(pieces := list(Pieces([text]))) > 20
    assert list(Pieces([text[first : first + 37] for first in range(0, len(text), 37)])) == pieces
    ids = tricky.encode_texts([memoryview(text)], [7])
    assert ids.dtype == np.uint16
    assert ids.tolist() == [7, *backend_ids(tricky, written)]


@pytest.mark.parametrize(
    "part",
    [
        "你好。\n",
        "\u3000\u3000你好，再见。\n",
        "“你好。”\n\n他们说，",
        "こんにちは、\n\n",
        "code\n",
        "x" * 20_000 + " y" * 9999,
    ],
)
def test_a_text_without_spaces_has_pieces_too(part):
    text = part * (200_000 // len(part.encode()) + 1)
    pieces = list(Pieces([text.encode()]))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 30_000


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_little_more_is_in_memory_than_the_text_and_its_ids(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "_PIECES_TOGETHER", 4)
    part = "".join(f"{n} bottles of “beer” on the wall\n" for n in range(500))
    for number in range(100):
        (tmp_path / f"{number}.txt").write_text(part, encoding="utf-8")
    data = TextData(path=str(tmp_path), context_length=16, tokenizer=TokenizerConfig(kind))
    training = TrainingConfig(batch_size=2, evaluate_batches=1)
    build(data, training)  # what is imported and kept at the first time
    size = len(load_text(data).content)
    # A byte for each of the text, two for its id; their array grows by an eighth.
    assert traced_peak(lambda: build(data, training)) < 1.3 * 3 * size + 500_000


# What is refused


@pytest.mark.parametrize("text", ["ab€", "<|end|>€", "\U0010ffff"])
def test_unknown_character_is_named(text):
    tokenizer = build_tokenizer(CHARACTERS, ["abc"], PAIR_TOKENS)
    with refused(r"U\+(20AC|10FFFF)\) is not in the tokenizer's vocabulary"):
        tokenizer.encode(text)


@pytest.mark.parametrize("text", ["two", "one two", "one<|end|> two"])
def test_unknown_word_is_told(text):
    tokenizer = build_tokenizer(TokenizerConfig("words"), ["one\tthree\n", "a\x1cb"], PAIR_TOKENS)
    assert len(tokenizer.encode("one a\x1cb")) == 2
    with refused(r"a word of '.*two' is not in the tokenizer's vocabulary"):
        tokenizer.encode(text)


def test_input_errors():
    with refused("the text is empty"):
        build_tokenizer(CHARACTERS, [""], {})
    with refused("without a name"):
        build_tokenizer(TokenizerConfig("huggingface"), [], {})


REVISION = "0123456789abcdef" * 2 + "01234567"


def test_a_revision_is_the_commit_of_a_hub_name(tmp_path):
    with refused("is a folder, which has no revision"):
        build_tokenizer(TokenizerConfig("huggingface", name=str(tmp_path), revision=REVISION), [], {})
    for wrong in ("main", REVISION[1:], REVISION.upper()):
        with refused(r"revision is '.*'; expected the commit of a hub name, 40 hex"):
            TokenizerConfig("huggingface", name="someone/tokenizer", revision=wrong)
    with refused("expected the commit of a hub name"):
        TokenizerConfig("bytes", revision=REVISION)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("tokenizer.json", None, "tokenizer.json does not exist"),
        *(
            ("tokenizer.json", content, "tokenizer.json is not a tokenizer")
            for content in ("", "{", '{"version": "1.0"}', "[]", "\0\0", '{"model":\n\n{"type": "BPE"}}')
        ),
        ("tokenizer_config.json", "{", "tokenizer_config.json is damaged: it is not JSON"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "</s>"}', "end token '</s>' has no id"),
        ("tokenizer_config.json", '{"framing": []}', "tokenizer_config.json holds list"),
        (
            "tokenizer_config.json",
            '{"framing": {"before": [-1], "after": []}}',
            "before is \\(-1,\\); expected a tuple of ids of at least 0",
        ),
        ("tokenizer_config.json", '{"framing": {"before": ["a"], "after": []}}', "is not a valid Framing"),
    ],
)
def test_a_damaged_tokenizer_is_named_in_one_line(tmp_path, name, content, message):
    build_tokenizer(BYTES, [], END_OF_TEXT).save(tmp_path)
    write(name, content)(tmp_path)
    with refused(message):
        load_tokenizer(tmp_path)


@needs_gpt2
def test_the_article_s_ids():
    """What the article prints (SOURCES.md, 000), under the GPT-2 tokenizer."""
    gpt2 = load_tokenizer(GPT2)
    start = gpt2.encode("<|endoftext|> machine learning using PyTorch")
    assert start.tolist() == [50256, 4572, 4673, 1262, 9485, 15884, 354]
    assert gpt2.decode(start) == " machine learning using PyTorch"
    assert gpt2.vocab_size == 50257
    assert roles(gpt2) == (50256, 50256, 50256, None)
    expected = [14126, 352, 628, 198, 198, 1026, 373, 257, 6016, 4692, 1110, 287, 3035]
    assert gpt2.encode("Chapter 1\n\n\n\nIt was a bright cold day in April").tolist() == expected
    assert gpt2.encode_texts([memoryview(CORPUS.encode())]).tolist() == backend_ids(gpt2, CORPUS)


def test_what_is_saved_is_on_the_disk_before_it_has_its_name(tmp_path, synced):
    build_tokenizer(CHARACTERS, ["ab"], {}).save(tmp_path)
    names = ("tokenizer_config.json", "tokenizer.json")
    assert synced == [place for name in names for place in (f"{tmp_path}/{name}.partial", str(tmp_path))]
