"""The ids of a folder's tokenizer, special tokens and conversations included, beside those of AutoTokenizer."""

import re
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from jax_tformer.cli.chat import Conversation, read_chat_template
from jax_tformer.data.tokenizers import _FORCED as FORCED
from jax_tformer.data.tokenizers import load_tokenizer
from jax_tformer.decoding.texts import PromptReader
from jax_tformer.files import write_json
from parity_tests.small_tokenizers import NAMED, TEXTS, byte_level, saved, sentence_pieces, word_pieces

GPT2 = Path(__file__).parents[2] / "shared" / "data" / "gpt2"


def require_same_ids(folder, texts=TEXTS):
    """Of texts, of prompts, and of what is decoded."""
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder).framed()
    read = PromptReader(ours, 1, translates=False, max_length=None)
    for text in texts:
        ids = theirs(text).input_ids
        assert [*ours.framing.before, *ours.encode(text).tolist(), *ours.framing.after] == ids, text
        assert read(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", [word_pieces, sentence_pieces, lambda: sentence_pieces(adds="before")])
def test_tokenizers_as_bert_t5_and_llama_have_them(make, tmp_path):
    saved(make(), tmp_path)
    require_same_ids(tmp_path)


@pytest.mark.skipif(not GPT2.exists(), reason="there is no copy of GPT-2's tokenizer here")
def test_the_tokenizer_of_gpt2():
    require_same_ids(GPT2)


def write(folder, tokenizer, model_type, **settings):
    """A folder as older versions wrote it: the tokenizer, its class and settings, and the type of the model."""
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", NAMED | settings)
    write_json(folder / "config.json", {"model_type": model_type})


SETTINGS = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": False, "add_eos_token": False},
    {"add_eos_token": True},
]
CLASSES = [
    *(("gpt2", name) for name in ("GPT2Tokenizer", "GPT2TokenizerFast", None)),
    ("llama", "PreTrainedTokenizerFast"),
    ("qwen2", "Qwen2Tokenizer"),
    ("gpt_neox", "GPTNeoXTokenizerFast"),
    ("roberta", "RobertaTokenizer"),
    ("bart", "BartTokenizer"),
]


@pytest.mark.parametrize("adds", ["nothing", "before", "around"])
@pytest.mark.parametrize("model_type, name", CLASSES)
def test_special_tokens(model_type, name, adds, tmp_path):
    """With a tokenizer.json, add_bos_token and add_eos_token change nothing; some classes add the same always."""
    tokenizer, chosen = byte_level(adds=adds), {} if name is None else {"tokenizer_class": name}
    # Qwen's class splits numbers as Qwen's files say, which this one does not.
    texts = [text for text in TEXTS if model_type != "qwen2" or not re.search(r"\d", text)]
    for settings in SETTINGS:
        write(tmp_path, tokenizer, model_type, **chosen, **settings)
        require_same_ids(tmp_path, texts)


@pytest.mark.parametrize("spaced", [True, False])
@pytest.mark.parametrize(
    "model_type, name",
    [
        ("gpt2", "GPT2Tokenizer"),
        ("gpt_neox", "GPTNeoXTokenizer"),
        ("roberta", "RobertaTokenizer"),
        ("llama", "PreTrainedTokenizerFast"),
        ("llama", "TokenizersBackend"),
    ],
)
def test_a_space_before_the_text(model_type, name, spaced, tmp_path):
    write(tmp_path, byte_level(), model_type, tokenizer_class=name, add_prefix_space=spaced)
    require_same_ids(tmp_path)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("strip", [True, False, None])
def test_letters_of_bert(lower, strip, tmp_path):
    named = {"cls_token": "<s>", "sep_token": "</s>", "tokenizer_class": "BertTokenizer"}
    write(tmp_path, word_pieces(), "bert", do_lower_case=lower, strip_accents=strip, **named)
    require_same_ids(tmp_path)


@pytest.mark.parametrize("kind", ["sentence pieces", "word pieces", "bytes", "bytes, forced", "no decoder"])
def test_spaces_before_punctuation(kind, tmp_path):
    """Taken out where tokenizer_config.json says so, as version 4 did by default; never of a BPE unless forced."""
    make = {"sentence pieces": sentence_pieces, "bytes": byte_level, "bytes, forced": byte_level}.get(kind, word_pieces)
    tokenizer = make(clean_up_tokenization_spaces=True)
    if kind == "bytes, forced":
        setattr(tokenizer, FORCED, True)
        tokenizer.init_kwargs[FORCED] = True
    if kind == "no decoder":
        tokenizer.backend_tokenizer.decoder = None
    theirs = saved(tokenizer, tmp_path)
    assert theirs.clean_up_tokenization_spaces is True
    ours, rng = load_tokenizer(tmp_path), np.random.default_rng(0)
    changed = 0
    for ids in rng.choice(ours.ordinary_ids, (50, 60)):
        text = theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids) == text
        changed += text != theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert bool(changed) == (kind != "bytes")


CHATML = """{% for message in messages %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TURNS = """{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) and messages[0]['role'] != 'system' -%}
        {{ raise_exception('roles must alternate') }}
    {%- endif -%}
    {%- if message['role'] == 'system' -%}{%- continue -%}{%- endif -%}
    {{- '<|' + message['role'] + '|> ' + message['content'] | trim }}
    {%- if message['role'] == 'assistant' -%}{% generation %}{{ eos_token }}{% endgeneration %}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
DATA = """{%- set ns = namespace(count=0) -%}
{%- for message in messages -%}{%- set ns.count = ns.count + 1 -%}
{{ ns.count }}: {{ message | tojson }} {{ dict(a=1) | tojson(indent=2) }}
{% endfor -%}
{% if tools is none and strftime_now('%Y') | length == 4 %}{{ pad_token }}{% endif %}"""
CONVERSATIONS = [
    [{"role": "user", "content": "It was <b>"}],
    [
        {"role": "system", "content": 'Be "brief"\n'},
        {"role": "user", "content": " To be "},
        {"role": "assistant", "content": "or not"},
        {"role": "user", "content": "é 的"},
    ],
]


@pytest.mark.parametrize("template", [CHATML, TURNS, DATA], ids=["ChatML", "turns", "data"])
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "by name"])
def test_conversations(template, place, tmp_path):
    """They become the ids that `transformers` makes of them."""
    tokenizer = byte_level(adds="before")
    tokenizer.chat_template = {"default": template, "other": "nothing"} if place == "by name" else template
    tokenizer.save_pretrained(tmp_path, save_jinja_files=place == "chat_template.jinja")
    assert (tmp_path / "chat_template.jinja").exists() == (place == "chat_template.jinja")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = read_chat_template(tmp_path)
    for messages in CONVERSATIONS:
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours(messages) == text
    # Said one after the other, with the answers between.
    read = PromptReader(load_tokenizer(tmp_path).framed(), 1, translates=False, max_length=None)
    talk = Conversation(ours, read, CONVERSATIONS[1][0]["content"])
    talk(CONVERSATIONS[1][1]["content"])
    talk.hear(CONVERSATIONS[1][2]["content"])
    ids = talk(CONVERSATIONS[1][3]["content"]).ids
    assert ids == theirs.apply_chat_template(CONVERSATIONS[1], add_generation_prompt=True).input_ids
