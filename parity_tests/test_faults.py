"""A gate that cannot fail is a defect: every planted fault turns one red, with room to spare.

A judge asks the gates about one pair of models. It is a function that computes the side where faults are planted, with
whatever fault is planted now, and returns the figures of the gates, and in some cases what hand-picked tolerances say.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax.traverse_util import flatten_dict
from torch.nn import functional as F

from jax_tformer.cache import KeyValue
from jax_tformer.config import ComputeConfig, DropoutConfig, StackConfig, TransformerConfig
from jax_tformer.config.experiment import DecodingConfig, LossConfig, MeshConfig, OptimizerConfig, TrainingConfig
from jax_tformer.data.pipeline import Pipeline
from jax_tformer.decoding.generate import generate
from jax_tformer.functional import transformer
from jax_tformer.hub.names import from_reference, to_reference
from jax_tformer.model.attention import attend, attend_by
from jax_tformer.model.masks import Mask
from jax_tformer.runs.evaluation import Evaluator
from jax_tformer.training.sharding import make_mesh
from jax_tformer.training.step import TrainState, train_step
from parity.gates.measure import BFLOAT16, FLOAT32, FLOAT64_BAR, ParityError, Sample, compared, quality, trajectory
from parity_tests import (
    family_faults,
    faults,
    library_faults,
    mask_faults,
    narrow_parts,
    quiet_faults,
    random_faults,
)
from parity_tests import test_draws as draws
from parity_tests import test_heads as heads
from parity_tests import test_initialisation as initialisation
from parity_tests import test_relative_positions as relative
from parity_tests.depth import deep
from parity_tests.family_faults import GEMMA
from parity_tests.generation import drivable, huggingface_generate
from parity_tests.huggingface import bytes_lost
from parity_tests.mask_faults import TEXT, blocks_of_four
from parity_tests.pairs import gates_1_and_2, random_pair
from parity_tests.quiet_faults import KERNELS_BAR, kernels_on_a_cpu
from parity_tests.small_configs import MASKED, MASKED_LENGTHS, TWO_STACKS, of_one_length
from parity_tests.test_decoding import (
    BEAMS,
    END,
    START,
    beams_of,
    checkpoint,
    differing,
    model_of,
    of_cache,
    reader,
    uneven_prompts,
)
from parity_tests.test_models import inputs, narrow_sample, norms
from parity_tests.test_strategies import SETTINGS, expected_pairs, processed, successive
from parity_tests.test_training import batches
from parity_tests.test_weights import noise
from parity_tests.training_pair import TrainingPair, same_path
from twin.cases import CONFIGS, OFF_CENTRE, Lengths, batch_for, weights_for
from twin.pair import Pair


def within(ours, theirs):
    """Whether common absolute tolerances would be content."""
    largest = float(np.abs(ours - theirs).max())
    return {"softmax, 1e-2": None, "logits, 1e-4": largest <= 1e-4, "logits, 1e-5": largest <= 1e-5}


def let_pass(ours, theirs):
    """The same of the logits, and of what a softmax makes of them."""
    logits = [np.asarray(side["logits"], np.float64) for side in (ours, theirs)]
    one, other = (np.asarray(jax.nn.softmax(each)) for each in logits)
    return within(*logits) | {"softmax, 1e-2": bool(np.abs(one - other).max() <= 1e-2)}


two_stacks = cache(partial(random_pair, TWO_STACKS, 0.02))


def judge_reference(pair, make_batch=None):
    """Gates 1 and 2, planted in the reference."""
    models = pair()
    batch = make_batch() if make_batch else batch_for(models.config, "right")
    ours = models.run_jax(batch)

    def ask():
        theirs = models.run_torch(batch)
        return gates_1_and_2(models.config, ours, theirs), let_pass(ours.outputs, theirs.outputs)

    return ask


def judge_forward(pair, make_batch, gate="1 activations"):
    """One gate of the forward pass, planted on either side, in short blocks of attention; no fault needs gradients."""
    models, batch = pair(), make_batch()
    models.share_masks(batch)

    def ask():
        with blocks_of_four():
            ours, theirs = models.forward(batch), models.run_torch(batch).outputs
        return [compared(gate, ours, theirs)], let_pass(ours, theirs)

    return ask


judge_two_stacks = partial(judge_reference, two_stacks, of_one_length)
TRAINED = replace(CONFIGS["post-decoder-only"], dropout=DropoutConfig(), logit_cap=library_faults.CAP)
STEPS = batches(TRAINED, 50)


def training_pair():
    # No number is optax's default.
    settings = {"clip_norm": 0.05, "weight_decay": 0.1, "beta1": 0.8, "eps": 1e-7}
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=10, **settings)
    training = TrainingConfig(steps=50, batch_size=4, accumulation=2, loss=LossConfig(label_smoothing=0.1))
    return TrainingPair(TRAINED, 0.02, optimizer, training)


@cache
def right_path():
    path = training_pair().follow_jax(STEPS)[0]
    assert (path.gradient_norms > 0.05).all(), "the clip must fire"
    return path


def of_paths(ours, theirs):
    """Gate 5; the softmax says nothing here, and instead of logits, tolerances get the losses of all steps."""
    return [same_path("5 optimizer", TRAINED, ours, theirs)], within(ours.losses, theirs.losses)


def judge_training():
    path = right_path()
    return lambda: of_paths(path, training_pair().follow_torch(STEPS, []))


def judge_our_training():
    path = right_path()  # which has been shown to be the reference's
    return lambda: of_paths(training_pair().follow_jax(STEPS)[0], path)


def judge_trajectory():
    optimizer, training = OptimizerConfig(learning_rate=3e-4, warmup_steps=10), TrainingConfig(steps=100)
    steps = batches(TRAINED, 100)

    def pair(dtype):
        return TrainingPair(TRAINED, 0.02, optimizer, training, dtype)

    truth, theirs = (pair(dtype).follow_torch(steps, []).losses for dtype in ("float64", "float32"))

    def ask():
        ours = pair("float32").follow_jax(steps)[0].losses
        return [trajectory("6 trajectory / allowed", ours, theirs, truth)], within(ours, theirs)

    return ask


def judge_dropout():
    config = replace(TRAINED, dropout=DropoutConfig(residual=0.1))
    pair = partial(random_pair, config, 0.02, dropout_seed=0)
    return judge_forward(pair, partial(batch_for, config, "none"), "7 dropout")


def judge_blocks():
    """Attention in blocks of queries, over four of them."""
    config = CONFIGS["switches-decoder-only"]
    return judge_forward(partial(random_pair, config), partial(batch_for, config, "none", lengths=Lengths(2, 15)))


def ask_quality(gate, name, allowed, cases):
    """Gate 3 or 4."""
    optimised = allowed is FLOAT32
    given = CONFIGS[name], weights_for(CONFIGS[name], 0.02)
    exact, narrow = Pair(*given), Pair(*given, "float32" if optimised else "bfloat16", optimised=optimised)
    samples = [narrow_sample(exact, narrow, *case) for case in cases]
    return [quality(gate, samples, allowed)], let_pass(samples[0].ours, samples[0].theirs)


def judge_float32():
    return partial(ask_quality, "3 float32 / allowed", "gpt2", FLOAT32, [*inputs("gpt2", 0.02, "right", 3, OFF_CENTRE)])


def judge_softmax():
    return partial(ask_quality, "4 bfloat16 / allowed", "gpt2", BFLOAT16, [*inputs("gpt2", 0.02, "right", 9)])


def judge_angles():
    """From position 256 on, neighbours are the same."""
    name, lengths = "switches-decoder-only", Lengths(batch=1, source=400)
    config = CONFIGS[name]
    cases = [(weights_for(config, 0.2, seed), batch_for(config, "none", seed, lengths)) for seed in (0, 1, 2)]
    return partial(ask_quality, "4 bfloat16 / allowed", name, BFLOAT16, cases)


def judge_parts():
    return lambda: [max(narrow_parts.judged(draws=2), key=lambda figure: figure.worst)]


def judge_beams():
    *given, options = checkpoint("gpt2")
    prompts = uneven_prompts(given[0].config, rows=6, seed=7)
    return lambda: list(beams_of(*given, prompts, BEAMS[-1], end_id=END, **options))


def judge_decoding():
    config, weights = CONFIGS["vaswani-base"], weights_for(CONFIGS["vaswani-base"], 0.2)
    batch, prompts, model = batch_for(config, "left"), uneven_prompts(config), drivable(config, weights)
    free = huggingface_generate(model, prompts, end_id=None, start_id=START, max_new_tokens=8)
    ends = {"end_id": free[0][0].tokens[3], "start_id": START}
    greedy = huggingface_generate(model, prompts, max_new_tokens=8, **ends)

    def ask():
        pair = model_of(config, weights)
        return [
            cached(*pair, batch),
            differing(generate(*pair, prompts, DecodingConfig(8), **ends), greedy),
        ]

    return ask


def cached(net, params, batch):
    """Gate 8 of a cache, which is filled with three tokens first."""
    return of_cache(*reader(net)(params, batch, first=3))


def judge_gemma():
    batch = batch_for(GEMMA, "left prefix", lengths=MASKED_LENGTHS)
    return lambda: [cached(*model_of(GEMMA), batch)]


def judge_choice(settings):
    return lambda: list(processed(settings))


def judge_successive():
    expected = expected_pairs()
    return lambda: [successive(expected)]


def judge_weights():
    params, shapes = noise(CONFIGS["gpt2"]), transformer(CONFIGS["gpt2"]).shapes
    return lambda: [bytes_lost(params, from_reference(to_reference(params), shapes))]


MASKED_PAIRS = {kind: (partial(random_pair, config), make_batch) for kind, (config, make_batch) in MASKED.items()}
JUDGES_OF_MASKS = {kind: partial(judge_forward, *given) for kind, given in MASKED_PAIRS.items()}


def judge_cudnn():
    """What XLA makes of the arguments that cuDNN is given, against plain attention, under every kind of mask.

    Six heads share three; rows have padding on the right, on the left, or nothing else. Across two sequences, some
    queries find no text of their own.
    """
    rng, length = np.random.default_rng(0), 12
    query, key, value = (jnp.asarray(rng.standard_normal((4, length, heads, 4))) for heads in (6, 3, 3))
    places = np.arange(length)[None].repeat(4, axis=0)
    tokens = jnp.asarray((places < [[12], [7], [12], [0]]) & (places >= [[0], [0], [5], [0]]))
    texts, prefix = jnp.asarray(places // 5), jnp.asarray(places % 5 < 2)

    def ask():
        plain, asked = {}, {}
        for causal, window, padded, apart in product(
            (True, False), (None, 1, 3), (False, True), ("", "texts", "prefix")
        ):
            segments = (texts, texts if causal else texts + 1) if apart == "texts" else None
            prefixes = (prefix, prefix) if apart == "prefix" else None
            mask = Mask(causal, window, tokens if padded else None, segments, prefixes)
            name = f"{causal=} {window=} {padded=} {apart}"
            plain[name] = attend(query, key, value, mask, 0.3)[0]
            with kernels_on_a_cpu():
                asked[name] = attend_by("cudnn", query, key, value, mask, 0.3)[0]
        return [compared("1 activations", asked, plain, bar=KERNELS_BAR)]

    return ask


judge_relative = partial(judge_reference, relative.models, relative.batch)
judge_ours_relative = partial(judge_forward, relative.models, relative.batch)
judge_forward_draws = partial(
    judge_forward,
    partial(random_pair, draws.SMALL, dropout_seed=0),
    partial(batch_for, draws.SMALL, "none"),
    "7 dropout",
)


def judge_step_draws():
    stack = replace(draws.SMALL.decoder, num_layers=1)
    config = replace(draws.SMALL, encoder=None, decoder=stack)
    training = TrainingConfig(steps=2, batch_size=4, accumulation=2)
    steps = [batch_for(config, "none", lengths=Lengths(batch=4, source=5))] * training.steps

    def ask():
        pair = TrainingPair(config, 0.2, OptimizerConfig(), training)
        return [pair.follow("7 dropout", steps)[1]]

    return ask


def judge_relative_cache():
    def ask():
        with blocks_of_four():
            return [relative.gate_8()]

    return ask


def judge_grouped(implementation, key_value_heads):
    """`attend` with six query heads against PyTorch's own attention with grouped heads."""
    rng, is_kernel = np.random.default_rng(0), implementation in ("cudnn", "pallas")
    length, slots = (128, 256) if is_kernel else (5, 7)
    query = rng.standard_normal((2, length, 6, 4))
    key, value = (rng.standard_normal((2, slots, key_value_heads, 4)) for _ in range(2))
    tensors = (torch.from_numpy(x).transpose(1, 2) for x in (query, key, value))
    theirs = F.scaled_dot_product_attention(*tensors, scale=0.5, enable_gqa=True).transpose(1, 2)
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    if implementation == "cache":
        empty = KeyValue(*(jnp.zeros((2 * key_value_heads, slots, 4)) for _ in range(2)))
        arrays[1:], implementation = empty.write(*arrays[1:], first=0).read(key_value_heads), "blocks"

    def ask():
        with kernels_on_a_cpu():
            ours = attend_by(implementation, *arrays, Mask(), 0.5)[0]
        bar = KERNELS_BAR if is_kernel else FLOAT64_BAR
        return [compared("1 activations", {"attention": ours}, {"attention": theirs}, bar=bar)]

    return ask


