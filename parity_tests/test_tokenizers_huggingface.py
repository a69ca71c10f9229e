"""The ids of a folder's tokenizer, special tokens included, beside those of transformers' AutoTokenizer."""

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from jax_tformer.data.tokenizers import _FORCED as FORCED
from jax_tformer.data.tokenizers import load_tokenizer
from parity_tests import small_tokenizers

SPECIAL = ["<s>", "</s>", "<unk>", "<pad>", "[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]"]
TEXTS = ("hello World", " Hi  thére", "A1. b")


def byte_level(single):
    """A tokenizer of bytes; `single` is what tokenizer.json puts around a text."""
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: id for id, token in enumerate(vocabulary)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if single is not None:
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    return backend


def word_pieces(single):
    """BERT's, of single letters, which stay as they are written."""
    letters = [chr(code) for code in range(33, 127)] + ["é"]
    vocabulary = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    backend = Tokenizer(models.WordPiece({token: id for id, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(SPECIAL)
    return backend


SETTINGS: list[dict[str, Any]] = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": False, "add_eos_token": False},
    {"add_eos_token": True},
]
TEMPLATES = (None, "<s> $A", "<s> $A </s>")
CLASSES = [
    *(("gpt2", name) for name in ("GPT2Tokenizer", "GPT2TokenizerFast", None)),
    ("llama", "PreTrainedTokenizerFast"),
    ("qwen2", "Qwen2Tokenizer"),
    ("gpt_neox", "GPTNeoXTokenizerFast"),
    ("roberta", "RobertaTokenizer"),
    ("bart", "BartTokenizer"),
]


def require_equal(folder, backend, model_type, settings):
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder).framed()
    assert ours.framing is not None
    for text in TEXTS:
        ids = [*ours.framing.before, *ours.encode(text).tolist(), *ours.framing.after]
        assert ids == theirs(text)["input_ids"], (settings, text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("model_type", "name"), CLASSES)
def test_special_tokens(model_type, name, template, tmp_path):
    """With a tokenizer.json, add_bos_token and add_eos_token change nothing; some classes add the same always."""
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    for settings in SETTINGS:
        chosen = {} if name is None else {"tokenizer_class": name}
        require_equal(tmp_path, byte_level(template), model_type, {**named, **chosen, **settings})


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "GPTNeoXTokenizer", "RobertaTokenizer"])
def test_a_space_before_the_text(name, tmp_path):
    model_type = {"GPT2Tokenizer": "gpt2", "GPTNeoXTokenizer": "gpt_neox"}.get(name, "roberta")
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": name}
    for spaced in (True, False):
        require_equal(tmp_path, byte_level(None), model_type, {**named, "add_prefix_space": spaced})


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("strip", [True, False, None])
def test_letters_of_bert(lower, strip, tmp_path):
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower, "strip_accents": strip}
    require_equal(tmp_path, word_pieces(None), "bert", settings)


@pytest.mark.parametrize("kind", ["sentence pieces", "word pieces", "bytes", "bytes, forced", "no decoder"])
def test_spaces_before_punctuation(kind, tmp_path):
    """Taken out where tokenizer_config.json says so, as version 4 did by default; never of a BPE unless forced."""
    make = {"sentence pieces": small_tokenizers.sentence_pieces, "word pieces": small_tokenizers.word_pieces}
    tokenizer = make.get(kind, small_tokenizers.byte_level)(clean_up_tokenization_spaces=True)
    if kind == "bytes, forced":
        setattr(tokenizer, FORCED, True)
        tokenizer.init_kwargs[FORCED] = True
    theirs = small_tokenizers.saved(tokenizer, tmp_path)
    if kind == "no decoder":
        words = {word: id for id, word in enumerate([*small_tokenizers.SPECIAL, "do", "n't", ".", "'s", "'", ","])}
        backend = Tokenizer(models.WordLevel(words, "<unk>"))
        backend.add_special_tokens(small_tokenizers.SPECIAL)
        backend.save(str(tmp_path / "tokenizer.json"))
        theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.clean_up_tokenization_spaces is True
    ours, rng = load_tokenizer(tmp_path), np.random.default_rng(0)
    changed = 0
    for ids in rng.choice(ours.ordinary_ids, (50, 60)):
        text = theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids) == text
        changed += text != theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert bool(changed) == (kind != "bytes")
