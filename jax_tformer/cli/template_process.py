"""A process that renders one chat template, whose time, memory and output are bounded. `chat` starts this file.

Standard input is JSON: {"source": the template, "names": what it may use, or null to compile it only}; standard output
is JSON: ["rendered", the text], or ["damaged" or "refused", the reason]. This file imports nothing of the library.
"""

import json
import resource
import sys
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 2
MEMORY = 2**30
CHARACTERS = 2**22


class _Generation(Extension):
    """`{% generation %}`, which marks what the assistant says, changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 (declared so by its base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> None:
    asked = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    json.dump(answer(asked["source"], asked["names"]), sys.stdout)


def answer(source: str, names: dict[str, Any] | None) -> tuple[str, str]:
    """Returns what standard output says."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # Jinja's own tojson escapes what HTML would read.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda format: datetime.now().strftime(format)}
    outcome = "damaged"
    try:
        template = environment.from_string(source)
        outcome = "refused"
        text = "" if names is None else template.render(names)
    # Whatever is raised is about the template: besides Jinja's own errors, say, a RecursionError for many brackets.
    except Exception as error:
        return outcome, " ".join(str(error).split())[:150] or type(error).__name__
    if len(text) > CHARACTERS:
        return "refused", f"it made {len(text):,} characters; expected at most {CHARACTERS:,}"
    return "rendered", text


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