def judge_accumulation():
    """Gradients of bfloat16 parameters, in many parts and in one; all else is computed in float32."""
    stack = StackConfig(num_layers=1, num_heads=2, feedforward_width=16, key_bias=False)
    compute = ComputeConfig(parameter_dtype="bfloat16", dtype="float32")
    config = TransformerConfig(vocab_size=23, d_model=16, decoder=stack, compute=compute)
    batch = jax.device_put(batch_for(config, "none", lengths=Lengths(batch=128, source=8)))
    net, exact = transformer(config), transformer(config.with_dtype("float64"))
    params = jax.tree.map(lambda x: x * 10, net.init(jax.random.key(0)))
    # It keeps the gradients that it is given.
    kept = optax.trace(decay=0)

    def gradients(net, params, parts):
        state = TrainState(params, kept.init(params), jnp.zeros((), jnp.int32), jax.random.key_data(jax.random.key(0)))
        state, _ = jax.jit(train_step(net, kept, accumulation=parts))(state, batch)
        return {path: np.asarray(leaf) for path, leaf in flatten_dict(state.opt_state.trace, sep=".").items()}

    truth = gradients(exact, jax.tree.map(lambda x: x.astype(jnp.float64), params), 1)
    whole, scales = gradients(net, params, 1), norms(truth)
    return lambda: [
        quality("4 bfloat16 / allowed", [Sample(gradients(net, params, 128), whole, truth, scales)], BFLOAT16)
    ]


