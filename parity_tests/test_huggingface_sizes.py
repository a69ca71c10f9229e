"""Hugging Face's models beyond small sizes: positions past 500 and past windows, and models of 110 and 124 million."""

import jax
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from jax_tformer.functional import transformer
from jax_tformer.hub.families import from_huggingface
from jax_tformer.hub.names import from_reference
from parity.gates.measure import FLOAT32, Sample, compared, quality
from parity.islands import Float64
from parity_tests.huggingface import Oracle, comparable, config_json, masked
from parity_tests.oracles import LLAMA3
from twin.bridge import parity_options
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
@pytest.mark.parametrize(("name", "side"), [*((name, "torch") for name in LONG), ("gemma3", "jax"), ("t5", "jax")])
def test_positions_far_from_the_start(name, side, record):
    """Against the PyTorch reference, which needs no compilation; in JAX in blocks of queries, each kind of layer."""
    oracle = Oracle(name, **LONG[name])
    pair, batch = oracle.pair(0.2, 0), batch_for(oracle.config, "left", lengths=Lengths(2, 520, 520))
    ours = pair.run_torch(batch).activations if side == "torch" else pair.forward(masked(batch))
    both = (comparable(oracle.config, batch, found) for found in (ours, oracle.run(batch).activations))
    record(f"huggingface {name}, 520 positions", compared("1 activations", *both))


LLAMA = LlamaConfig(
    vocab_size=32000,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    intermediate_size=2048,
)
"""The shape that benchmarks/decoding measures."""


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kind", "config", "count"),
    [
        (GPT2LMHeadModel, GPT2Config(), 124_439_808),
        (LlamaForCausalLM, LLAMA, 124_668_672),
        (BertForMaskedLM, BertConfig(), 109_514_298),
    ],
)
def test_logits_at_full_size(kind, config, count, record):
    """float32 beside Hugging Face's own, both beside its float64; weights as it draws them."""
    torch.manual_seed(0)
    model = kind(config).eval()
    arrays = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    assert sum(array.size for array in arrays.values()) == count
    ours, weights = from_huggingface(config_json(model), arrays)
    net = transformer(ours)
    params = jax.device_put(from_reference(weights, net.shapes))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 12))
    options = parity_options("float32", optimised=True)
    mine = jax.jit(lambda p, t: net.apply(p, t), compiler_options=options)(params, tokens.astype(np.int32))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
    # Made anew: its frequencies of rotation are to be whole, too.
    with torch.no_grad(), Float64(), no_init_weights():
        exact = kind(config).eval()
        exact.load_state_dict(model.state_dict())
        truth = exact(torch.from_numpy(tokens)).logits.numpy()
    sample = Sample(
        *({"logits": np.asarray(x)} for x in (mine, theirs, truth)), {"logits": float(np.linalg.norm(truth))}
    )
    record(f"huggingface {kind.__name__}, full size", quality("3 float32 / allowed", [sample], FLOAT32))
