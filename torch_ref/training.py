"""What training minimises, in PyTorch."""

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats over the labels that are not -100; 0 where there are none."""
    total = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=label_smoothing, reduction="sum"
    )
    return total / (labels != -100).sum().clamp(min=1)
