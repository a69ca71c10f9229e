"""Where the numbers went wrong, looked for once a step was not finite: in which parameter, layer or gradient."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Key, PyTree

from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.models.transformer import Transformer
from jax_tformer.nn.arrays import Params, accumulator
from jax_tformer.sharding import place_batch
from jax_tformer.training.step import Batch, TrainState, apply_to_batch, batch_loss, dropout_keys

_SHOWN = 12
"""Tokens of a row that are shown, so that it can be found in the data."""


class Diagnosis:
    """Runs the model once more, as the step that failed did, and looks at what it computes on the way."""

    def __init__(self, net: Transformer, mesh: Mesh, tokenizer: Tokenizer, accumulation: int) -> None:
        self._net, self._mesh, self._tokenizer, self._accumulation = net, mesh, tokenizer, accumulation

    def __call__(self, state: TrainState, batch: Mapping[str, np.ndarray]) -> str:
        """The first parameter, layer or gradient that is not finite, in words; "" where none is found.

        `state` is what `train_step` left, its step below 0, or for an evaluation a state as it is.
        """
        parameter = _first_not_finite(state.params)
        if parameter:
            return f"{parameter} was not finite before it"
        step = int(state.step)
        parts = self._accumulation if step < 0 else 1
        keys = dropout_keys(self._net, state._replace(step=jnp.int32(~step)), parts) if step < 0 else None
        rows = len(batch["labels"]) // parts
        for number in range(parts):
            part = {name: array[number * rows : (number + 1) * rows] for name, array in batch.items()}
            key = None if keys is None else keys[number]
            with jax.set_mesh(self._mesh):
                placed = place_batch(self._mesh, part)
                finite = jax.device_get(jax.jit(self._finite_rows)(state.params, placed, key))
                for name, by_row in finite.items():
                    if not by_row.all():
                        row = number * rows + int(np.argmin(by_row))
                        return f"{name} is the first that is not finite, in {self._row(batch, row)}"
                gradients = jax.jit(self._squared_gradients)(state.params, placed, key) if step < 0 else {}
            parameter = _first_not_finite(gradients)
            if parameter:
                return f"every layer's output is finite, the norm of the gradient of {parameter} is not"
        return ""

    def _finite_rows(self, params: Params, batch: Batch, key: Key[Array, ""] | None) -> dict[str, Bool[Array, " B"]]:
        """Whether each row is finite, behind every layer in turn."""
        outputs = apply_to_batch(self._net, params, batch, dropout_key=key, capture=True, project=False)
        found = {}
        for stack, captured in (("encoder", outputs.encoder), ("decoder", outputs.decoder)):
            for layer, hidden in enumerate(() if captured is None else captured.hidden):
                found[f"the output of {stack}.blocks.{layer}"] = jnp.isfinite(hidden).all((1, 2))
        # Logits would be several times as large as all else; what they come of says as much.
        return found | {"what the vocabulary projection is given": jnp.isfinite(outputs.logits).all((1, 2))}

    def _squared_gradients(self, params: Params, batch: Batch, key: Key[Array, ""] | None) -> Params:
        """What their norm is the sum of: squares overflow before the numbers do."""
        gradients = jax.grad(lambda params: batch_loss(self._net, params, batch, dropout_key=key)[0])(params)
        return jax.tree.map(lambda g: jnp.square(g.astype(accumulator(g.dtype))), gradients)

    def _row(self, batch: Mapping[str, np.ndarray], row: int) -> str:
        ids = batch["source" if "source" in batch else "tokens"]
        return f"row {row + 1} of {len(ids)}, which begins {self._tokenizer.decode(ids[row, :_SHOWN].tolist())!r}"


def _first_not_finite(tree: PyTree[Array]) -> str | None:
    """The name of the first array with a number that is not finite; layers count one by one."""

    def flags(path: jax.tree_util.KeyPath, leaf: Array) -> Bool[Array, " L"]:
        layers = len(leaf) if "blocks" in (key.key for key in path) else 1
        return jnp.isfinite(leaf).reshape(layers, -1).all(1)

    found = jax.device_get(jax.jit(lambda tree: jax.tree_util.tree_map_with_path(flags, tree))(tree))
    for path, finite in jax.tree_util.tree_leaves_with_path(found):
        if not finite.all():
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return name.replace(".blocks.", f".blocks.{int(np.argmin(finite))}.")
    return None
