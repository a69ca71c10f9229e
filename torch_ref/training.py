"""Training in PyTorch: the loss, the schedule, AdamW, and one step of them, as jax_tformer.training has them."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from jax_tformer.config.experiment import OptimizerConfig, TrainingConfig
from torch_ref.layers import inject
from torch_ref.transformer import DecoderOnly, EncoderDecoder, EncoderOnly, Outputs

Batch = Mapping[str, Tensor]
"""tokens, or source and target; their masks and token types where there are any; labels."""


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats over the labels that are not -100; 0 where there are none."""
    return summed_cross_entropy(logits, labels, label_smoothing) / counted(labels).clamp(min=1)


def summed_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy in nats, summed over the labels that are not -100."""
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=label_smoothing, reduction="sum"
    )


def counted(labels: Tensor) -> Tensor:
    """How many labels are not -100."""
    return (labels != -100).sum()


def learning_rate(config: OptimizerConfig, n: int, steps: int) -> float:
    """The learning rate of update n = 0, 1, ... of `steps`: linear warm-up, then the schedule."""
    step, warmup = n + 1, config.warmup_steps
    if step <= warmup:
        return config.learning_rate * step / warmup
    if config.schedule == "inverse_sqrt":
        return config.learning_rate * math.sqrt(warmup / step)
    if config.schedule == "cosine":
        progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * cosine)
    return config.learning_rate


def adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """torch.optim.AdamW with weight decay on matrices and tables, none on biases and norms, of what trains."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps)


def freeze(model: nn.Module) -> None:
    """Freezes everything but the adapters of LoRA, if the model has any."""
    names = [name for name, _ in model.named_parameters() if ".lora." in name]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not names or name in names)


class StepMetrics(NamedTuple):
    """What one step measured, on the model's device."""

    loss: Tensor
    """Mean cross-entropy (smoothed, if training is) of the batch before the update, in nats a token."""
    gradient_norm: Tensor
    """Global norm before clipping."""
    tokens: Tensor
    """Tokens that the model read, source and target, without padding."""


class Trainer:
    """A model, its optimizer and its schedule; `step` trains on one batch."""

    def __init__(
        self,
        model: DecoderOnly | EncoderOnly | EncoderDecoder,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
    ) -> None:
        freeze(model)
        self.model = model.train()
        self.optimizer = adamw(model, optimizer)
        self.config, self.training = optimizer, training
        self.updates = 0

    def step(self, batch: Batch, masks: Sequence[Mapping[str, Tensor]] | None = None) -> StepMetrics:
        """One update from the gradients of the mean loss over the whole batch, computed in `accumulation` parts.

        `masks` are the dropout masks of each part (see `inject`); without them the model draws its own.
        """
        parts = self.training.accumulation
        self.optimizer.zero_grad()
        count = counted(batch["labels"]).clamp(min=1)
        losses = []
        for index in range(parts):
            part = {name: tensor.chunk(parts)[index] for name, tensor in batch.items()}
            inject(self.model, masks[index] if masks else {})
            logits = apply_to_batch(self.model, part).logits
            share = summed_cross_entropy(logits, part["labels"], self.training.label_smoothing) / count
            share.backward()
            losses.append(share.detach())
        norm = self._clip()
        rate = learning_rate(self.config, self.updates, self.training.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.updates += 1
        return StepMetrics(torch.stack(losses).sum(), norm, tokens_read(batch))

    def _clip(self) -> Tensor:
        limit = math.inf if self.config.clip_norm is None else self.config.clip_norm
        return clip_grad_norm_(self.model.parameters(), limit)


def apply_to_batch(model: DecoderOnly | EncoderOnly | EncoderDecoder, batch: Batch) -> Outputs:
    """The model's output for whatever kind of batch this is."""
    if "source" in batch:
        names = ("source_mask", "target_mask", "source_segments", "target_segments")
        return model(batch["source"], batch["target"], *map(batch.get, names))
    names = ("mask", "token_types", "segments", *(("prefix",) if isinstance(model, DecoderOnly) else ()))
    return model(batch["tokens"], *map(batch.get, names))


def tokens_read(batch: Batch) -> Tensor:
    """How many tokens of the batch are not padding."""
    masks = {"source": "source_mask", "target": "target_mask", "tokens": "mask"}
    read = [batch.get(mask, torch.ones_like(batch[ids])) for ids, mask in masks.items() if ids in batch]
    return torch.stack([tokens.sum() for tokens in read]).sum()
