"""Parameters as they come, by dotted paths: nested dicts, flax's states and variables, Equinox modules, any pytree.

Nested dicts are read without JAX, so that a machine that has PyTorch alone can read a weight map.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


def paths(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree by their dotted paths, in the tree's order: `{"layers.0.up.kernel": array, ...}`.

    Keys of dicts, positions in lists and names of attributes stand alike; an array by itself has the path "". What
    flax wraps around an array (`nnx.Variable`, `nn.Partitioned`) adds nothing to its path.
    """
    return dict(_named_leaves(tree))


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or says what an array will be, and not a function or a number of Python."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is an array of floating-point numbers: not a counter, a mask or a random key."""
    if isinstance(getattr(leaf, "dtype", None), np.dtype) and np.issubdtype(leaf.dtype, np.floating):
        return True
    if not is_array(leaf):
        return False
    import jax.numpy as jnp

    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def is_promised(leaf: Any) -> bool:
    """Whether a leaf says what an array will be (`jax.ShapeDtypeStruct`) and has no numbers yet."""
    return type(leaf).__name__ == "ShapeDtypeStruct"


def replaced(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The same pytree with other leaves at these dotted paths; the rest stays as it is."""
    import jax

    _, structure = jax.tree_util.tree_flatten(tree)
    return jax.tree_util.tree_unflatten(structure, [leaves.get(path, leaf) for path, leaf in _named_leaves(tree)])


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


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    if _is_nested(tree):
        return list(_of_dicts(tree, ""))
    import jax

    named = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)[0]:
        inner = jax.tree_util.tree_flatten_with_path(leaf)[0]
        for rest, value in inner:
            keys = path if len(inner) == 1 else (*path, *rest)
            named.append((jax.tree_util.keystr(keys, simple=True, separator="."), value))
    return named


def _is_nested(tree: Any) -> bool:
    """Whether these are dicts of dicts of arrays of NumPy, and nothing else."""
    if type(tree) is not dict:
        return isinstance(tree, np.ndarray)
    return all(isinstance(key, str) and _is_nested(branch) for key, branch in tree.items())


def _of_dicts(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """In the order of JAX, which sorts the keys of a dict."""
    if not isinstance(tree, dict):
        yield path, tree
        return
    for key in sorted(tree):
        yield from _of_dicts(tree[key], f"{path}.{key}" if path else key)


def _is_box(node: Any) -> bool:
    """Whether flax wraps an array in this; asked by name, since flax need not be installed."""
    kinds = {base.__name__ for base in type(node).__mro__ if base.__module__.split(".")[0] == "flax"}
    return bool(kinds & {"Variable", "AxisMetadata"})
