"""Hugging Face's decoders beyond small sizes: positions past 500 and past windows, and models of 124 million."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from jax_tformer.functional import transformer
from jax_tformer.hub.families import from_huggingface
from jax_tformer.hub.names import from_reference
from parity.gates.measure import FLOAT32, Measured, Sample, compared, quality
from parity.islands import Float64
from parity_tests.huggingface import Oracle, comparable, config_json, masked
from twin.bridge import Pair, parity_options
from twin.cases import Lengths, batch_for

Record = Callable[[str, Measured], None]
FAR = Lengths(batch=2, source=520, target=520)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 530},
    "llama": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 100}},
    "mistral": {"sliding_window": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 64},
    "gemma3": {"sliding_window": 64},
    "opt": {},
    "gpt_neox": {},
    "starcoder2": {"sliding_window": 64},
}
"""Entry -> what is changed for texts of 520 tokens, beside the number of positions."""


def far(name: str) -> tuple[Oracle, Any, Any]:
    """A model for long texts with weights of large deviation, these weights as ours, and a batch."""
    changes = LONG[name] if name == "gpt2" else {"max_position_embeddings": 530, **LONG[name]}
    oracle = Oracle(name, **changes)
    raw = oracle.random_weights(0.2, 0)
    oracle.load(raw)
    return oracle, from_huggingface(oracle.json, raw)[1], batch_for(oracle.config, "left", lengths=FAR)


@pytest.mark.deep
@pytest.mark.parametrize("name", LONG)
def test_positions_far_from_the_start(name: str, record: Record) -> None:
    """Against the PyTorch reference, which needs no compilation."""
    oracle, weights, batch = far(name)
    ours, theirs = Pair(oracle.config, weights, "float64", optimised=False).run_torch(batch), oracle.run(batch)
    activations = (comparable(oracle.config, batch, side.activations) for side in (ours, theirs))
    record(f"huggingface {name}, 520 positions", compared("1 activations", *activations))


@pytest.mark.deep
def test_positions_far_from_the_start_in_jax(record: Record) -> None:
    """In blocks of queries, each kind of layer with its own positions."""
    oracle, weights, batch = far("gemma3")
    pair = Pair(oracle.config, weights, "float64", optimised=False)
    activations = (
        comparable(oracle.config, batch, side) for side in (pair.forward(masked(batch)), oracle.run(batch).activations)
    )
    record("huggingface gemma3, 520 positions", compared("1 activations", *activations))


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
@pytest.mark.parametrize(("kind", "config"), [(GPT2LMHeadModel, GPT2Config()), (LlamaForCausalLM, LLAMA)])
def test_logits_at_full_size(kind: type[PreTrainedModel], config: Any, record: Record) -> None:
    """124 million parameters, float32 beside Hugging Face's own, both beside its float64; weights as it draws them."""
    torch.manual_seed(0)
    model = kind(config).eval()
    arrays = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    assert 124e6 < sum(array.size for array in arrays.values()) < 125e6
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
        {"logits": np.asarray(mine)}, {"logits": theirs}, {"logits": truth}, {"logits": float(np.linalg.norm(truth))}
    )
    record(f"huggingface {kind.__name__}, 124 million", quality("3 float32 / allowed", [sample], FLOAT32))
