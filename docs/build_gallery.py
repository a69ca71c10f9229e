"""Writes docs/gallery.md: `python docs/build_gallery.py`, in about half a minute.

The text is docs/gallery.template.md, where {{NAME}} stands for examples/gallery/NAME.py: what its docstring says, the
command that finds its bug, the answer, and the mend, which stands in the file above the line of the bug.
"""

import ast
import contextlib
import io
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from build_porting import main  # noqa: E402

from parity.__main__ import main as parity  # noqa: E402
from parity.differ.answer import folded  # noqa: E402

EXAMPLES = DOCS.parent / "examples" / "gallery"
BUG = re.compile(r"^( *)# The bug\. Mended: (.*)\n *(.*)$", re.MULTILINE)
_WIDTH = 110


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

    def asked(self, text: str, *more: str) -> tuple[int, str]:
        """The exit status of the command, and what it prints, with this text in the file."""
        file, said = f"{self.name}.py", io.StringIO()
        with tempfile.TemporaryDirectory() as made, contextlib.chdir(made), contextlib.redirect_stdout(said):
            Path(file).write_text(text, "utf-8")
            sides, weights, inputs = [f"{file}:ours", f"{file}:Theirs"], f"{file}:WEIGHTS", f"{file}:INPUTS"
            status = parity(["find", *sides, "--weights", weights, "--inputs", inputs, *more])
        return status, said.getvalue().strip()

    def section(self) -> str:
        """What the page has of it."""
        title, story, links = (ast.get_docstring(ast.parse(self.text)) or "").split("\n\n")
        linked = re.sub(r"https://github.com/([^/]+/[^/]+)/\w+/(\d+)", r"[\1 \2](\g<0>)", ", ".join(links.split()))
        answer = "\n".join(folded(line, _WIDTH) for line in self.asked(self.text)[1].splitlines())
        mends = "\n".join(f"-{wrong}\n+{right}" for _, right, wrong in BUG.findall(self.text))
        file = f"{self.name}.py"
        return (
            f"## {title}\n\n{story}\n({linked})\n\n```\n"
            f"$ python -m parity find {file}:ours {file}:Theirs --weights {file}:WEIGHTS --inputs {file}:INPUTS\n"
            f"{answer}\n```\n\nThe mend, in [{file}](../examples/gallery/{file}):\n\n```diff\n{mends}\n```"
        )


def built() -> str:
    """The page."""
    template = (DOCS / "gallery.template.md").read_text("utf-8")
    return re.sub(r"^\{\{(.*)\}\}$", lambda asked: Example(asked[1]).section(), template, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], name="gallery", made=built))
