"""Hugging Face's `generate` as a side: GPT-2 with our weights, or a BART of our shape with weights of its own."""

import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CompileConfig,
    GPT2Config,
    GPT2LMHeadModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from benchmarks.sides import START_ID, Decoded, draw_weights
from jax_tformer.config import TransformerConfig
from jax_tformer.models.transformer import transformer
from jax_tformer.weights.huggingface import to_huggingface
from jax_tformer.weights.names import to_reference

CacheKind = Literal["dynamic", "static", "static compiled"]


class HuggingFace:
    """One model with one kind of cache."""

    def __init__(self, config: TransformerConfig, seed: int, device: str, cache: CacheKind) -> None:
        self._device = "cuda" if device == "gpu" else device
        self._model: Any = _gpt2(config, seed) if config.encoder is None else _bart(config, seed)
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


def _gpt2(config: TransformerConfig, seed: int) -> Any:
    settings, arrays = to_huggingface("GPT2LMHeadModel", config, to_reference(draw_weights(transformer(config), seed)))
    model = GPT2LMHeadModel(GPT2Config(**settings | {"bos_token_id": None, "eos_token_id": None}))
    missing, unexpected = model.load_state_dict({name: torch.from_numpy(x) for name, x in arrays.items()}, strict=False)
    # The head is the token table, and is saved once.
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    return model


def _bart(config: TransformerConfig, seed: int) -> Any:
    encoder, decoder = config.encoder, config.decoder
    assert encoder is not None
    assert decoder is not None
    assert config.vocab_size is not None
    torch.manual_seed(seed)
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            encoder_layers=encoder.num_layers,
            decoder_layers=decoder.num_layers,
            encoder_attention_heads=encoder.num_heads,
            decoder_attention_heads=decoder.num_heads,
            encoder_ffn_dim=encoder.feedforward_width,
            decoder_ffn_dim=decoder.feedforward_width,
            activation_function="relu",
            scale_embedding=True,
            bos_token_id=None,
            eos_token_id=None,
            forced_eos_token_id=None,
            decoder_start_token_id=START_ID,
        )
    )
