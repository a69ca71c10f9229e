"""Docstrings of config classes, made of the strings below their fields."""

import ast
import dataclasses
import inspect
import sys
from functools import cache
from typing import TypeVar

C = TypeVar("C", bound=type)


def described(kind: C) -> C:
    """Adds an "Attributes" section to a dataclass's docstring, from the strings below its fields.

    The source is read only when somebody asks for the docstring.
    """
    kind.__doc__ = _FieldDocs(inspect.cleandoc(kind.__doc__ or ""))  # type: ignore[assignment]
    return kind


class _FieldDocs:
    """Takes the place of a class's docstring and builds it on access; without source, returns the original."""

    def __init__(self, docstring: str) -> None:
        self._docstring = docstring

    def __get__(self, instance: object, owner: type) -> str:
        descriptions: dict[str, str] = {}
        for parent in reversed(owner.__mro__):
            descriptions |= _descriptions(parent.__module__).get(parent.__qualname__, {})
        names = [field.name for field in dataclasses.fields(owner)]
        # One line per field, however long: tyro shows this text in --help, and would show line breaks too.
        lines = [f"    {name}: {descriptions[name]}" for name in names if name in descriptions]
        return "\n".join([self._docstring, "", "Attributes:", *lines]) if lines else self._docstring


@cache
def _descriptions(module: str) -> dict[str, dict[str, str]]:
    """{class: {field: the string below it}} of a module; empty if its source is not available."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            fields = found.setdefault(node.name, {})
            for line, below in zip(node.body, node.body[1:], strict=False):
                match line, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        fields[name] = " ".join(text.split())
    return found
