"""The third oracle: Hugging Face's own models, of reduced configs, with random weights, run on our batches."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.models.bert import BertConfig, BertForMaskedLM, BertModel
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from jax_tformer.config import Dtype, TransformerConfig
from jax_tformer.weights.huggingface import config_from_huggingface, from_huggingface
from parity_tests.bridge import Result, Tensors
from parity_tests.cases import VOCABULARY, batch_for
from torch_ref.models import position_ids
from torch_ref.training import cross_entropy

_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 40,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 80,
    "bos_token_id": None,
    "eos_token_id": None,
}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 40,
    # As the padding_idx of the token table it would take token 0 its gradient.
    "pad_token_id": None,
}
MODELS: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "gpt2": (GPT2LMHeadModel, _GPT2),
    "bert": (BertModel, _BERT),
    "bert masked": (BertForMaskedLM, _BERT),
}
"""The class, and the settings of its reduced config."""
_BLOCKS = {GPT2Config: ("h", "attn"), BertConfig: ("encoder.layer", "attention.self")}
"""Where the layers are, and in a layer the module that returns attention weights."""


class Oracle:
    """A Hugging Face model of one class and type, with the interface of `bridge.Pair`."""

    def __init__(self, name: str, dtype: Dtype = "float64", **settings: Any) -> None:
        """`settings` are changes of the reduced config."""
        kind, reduced = MODELS[name]
        self.model = kind(kind.config_class(**reduced | settings, attn_implementation="eager"))
        self._fresh = {name: p.detach().double().numpy() for name, p in self.model.named_parameters()}
        self.model.to(getattr(torch, dtype)).eval()
        self.json = config_json(self.model)
        self.config: TransformerConfig = config_from_huggingface(self.json)
        self._captured: dict[str, torch.Tensor] = {}
        self._watch()

    def random_weights(self, std: float, seed: int) -> Tensors:
        """Float64 weights by the names that the model saves: matrices N(0, std^2), vectors off their 0 and 1."""
        rng = np.random.default_rng(seed)
        return {
            name: rng.normal(0, std, fresh.shape) if fresh.ndim > 1 else rng.normal(fresh.round(), 0.1)
            for name, fresh in self._fresh.items()
        }

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Gives the model these weights, rounded to its type."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.from_numpy(weights[name]))

    def run(self, batch: Tensors) -> Result:
        """Forward and backward; activations and gradients are named as ours."""
        arrays = {name: torch.from_numpy(array) for name, array in batch.items()}
        self.model.zero_grad()
        logits = self.model(**self._inputs(arrays))[0]
        activations = {"logits": logits, **self._captured}
        if self.config.head == "none":
            loss = logits.square().mean()
        else:
            loss = cross_entropy(logits, arrays["labels"])
            losses = F.cross_entropy(logits.flatten(0, 1), arrays["labels"].flatten(), reduction="none")
            activations["loss of each token"] = losses.view(arrays["labels"].shape)
        loss.backward()
        activations["loss"] = loss
        gradients = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy()
            for name, p in self.model.named_parameters()
        }
        return Result(
            {name: tensor.detach().numpy() for name, tensor in activations.items()},
            from_huggingface(self.json, gradients)[1],
        )

    def batch(self, padding: str, seed: int) -> Tensors:
        """A batch for this model.

        Without a head the loss counts every position, so that the last row, which is padding alone and differs (see
        `comparable`), has to be left out.
        """
        batch = batch_for(self.config, padding, seed)
        return {name: array[:-1] for name, array in batch.items()} if self.config.head == "none" else batch

    def _inputs(self, arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": arrays["tokens"]}
        if "mask" in arrays:
            inputs["attention_mask"] = arrays["mask"].long()
            # Hugging Face counts from the start of the row unless it is told.
            inputs["position_ids"] = position_ids(arrays["tokens"], arrays["mask"])
        if "token_types" in arrays:
            inputs["token_type_ids"] = arrays["token_types"]
        return inputs

    def _watch(self) -> None:
        blocks, attention = _BLOCKS[type(self.model.config)]
        side = "encoder" if self.config.decoder is None else "decoder"

        def keep(name: str, part: int | None = None) -> Callable[..., None]:
            def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
                self._captured[name] = output if part is None else output[part]

            return hook

        for layer, block in enumerate(self.model.base_model.get_submodule(blocks)):
            block.register_forward_hook(keep(f"{side}.{layer}.hidden"))
            block.get_submodule(attention).register_forward_hook(keep(f"{side}.{layer}.self_attention", 1))


def config_json(model: PreTrainedModel) -> dict[str, Any]:
    """The model's config.json, parsed."""
    return model.config.to_dict() | {"architectures": [type(model).__name__]}


def comparable(config: TransformerConfig, batch: Tensors, activations: Mapping[str, np.ndarray]) -> Tensors:
    """The activations at the positions that may attend to something, flattened to `[N, ...]`.

    At the others (padding alone before them, or in the whole row) ours attends to nothing, and Hugging Face, whose
    mask adds a large negative number to all scores alike, to everything. Nothing else depends on them: no position
    may attend to padding, and its labels are ignored.
    """
    mask = batch.get("mask", np.ones(batch["tokens"].shape, bool))
    seen = mask.any(axis=1, keepdims=True) if config.decoder is None else mask.cumsum(axis=1) > 0
    seen = np.broadcast_to(seen, mask.shape)
    return {
        name: (array.swapaxes(1, 2) if name.endswith("attention") else array)[seen] if array.ndim else array
        for name, array in activations.items()
    }


class Narrowed(TorchDispatchMode):
    """Lists the operations that return float32 while it is on: the islands of a model that should be in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves(result)):
            self.found.add(str(func))
        return result
