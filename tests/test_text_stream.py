"""Text from tokens as they come: together it is what decoding all of them gives, and none is taken back."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from jax_tformer.config.experiment import TokenizerConfig
from jax_tformer.data.tokenizers import Tokenizer, build_tokenizer, follow_settings
from jax_tformer.decoding.texts import TextStream, decode_added
from tests.test_tokenizers import BPE, BYTES, CHARACTERS, END_OF_TEXT, GPT2, needs_gpt2

TEXT = (
    "Plain words, then: naïve cafe\u0301, e\u0308\u0323, 你好,世界。汉字不是拉丁字母。 العربية हिन्दी 🙂👍🏽 "
    "👨‍👩‍👧‍👦 🇩🇪🇯🇵 — “quoted”\n\n\ttabs  and   spaces ,  ﷽ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \N{REPLACEMENT CHARACTER} end "
)


SAVED = TokenizerConfig("huggingface", name=str(GPT2))


@pytest.fixture(scope="module", params=[BYTES, CHARACTERS, BPE, pytest.param(SAVED, marks=needs_gpt2)])
def tokenizer(request):
    return build_tokenizer(request.param, [TEXT * 3], {} if request.param == CHARACTERS else END_OF_TEXT)


def pushed(tokenizer, ids, before=()):
    stream = TextStream(tokenizer, before)
    pieces = [stream.push(int(token)) for token in ids]
    return [*pieces, stream.finish()]


def test_text_comes_back(tokenizer):
    ids = tokenizer.encode(TEXT * 7)
    pieces = pushed(tokenizer, ids)
    assert "".join(pieces) == TEXT * 7
    # As it comes, and not at the end.
    assert (pieces[0], pieces[-1]) == (tokenizer.decode(ids[:1]), "")
    assert len(list(filter(None, pieces))) > len(ids) / 3


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens(tokenizer, seed):
    # Of bytes, most are no characters.
    random = np.random.default_rng(seed)
    ids = random.integers(tokenizer.vocab_size, size=700)
    ids[random.random(700) < random.random() / 2] = tokenizer.end_id or 0
    before, after = ids[:90], ids[90:]
    assert "".join(pushed(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(pushed(tokenizer, after, before)) == decode_added(tokenizer, before, after)


@pytest.mark.parametrize("text", ["Fine. " * 1700, b"\xff" * 10_000, b"\x80" * 10_000, b"\xf0" * 10_000])
def test_a_long_stream_costs_little(text, monkeypatch):
    tokenizer = build_tokenizer(BYTES, (), END_OF_TEXT)
    ids, decode, counts = list(text) if isinstance(text, bytes) else tokenizer.encode(text), tokenizer.decode, []

    def counted(ids):
        counts.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", counted)
    pieces = pushed(tokenizer, ids)
    assert sum(counts) < 150 * len(ids)
    assert "".join(pieces) == decode(ids)
    # Garbage comes late, and comes.
    assert "".join(pieces[:-1]).startswith(decode(ids)[:-40])


def test_spaces_that_are_taken_out_are_held_back():
    """Whatever comes: what a later token would close up has not been returned yet."""
    words = [" ", ".", "'", " '", "n", " n", "n't", "t", "'s", "s", " v", "ve", "re", "m", "a", "�"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, "a"))
    backend.decoder = decoders.Fuse()
    follow_settings(backend, {"clean_up_tokenization_spaces": True}, {})
    tokenizer, rng, closed = Tokenizer(backend, {}), np.random.default_rng(0), 0
    assert tokenizer.cleans_spaces
    for ids in rng.integers(0, len(words), (300, 40)):
        text = tokenizer.decode(ids)
        assert "".join(pushed(tokenizer, ids)) == text
        closed += sum(len(words[id]) for id in ids) - len(text)
    assert closed > 500
