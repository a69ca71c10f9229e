"""Finds the first value that was not finite in a step that failed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Key, PyTree

from jax_tformer.data.order import Batch
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.functional import AnyTransformer, Params
from jax_tformer.lora import join_adapters, split_adapters
from jax_tformer.model.parameters import accumulator
from jax_tformer.training.sharding import place_batch, replicate
from jax_tformer.training.step import TrainState, batch_loss, dropout_keys, forward

DeviceBatch = dict[str, Array]
DropoutKey = Key[Array, ""] | None
_SHOWN = 12
"""Tokens shown of a row, so that it can be found in the data."""


def find_not_finite(
    net: AnyTransformer, mesh: Mesh, tokenizer: Tokenizer, accumulation: int, state: TrainState, batch: Batch
) -> str:
    """Describes the first parameter, layer or gradient that is not finite in a step of `batch`; "" if none is found.

    Runs the model again, as the step did. `state` is that which `train_step` returned for the failed step, or the one
    whose evaluation failed.
    """

    def finite_rows(params: Params, part: DeviceBatch, key: DropoutKey) -> dict[str, Bool[Array, " B"]]:
        """Returns for every layer in turn whether each row of its output is finite."""
        outputs = forward(net, params, part, dropout_key=key, capture=True)
        found = {}
        for stack, captured in (("encoder", outputs.encoder), ("decoder", outputs.decoder)):
            for layer, hidden in enumerate(() if captured is None else captured.hidden):
                found[f"the output of {stack}.blocks.{layer}"] = jnp.isfinite(hidden).all((1, 2))
        # Checks the input of the logits, which would be several times as large as all else.
        return replicate(found | {"what the vocabulary projection is given": jnp.isfinite(outputs.hidden).all((1, 2))})

    def squared_gradients(params: Params, part: DeviceBatch, key: DropoutKey) -> Params:
        """Returns the terms of the squared norm, because squares overflow before the numbers do."""
        trains, frozen = split_adapters(params)

        def loss(trains: Params) -> Array:
            return batch_loss(net, join_adapters(trains, frozen), part, dropout_key=key)[0]

        gradients = jax.grad(loss)(trains)
        squared: Params = jax.tree.map(lambda g: jnp.square(g.astype(accumulator(g.dtype))), gradients)
        return squared

    with jax.set_mesh(mesh):
        name = _not_finite_in(state.params)
    if name:
        return f"{name} was not finite before it"
    trains = not state.finite
    parts = accumulation if trains else 1
    keys = dropout_keys(net, state, parts) if trains else None
    ids = batch["source" if "source" in batch else "tokens"]
    rows = len(ids) // parts
    for number in range(parts):
        key = None if keys is None else keys[number]
        with jax.set_mesh(mesh):
            part = place_batch(mesh, {name: x[number * rows : (number + 1) * rows] for name, x in batch.items()})
            for name, finite in jax.device_get(jax.jit(finite_rows)(state.params, part, key)).items():
                if not finite.all():
                    found = f"{name} is the first that is not finite"
                    if len(finite) > rows:
                        # Another process may have made this row.
                        return found
                    row = number * rows + int(np.argmin(finite))
                    begins = tokenizer.decode(ids[row, :_SHOWN])
                    return f"{found}, in row {row + 1} of {len(ids)}, which begins {begins!r}"
            gradients = jax.jit(squared_gradients)(state.params, part, key) if trains else {}
            name = _not_finite_in(gradients)
        if name:
            return f"every layer's output is finite, the norm of the gradient of {name} is not"
    return ""


def _not_finite_in(tree: PyTree[Array]) -> str | None:
    """Returns the name of the first array with a number that is not finite; checks each layer separately."""

    def flags(path: tuple[Any, ...], leaf: Array) -> Bool[Array, " L"]:
        layers = len(leaf) if "blocks" in (key.key for key in path) else 1
        return jnp.isfinite(leaf).reshape(layers, -1).all(1)

    found = jax.device_get(jax.jit(lambda tree: replicate(jax.tree_util.tree_map_with_path(flags, tree)))(tree))
    for path, finite in jax.tree_util.tree_leaves_with_path(found):
        if not finite.all():
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return name.replace(".blocks.", f".blocks.{int(np.argmin(finite))}.")
    return None
