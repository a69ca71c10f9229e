"""Windows, segments and prefixes: what is seen too much or too little turns a gate red."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.model.attention import attend, attend_by
from jax_tformer.model.fast import rows
from jax_tformer.model.masks import Mask
from parity.gates.measure import compared
from parity_tests import mask_faults
from parity_tests.family_faults import GEMMA
from parity_tests.mask_faults import PAIR, TEXT
from parity_tests.quiet_faults import KERNELS_BAR, kernels_on_a_cpu
from parity_tests.test_decoding import CACHED, model_of, stepwise
from twin.bridge import Pair
from twin.cases import VOCABULARY, Lengths, batch_for, weights_for

# Rotation alone would not show where positions begin: it is relative.
STACK = StackConfig(num_layers=1, num_heads=2, feedforward_width=12, positions="sinusoidal_interleaved", window=5)
TEXTS = TransformerConfig(vocab_size=VOCABULARY, d_model=8, decoder=STACK)
PAIRS = replace(TEXTS, encoder=replace(STACK, window=4))
LENGTHS = Lengths(batch=3, source=14, target=11)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Attention in blocks of 4 queries: these sequences would otherwise fit into one block."""
    monkeypatch.setattr(rows, "block_length", lambda length: 4)


@pytest.fixture(scope="module")
def models():
    made = {TEXT: (TEXTS, "right segments prefix"), PAIR: (PAIRS, "none segments")}
    return {
        name: (Pair(config, weights_for(config, 0.2), "float64", optimised=False), batch_for(config, kind, 1, LENGTHS))
        for name, (config, kind) in made.items()
    }


def gate_1(models, batch):
    """With whatever fault is planted now; no fault here needs gradients to be seen."""
    return compared("1 activations", models.forward(batch), models.run_torch(batch).activations)


@pytest.mark.parametrize("kind", [TEXT, PAIR])
def test_without_a_fault_the_gate_is_green(kind, models):
    gate_1(*models[kind]).require()


@pytest.mark.parametrize(("kind", "fault"), mask_faults.MASKS, ids=[fault.name for _, fault in mask_faults.MASKS])
def test_a_fault_of_who_sees_whom(kind, fault, models, report):
    with fault.plant():
        report(fault.name, "library", [gate_1(*models[kind])])


def test_a_fault_of_the_reference(models, report):
    fault = mask_faults.REFERENCE
    with fault.plant():
        report(fault.name, "reference", [gate_1(*models[TEXT])])


@pytest.fixture(scope="module")
def gate_8():
    """Green; compiled anew, with whatever fault is planted now."""
    batch = batch_for(GEMMA, "left prefix", lengths=LENGTHS)

    def gate():
        net, params = model_of(GEMMA, weights_for(GEMMA, 0.2))
        ours, full = stepwise(net, params, batch, first=3)
        return compared(CACHED, {"logits": ours}, {"logits": full})

    with jax.enable_x64(True):
        gate().require()
    return gate


@pytest.mark.parametrize("fault", mask_faults.CACHED, ids=lambda fault: fault.name)
def test_a_fault_of_the_cache(fault, gate_8, report):
    with fault.plant():
        report(fault.name, "library", [gate_8()])


def asked_of_cudnn():
    """What XLA makes of the arguments that cuDNN is given, against plain attention, under every kind of mask.

    Six heads share three; rows have padding on the right, on the left, or nothing else. Across two sequences, some
    queries find no text of their own.
    """
    rng, length = np.random.default_rng(0), 12
    query, key, value = (jnp.asarray(rng.standard_normal((4, length, heads, 4))) for heads in (6, 3, 3))
    places = np.arange(length)[None].repeat(4, axis=0)
    tokens = jnp.asarray((places < [[12], [7], [12], [0]]) & (places >= [[0], [0], [5], [0]]))
    texts, prefix = jnp.asarray(places // 5), jnp.asarray(places % 5 < 2)
    plain, asked = {}, {}
    for causal, window, padded, apart in product((True, False), (None, 1, 3), (False, True), ("", "texts", "prefix")):
        segments = (texts, texts if causal else texts + 1) if apart == "texts" else None
        prefixes = (prefix, prefix) if apart == "prefix" else None
        mask = Mask(causal, window, tokens if padded else None, segments, prefixes)
        name = f"{causal=} {window=} {padded=} {apart}"
        plain[name] = attend(query, key, value, mask, 0.3)[0]
        with kernels_on_a_cpu():
            asked[name] = attend_by("cudnn", query, key, value, mask, 0.3)[0]
    return compared("1 activations", asked, plain, bar=KERNELS_BAR)


def test_what_cudnn_is_asked_for():
    asked_of_cudnn().require()


@pytest.mark.parametrize("fault", mask_faults.CUDNN, ids=lambda fault: fault.name)
def test_a_fault_of_what_cudnn_is_asked_for(fault, report):
    with fault.plant():
        report(fault.name, "library", [asked_of_cudnn()])
