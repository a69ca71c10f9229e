"""Both frameworks on the same path: the same weights, batches and optimizer, step by step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_tformer.functional import transformer
from jax_tformer.hub.names import from_reference, to_reference
from jax_tformer.lora import trained
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import TrainState, train_step
from parity.gates.measure import compared
from parity.gates.pair import Tensors, to_torch
from torch_ref import reference
from torch_ref.training import Trainer
from twin.bridge import known_zeros, parity_options
from twin.dropout import masks_of_step


class Path(NamedTuple):
    """Where training went."""

    losses: np.ndarray
    """Of every step, before its update."""
    gradient_norms: np.ndarray
    """Of every step, before clipping."""
    tokens: np.ndarray
    """That every step read, as floating point."""
    parameters: Tensors
    """After the last step, by the reference's names."""

    def tensors(self):
        """Everything, by name."""
        path = {"loss of each step": self.losses, "gradient norm of each step": self.gradient_norms}
        return path | {"tokens of each step": self.tokens} | self.parameters


def same_path(gate, config, ours, theirs):
    """Gate 5, 6 or 7: every loss, every gradient norm, every parameter at the end.

    A key bias, whose gradient is zero but for rounding, which AdamW divides by its own size, is measured against all
    parameters together.
    """
    return compared(gate, ours.tensors(), theirs.tensors(), zero=known_zeros(config, theirs.parameters))


class TrainingPair:
    """A model, its optimizer and its schedule in both frameworks; every path starts from the same weights."""

    def __init__(
        self,
        config,
        weights,
        optimizer_config,
        training,
        dtype="float64",
        *,
        optimised=False,
    ):
        self.config, self.training, self.optimizer = config.with_dtype(dtype), training, optimizer_config
        self.dtype = np.dtype(dtype)
        self.load(weights)
        self.net = transformer(self.config)
        options = parity_options(dtype, optimised=optimised)
        self._tx = optimizer(optimizer_config, training.steps)
        settings = {"accumulation": training.accumulation, "label_smoothing": training.label_smoothing}
        self._step = jax.jit(train_step(self.net, self._tx, **settings), compiler_options=options)
        self._record = jax.jit(masks_of_step(self.net, accumulation=training.accumulation))

    def load(self, weights):
        """Paths start from these weights, by the reference's names; what has been compiled stays."""
        self.weights = {name: array.astype(self.dtype) for name, array in weights.items()}

    def follow_jax(self, batches):
        """The path over these batches, and the dropout masks that were drawn: one list a step, one dict a part."""
        params = jax.tree.map(jnp.asarray, from_reference(self.weights, self.net.shapes))
        key = jax.random.key_data(jax.random.key(self.training.seed))
        state = TrainState(params, self._tx.init(trained(params)), jnp.zeros((), jnp.int32), key)
        losses, norms, tokens, masks = [], [], [], []
        for batch in batches:
            arrays = {name: jnp.asarray(array) for name, array in batch.items()}
            if self.config.drops:
                masks.append(jax.tree.map(np.asarray, self._record(state, arrays)))
            state, metrics = self._step(state, arrays)
            losses.append(metrics.loss)
            norms.append(metrics.gradient_norm)
            tokens.append(metrics.tokens)
        return Path(np.stack(losses), np.stack(norms), np.array(tokens, np.float64), to_reference(state.params)), masks

    def follow_torch(self, batches, masks):
        """The reference's path over these batches, with these dropout masks."""
        model = reference(self.config)
        model.load_state_dict({name: to_torch(array.copy()) for name, array in self.weights.items()})
        trainer = Trainer(model, self.optimizer, self.training)
        losses, norms, tokens = [], [], []
        for number, batch in enumerate(batches):
            kept = (
                [{site: torch.from_numpy(mask.copy()) for site, mask in part.items()} for part in masks[number]]
                if masks
                else None
            )
            metrics = trainer.step({name: torch.from_numpy(array) for name, array in batch.items()}, kept)
            losses.append(metrics.loss.numpy())
            norms.append(metrics.gradient_norm.numpy())
            tokens.append(metrics.tokens)
        parameters = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        return Path(np.stack(losses), np.stack(norms), np.array(tokens, np.float64), parameters)
