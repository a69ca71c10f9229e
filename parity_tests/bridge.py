"""One architecture in both frameworks, with the same weights, run on the same batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F

from jax_tformer.config import Dtype, TransformerConfig
from jax_tformer.models.transformer import Transformer, transformer
from jax_tformer.nn.arrays import Params
from jax_tformer.training.losses import cross_entropy as cross_entropy_sum
from jax_tformer.training.losses import mean_cross_entropy
from jax_tformer.weights.names import from_reference, to_reference
from torch_ref import Output, reference
from torch_ref.training import cross_entropy

Tensors = dict[str, np.ndarray]
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
"""Compiles as outside of the tests, where conftest.py switches optimisation off."""


@dataclass(frozen=True)
class Result:
    """What one framework computed from one batch, by name, as NumPy arrays of the type that it was computed in."""

    activations: Tensors = field(default_factory=dict)
    """Logits, every block's hidden states, attention weights, the loss, the loss of each token."""
    gradients: Tensors = field(default_factory=dict)
    """Of the loss, by the reference's parameter names."""


class Pair:
    """The JAX model and the PyTorch reference of one config and one type, holding the same weights."""

    def __init__(
        self, config: TransformerConfig, weights: Mapping[str, np.ndarray], dtype: Dtype, *, optimised: bool
    ) -> None:
        """`weights` are the reference's, by name; they are rounded to `dtype`."""
        self._compiler_options = OPTIMISED if optimised else None
        self.config = config.with_dtype(dtype)
        self.dtype = np.dtype(dtype)
        self.net: Transformer = transformer(self.config)
        self.torch = reference(self.config).eval()
        self.load(weights)

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Gives both models these weights; what has been compiled stays."""
        rounded = {name: array.astype(self.dtype) for name, array in weights.items()}
        self.params: Params = jax.tree.map(jnp.asarray, from_reference(rounded, self.net.shapes))
        self.torch.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in rounded.items()})

    def run_jax(self, batch: Tensors) -> Result:
        """Forward and backward in JAX."""
        arrays = {name: jnp.asarray(array) for name, array in batch.items()}
        (_, activations), gradients = self._jax(self.params, arrays)
        return Result(
            {name: np.asarray(array) for name, array in activations.items()},
            to_reference(gradients),
        )

    def run_torch(self, batch: Tensors) -> Result:
        """Forward and backward in PyTorch."""
        arrays = {name: torch.from_numpy(array) for name, array in batch.items()}
        self.torch.zero_grad()
        if "source" in arrays:
            masks = (arrays.get("source_mask"), arrays.get("target_mask"))
            output: Output = self.torch(arrays["source"], arrays["target"], *masks)
        else:
            output = self.torch(arrays["tokens"], arrays.get("mask"), arrays.get("token_types"))
        loss = self._objective_torch(output.logits, arrays["labels"])
        loss.backward()
        activations = {"logits": output.logits, "loss": loss}
        if self.config.head != "none":
            losses = F.cross_entropy(output.logits.flatten(0, 1), arrays["labels"].flatten(), reduction="none")
            activations["loss of each token"] = losses.view(arrays["labels"].shape)
        for side in ("encoder", "decoder"):
            captured = getattr(output, side)
            for kind in captured._fields if captured else ():
                for layer, tensor in enumerate(getattr(captured, kind)):
                    activations[f"{side}.{layer}.{kind}"] = tensor
        zeros = {name: torch.zeros_like(p) for name, p in self.torch.named_parameters() if p.grad is None}
        gradients = {name: zeros.get(name, p.grad) for name, p in self.torch.named_parameters()}
        return Result(
            {name: tensor.detach().numpy() for name, tensor in activations.items()},
            {name: tensor.numpy() for name, tensor in gradients.items()},
        )

    @cached_property
    def _jax(self) -> Any:
        def objective(params: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
            inputs = [batch[name] for name in ("source", "target", "tokens") if name in batch]
            names = ("source_mask", "target_mask", "mask", "token_types")
            options = {name: batch[name] for name in names if name in batch}
            outputs = self.net.apply(params, *inputs, **options, capture=True)
            if self.config.head == "none":
                loss = jnp.square(outputs.logits).mean()
            else:
                loss = mean_cross_entropy(outputs.logits, batch["labels"])
            activations = {"logits": outputs.logits, "loss": loss}
            if self.config.head != "none":
                activations["loss of each token"] = token_losses(outputs.logits, batch["labels"])
            for side in ("encoder", "decoder"):
                captured = getattr(outputs, side)
                for kind in captured._fields if captured else ():
                    layers = getattr(captured, kind)
                    for layer in range(0 if layers is None else layers.shape[0]):
                        activations[f"{side}.{layer}.{kind}"] = layers[layer]
            return loss, activations

        return jax.jit(jax.value_and_grad(objective, has_aux=True), compiler_options=self._compiler_options)

    def _objective_torch(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # A model without a head has no labels to meet: any smooth function of its output shows its gradients.
        return logits.square().mean() if self.config.head == "none" else cross_entropy(logits, labels)


def token_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """`[B, T]`, the cross-entropy of every token by itself."""

    def one(logits: jax.Array, label: jax.Array) -> jax.Array:
        return cross_entropy_sum(logits[None, None], label[None, None])[0]

    return jax.vmap(jax.vmap(one))(logits, labels)


def known_zeros(config: TransformerConfig, gradients: Tensors) -> dict[str, float]:
    """The gradients that are zero in exact arithmetic, with the global norm to measure them against.

    A key bias adds the same number to all scores of a query, which the softmax takes out again (not so where a
    rotation stands between them).
    """
    scale = float(np.sqrt(sum(float(np.square(g.astype(np.float64)).sum()) for g in gradients.values())))
    rotary = {
        side for side in ("encoder", "decoder") if (stack := getattr(config, side)) and stack.positions == "rotary"
    }
    return {
        name: scale
        for name in gradients
        if name.endswith("key.bias") and not (name.split(".")[0] in rotary and ".self_attention." in name)
    }
