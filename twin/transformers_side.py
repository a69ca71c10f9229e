"""The model of a Hugging Face folder: its weights, and the same model in `transformers` itself, as a side."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from jax_tformer.config.errors import InputError
from jax_tformer.files import user_path
from jax_tformer.hub.families import from_huggingface, to_huggingface
from jax_tformer.hub.names import to_reference
from jax_tformer.hub.pretrained import load_pretrained
from parity.gates.measure import ParityError
from parity.islands import Float64
from twin.options import Plan
from twin.sides import Masks, Setting, StepFigures, Tensors
from twin.torch_side import TorchSide


def checkpoint_weights(plan: Plan) -> Tensors | None:
    """Returns the weights of the checkpoint that the comparison begins with, named as torch_ref's; None: none."""
    if plan.experiment.init is None:
        return None
    return to_reference(load_pretrained(plan.experiment.init, dtype=plan.dtype)[1])


def transformers_side(plan: Plan, setting: Setting) -> "TransformersSide | None":
    """Returns the side of `transformers`; None without a checkpoint, or where it cannot take part.

    It has neither our dropout masks nor our adapters. Raises InputError if it is not installed.
    """
    experiment = plan.experiment
    if experiment.init is None or plan.dropout == "shared" or experiment.model.lora is not None:
        return None
    return TransformersSide(experiment.init, setting)


class TransformersSide(TorchSide):
    """A class of `transformers` with torch_ref's Trainer around it: the same loss, AdamW and schedule."""

    def __init__(self, folder: str, setting: Setting) -> None:
        """`folder` has the config.json; `setting.model` is our config of it, without dropout."""
        try:
            import transformers
        except ImportError as error:
            raise InputError(
                "a comparison with --init needs transformers; in the repository, pip install '.[parity]' adds it"
            ) from error
        self._settings = transformers.AutoConfig.from_pretrained(user_path(folder))
        self._architecture = str((self._settings.architectures or [""])[0])
        self._kind: Any = getattr(transformers, self._architecture, None)
        if self._kind is None:
            raise InputError(f"this transformers ({transformers.__version__}) has no class {self._architecture!r}")
        super().__init__("transformers", setting)

    def _load(self, weights: Tensors) -> None:
        load_arrays(self._model.inner, to_huggingface(self._architecture, self._config, weights)[1])

    def step(self, batch: Tensors, masks: Masks | None) -> StepFigures:
        """Makes one update; there is no dropout, and `masks` must be None."""
        with self._whole():
            return super().step(batch, None)

    def parameters(self) -> dict[str, Any]:
        """Returns the current parameters, by the names of torch_ref."""
        theirs = {
            name: tensor.detach().cpu().numpy().reshape(self._model.saved.get(name, tensor.shape))
            for name, tensor in self._model.inner.state_dict().items()
        }
        return from_huggingface(self._settings.to_dict(), theirs)[1]

    def _build(self) -> nn.Module:
        with self._whole():
            dtype = getattr(torch, self._config.compute.parameter_dtype)
            return _Adapter(self._kind(self._settings).to(dtype))

    def _whole(self) -> AbstractContextManager[object]:
        """In a comparison in float64 nothing is computed in float32, as `transformers` would with some constants."""
        return Float64() if self._config.compute.dtype == "float64" else nullcontext()


def load_arrays(model: Any, arrays: Tensors) -> None:
    """Gives a model of `transformers` its weights; raises ParityError for one that it lacks."""
    own = model.state_dict()
    if unknown := arrays.keys() - own.keys():
        raise ParityError(f"transformers has no {sorted(unknown)[0]}, which our tables write")
    with torch.no_grad():
        for name, array in arrays.items():
            own[name].copy_(torch.from_numpy(array.astype("float64")).view(own[name].shape))
    model.tie_weights()


class _Adapter(nn.Module):
    """Takes batches as torch_ref's models do. Never draws dropout, whatever the folder says.

    Trains the numbers that are saved as buffers too: the bias of BART's and Marian's logits, which is a parameter of
    ours. `saved` has their shapes. Trains the row of the padding token by look-ups, as ours does: a Marian begins with
    it. A class without a head predicts with its token table.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.saved: dict[str, torch.Size] = {}
        for name, buffer in [*inner.named_buffers()]:
            if name in inner.state_dict() and buffer.is_floating_point():
                place, _, leaf = name.rpartition(".")
                owner = inner.get_submodule(place)
                self.saved[name] = buffer.shape
                delattr(owner, leaf)
                # A vector: weight decay is for matrices.
                owner.register_parameter(leaf, nn.Parameter(buffer.flatten()))
        for module in inner.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None
        inner.config.use_cache = False  # type: ignore[union-attr, unused-ignore]

    def train(self, mode: bool = True) -> "_Adapter":
        super().train(mode)
        self.inner.eval()
        return self

    def forward(self, *inputs: Tensor | None) -> Any:
        """(tokens, mask, token types, segments), or (source, target, their masks, their segments) -> logits."""
        names: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids")
        if len(inputs) > 4:
            names = ("input_ids", "decoder_input_ids", "attention_mask", "decoder_attention_mask")
        arrays = {
            name: array.long() if array.dtype == torch.bool else array
            for name, array in zip(names, inputs, strict=False)
            if array is not None
        }
        output = self.inner(**arrays)
        if "logits" in output:
            logits = output.logits
        else:
            table: nn.Embedding = self.inner.get_input_embeddings()  # type: ignore[operator]
            logits = output[0] @ table.weight.T
        return SimpleNamespace(logits=logits if logits.dtype == torch.float64 else logits.float())
