"""From a trained model to tokens: `generate`, `stream` and `score`, chosen by a `DecodingConfig`."""

from jax_tformer.decoding.generation import Generated, generate, stream
from jax_tformer.decoding.scoring import Scores, score
from jax_tformer.decoding.settings import DecodingConfig

__all__ = ["DecodingConfig", "Generated", "Scores", "generate", "score", "stream"]
