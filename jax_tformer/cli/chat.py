"""Chat templates: a conversation as the text that a model was trained on (Jinja, in a process of its own)."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jax_tformer.config.errors import InputError, explained, require
from jax_tformer.data.tokenizers import read_settings, special_tokens
from jax_tformer.decoding.texts import Prompt, PromptReader
from jax_tformer.files import Json, read_text

Message = dict[str, str]
"""{"role": "system", "user" or "assistant", "content": text}."""
Render = Callable[[list[Message]], str]
"""Returns the text of a conversation, up to where the assistant's next answer begins."""
_PROCESS = Path(__file__).with_name("template_process.py")
_WAIT = 60
"""Seconds; the process bounds its own, but does not get them all on a busy machine."""


def chat_template(source: str, tokens: Mapping[str, str], where: str) -> Render:
    """Returns what makes a text of a conversation, up to where the assistant's next answer begins.

    `tokens` are the special tokens by name that a template may use; `where` it stands is for messages. It may come from
    a stranger: it runs in Jinja's sandbox, which lets it read and change nothing but the messages, and in a process
    whose time, memory and output are bounded. Starting that takes about 0.1 s for each message.

    Raises InputError if `source` is no Jinja template, and what is returned if the template refuses the conversation.
    """

    def ask(names: Json | None) -> str:
        asked = json.dumps({"source": source, "names": names})
        with explained(
            f"the chat template in {where} takes more time or memory than any conversation needs; "
            "check it, or leave --chat out",
            subprocess.SubprocessError,
        ):
            # -P: the modules beside that file do not take the place of others.
            done = subprocess.run(
                [sys.executable, "-P", _PROCESS], input=asked, capture_output=True, text=True, timeout=_WAIT, check=True
            )
        outcome, text = json.loads(done.stdout)
        require(outcome != "damaged", f"the chat template in {where} is damaged ({text}); restore it")
        require(outcome != "refused", f"the chat template in {where} refuses this ({text})")
        return text

    ask(None)
    given = {"tools": None, "documents": None, "add_generation_prompt": True, **tokens}
    return lambda messages: ask({"messages": messages, **given})


def read_chat_template(folder: Path) -> Render:
    """Reads chat_template.jinja, or chat_template in tokenizer_config.json; of several by name, takes "default".

    Raises InputError if there is none, or if it is damaged.
    """
    settings = read_settings(folder)
    path = folder / "chat_template.jinja"
    found = settings.get("chat_template")
    where = folder / "tokenizer_config.json"
    if path.exists():
        found = read_text(path)
        where = path
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    require(
        found is not None,
        f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
        "leave --chat out, or take the checkpoint of a model that was trained to chat",
    )
    if not isinstance(found, str):
        raise InputError(f"chat_template is {found!r:.40} in {where}; expected a template, or a list of them by name")
    return chat_template(found, special_tokens(settings), str(where))


@dataclass
class Conversation:
    """A conversation, message by message: makes a Prompt of what the user says, and hears the answer."""

    render: Render
    read: PromptReader
    system: str | None
    """What the first message says, before the user does."""

    def __post_init__(self) -> None:
        self._messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def __call__(self, text: str, number: int = 1, place: str | None = None) -> Prompt:
        """Adds what the user says; raises InputError, and forgets it, if the model cannot take it."""
        messages = [*self._messages, {"role": "user", "content": text}]
        # The template says the special tokens already.
        ids = self.read.tokenizer.encode(self.render(messages)).tolist()
        prompt = self.read(text, number, place, ids)
        self._messages = messages
        return prompt

    def hear(self, answer: str) -> None:
        """Adds the answer."""
        self._messages.append({"role": "assistant", "content": answer})
