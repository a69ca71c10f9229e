"""The texts of others, on a terminal: their control characters are shown and not obeyed.

What a model says, what it is asked, a path and a message may hold whatever stood in somebody's file: a terminal takes
some of that for commands (its title, its colours, what was on the screen). Files, pipes and JSON get everything as it
is.
"""

import re
import sys

# C0 without tab and newline, delete, C1; what turns the direction of a line; halves of surrogate pairs.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})


def visible(text: str) -> str:
    """`text` with each control character as \\u001b; JSON stays JSON, and tabs and newlines what they are."""
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """`visible`, in a single line, for messages."""
    return visible(text.translate(_LINE))


def say(text: str, *, end: str = "\n") -> None:
    """Prints `text` to standard output at once: `visible` on a terminal, as it is elsewhere."""
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    print(visible(text) if on_terminal else text, end=end, flush=True)
