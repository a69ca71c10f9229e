"""The settings as compiled code takes them: numbers are traced, so that another temperature is no other program."""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_tformer.decoding.settings import DecodingConfig, LengthPenaltyForm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rules:
    """A DecodingConfig; what it does not ask for is None, and costs nothing."""

    temperature: Float[Array, ""] | None
    """None: the best token is chosen and nothing drawn."""
    top_p: Float[Array, ""] | None
    min_p: Float[Array, ""] | None
    repetition_penalty: Float[Array, ""] | None
    length_penalty: Float[Array, ""]
    top_k: int | None = field(metadata={"static": True})
    num_beams: int = field(metadata={"static": True})
    length_penalty_form: LengthPenaltyForm = field(metadata={"static": True})
    early_stopping: bool | Literal["never"] = field(metadata={"static": True})


def rules_of(decoding: DecodingConfig) -> Rules:
    """The rules of a config."""

    def number(value: float | None, idle: float) -> Array | None:
        return None if value is None or value == idle else jnp.asarray(value, jnp.result_type(float))

    return Rules(
        temperature=number(decoding.temperature, 0.0),
        top_p=number(decoding.top_p, 1.0),
        min_p=number(decoding.min_p, 0.0),
        repetition_penalty=number(decoding.repetition_penalty, 1.0),
        length_penalty=jnp.asarray(decoding.length_penalty, jnp.result_type(float)),
        top_k=decoding.top_k,
        num_beams=decoding.num_beams,
        length_penalty_form=decoding.length_penalty_form,
        early_stopping=decoding.early_stopping,
    )
