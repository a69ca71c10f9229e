"""How `make docs` builds the site: the pages of this folder, and the docstrings of the public names."""

import re

from sphinx.application import Sphinx

project = "jax-tformer"
author = "The jax-tformer authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["*.template.md"]
html_theme = "furo"
html_title = project
# Named by <img> in the pages, which Sphinx does not follow.
html_extra_path = ["architecture.svg", "attention.svg"]
html_show_copyright = False
html_copy_source = False
smartquotes = False
highlight_language = "text"
myst_heading_anchors = 3
myst_fence_as_directive = ["math"]
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


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", unlink_sources)
