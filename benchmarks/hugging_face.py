"""Hugging Face's `generate` as a side: GPT-2 with our weights, or a BART of our shape with weights of its own."""

import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from transformers import CompileConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from benchmarks.hugging_face_models import same_model
from benchmarks.sides import Decoded
from jax_tformer.config import TransformerConfig

CacheKind = Literal["dynamic", "static", "static compiled"]


class HuggingFace:
    """One model with one kind of cache."""

    def __init__(self, config: TransformerConfig, seed: int, device: str, cache: CacheKind) -> None:
        self._device = "cuda" if device == "gpu" else device
        self._model: Any = same_model(config, seed)
        self._model.to(self._device).eval()
        self._starts = 0 if config.encoder is None else 1
        self._options: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": "static"}
        if cache == "static compiled":
            compiling: Any = CompileConfig(mode="default" if device == "cpu" else "reduce-overhead")
            # Else only on accelerators.
            compiling._compile_all_devices = True
            self._options["compile_config"] = compiling
        elif cache == "static":
            self._options["disable_compile"] = True
        self._shape: tuple[int, ...] = ()

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int, room: int, beams: int) -> Decoded:
        """A static cache always has `room`, and stops early: with another size it would be compiled again."""
        tokens = torch.tensor(prompts, device=self._device)
        if "compile_config" in self._options and (*tokens.shape, room) != self._shape:
            self._shape = (*tokens.shape, room)
            # What is compiled for a second shape takes sizes as variables, and is slower.
            torch._dynamo.reset()
        options = dict(self._options)
        if options and new_tokens < room:
            options["stopping_criteria"] = StoppingCriteriaList([_Stop(self._prefix(tokens) + new_tokens)])
        began = time.perf_counter()
        found = self._generate(tokens, room if options else new_tokens, num_beams=beams, **options).cpu().numpy()
        seconds = time.perf_counter() - began
        return Decoded(seconds, found[:, self._prefix(tokens) :].astype(np.int32))

    def intervals(self, prompt: Sequence[int], count: int, room: int) -> list[float]:
        """Token by token through a streamer."""
        clock = _Clock()
        self._generate(torch.tensor([prompt], device=self._device), count + 1, streamer=clock, **self._options)
        # What comes first is the prompt.
        return np.diff(clock.times[1:]).tolist()

    def device_memory(self) -> int | None:
        """As torch's allocator counts it."""
        return torch.cuda.max_memory_allocated() if self._device == "cuda" else None

    def _prefix(self, tokens: torch.Tensor) -> int:
        return self._starts or tokens.shape[1]

    def _generate(self, tokens: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:
        mask = torch.ones_like(tokens)
        return self._model.generate(
            tokens, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, **options
        )


class _Stop(StoppingCriteria):
    """All rows end at a length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self._length, device=input_ids.device)


class _Clock(BaseStreamer):
    """When tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
