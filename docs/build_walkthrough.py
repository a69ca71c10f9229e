"""Writes docs/walkthrough.md: `python docs/build_walkthrough.py`.

The text is docs/walkthrough.template.md. Where that has a block ```twin, the page gets code, taken from the sources:

    jax layers.py Norm | high = high - ... high = high * self.scale
    torch layers.py Norm | return F.layer_norm

Each line names a side, a file, a function, and the lines to show, by how they begin: one statement as a whole, or from
a first one ... to a last one. A class stands for its forward pass. `both` says the same of both sides, `shared` is for
what both are given. Files are those of the model, or stand with their whole path.
"""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
MODELS = {"jax": "jax_tformer/model", "torch": "torch_ref", "shared": "."}
FORWARD = {"jax": "__call__", "torch": "forward", "shared": "__call__"}
TITLES = {"jax": "JAX", "torch": "PyTorch", "both": "JAX and PyTorch", "shared": "Given to both"}


class WalkthroughError(Exception):
    """What the template asks for is not in the sources."""


def built() -> str:
    """The page; raises WalkthroughError, a line for each wrong address."""
    wrong: list[str] = []

    def code(block: re.Match[str]) -> str:
        try:
            return twin(block[1])
        except (WalkthroughError, OSError) as error:
            wrong.append(f"{error}; mend docs/walkthrough.template.md")
            return ""

    template = (DOCS / "walkthrough.template.md").read_text("utf-8")
    page = re.sub(r"^```twin\n(.*?)^```$", code, template, flags=re.MULTILINE | re.DOTALL)
    if wrong:
        raise WalkthroughError("\n".join(wrong))
    return page


def twin(block: str) -> str:
    """The code that a block of the template asks for: where it is from, then each side's, and once what is the same."""
    found: dict[tuple[str, str], list[str]] = {}
    paths: dict[tuple[str, str], None] = {}
    for line in block.strip().splitlines():
        address, *spans = (part.strip() for part in line.split(" | "))
        side, file, name = address.split()
        for each in ("jax", "torch") if side == "both" else (side,):
            path = file if "/" in file else f"{MODELS[each]}/{file}"
            found.setdefault((each, name), []).append(snippet(ROOT / path, name, spans, FORWARD[each]))
            paths[each, path] = None
    texts = {place: "\n".join(pieces) for place, pieces in found.items()}
    same = [name for side, name in texts if side == "jax" and texts["jax", name] == texts.get(("torch", name))]
    parts = [
        f"# {TITLES[side]}: {name}\n{text}"
        for only in ("shared", "jax", "torch")
        for (side, name), text in texts.items()
        if side == only and name not in same
    ]
    parts += [f"# {TITLES['both']}: {name}\n{texts['jax', name]}" for name in same]
    links = " · ".join(
        f"{title} " + ", ".join(f"[{Path(path).name}](../{path})" for side, path in paths if side == each)
        for each, title in TITLES.items()
        if each in [side for side, _ in paths]
    )
    code = "\n\n".join(parts)
    return f"{links}\n\n```python\n{code}\n```"


def snippet(path: Path, name: str, spans: list[str], forward: str) -> str:
    """The lines of the function `name` in a file that the spans name; "..." stands where some are left out."""
    source = path.read_text("utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    told = f"{path.relative_to(ROOT)}, {name}"
    function = find(tree, name.split("."), forward, told)
    statements = {node.lineno: node for node in ast.walk(function) if isinstance(node, ast.stmt)}

    def number(start: str) -> int:
        found = [line for line in statements if lines[line - 1].strip().startswith(start)]
        if len(found) != 1:
            raise WalkthroughError(f"{told}: {len(found)} statements begin with {start!r}; expected one")
        return found[0]

    shown: list[str] = []
    before = None
    for span in spans:
        first, _, last = (part.strip() for part in span.partition(" ... "))
        begin = number(first)
        end = statements[number(last) if last else begin].end_lineno or begin
        if end < begin or (before is not None and begin <= before):
            raise WalkthroughError(f"{told}: {span!r} stands before what precedes it; expected the order of the source")
        text = dedent("\n".join(lines[begin - 1 : end]))
        shown += ["..."] if before is not None and begin > before + 1 else []
        shown.append(text)
        before = end
    return "\n".join(shown)


def find(tree: ast.AST, names: list[str], forward: str, told: str) -> ast.AST:
    """The function of that name, or of a class the method `forward`."""
    for name in names:
        children = [node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == name]
        if len(children) != 1:
            raise WalkthroughError(f"{told}: {len(children)} are called {name!r}; expected one")
        [tree] = children
    return find(tree, [forward], forward, told) if isinstance(tree, ast.ClassDef) else tree


def dead_links(page: str) -> list[str]:
    """Links and pictures of the page that lead nowhere."""
    targets = re.findall(r"\]\((?!http)([^)\s]+)\)|(?:src|srcset|href)=\"(?!http)([^\"]+)\"", page)
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}

    def dead(target: str) -> bool:
        file, _, anchor = target.partition("#")
        return not (DOCS / file).exists() if file else anchor not in anchors

    return [target for target in ("".join(pair) for pair in targets) if dead(target)]


def main(arguments: list[str], write: Callable[[str], object] = sys.stderr.write) -> int:
    """Writes what is built; with --check only says what is not as it would be written. 1 where anything is wrong."""
    if arguments not in ([], ["--check"]):
        write("usage: python docs/build_walkthrough.py [--check]\n")
        return 2
    page = DOCS / "walkthrough.md"
    try:
        text = built()
    except (WalkthroughError, OSError) as error:
        write(f"{error}\n")
        return 1
    told = [f"the link {link} leads nowhere" for link in dead_links(text)]
    if not arguments:
        page.write_text(text, "utf-8")
    elif not page.exists() or page.read_text("utf-8") != text:
        told.append("docs/walkthrough.md is not what the sources say; run this without --check")
    for line in told:
        write(f"{line}\n")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
