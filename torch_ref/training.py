"""Training in PyTorch: loss, schedule, optimizers, and one step of them, as jax_tformer.training has them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from jax_tformer.config.experiment import LossConfig, OptimizerConfig, TrainingConfig
from torch_ref.layers import inject
from torch_ref.transformer import DecoderOnly, EncoderDecoder, EncoderOnly, Outputs

Batch = Mapping[str, Tensor]
"""tokens, or source and target; their masks and token types where there are any; labels."""
KINDS = ("matrices", "tables", "head", "vectors")
"""Of parameters, as `OptimizerConfig.rates` has them."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the labels that are not -100; 0 where there are none."""
    return summed_cross_entropy(logits, labels) / counted(labels).clamp(min=1)


def summed_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy in nats, summed over the labels that are not -100."""
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=label_smoothing, reduction="sum"
    )


def summed_loss(logits: Tensor, labels: Tensor, loss: LossConfig) -> Tensor:
    """What trains: `summed_cross_entropy`, and the z-loss on the same labels."""
    total = summed_cross_entropy(logits, labels, loss.label_smoothing)
    if loss.z_loss == 0:
        return total
    normalisers = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)
    return total + loss.z_loss * (normalisers.square() * (labels != -100)).sum()


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
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "warmup_stable_decay":
        warmup = max(warmup, round(steps * (1 - config.decay_share)))
    progress = min(max(step - warmup, 0) / max(steps - warmup, 1), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * left)


class Lion(torch.optim.Optimizer):
    """Steps of the size of the learning rate, with the sign of a mean of gradients (Chen et al., 2023, algorithm 2)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                direction = torch.sign(beta1 * mean + (1 - beta1) * p.grad)
                p.sub_(group["lr"] * (direction + group["weight_decay"] * p))
                mean.lerp_(p.grad, 1 - beta2)


def kind_of(model: nn.Module, parameter: nn.Parameter) -> str:
    """What `OptimizerConfig.rates` calls a parameter: its kind."""
    if parameter.ndim < 2:
        return "vectors"
    home = next(module for module in model.modules() if any(p is parameter for p in module.parameters(recurse=False)))
    return "tables" if isinstance(home, nn.Embedding) else "matrices" if isinstance(home, nn.Linear) else "head"


def optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """The optimizer that `config` names; for Muon two, of which AdamW has what is no matrix within the layers."""
    match config.name:
        case "adamw":
            return [adamw(model, config)]
        case "lion":
            return [Lion(groups(model, config), {"betas": (config.beta1, config.beta2)})]
        case "adafactor":
            # Without an eps of its own, PyTorch takes one in place of the paper's that small gradients fall below.
            return [torch.optim.Adafactor(groups(model, config), lr=config.learning_rate, eps=(1e-15, 1e-3))]
        case "sgd":
            return [torch.optim.SGD(groups(model, config), config.learning_rate, config.momentum, nesterov=True)]
        case "muon":
            matrices = groups(model, config, ("matrices",))
            muon = torch.optim.Muon(matrices, momentum=config.momentum, adjust_lr_fn="match_rms_adamw")
            rest = ("tables", "head", "vectors")
            # Adapters are matrices alone.
            return [muon, adamw(model, config, rest)] if groups(model, config, rest) else [muon]


def adamw(model: nn.Module, config: OptimizerConfig, kinds: Sequence[str] = KINDS) -> torch.optim.AdamW:
    """torch.optim.AdamW with weight decay on matrices and tables, none on biases and norms, of what trains."""
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups(model, config, kinds), lr=config.learning_rate, betas=betas, eps=config.eps)


def groups(model: nn.Module, config: OptimizerConfig, kinds: Sequence[str] = KINDS) -> list[dict[str, Any]]:
    """What trains, by kind, with its weight decay and the factor of its learning rate."""
    found = [
        {
            "params": [p for p in model.parameters() if p.requires_grad and kind_of(model, p) == kind],
            "weight_decay": 0.0 if kind == "vectors" else config.weight_decay,
            "factor": getattr(config.rates, kind),
        }
        for kind in kinds
    ]
    return [group for group in found if group["params"]]


def freeze(model: nn.Module) -> None:
    """Freezes everything but the adapters of LoRA, if the model has any."""
    names = [name for name, _ in model.named_parameters() if ".lora." in name]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not names or name in names)


class StepMetrics(NamedTuple):
    """What one step measured, on the model's device."""

    loss: Tensor
    """Mean cross-entropy, with what `LossConfig` adds, of the batch before the update, in nats a token."""
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
        self.optimizers = optimizers(model, optimizer)
        self.config, self.training = optimizer, training
        self.updates = 0

    def step(self, batch: Batch, masks: Sequence[Mapping[str, Tensor]] | None = None) -> StepMetrics:
        """One update from the gradients of the mean loss over the whole batch, computed in `accumulation` parts.

        `masks` are the dropout masks of each part (see `inject`); without them the model draws its own.
        """
        parts = self.training.accumulation
        self.model.zero_grad()
        count = counted(batch["labels"]).clamp(min=1)
        losses = []
        for index in range(parts):
            part = {name: tensor.chunk(parts)[index] for name, tensor in batch.items()}
            inject(self.model, masks[index] if masks else {})
            logits = apply_to_batch(self.model, part).logits
            share = summed_loss(logits, part["labels"], self.training.loss) / count
            share.backward()
            losses.append(share.detach())
        norm = self._clip()
        rate = learning_rate(self.config, self.updates, self.training.steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["factor"]
            optimizer.step()
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
