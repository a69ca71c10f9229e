"""Who sees whom, and where tokens stand: B batch, T length. Masks are boolean, True = may attend."""

import torch
from torch import Tensor
from torch.nn import functional as F


def visible(
    tokens: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    is_token: Tensor | None = None,
    segments: Tensor | None = None,
    prefix: Tensor | None = None,
) -> Tensor | None:
    """Who sees whom within one sequence, `[B or 1, 1, T, T]`; None: all see all.

    Position t sees position s if s is a token; if both are of one segment; if s is less than `window` places away; and,
    where `causal`, if s does not come later, unless both are of the prefix.
    """
    if not causal and window is None and is_token is None and segments is None:
        return None
    places = torch.arange(tokens.shape[1], device=tokens.device)
    distance = places[:, None] - places[None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)[None, None]
    if causal:
        seen = (distance >= 0)[None, None]
        if prefix is not None:
            seen = seen | (prefix[:, None, :, None] & prefix[:, None, None, :])
    if window is not None:
        seen = seen & (distance.abs() < window)[None, None]
    if is_token is not None:
        seen = seen & is_token[:, None, None, :]
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    return seen


def position_ids(tokens: Tensor, is_token: Tensor | None, segments: Tensor | None = None) -> Tensor:
    """0, 1, 2 ... along the tokens of each segment; padding (False) on the left does not count."""
    if is_token is None:
        is_token = torch.ones_like(tokens, dtype=torch.bool)
    if segments is None:
        return (is_token.cumsum(dim=1) - 1).clamp(min=0)
    # Tokens of the same run of equal numbers, up to this one.
    run = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0)).cumsum(dim=1)
    same = (run[:, :, None] == run[:, None, :]) & is_token[:, None, :]
    return (same.tril().sum(dim=2) - 1).clamp(min=0)