def judge_held_out():
    """Batches of very different numbers of labels, and capped logits, against PyTorch's loss of every token."""
    config = replace(CONFIGS["gpt2"], logit_cap=2.0)
    pair = random_pair(config)
    held_out = [batch_for(config, "right", seed) for seed in (1, 2)]
    held_out[1]["labels"][:, 1:] = -100
    held_out[0]["labels"][0, 0] = held_out[1]["labels"][0, 0] = 3
    losses = [pair.run_torch(batch).outputs["loss of each token"][batch["labels"] != -100] for batch in held_out]

    def ask():
        pipeline = Pipeline(train=None, evaluation=held_out, fingerprint="")
        evaluator = Evaluator(pair.net, None, pipeline, None, make_mesh(MeshConfig(), 1))
        found = {"held-out loss": np.asarray(evaluator(pair.params)["val_loss"])}
        return [compared("1 activations", found, {"held-out loss": np.concatenate(losses).mean()})]

    return ask


def judge_draws():
    return lambda: [draws.gate(draws.drawn(draws.SMALL, parts=2))]


def judge_fresh(name):
    return lambda: [initialisation.gate(CONFIGS[name], initialisation.drawn(CONFIGS[name]))]


def judge_first_loss():
    return lambda: [initialisation.excess(CONFIGS["vaswani-base"])]


