"""A gate that cannot fail is a defect: every planted fault turns one red, with room to spare."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest

from jax_tformer.config import DropoutConfig
from jax_tformer.config.experiment import OptimizerConfig, TrainingConfig
from jax_tformer.decoding.generate import generate
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.functional import transformer
from jax_tformer.hub.names import from_reference, to_reference
from parity.gates.measure import BFLOAT16, FLOAT32, Measured, ParityError, Quality, compared, quality, trajectory, worst
from parity.gates.pair import Result, Tensors
from parity_tests import faults, library_faults
from parity_tests.faults import Fault, changed_weight, faulty
from parity_tests.generation import drivable, greedy_margins, huggingface_generate
from parity_tests.small_configs import TWO_STACKS, of_one_length
from parity_tests.test_decoding import (
    BEAMS,
    CACHED,
    END,
    START,
    beams_of,
    differing,
    model_of,
    small_gpt2,
    stepwise,
    uneven_prompts,
)
from parity_tests.test_models import inputs, narrow_sample
from parity_tests.test_training import batches
from parity_tests.test_weights import bytes_lost, noise
from parity_tests.training_pair import Path, TrainingPair, same_path
from torch_ref import reference
from twin.bridge import Pair, known_zeros
from twin.cases import CONFIGS, OFF_CENTRE, Lengths, batch_for, weights_for

BATCH = of_one_length()


def gates_1_and_2(ours: Result, theirs: Result) -> list[Measured]:
    zeros = known_zeros(TWO_STACKS, theirs.gradients)
    return [
        compared("1 activations", ours.activations, theirs.activations),
        compared("2 gradients", ours.gradients, theirs.gradients, zero=zeros),
    ]


def let_pass(ours: np.ndarray, theirs: np.ndarray) -> dict[str, bool | None]:
    """Whether comparisons with common absolute tolerances would be content with these logits."""
    largest = float(np.abs(ours - theirs).max())
    return {"softmax_1e-2": bool(np.abs(softmax(ours) - softmax(theirs)).max() <= 1e-2)} | within(largest)


def within(largest: float) -> dict[str, bool | None]:
    return {"logits_1e-4": largest <= 1e-4, "logits_1e-5": largest <= 1e-5}


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(TWO_STACKS, weights_for(TWO_STACKS, 0.02), "float64", optimised=False)


@pytest.fixture(scope="module")
def ours(pair: Pair) -> Result:
    return pair.run_jax(BATCH)


def test_without_a_fault_both_gates_are_green(pair: Pair, ours: Result) -> None:
    assert all(measured.passed for measured in gates_1_and_2(ours, pair.run_torch(BATCH)))


@pytest.mark.parametrize("fault", faults.MODEL, ids=lambda fault: fault.name)
def test_faults_of_the_model(
    fault: Fault, pair: Pair, ours: Result, report: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault.changes:
        model = reference(faulty(pair.config, fault.changes)).eval()
        model.load_state_dict(pair.module.state_dict())
        monkeypatch.setattr(pair, "module", model)
    with fault.plant():
        theirs = pair.run_torch(BATCH)
    report(fault.name, "reference", gates_1_and_2(ours, theirs), let_pass(*logits(ours, theirs)))


@pytest.mark.parametrize("name", faults.WEIGHTS)
def test_faults_of_weights(name: str, pair: Pair, ours: Result, report: Callable[..., None]) -> None:
    with changed_weight(pair.module, *faults.WEIGHTS[name]):
        theirs = pair.run_torch(BATCH)
    report(name, "reference", gates_1_and_2(ours, theirs), let_pass(*logits(ours, theirs)))


def logits(ours: Result, theirs: Result) -> tuple[np.ndarray, np.ndarray]:
    return ours.activations["logits"], theirs.activations["logits"]


TRAINED = replace(CONFIGS["post-decoder-only"], dropout=DropoutConfig(), logit_cap=library_faults.CAP)
STEPS = batches(TRAINED, 50)


def training_pair() -> TrainingPair:
    # No number is optax's default.
    settings = {"clip_norm": 0.05, "weight_decay": 0.1, "beta1": 0.8, "eps": 1e-7}
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=10, **settings)
    training = TrainingConfig(steps=50, batch_size=4, accumulation=2, label_smoothing=0.1)
    return TrainingPair(TRAINED, weights_for(TRAINED, 0.02), optimizer, training, "float64", optimised=False)


@pytest.fixture(scope="module")
def path() -> Path:
    return training_pair().follow_jax(STEPS)[0]


def gate_5(ours: Path, theirs: Path) -> list[Measured]:
    return [same_path("5 optimizer", TRAINED, ours, theirs)]


def losses_let_pass(ours: Path, theirs: Path) -> dict[str, bool | None]:
    """The softmax says nothing here; instead of logits, the losses of all steps."""
    return {"softmax_1e-2": None} | within(float(np.abs(ours.losses - theirs.losses).max()))


def test_without_a_fault_gate_5_is_green(path: Path) -> None:
    assert gate_5(path, training_pair().follow_torch(STEPS, []))[0].passed
    assert (path.gradient_norms > 0.05).all(), "the clip must fire"


@pytest.mark.parametrize("fault", faults.TRAINING, ids=lambda fault: fault.name)
def test_faults_of_training(fault: Fault, path: Path, report: Callable[..., None]) -> None:
    with fault.plant():
        theirs = training_pair().follow_torch(STEPS, [])
    report(fault.name, "reference", gate_5(path, theirs), losses_let_pass(path, theirs))


@pytest.mark.parametrize("fault", library_faults.LIBRARY_TRAINING, ids=lambda fault: fault.name)
def test_faults_of_our_training(fault: Fault, path: Path, report: Callable[..., None]) -> None:
    with fault.plant():
        wrong = training_pair().follow_jax(STEPS)[0]
    # `path` has been shown to be the reference's.
    report(fault.name, "library", gate_5(wrong, path), losses_let_pass(wrong, path))


def test_a_fault_of_dropout(report: Callable[..., None]) -> None:
    config = replace(TRAINED, dropout=DropoutConfig(residual=0.1))
    models = Pair(config, weights_for(config, 0.02), "float64", optimised=False, dropout_seed=0)
    batch = batch_for(config, "none")
    ours = models.run_jax(batch)
    with faults.DROPOUT.plant():
        theirs = models.run_torch(batch)
    measured = compared("7 dropout", ours.activations, theirs.activations)
    report(faults.DROPOUT.name, "reference", [measured], let_pass(*logits(ours, theirs)))


def gate_of_quality(
    gate: str,
    name: str,
    fault: Fault,
    allowed: Quality,
    cases: Sequence[tuple[Tensors, Tensors]],
) -> tuple[Measured, dict[str, bool | None]]:
    """The figure of gate 3 or 4 with a fault in the library."""
    dtype = "float32" if allowed is FLOAT32 else "bfloat16"
    start = weights_for(CONFIGS[name], 0.02)
    exact = Pair(CONFIGS[name], start, "float64", optimised=False)
    narrow = Pair(CONFIGS[name], start, dtype, optimised=dtype == "float32")
    with fault.plant():
        samples = [narrow_sample(exact, narrow, *case) for case in cases]
    first = [np.asarray(side["logits"], np.float64) for side in (samples[0].ours, samples[0].theirs)]
    return quality(gate, samples, allowed), let_pass(*first)


@pytest.mark.parametrize("fault", library_faults.BLOCKS, ids=lambda fault: fault.name)
def test_faults_of_blocks(fault: Fault, report: Callable[..., None]) -> None:
    """Attention in blocks of queries, over three of them."""
    config = CONFIGS["switches-decoder-only"]
    models = Pair(config, weights_for(config, 0.2), "float64", optimised=False)
    batch = batch_for(config, "none", lengths=Lengths(batch=2, source=150))
    with fault.plant():
        ours = models.run_jax(batch)
    theirs = models.run_torch(batch)
    report(fault.name, "library", gates_1_and_2(ours, theirs), let_pass(*logits(ours, theirs)))


def test_a_fault_of_float32(report: Callable[..., None]) -> None:
    cases = list(inputs("gpt2", 0.02, "right", 3, OFF_CENTRE))
    figure, passes = gate_of_quality("3 float32 / allowed", "gpt2", library_faults.ONE_PASS, FLOAT32, cases)
    report(library_faults.ONE_PASS.name, "library", [figure], passes)


def test_a_fault_of_bfloat16(report: Callable[..., None]) -> None:
    """Angles in bfloat16: from position 256 on, neighbours are the same."""
    name = "switches-decoder-only"
    lengths = Lengths(batch=1, source=400)
    cases = [
        (weights_for(CONFIGS[name], 0.2, seed), batch_for(CONFIGS[name], "none", seed, lengths)) for seed in (0, 1, 2)
    ]
    figure, passes = gate_of_quality("4 bfloat16 / allowed", name, library_faults.NARROW_ANGLES, BFLOAT16, cases)
    report(library_faults.NARROW_ANGLES.name, "library", [figure], passes)


def test_a_softmax_in_bfloat16(report: Callable[..., None]) -> None:
    cases = list(inputs("gpt2", 0.02, "right", 9))
    figure, passes = gate_of_quality("4 bfloat16 / allowed", "gpt2", library_faults.NARROW_SOFTMAX, BFLOAT16, cases)
    report(library_faults.NARROW_SOFTMAX.name, "library", [figure], passes)


def test_lowered_weights_are_refused_by_their_type() -> None:
    cases = list(inputs("switches-decoder-only", 0.02, "right", 1))
    with pytest.raises(ParityError, match=r"self_attention: dtypes differ: ours bfloat16, theirs float32"):
        gate_of_quality("4 bfloat16 / allowed", "switches-decoder-only", library_faults.NARROW_WEIGHTS, BFLOAT16, cases)


def test_a_fault_of_trajectories(report: Callable[..., None]) -> None:
    optimizer, training = OptimizerConfig(learning_rate=3e-4, warmup_steps=10), TrainingConfig(steps=100)
    steps, weights = batches(TRAINED, 100), weights_for(TRAINED, 0.02)
    truth = TrainingPair(TRAINED, weights, optimizer, training, "float64", optimised=False).follow_torch(steps, [])
    single = TrainingPair(TRAINED, weights, optimizer, training, "float32", optimised=False)
    theirs = single.follow_torch(steps, [])
    right = single.follow_jax(steps)[0]
    with library_faults.COARSE_MOMENT.plant():
        wrong = TrainingPair(TRAINED, weights, optimizer, training, "float32", optimised=False).follow_jax(steps)[0]

    def gate(ours: Path) -> Measured:
        return trajectory("6 trajectory / allowed", ours.losses, theirs.losses, truth.losses)

    assert gate(right).passed
    report(library_faults.COARSE_MOMENT.name, "library", [gate(wrong)], losses_let_pass(wrong, right))


@pytest.fixture(scope="module")
def decoding_gates() -> Iterator[Callable[[bool], Iterator[Measured]]]:
    """What gate 8 measures of two models, figure by figure, or of beams alone; green."""
    config, weights = CONFIGS["vaswani-base"], weights_for(CONFIGS["vaswani-base"], 0.2)
    batch, prompts, model = batch_for(config, "left"), uneven_prompts(config), drivable(config, weights)
    net, params, gpt2 = small_gpt2()
    more = uneven_prompts(net.config, rows=6, seed=7)
    free = huggingface_generate(model, prompts, end_id=None, start_id=START, max_new_tokens=8)
    ends = {"end_id": free[0][0].tokens[3], "start_id": START}
    greedy = huggingface_generate(model, prompts, max_new_tokens=8, **ends)
    margins = greedy_margins(model, prompts, max_new_tokens=8, **ends)

    def gates(beams_alone: bool) -> Iterator[Measured]:
        # To compile anew, with whatever fault is planted now.
        jax.clear_caches()
        if not beams_alone:
            pair = model_of(config, weights)
            ours, full = stepwise(*pair, batch, first=3)
            yield compared(CACHED, {"logits": ours}, {"logits": full})
            yield differing(generate(*pair, prompts, DecodingConfig(8), **ends), greedy, margins)
        yield from beams_of(net, params, gpt2, more, BEAMS[-1], end_id=END, use_cache=True)

    with jax.enable_x64(True):
        assert all(figure.passed for figure in gates(False))
    yield gates
    jax.clear_caches()


@pytest.mark.parametrize("fault", library_faults.DECODING, ids=lambda fault: fault.name)
def test_a_fault_of_decoding(
    fault: Fault, decoding_gates: Callable[[bool], Iterator[Measured]], report: Callable[..., None]
) -> None:
    with fault.plant():
        figures = decoding_gates(fault.name.startswith("beams: "))
        red = next((figure for figure in figures if not figure.passed), None)
    assert red is not None, f"no gate sees {fault.name!r}"
    report(fault.name, "library", [red])


def test_a_fault_of_weights(report: Callable[..., None]) -> None:
    params = noise(CONFIGS["gpt2"])
    with library_faults.THROUGH_FLOAT16.plant():
        lost = bytes_lost(params, from_reference(to_reference(params), transformer(CONFIGS["gpt2"]).shapes))
    measured = worst("9 bytes lost", {"all parameters": float(lost)}, 0.0)
    report(library_faults.THROUGH_FLOAT16.name, "library", [measured])
