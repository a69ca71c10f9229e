"""Conversations become the ids that `transformers` makes of them."""

import pytest
from transformers import AutoTokenizer

from jax_tformer.cli.chat import Conversation, read_chat_template
from jax_tformer.data.tokenizers import load_tokenizer
from jax_tformer.decoding.texts import PromptReader
from parity_tests.small_tokenizers import byte_level

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
