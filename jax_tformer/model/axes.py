"""What each axis of each parameter is: one table, read by sharding, weight decay, LoRA and the names of weights.

D model width, H heads, K key/value heads, C head width, F feed-forward width, V vocabulary, N classes, P positions,
Y token types, U buckets of distances, R rank of an adapter. `inputs -> outputs` is a matrix x W; other parameters are
vectors, or tables with a row for each index. The leading L axis of stacked layers is not written.
"""

AXES = {
    "query.kernel": "D -> H C",
    "key.kernel": "D -> K C",
    "value.kernel": "D -> K C",
    "output.kernel": "H C -> D",
    "gate.kernel": "D -> F",
    "up.kernel": "D -> F",
    "down.kernel": "F -> D",
    "dense.kernel": "D -> E",
    "head.kernel": "D -> V",
    "classifier.kernel": "D -> N",
    "query.bias": "H C",
    "key.bias": "K C",
    "value.bias": "K C",
    "gate.bias": "F",
    "up.bias": "F",
    "head.bias": "V",
    "classifier.bias": "N",
    "query_norm.scale": "C",
    "query_norm.bias": "C",
    "key_norm.scale": "C",
    "key_norm.bias": "C",
    "tokens.embedding": "V D",
    "positions.embedding": "P D",
    "token_types.embedding": "Y D",
    "relative_positions.embedding": "U H",
    "scale": "D",
    "bias": "D",
}
"""The end of a parameter's path -> its axes; the first that fits. Adapters follow from the matrix that they change."""


def axes_of(path: str) -> str:
    """Returns the axes of the parameter at `path`, such as `decoder.blocks.feedforward.up.kernel`.

    Raises KeyError for a parameter that the table does not have.
    """
    module, _, leaf = path.rpartition(".lora.")
    if module:
        inputs, outputs = axes_of(f"{module}.kernel").split(" -> ")
        return f"{inputs} -> R" if leaf == "a" else f"R -> {outputs}"
    try:
        return next(axes for name, axes in AXES.items() if f".{path}".endswith(f".{name}"))
    except StopIteration:
        raise KeyError(path) from None


def is_vector(path: str) -> bool:
    """Whether the parameter is a bias or the scale of a norm: neither a matrix nor a table."""
    return f".{path}".endswith((".bias", ".scale"))
