"""One model in both frameworks, with the same weights, run on the same batch."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch.nn import functional as F

from jax_tformer.config import Dtype, TransformerConfig
from jax_tformer.functional import Params, transformer
from jax_tformer.hub.names import from_reference, slots, to_reference
from jax_tformer.model.parameters import accumulator
from jax_tformer.startup import FLOAT64, fusion_emitters
from jax_tformer.training.step import forward
from parity.differ.answer import Difference
from parity.differ.first_difference import difference_of
from parity.gates.bridge import Bridge, Tensors, Values
from parity.gates.measure import FLOAT64_BAR, Measured, compared, global_norm, searched, worst
from torch_ref import Outputs, reference
from torch_ref.layers import inject
from torch_ref.training import apply_to_batch as apply_theirs
from torch_ref.training import cross_entropy
from twin.dropout import drawn_masks
from twin.reference_loss import mean_cross_entropy, token_losses

OPTIMISED = {"xla_backend_optimization_level": 3, **fusion_emitters(True)}
"""Compiles as outside of the tests, where conftest.py switches optimisation off."""
EVERY_ROUNDING = {"xla_allow_excess_precision": False, "xla_cpu_experimental_ynn_fusion_type": ""}
"""Compiles what the program says. By default XLA leaves roundings to bfloat16 out where it can, and its fusions for
YNNPACK do so whatever it is told."""
KINDS = ("hidden", "self_attention", "cross_attention")
"""What is captured of every layer and compared."""


def parity_options(dtype: str, *, optimised: bool) -> dict[str, Any]:
    """How a gate compiles: as fast as can be, or as users do; float64 always without what FLOAT64 leaves out."""
    exact = FLOAT64.get(jax.default_backend(), {}) if dtype == "float64" else {}
    return (OPTIMISED if optimised else {}) | exact


class Pair(Bridge):
    """The JAX model and the PyTorch reference of one config and one type, holding the same weights."""

    def __init__(
        self,
        config: TransformerConfig,
        weights: Mapping[str, np.ndarray],
        dtype: Dtype = "float64",
        *,
        optimised: bool = False,
        dropout_seed: int | None = None,
    ) -> None:
        """`weights` are the reference's, by name; they are rounded to `dtype`.

        With `dropout_seed` JAX drops by that key, and the reference by the masks that JAX drew.
        """
        self.config = config.with_dtype(dtype)
        self.net = transformer(self.config)
        self.key = None if dropout_seed is None else jax.random.key(dropout_seed)
        holds = defaultdict[str, list[list[str]]](list)
        for name, slot in slots(self.net.shapes).items():
            holds[slot.path].append([name])
        super().__init__(
            self._ours,
            self._theirs,
            reference(self.config).eval(),
            into=lambda weights: from_reference(weights, self.net.shapes),
            back=to_reference,
            dtype=dtype,
            holds=holds,
            compiler_options=parity_options(dtype, optimised=optimised),
        )
        self.load(weights)

    def run_jax(self, batch: Tensors) -> Values:
        """Forward and backward in JAX; the masks that it drew go to the reference."""
        self.share_masks(batch)
        return super().run_jax(batch)

    def share_masks(self, batch: Tensors) -> None:
        """Draws the masks that JAX drops by in this batch, and gives them to the reference."""
        masks = drawn_masks(self.config, self.key, batch)
        inject(self.module, {name: torch.from_numpy(np.asarray(mask).copy()) for name, mask in masks.items()})

    def forward(self, batch: Tensors) -> Tensors:
        """The activations alone, in JAX; compiled anew."""
        activations = jax.jit(lambda *given: self.ours(*given)[1], compiler_options=self.compiler_options)
        return {k: np.asarray(x) for k, x in activations(self.params, jax.device_put(batch)).items()}

    def _ours(self, params: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        outputs = forward(self.net, params, batch, dropout_key=self.key, capture=True)
        if self.config.head == "none":
            return _activations(outputs, _mean_squares(outputs, lambda x: x.astype(accumulator(x.dtype))))
        logits = outputs.logits if outputs.logits.ndim == 3 else outputs.logits[:, None]
        loss = mean_cross_entropy(logits, batch["labels"])
        return _activations(outputs, loss, token_losses(logits, batch["labels"]))

    def _theirs(self, model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        outputs: Outputs = apply_theirs(model, batch)
        if self.config.head == "none":
            widened = lambda x: x.to(torch.promote_types(x.dtype, torch.float32))  # noqa: E731
            return _activations(outputs, _mean_squares(outputs, widened))
        logits = outputs.logits if outputs.logits.ndim == 3 else outputs.logits[:, None]
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return _activations(outputs, cross_entropy(logits, batch["labels"]), losses.view(batch["labels"].shape))


def _mean_squares(outputs: Any, widened: Callable[[Any], Any]) -> Any:
    """A loss of a model without a head, which has no labels to meet: any smooth function shows its gradients."""
    return sum((widened(x) ** 2).mean() for x in (outputs.logits, outputs.pooled) if x is not None)


def _activations(outputs: Any, loss: Any, losses: Any = None) -> tuple[Any, dict[str, Any]]:
    """(loss, all that a gate compares of either side, by name)."""
    # With a head, the pooled text is a step on the way to the logits, which Hugging Face's models do not return.
    pooled = outputs.pooled if losses is None else None
    found = {"logits": outputs.logits, "pooled": pooled, "loss of each token": losses, "loss": loss}
    for side in ("encoder", "decoder"):
        for kind in KINDS if (captured := getattr(outputs, side)) else ():
            layers = getattr(captured, kind)
            for layer in range(0 if layers is None else len(layers)):
                found[f"{side}.{layer}.{kind}"] = layers[layer]
    return loss, {name: value for name, value in found.items() if value is not None}


def identity(models: Pair, batch: Tensors) -> Iterator[Measured]:
    """Gates 1 and 2 on one batch."""
    ours, theirs = models.run_jax(batch), models.run_torch(batch)
    yield compared("1 activations", ours.outputs, theirs.outputs)
    zeros = known_zeros(models.config, theirs.gradients)
    yield compared("2 gradients", ours.gradients, theirs.gradients, zero=zeros)
    # What is zero in exact arithmetic must be so on either side, not merely alike.
    for side in (ours, theirs) if zeros else ():
        sizes = {key: float(np.linalg.norm(side.gradients[key])) / scale for key, scale in zeros.items()}
        yield worst("2 gradients", sizes, FLOAT64_BAR)


def where_they_part(models: Bridge, batch: Tensors, name: str) -> Difference | str:
    """The first difference, or why there is none."""
    found: Difference | str = searched(lambda: difference_of(models, batch, name=name))
    return found


def known_zeros(config: TransformerConfig, gradients: Tensors) -> dict[str, float]:
    """The gradients that are zero in exact arithmetic, with the global norm to measure them against.

    A key bias adds the same number to all scores of a query, which the softmax takes out again (not so where a
    rotation, a norm or a bound stands between them).
    """
    scale = global_norm(gradients)

    def taken_out(name: str) -> bool:
        stack = getattr(config, name.split(".")[0])
        turned = stack.positions == "rotary" and ".self_attention." in name
        return not (turned or stack.query_key_norm or stack.score_cap is not None)

    return {name: scale for name in gradients if name.endswith("key.bias") and taken_out(name)}