FAMILIES = {config: partial(judge_reference, partial(family_faults.pair, config)) for config in family_faults.FAULTS}
GROUPED = [
    (fault._replace(name=f"{fault.name}, {groups} groups of {6 // groups}"), partial(judge_grouped, by, groups))
    for by, fault in quiet_faults.GROUPED.items()
    for groups in (2, 3)
]
BY_FIRST_LOSS = random_faults.NARROW_TABLES._replace(name="init: tables at 0.02, by the first loss")
TABLE = {
    "reference": [
        (judge_two_stacks, [*faults.MODEL, *faults.WEIGHTS]),
        (judge_training, faults.TRAINING),
        (judge_dropout, [faults.DROPOUT]),
        (partial(judge_reference, *MASKED_PAIRS[TEXT]), [mask_faults.REFERENCE]),
        *((partial(judge_reference, partial(heads.pair, name)), given) for name, given in heads.FAULTS.items()),
        *((make, family_faults.FAULTS[config]) for config, make in FAMILIES.items()),
        (judge_relative, relative.IN_REFERENCE),
    ],
    "library": [
        (judge_our_training, library_faults.LIBRARY_TRAINING),
        (judge_trajectory, [library_faults.COARSE_MOMENT]),
        (judge_blocks, library_faults.BLOCKS),
        (judge_float32, [library_faults.ONE_PASS]),
        (judge_softmax, [library_faults.NARROW_SOFTMAX]),
        (judge_angles, [library_faults.NARROW_ANGLES]),
        (judge_parts, library_faults.NARROW_PARTS),
        (judge_decoding, library_faults.DECODING),
        (judge_beams, library_faults.BEAMS),
        (judge_gemma, mask_faults.CACHED),
        *(
            (partial(judge_choice, setting), [fault])
            for setting, fault in zip(SETTINGS, library_faults.CHOICES, strict=False)
        ),
        (judge_successive, [library_faults.SAME_NUMBER]),
        (judge_weights, [library_faults.THROUGH_FLOAT16]),
        *((JUDGES_OF_MASKS[kind], given) for kind, given in mask_faults.MASKS.items()),
        (judge_cudnn, mask_faults.CUDNN),
        (judge_ours_relative, relative.IN_LIBRARY),
        (judge_relative_cache, [relative.IN_CACHE]),
        (judge_draws, random_faults.DRAWS),
        (judge_forward_draws, random_faults.FORWARD_DRAWS),
        (judge_step_draws, random_faults.STEP_DRAWS),
        (partial(judge_fresh, "gpt2"), random_faults.INITIALISATION[:1]),
        (partial(judge_fresh, "vaswani-base"), random_faults.INITIALISATION[1:]),
        (judge_first_loss, [BY_FIRST_LOSS]),
        *((make, [fault]) for fault, make in GROUPED),
        (judge_accumulation, [quiet_faults.ACCUMULATED]),
        (judge_held_out, quiet_faults.HELD_OUT),
    ],
}
"""Where faults are planted -> what judges them, and the faults."""
DEEP = (*relative.IN_LIBRARY, relative.IN_CACHE)


