"""Parameters as they come, by dotted paths: nested dicts, flax's states and variables, Equinox modules, any pytree."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]
"""By name."""


def paths(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree by their dotted paths, in the tree's order: `{"layers.0.up.kernel": array, ...}`.

    Keys of dicts, positions in lists and names of attributes stand alike; an array by itself has the path "". What
    flax wraps around an array (`nnx.Variable`, `nn.Partitioned`) adds nothing to its path.
    """
    import jax

    named = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)[0]:
        inner = jax.tree_util.tree_flatten_with_path(leaf)[0]
        for rest, value in inner:
            keys = path if len(inner) == 1 else (*path, *rest)
            named[jax.tree_util.keystr(keys, simple=True, separator=".")] = value
    return named


def replaced(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The same pytree with other leaves at these dotted paths; the rest stays as it is."""
    import jax

    own = paths(tree).items()
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves.get(path, leaf) for path, leaf in own])


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


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or says what an array will be; not a function, a number of Python or a random key."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not is_key(leaf)


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is an array of floating-point numbers, of any framework: not a counter, a mask or a random key."""
    return "float" in str(getattr(leaf, "dtype", ""))


def is_key(leaf: Any) -> bool:
    """Whether these are random keys of JAX that have a type of their own."""
    return str(getattr(leaf, "dtype", "")).startswith("key<")


def is_promised(leaf: Any) -> bool:
    """Whether a leaf says what an array will be (`jax.ShapeDtypeStruct`) and has no numbers yet."""
    return type(leaf).__name__ == "ShapeDtypeStruct"


def _is_box(node: Any) -> bool:
    """Whether flax wraps an array in this; asked by name, since flax need not be installed."""
    kinds = {base.__name__ for base in type(node).__mro__ if base.__module__.split(".")[0] == "flax"}
    return bool(kinds & {"Variable", "AxisMetadata"})
