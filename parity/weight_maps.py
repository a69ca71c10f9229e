"""Which numbers of the module our parameters hold, and how one is made of the other."""

from collections.abc import Mapping
from typing import Any

import jax

WeightMap = Mapping[str, str | tuple[str, str]]
"""Path in our parameters -> name of the module's parameter, with the einops pattern from its axes to ours if they
differ: `{"up.kernel": ("up.weight", "o i -> i o"), "up.bias": "up.bias"}`."""


def paths(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree by their dotted paths, in the tree's order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts of what stands at dotted paths."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = leaf
    return tree
