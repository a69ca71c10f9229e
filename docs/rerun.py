"""Runs the commands of docs/gallery.md and docs/porting.md again: `python docs/rerun.py [--check] [gallery|porting]`.

A block that begins with `$ ` is a command and what it prints, beside the files of a folder. The page's diffs mend these
files one after the other, so that a command reads them without the mends that stand below it. With --check nothing is
written, and the status is 1 where a command prints something else now; rounding errors, times and versions may differ.
"""

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from parity.differ.answer import folded

DOCS = Path(__file__).resolve().parent
FOLDERS = {"gallery": DOCS.parent / "examples" / "gallery", "porting": DOCS / "porting"}
"""Page -> the files beside which its commands are run."""
COMMAND = re.compile(r"^```\n\$ (.+)\n(?:.*\n)*?```$", re.MULTILINE)
MEND = re.compile(r"^```diff\n((?:-.*\n)+)((?:\+.*\n)+)```$", re.MULTILINE)
_WIDTH = 110


def before_mends(text: str, below: str) -> str:
    """A file as it is before the mends in this part of a page."""
    for wrong, right in reversed(MEND.findall(below)):
        old, new = (re.sub(r"^[+-]", "", lines, flags=re.MULTILINE) for lines in (right, wrong))
        text = text.replace(f"\n{old}", f"\n{new}")
    return text


def run(command: str, name: str, below: str) -> str:
    """What a command prints beside the files of a page, whatever its exit status."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / name
        shutil.copytree(FOLDERS[name], folder, ignore=shutil.ignore_patterns("__pycache__"))
        for file in folder.glob("*.py"):
            file.write_text(before_mends(file.read_text("utf-8"), below), "utf-8")
        found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": found, "JAX_PLATFORMS": "cpu", "COLUMNS": "100", "NO_COLOR": "1"}
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        said = done.stdout.strip().replace(str(folder), ".")
        return "\n".join(folded(line, _WIDTH) for line in said.splitlines())


def rerun(name: str) -> str:
    """A page with what its commands print now."""
    page = (DOCS / f"{name}.md").read_text("utf-8")
    return COMMAND.sub(lambda block: f"```\n$ {block[1]}\n{run(block[1], name, page[block.end() :])}\n```", page)


def comparable(page: str) -> list[str]:
    """The lines of a page without what differs from machine to machine."""
    page = re.sub(r"\d\.\d+e-1[2-9]", "ROUNDING", page)
    heads = r"^(platform|rootdir|plugins|configfile|measured on).*$|in \d+\.\d+s( \(.*\))?"
    return re.sub(heads, "", page, flags=re.MULTILINE).splitlines()


def main() -> int:
    """Writes the page that is named, or all; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", nargs="?", choices=[*FOLDERS], help="one alone")
    parser.add_argument("--check", action="store_true", help="write nothing")
    given, changed = parser.parse_args(), False
    for name in [given.page] if given.page else FOLDERS:
        page, text = DOCS / f"{name}.md", rerun(name)
        if not given.check:
            page.write_text(text, "utf-8")
        lines = comparable(page.read_text("utf-8")), comparable(text)
        for line in difflib.unified_diff(*lines, str(page), "what its commands print now", lineterm="", n=0):
            changed = True
            print(line, file=sys.stderr)
    return int(changed)


if __name__ == "__main__":
    sys.exit(main())
