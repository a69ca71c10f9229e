"""What stands under a field in the source, shown by `help()` as well: Python itself forgets such strings."""

import ast
import dataclasses
import inspect
import sys
from functools import cache
from typing import TypeVar

C = TypeVar("C", bound=type)


def described(kind: C) -> C:
    """Lets the docstring of a dataclass go on with its fields, each with the string that stands under it.

    That is read from the source when somebody asks, so it costs nothing before, and nothing is written twice.
    """
    kind.__doc__ = _FieldDocs(inspect.cleandoc(kind.__doc__ or ""))  # type: ignore[assignment]
    return kind


class _FieldDocs:
    """Stands where a class has its docstring, and makes one. Without source it is what it was."""

    def __init__(self, docstring: str) -> None:
        self._docstring = docstring

    def __get__(self, instance: object, owner: type) -> str:
        descriptions: dict[str, str] = {}
        for parent in reversed(owner.__mro__):
            descriptions |= _descriptions(parent.__module__).get(parent.__qualname__, {})
        names = [field.name for field in dataclasses.fields(owner)]
        # A line each, however long: tyro takes the text of its flags from here, and would show where it was broken.
        lines = [f"    {name}: {descriptions[name]}" for name in names if name in descriptions]
        return "\n".join([self._docstring, "", "Attributes:", *lines]) if lines else self._docstring


@cache
def _descriptions(module: str) -> dict[str, dict[str, str]]:
    """{class: {field: the string under it}} of a module; nothing where its source is not at hand."""
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
