"""How `make docs` builds the site: the pages of this folder, and the docstrings of the public names."""

import re
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

project = "jax-tformer"
author = "The jax-tformer authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = project
# Named by <img> in the pages, which Sphinx does not follow.
html_extra_path = ["architecture.svg", "attention.svg", "first-difference.svg", "python-docs.png"]
html_show_copyright = False
html_copy_source = False
smartquotes = False
highlight_language = "text"
myst_heading_anchors = 3
myst_fence_as_directive = ["math"]
# Browsers draw MathML themselves, so that the pages load nothing from elsewhere.
html_math_renderer = "mathml"
# What stands between single backticks in a docstring is code, as in Markdown.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88


def unlink_sources(app: Sphinx, name: str, source: list[str]) -> None:
    """Makes text of links to files outside this folder, which the site does not have."""
    if not name.startswith("api/"):
        source[0] = re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", source[0])


def read_from_docs(app: Sphinx, file: Path, name: str, source: list[str]) -> None:
    """Makes the links of README.md, the first page, those of a page of this folder."""
    inside = re.sub(r'(\]\(|src=")docs/', r"\1", source[0])
    source[0] = re.sub(r"\[([^\]]+)\]\((?:[A-Z][A-Za-z.]+|llms\.txt)\)", r"\1", inside)


def write_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Writes an equation within a line."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def write_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Writes an equation in lines of its own, with room for what stands high or low in it."""
    translator.body.append(f'<div style="padding: 0.4em 0">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
    app.connect("source-read", unlink_sources)
    app.connect("include-read", read_from_docs)
