"""Hugging Face's models beyond small sizes: positions past 500 and past windows, and models of 110 and 124 million."""

import gc

import pytest

from parity.gates.measure import FLOAT32, compared, quality
from parity_tests.huggingface import Oracle, comparable, masked
from parity_tests.oracles import LLAMA3
from parity_tests.test_huggingface import narrow_samples
from twin.cases import Lengths, batch_for

ROWS = {"max_position_embeddings": 530}
LONG = {
    "gpt2": {"n_positions": 530},
    "llama": ROWS | {"rope_parameters": LLAMA3 | {"rope_theta": 1e4, "original_max_position_embeddings": 100}},
    "mistral": ROWS | {"sliding_window": 64},
    "qwen2": ROWS | {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
    "qwen3": ROWS,
    "gemma": ROWS,
    "gemma2": ROWS | {"sliding_window": 64},
    "gemma3": ROWS | {"sliding_window": 64},
    "opt": ROWS,
    "gpt_neox": ROWS,
    "starcoder2": ROWS | {"sliding_window": 64},
    # The usual buckets.
    "t5": {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
}
"""Entry -> what is changed for texts of 520 tokens."""


@pytest.mark.deep
@pytest.mark.parametrize("name, side", [*((name, "torch") for name in LONG), ("gemma3", "jax"), ("t5", "jax")])
def test_positions_far_from_the_start(name, side, record):
    """Against the PyTorch reference, which needs no compilation; in JAX in blocks of queries, each kind of layer."""
    oracle = Oracle(name, **LONG[name])
    pair, batch = oracle.pair(0.2, 0), batch_for(oracle.config, "left", lengths=Lengths(2, 520, 520))
    ours = pair.run_torch(batch).outputs if side == "torch" else pair.forward(masked(batch))
    both = (comparable(oracle.config, batch, found) for found in (ours, oracle.run(batch).outputs))
    record(f"huggingface {name}, 520 positions", compared("1 activations", *both))


WIDE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 512}


@pytest.mark.deep
@pytest.mark.parametrize(
    "name, sizes, count",
    [
        (
            "gpt2",
            {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "n_positions": 1024},
            124_439_808,
        ),
        # The shape that benchmarks/decoding measures.
        (
            "llama",
            WIDE | {"vocab_size": 32000, "num_key_value_heads": 4, "intermediate_size": 2048},
            124_668_672,
        ),
        ("bert masked", WIDE | {"vocab_size": 30522, "intermediate_size": 3072}, 109_514_298),
    ],
)
def test_gate_3_at_full_size(name, sizes, count, record):
    """What is computed forward in float32, beside Hugging Face's own, both beside its float64.

    Three draws, because a batch has few tokens: of one draw, the loss of a single token can decide, by luck.
    """
    assert sum(tensor.numel() for tensor in Oracle(name, "float32", **sizes).kept().values()) == count
    for samples in narrow_samples(name, "float32", 3, backward=False, **sizes):
        record(f"huggingface {name}, full size", quality("3 float32 / allowed", samples, FLOAT32))
    # A model and its hooks hold each other: 4 GB would stay beside the next one.
    gc.collect()
