"""Hugging Face's model of the same shape as a side that trains."""

import math
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.hugging_face_models import same_model
from benchmarks.training_sides import OPTIMIZER, BatchShape
from benchmarks.training_torch import TorchSide, fuse
from jax_tformer.config import TransformerConfig
from torch_ref.training import adamw


class HuggingFace(TorchSide):
    """Hugging Face's model with its own loss and attention kernels, fused AdamW, clipping as the Trainer does it."""

    def __init__(
        self, config: TransformerConfig, shape: BatchShape, seed: int, device: str, compiled: bool = False
    ) -> None:
        super().__init__(config, shape, seed, device)
        self._model = same_model(config, seed).to(self._device).train()
        self._optimizer = adamw(self._model, OPTIMIZER)
        fuse(self._optimizer)
        if compiled:
            self._model.compile()
        labels = self._batch["labels"]
        if config.encoder is None:
            # These labels are next tokens already: without shift_labels the model would shift them.
            inputs = {"input_ids": self._batch["tokens"], "shift_labels": labels, "use_cache": False}
        elif config.decoder is None:
            inputs = {"input_ids": self._batch["tokens"]}
        else:
            inputs = {
                "input_ids": self._batch["source"],
                "decoder_input_ids": self._batch["target"],
                "use_cache": False,
            }
        self._inputs: dict[str, Any] = {**inputs, "labels": labels}

    def _update(self) -> Tensor:
        self._optimizer.zero_grad()
        with self._arithmetic():
            loss = self._model(**self._inputs).loss
        loss.backward()
        clip_grad_norm_(self._model.parameters(), OPTIMIZER.clip_norm or math.inf)
        self._optimizer.step()
        return loss.detach()