@cache
def judge(make):
    """The judge that `make` makes, once for all its faults."""
    return make()


def answer(ask):
    """(figures, what hand-picked tolerances say where they are asked), of programs that are made anew."""
    jax.clear_caches()
    found = ask()
    return found if isinstance(found, tuple) else (found,)


def require_a_cpu(make, fault=""):
    """Skips what is planted in a CPU's blocks, or in other devices' kernels as a CPU computes them."""
    on_a_cpu = make in (judge_blocks, judge_cudnn, *(make for _, make in GROUPED)) or "blocks" in fault
    if on_a_cpu and jax.default_backend() != "cpu":
        pytest.skip("a CPU computes this")


@pytest.mark.parametrize(
    "make",
    [
        *(judge_two_stacks, judge_training, judge_trajectory, judge_decoding, judge_beams, judge_gemma),
        *(*JUDGES_OF_MASKS.values(), judge_cudnn, judge_forward_draws, *FAMILIES.values()),
        *(judge_blocks, judge_relative, judge_ours_relative),
        *(*(make for _, make in GROUPED), judge_accumulation, judge_held_out),
    ],
)
def test_without_a_fault_the_gates_are_green(make):
    require_a_cpu(make)
    assert all(figure.passed for figure in answer(judge(make))[0])


@pytest.mark.parametrize(
    "planted, make, fault",
    [
        (deep if fault in DEEP else pytest.param)(planted, make, fault, id=fault.name)
        for planted, rows in TABLE.items()
        for make, given in rows
        for fault in given
    ],
)
def test_a_fault_turns_a_gate_red(planted, make, fault, report):
    require_a_cpu(make, fault.name)
    ask = judge(make)
    with fault.plant(two_stacks()):
        found = answer(ask)
    jax.clear_caches()
    report(fault.name, planted, *found)


def test_lowered_weights_are_refused_by_their_type():
    name = "switches-decoder-only"
    cases = list(inputs(name, 0.02, "right", 1))
    refusal = pytest.raises(ParityError, match=r"self_attention: dtypes differ: ours bfloat16, theirs float32")
    with refusal, library_faults.NARROW_WEIGHTS.plant():
        ask_quality("4 bfloat16 / allowed", name, BFLOAT16, cases)
