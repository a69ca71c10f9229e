"""Hugging Face's models as sides: `generate` with each kind of cache; training with their own losses and kernels.

GPT-2, Llama and BERT have our weights; a BART of our shape has weights of its own.
"""

import math
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertForMaskedLM,
    CompileConfig,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from benchmarks.sides import Decoded, Prompts, Training, draw_weights
from benchmarks.sides.reference import TorchDecoding, fuse
from benchmarks.training_cases import OPTIMIZER, START_ID, TRAINING, BatchShape
from jax_tformer.config import TransformerConfig
from jax_tformer.functional import transformer
from jax_tformer.hub.families import to_huggingface
from torch_ref.training import StepMetrics, adamw, tokens_read
from twin.jax_side import reference_shapes
from twin.sides import Setting, Shapes, Tensors
from twin.torch_side import TorchSide
from twin.transformers_side import load_arrays

CacheKind = Literal["dynamic", "static", "static compiled"]
NO_END = {"bos_token_id": None, "eos_token_id": None}
"""All sides decode as many tokens."""


def same_model(config: TransformerConfig) -> Any:
    """Makes the model that computes what ours does, with the weights of `draw_weights` (a BART draws its own)."""
    if config.encoder is None or config.decoder is None:
        gated = config.output_stack.gated
        kind: Any = BertForMaskedLM if config.decoder is None else LlamaForCausalLM if gated else GPT2LMHeadModel
        drawn = draw_weights(reference_shapes(transformer(config)))
        described, arrays = to_huggingface(kind.__name__, config, drawn)
        model = kind(kind.config_class(**described | NO_END))
        load_arrays(model, arrays)
        return model
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "activation_function": "relu",
        "scale_embedding": True,
        "dropout": config.dropout.residual,
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "decoder_start_token_id": START_ID,
    }
    for side, stack in config.stacks.items():
        settings |= {f"{side}_layers": stack.num_layers, f"{side}_attention_heads": stack.num_heads}
        settings[f"{side}_ffn_dim"] = stack.feedforward_width
    return BartForConditionalGeneration(BartConfig(**settings | NO_END, forced_eos_token_id=None))


class HuggingFace(TorchSide):
    """A side of the comparison with Hugging Face's model in it."""

    def _build(self) -> torch.nn.Module:
        return same_model(self._config)

    def shapes(self) -> Shapes:
        """None: the model has its weights already."""
        return {}

    def start(self, seed: int, weights: Tensors | None) -> None:
        """Step 0."""
        self._trainer = HuggingFaceTrainer(self._model)


class HuggingFaceTrainer:
    """The model's own loss, AdamW as one kernel, clipping as transformers' Trainer does it."""

    updates = 0

    def __init__(self, model: Any) -> None:
        self._model, self._optimizer = model.train(), adamw(model, OPTIMIZER)
        fuse(self._optimizer)

    def step(self, batch: Mapping[str, Tensor], masks: None) -> StepMetrics:
        """One update."""
        self._optimizer.zero_grad()
        loss = self._model(**_inputs(batch, causal=isinstance(self._model, GPT2LMHeadModel))).loss
        loss.backward()
        norm = clip_grad_norm_(self._model.parameters(), OPTIMIZER.clip_norm or math.inf)
        self._optimizer.step()
        return StepMetrics(loss.detach(), norm, tokens_read(batch))


def _inputs(batch: Mapping[str, Tensor], *, causal: bool) -> dict[str, Any]:
    labels = batch["labels"]
    if "source" in batch:
        pair = {"input_ids": batch["source"], "decoder_input_ids": batch["target"]}
        return {**pair, "use_cache": False, "labels": labels}
    if causal:
        # These labels are next tokens already: without shift_labels the model would shift them.
        return {"input_ids": batch["tokens"], "shift_labels": labels, "use_cache": False, "labels": labels}
    return {"input_ids": batch["tokens"], "labels": labels}


def training(config: TransformerConfig, shape: BatchShape, device: str, compiled: bool = False) -> Training:
    """Makes the side that trains as Hugging Face does."""
    return Training(HuggingFace("HF", Setting(config, OPTIMIZER, TRAINING, device), compiled), config, shape)


class Decoding(TorchDecoding):
    """`generate` with one kind of cache."""

    def __init__(self, config: TransformerConfig, device: str, cache: CacheKind) -> None:
        super().__init__(same_model(config), config, device)
        self._options: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": "static"}
        if cache == "static compiled":
            compiling: Any = CompileConfig(mode="default" if device == "cpu" else "reduce-overhead")
            # Else only on accelerators.
            compiling._compile_all_devices = True
            self._options["compile_config"] = compiling
        elif cache == "static":
            self._options["disable_compile"] = True
        self._shape: tuple[int, ...] = ()

    def decode(self, prompts: Prompts, new_tokens: int, room: int, beams: int) -> Decoded:
        """A static cache always has `room`, and stops early: with another size it would be compiled again."""
        tokens = torch.tensor(prompts, device=self._device)
        if "compile_config" in self._options and (*tokens.shape, room) != self._shape:
            self._shape = (*tokens.shape, room)
            # What is compiled for a second shape takes sizes as variables, and is slower.
            torch._dynamo.reset()
        options, prefix = dict(self._options), 1 if self._translates else tokens.shape[1]
        if options and new_tokens < room:
            options["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(prefix + new_tokens)])
        options |= {"max_new_tokens": room if options else new_tokens, "num_beams": beams, "do_sample": False}
        began = time.perf_counter()
        mask = torch.ones_like(tokens)
        found = self._model.generate(tokens, attention_mask=mask, pad_token_id=0, **options).cpu().numpy()
        seconds = time.perf_counter() - began
        return Decoded(seconds, found[:, prefix:].astype(np.int32))
