"""Mistral."""

from transformers import AutoModelForCausalLM
from transformers.models.mistral import MistralForCausalLM

from parity_tests.oracles.decoders import SCALINGS, SETTINGS, STACKS
from parity_tests.oracles.entry import Entry

ENTRIES = {
    "mistral": Entry(
        kind=MistralForCausalLM,
        auto=AutoModelForCausalLM,
        settings=SETTINGS | {"sliding_window": 4},
        stacks=STACKS,
        variants={
            "no window": {"sliding_window": None},
            "wide heads, scaled": {"head_dim": 12, **SCALINGS["scaled linearly"]},
        },
        further=True,
        islands=True,
    )
}
