"""Writes docs/porting.md: `python docs/build_porting.py`, in about a minute.

The text is docs/porting.template.md. Its commands are run in a folder that holds the files of docs/porting, and what
they print goes into the page. The port begins with MISTAKES in it, and each chapter takes one out.

    {{ports 0 opt feed_forward}}   functions of the port with all its mistakes, as code; 1: without the first, and so on
    {{from 0 DECODER}}             what begins with a line of the port and goes to its end
    {{file test_opt.py}}           a file as it is
    {{run 0 python where.py}}      a command and what it prints, with that port
    {{mend 0}}                     what changes from port 0 to port 1
"""

import ast
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
MISTAKES = (
    ('params["positions"][2 : 2 + tokens.shape[1]]', 'params["positions"][: tokens.shape[1]]'),
    ('jax.nn.relu(linear(p["up"], x))', 'jax.nn.gelu(linear(p["up"], x))'),
    (
        "    # The module's padding_idx: the row of padding is read, and learns nothing from that.\n"
        "    read = table.at[PADDING].set(jax.lax.stop_gradient(table[PADDING]))\n"
        "    x = read[tokens]",
        "    x = table[tokens]",
    ),
)


class PortingError(Exception):
    """The template, the port and the mistakes do not fit each other, or a command could not be run."""


def port(state: int) -> str:
    """The source of the port without its first `state` mistakes."""
    text = (DOCS / "porting" / "opt.py").read_text("utf-8")
    for right, wrong in MISTAKES[state:]:
        if text.count(right) != 1:
            raise PortingError(f"docs/porting/opt.py has {right!r} {text.count(right)} times; expected once")
        text = text.replace(right, wrong)
    return text


def functions(text: str, names: list[str]) -> str:
    """These functions of a source."""
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    if absent := [name for name in names if name not in found]:
        raise PortingError(f"docs/porting/opt.py has no function {absent}; it has {sorted(found)}")
    return "\n\n\n".join(ast.get_source_segment(text, found[name]) or "" for name in names)


def printed(state: int, command: str) -> str:
    """What a command prints in a folder with the port in that state, whatever its exit status."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "porting"
        shutil.copytree(DOCS / "porting", folder, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "opt.py").write_text(port(state), "utf-8")
        program, *rest = command.split()
        # The plugin by its name, also where this project is no installed package.
        plugins = ["-p", "no:parity", "-p", "parity.plugin", "-p", "no:cacheprovider"]
        found = {"python": [sys.executable], "pytest": [sys.executable, "-m", "pytest", *plugins]}
        if program not in found:
            raise PortingError(f"{command!r} is not run here; expected a command that begins with python or pytest")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "COLUMNS": "100", "NO_COLOR": "1"}
        done = subprocess.run(
            [*found[program], *rest], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if not done.stdout:
            raise PortingError(f"{command!r} printed nothing, and ended with {done.returncode}: {done.stderr[-500:]}")
        return done.stdout.strip().replace(str(folder), ".")


def mended(state: int) -> str:
    """The lines that change from one port to the next, as a diff without its heads."""
    lines = difflib.unified_diff(port(state).splitlines(), port(state + 1).splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def block(request: re.Match[str]) -> str:
    """What stands in the page for one line of the template."""
    kind, *rest = request[1].split(" ", 2)
    if kind == "ports":
        return f"```python\n{functions(port(int(rest[0])), rest[1].split())}\n```"
    if kind == "from":
        _, found, after = port(int(rest[0])).partition(f"\n{rest[1]}")
        if not found:
            raise PortingError(f"docs/porting/opt.py has no line that begins with {rest[1]!r}")
        return f"```python\n{(found + after).strip()}\n```"
    if kind == "file":
        return f"```python\n{(DOCS / 'porting' / rest[0]).read_text('utf-8').strip()}\n```"
    if kind == "run":
        return f"```\n$ {rest[1]}\n{printed(int(rest[0]), rest[1])}\n```"
    if kind == "mend":
        return f"```diff\n{mended(int(rest[0]))}\n```"
    raise PortingError(f"the template asks for {request[1]!r}; expected ports, from, file, run or mend")


def built() -> str:
    """The page."""
    template = (DOCS / "porting.template.md").read_text("utf-8")
    return re.sub(r"^\{\{(.*)\}\}$", block, template, flags=re.MULTILINE)


def comparable(page: str) -> str:
    """The page without what differs from machine to machine: rounding errors, times, versions in heads of pytest."""
    page = re.sub(r"\d\.\d+e-1[2-9]", "ROUNDING", page)
    return re.sub(r"^(platform|rootdir|plugins|configfile|measured on).*$|in \d+\.\d+s", "", page, flags=re.MULTILINE)


def main(
    arguments: list[str],
    write: Callable[[str], object] = sys.stderr.write,
    name: str = "porting",
    made: Callable[[], str] = lambda: built(),
) -> int:
    """Writes a page; with --check only says whether it is what the commands print now. 1 where it is not."""
    if arguments not in ([], ["--check"]):
        write(f"usage: python docs/build_{name}.py [--check]\n")
        return 2
    page = DOCS / f"{name}.md"
    try:
        text = made()
    except (PortingError, OSError) as error:
        write(f"{error}\n")
        return 1
    if not arguments:
        page.write_text(text, "utf-8")
        return 0
    there = comparable(page.read_text("utf-8")).splitlines() if page.exists() else []
    if changed := list(difflib.unified_diff(there, comparable(text).splitlines(), "the page", "now", "", "", 0, "")):
        write("\n".join([f"docs/{name}.md is not what its commands print; run this without --check", *changed, ""]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
