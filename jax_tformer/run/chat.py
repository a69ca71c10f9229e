"""Chat templates: a conversation as the text that a model was trained on (Jinja, in a sandbox)."""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jax_tformer.errors import InputError
from jax_tformer.files import read_text
from jax_tformer.run.texts import Text

Message = dict[str, str]
"""{"role": "system", "user" or "assistant", "content": text}."""


class _Generation(Extension):
    """`{% generation %}`, which marks what the assistant says, changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 (declared so by its base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A template, and the special tokens by name that it may use.

    It may come from a stranger: it runs in Jinja's sandbox, which lets it read and change nothing but the messages.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        """Raises InputError, naming `where`, if `source` is no Jinja template."""
        self._tokens, self._where = dict(tokens), where
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template in {where} is damaged ({_said(error)}); restore it") from error

    def render(self, messages: list[Message]) -> str:
        """Returns the text of a conversation, up to where the assistant's next answer begins.

        Raises InputError if the template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InputError(f"the chat template in {self._where} refuses this ({_said(error)})") from error


def read_chat_template(folder: Path, settings: Mapping[str, Any], tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Reads chat_template.jinja, or chat_template in `settings` (tokenizer_config.json); None if there is none.

    Of several templates by name, takes "default". Raises InputError if it is damaged.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        return ChatTemplate(read_text(path), tokens, str(path))
    found, where = settings.get("chat_template"), str(folder / "tokenizer_config.json")
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    if found is None:
        return None
    if not isinstance(found, str):
        raise InputError(f"chat_template is {found!r:.40} in {where}; expected a template, or a list of them by name")
    return ChatTemplate(found, tokens, where)


class Conversation:
    """A conversation, message by message: makes a Text of what the user says, and hears the answer."""

    def __init__(
        self, template: ChatTemplate, read: Callable[..., Text], encode: Callable[[str], list[int]], system: str | None
    ) -> None:
        """`read` makes a Text of a text and its ids; `encode` makes the ids of a rendered conversation."""
        self._template, self._read, self._encode = template, read, encode
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def __call__(self, text: str, number: int = 1, place: str | None = None) -> Text:
        """Adds what the user says; raises InputError, and forgets it, if the model cannot take it."""
        self._messages.append({"role": "user", "content": text})
        try:
            return self._read(text, number, place, ids=self._encode(self._template.render(self._messages)))
        except InputError:
            self._messages.pop()
            raise

    def hear(self, answer: str) -> None:
        """Adds the answer."""
        self._messages.append({"role": "assistant", "content": answer})


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML would read.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:150] or type(error).__name__
