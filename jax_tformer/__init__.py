"""Transformers in JAX, proven equal to a readable PyTorch reference.

The axis glossary, used in every docstring, type and einsum:

    B  batch              T  query (target) length      S  key (source) length
    D  model width        H  query heads                K  key/value heads
    C  width of one head  F  feed-forward width         V  vocabulary
    L  layers             P  prompt length              N  new tokens

Names are imported at first use, so that reading a config does not import jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_tformer.config import ComputeConfig, DropoutConfig, StackConfig, TransformerConfig
    from jax_tformer.decoding.generation import generate, stream
    from jax_tformer.decoding.scoring import score
    from jax_tformer.decoding.settings import DecodingConfig
    from jax_tformer.errors import InputError
    from jax_tformer.model.functional import Transformer, transformer
    from jax_tformer.presets import ARCHITECTURES, EXPERIMENTS
    from jax_tformer.pretrained.loading import load_pretrained
    from jax_tformer.pretrained.saving import save_pretrained
    from jax_tformer.weights.files import load_weights, save_weights
    from jax_tformer.weights.names import from_reference, to_reference

__version__ = "0.1.0"

_HOMES = {
    "ARCHITECTURES": "presets",
    "EXPERIMENTS": "presets",
    "ComputeConfig": "config",
    "DecodingConfig": "decoding.settings",
    "DropoutConfig": "config",
    "InputError": "errors",
    "StackConfig": "config",
    "Transformer": "model.functional",
    "TransformerConfig": "config",
    "from_reference": "weights.names",
    "generate": "decoding.generation",
    "load_pretrained": "pretrained.loading",
    "load_weights": "weights.files",
    "save_pretrained": "pretrained.saving",
    "save_weights": "weights.files",
    "score": "decoding.scoring",
    "stream": "decoding.generation",
    "to_reference": "weights.names",
    "transformer": "model.functional",
}

__all__ = [
    "ARCHITECTURES",
    "EXPERIMENTS",
    "ComputeConfig",
    "DecodingConfig",
    "DropoutConfig",
    "InputError",
    "StackConfig",
    "Transformer",
    "TransformerConfig",
    "from_reference",
    "generate",
    "load_pretrained",
    "load_weights",
    "save_pretrained",
    "save_weights",
    "score",
    "stream",
    "to_reference",
    "transformer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jax_tformer' has no attribute {name!r}")
    return getattr(import_module(f"jax_tformer.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})
