"""Writes docs/gallery.md: `python docs/build_gallery.py`, in about half a minute.

The text is docs/gallery.template.md, where {{NAME}} stands for examples/gallery/NAME.py: its docstring, the command that
finds its bug, what the command prints, and the mend, which stands in the file above the line of the bug.
"""

import ast
import contextlib
import io
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

from build_porting import PortingError, main  # noqa: E402

from parity.__main__ import main as parity  # noqa: E402

EXAMPLES = DOCS.parent / "examples" / "gallery"
BUG = re.compile(r"^( *)# The bug\. Mended: (.*)\n.*$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A port with a bug that was made in public."""

    name: str

    @property
    def text(self) -> str:
        """The file, with the bug."""
        return (EXAMPLES / f"{self.name}.py").read_text("utf-8")

    @property
    def mended(self) -> str:
        """The file without the bug."""
        return BUG.sub(r"\1\2", self.text)

    @property
    def bugs(self) -> list[int]:
        """The lines of the bug, counted from 1."""
        return [self.text.count("\n", 0, found.end()) + 1 for found in BUG.finditer(self.text)]

    @property
    def command(self) -> list[str]:
        """What `python -m parity` is asked, in the folder of the examples."""
        file = f"{self.name}.py"
        return ["find", f"{file}:ours", f"{file}:Theirs", "--weights", f"{file}:WEIGHTS", "--inputs", f"{file}:INPUTS"]

    def asked(self, text: str, *more: str) -> tuple[int, str]:
        """The exit status of the command, and what it prints, of this text of the example."""
        with tempfile.TemporaryDirectory() as made, contextlib.chdir(made), contextlib.redirect_stdout(io.StringIO()) as said:
            Path(f"{self.name}.py").write_text(text, "utf-8")
            status = parity([*self.command, *more])
        return status, said.getvalue().strip()

    def section(self) -> str:
        """What the page has of it."""
        title, _, about = (ast.get_docstring(ast.parse(self.text)) or "").partition("\n\n")
        story, _, links = about.partition("\n\nhttps://")
        named = [re.sub(r".*/([^/]+/[^/]+)/(pull|issues)/", r"\1 ", link) for link in links.split()]
        linked = [f"[{said}](https://{link.removeprefix('https://')})" for said, link in zip(named, links.split(), strict=True)]
        _, answer = self.asked(self.text)
        numbers = [re.sub(r"^( *)# The bug.*", "", line) for line in self.text.splitlines()]
        mends = "\n".join(
            f"-{numbers[line - 1].strip()}\n+{found[2]}" for line, found in zip(self.bugs, BUG.finditer(self.text), strict=True)
        )
        words = f"python -m parity find {self.name}.py:ours {self.name}.py:Theirs"
        return (
            f"## {title}\n\n{story} ({', '.join(linked)})\n\n```\n$ {words} \\\n"
            f"    --weights {self.name}.py:WEIGHTS --inputs {self.name}.py:INPUTS\n{answer}\n```\n\n"
            f"The mend, in [line {self.bugs[0]}](../examples/gallery/{self.name}.py):\n\n```diff\n{mends}\n```"
        )


def built() -> str:
    """The page."""
    template = (DOCS / "gallery.template.md").read_text("utf-8")
    os.environ["COLUMNS"] = "110"
    return re.sub(r"^\{\{(.*)\}\}$", lambda asked: Example(asked[1]).section(), template, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], name="gallery", made=built))
