"""Transformers in JAX, proven equal to a readable PyTorch reference.

The axes that docstrings, types and einsums share; a file says which others it has::

    B  batch              T  query (target) length      S  key (source) length
    D  model width        H  query heads                K  key/value heads
    C  width of one head  F  feed-forward width         V  vocabulary
    L  layers

Names are imported at first use, so that reading a config does not import jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jax_tformer.terminal import __version__ as __version__

if TYPE_CHECKING:
    from jax_tformer.config import ComputeConfig, DropoutConfig, LoraConfig, StackConfig, TransformerConfig
    from jax_tformer.config.errors import InputError
    from jax_tformer.config.experiment import DecodingConfig
    from jax_tformer.config.presets import ARCHITECTURES, EXPERIMENTS
    from jax_tformer.decoding.generate import generate, stream
    from jax_tformer.decoding.score import score
    from jax_tformer.functional import Transformer, transformer
    from jax_tformer.hub.adapters import load_adapters, save_adapters
    from jax_tformer.hub.names import from_reference, load_weights, save_weights, to_reference
    from jax_tformer.hub.pretrained import load_pretrained, save_pretrained
    from jax_tformer.lora import add_lora, merge_lora

__all__ = [
    "ARCHITECTURES",
    "EXPERIMENTS",
    "ComputeConfig",
    "DecodingConfig",
    "DropoutConfig",
    "InputError",
    "LoraConfig",
    "StackConfig",
    "Transformer",
    "TransformerConfig",
    "add_lora",
    "from_reference",
    "generate",
    "load_adapters",
    "load_pretrained",
    "load_weights",
    "merge_lora",
    "save_adapters",
    "save_pretrained",
    "save_weights",
    "score",
    "stream",
    "to_reference",
    "transformer",
]

_MODULES = {
    "config": "ComputeConfig DropoutConfig LoraConfig StackConfig TransformerConfig",
    "config.errors": "InputError",
    "config.presets": "ARCHITECTURES EXPERIMENTS",
    "decoding.generate": "generate stream",
    "decoding.score": "score",
    "config.experiment": "DecodingConfig",
    "functional": "Transformer transformer",
    "hub.adapters": "load_adapters save_adapters",
    "hub.pretrained": "load_pretrained save_pretrained",
    "hub.names": "from_reference load_weights save_weights to_reference",
    "lora": "add_lora merge_lora",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jax_tformer' has no attribute {name!r}")
    return getattr(import_module(f"jax_tformer.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})
