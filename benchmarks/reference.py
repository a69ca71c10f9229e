"""`torch_ref` as a side: no cache, the whole forward pass for every token. It also judges where sides disagree."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.sides import START_ID, Decoded
from benchmarks.training_torch import load_drawn
from jax_tformer.config import TransformerConfig
from torch_ref import reference


class Reference:
    """One model on one device."""

    def __init__(self, config: TransformerConfig, seed: int, device: str) -> None:
        self._device = "cuda" if device == "gpu" else device
        self._model = reference(config)
        load_drawn(self._model, seed)
        self._model.to(self._device).eval()
        self._translates = config.encoder is not None

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int, room: int, beams: int) -> Decoded:
        """Greedy search alone."""
        assert beams == 1
        found = np.zeros((len(prompts), 0), np.int32)
        began = time.perf_counter()
        for _ in range(new_tokens):
            best = self._logits(prompts, found).argmax(-1, keepdim=True)
            found = np.concatenate([found, best.cpu().numpy().astype(np.int32)], axis=1)
        return Decoded(time.perf_counter() - began, found)

    def gap(self, prompt: Sequence[int], before: Sequence[int], one: int, other: int) -> float:
        """How far apart the logits of two tokens are, after `prompt` and the new tokens `before`."""
        logits = self._logits([prompt], np.array([before], np.int32))[0]
        return abs(float(logits[one] - logits[other]))

    def intervals(self, prompt: Sequence[int], count: int, room: int) -> list[float]:
        """Not measured: the whole forward pass is so much slower."""
        raise NotImplementedError

    def device_memory(self) -> int | None:
        """As torch's allocator counts it."""
        return torch.cuda.max_memory_allocated() if self._device == "cuda" else None

    @torch.inference_mode()
    def _logits(self, prompts: Sequence[Sequence[int]], found: np.ndarray) -> torch.Tensor:
        """Of the next token, `[B, V]`."""
        given = torch.tensor(prompts, device=self._device)
        new = torch.from_numpy(found.astype(np.int64)).to(self._device)
        if not self._translates:
            return self._model(torch.cat([given, new], dim=1)).logits[:, -1]
        start = torch.full((len(given), 1), START_ID, device=self._device)
        return self._model(given, torch.cat([start, new], dim=1)).logits[:, -1]
