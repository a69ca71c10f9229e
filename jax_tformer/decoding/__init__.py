"""From a trained model to tokens: `generate`, `stream` and `score`, chosen by a `DecodingConfig`.

Names are resolved when they are used: the settings alone cost no jax import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_tformer.decoding.generation import Generated, generate, stream
    from jax_tformer.decoding.scoring import Scores, score
    from jax_tformer.decoding.settings import DecodingConfig

_HOMES = {
    "DecodingConfig": "settings",
    "Generated": "generation",
    "Scores": "scoring",
    "generate": "generation",
    "score": "scoring",
    "stream": "generation",
}

__all__ = ["DecodingConfig", "Generated", "Scores", "generate", "score", "stream"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jax_tformer.decoding' has no attribute {name!r}")
    return getattr(import_module(f"jax_tformer.decoding.{_HOMES[name]}"), name)
