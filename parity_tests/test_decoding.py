"""Gate 8: decoding with a cache is the full forward pass, and its tokens are Hugging Face's `generate`'s.

`generate` drives its own GPT-2 and, for every preset, the reference.
"""

from functools import cache, partial
from itertools import pairwise, product, zip_longest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config.experiment import DecodingConfig
from jax_tformer.decoding.generate import Generated, generate
from jax_tformer.decoding.loop import layers_apart
from jax_tformer.functional import transformer
from jax_tformer.hub.families import FAMILIES, Layout, from_huggingface
from jax_tformer.hub.names import from_reference, read
from jax_tformer.training.step import forward
from parity.gates.measure import compared, worst
from parity_tests.depth import deep
from parity_tests.family_faults import GEMMA
from parity_tests.generation import Hypothesis, drivable, huggingface_generate
from parity_tests.huggingface import Oracle
from twin.cases import CONFIGS, PADDINGS, WINDOWED, Lengths, batch_for, weights_for

CLEAR = 1e-6
"""Of two best logits nearer than this, rounding may choose."""
NEW = 24
START, END = 1, 2
TOKENS, CACHED = "8 decoding", "8 decoding, float64"
DECODERS = [name for name, config in CONFIGS.items() if config.decoder is not None and config.predicts_tokens]
BEAMS = [
    {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.6},
    {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 1.0, "early_stopping": True},
    {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 2, "num_return_sequences": 1, "length_penalty": -0.5, "repetition_penalty": 1.3},
    # Here a prompt whose search is over would hope again while others go on.
    {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 1.0, "repetition_penalty": 1.3},
]


def model_of(config, weights=None):
    """(ours, its parameters), in float64; of random weights, if none are given."""
    weights = weights_for(config, 0.2) if weights is None else weights
    net = transformer(config.with_dtype("float64"))
    return net, jax.device_put(from_reference(weights, net.shapes))


def uneven_prompts(config, rows=4, seed=5):
    """Of 1 to 12 tokens, or to half of the learned positions."""
    rng, longest = np.random.default_rng(seed), min(12, (config.output_stack.max_positions or 99) // 2)
    lengths = [longest, *rng.integers(1, longest, rows - 1)]
    return [rng.integers(3, config.vocab_size, length).tolist() for length in lengths]


def room(config):
    """New tokens after such prompts."""
    return min(NEW, (config.output_stack.max_positions or 99) // 2)


def differing(ours, theirs):
    """How many greedy tokens differ before the first unclear choice of their row."""
    wrong = clear = 0
    for prompt, [hypothesis] in enumerate(theirs):
        certain = int(np.logical_and.accumulate(np.array(hypothesis.margins) > CLEAR).sum())
        [row] = ours.rows(prompt)
        wrong += sum(a != b for a, b in zip(row[:certain], hypothesis.tokens[:certain], strict=True))
        clear += certain
    assert clear > sum(len(hypothesis.margins) for [hypothesis] in theirs) / 2, (
        "the choices must be clear, or nothing is compared"
    )
    return worst(TOKENS, {"greedy tokens": float(wrong)}, 0.0)


def compared_beams(ours, theirs):
    """Tokens that differ in any of the returned beams, and the error of their scores."""
    tokens = [row for prompt in range(len(theirs)) for row in ours.rows(prompt)]
    expected = [list(hypothesis.tokens) for hypotheses in theirs for hypothesis in hypotheses]
    wrong = sum(a != b for both in zip(tokens, expected, strict=True) for a, b in zip_longest(*both))
    scores = np.array([[hypothesis.score for hypothesis in hypotheses] for hypotheses in theirs], np.float64)
    return (
        worst(TOKENS, {"tokens of beams": float(wrong)}, 0.0),
        compared(CACHED, {"scores of beams": ours.scores}, {"scores of beams": scores}),
    )


def of_cache(ours, full):
    """Gate 8, of logits from a cache and by the forward pass."""
    return compared(CACHED, {"logits": ours}, {"logits": full})


def reader(net):
    """What reads a batch into a cache, piece by piece, and as a whole; it compiles once what it computes.

    It is made anew for whatever fault is planted then.
    """

    @partial(jax.jit, static_argnames="slots")
    def begin(params, piece, slots):
        model = net.bind(params)
        rows, lengths = len(next(iter(piece.values()))), [slots]
        if "source" in piece:
            lengths.append(piece["source"].shape[1])
        return model(**piece, cache=model.new_cache(rows, *lengths))

    @jax.jit
    def extend(params, piece, cache):
        model = net.bind(params)
        return model.decode(memory=None, **piece, cache=cache) if "target" in piece else model(**piece, cache=cache)

    @jax.jit
    def whole(params, batch):
        return forward(net, params, batch).logits

    def read(params, batch, first, then=(), *, rows=1):
        """Logits of all positions: from the cache, and by the forward pass.

        `first` positions are read at once, then as many as `then` says, then one by one. A prefix, which sees itself in
        both directions, has to be in the first piece: what goes beyond that is cut off.
        """
        batch = {name: array for name, array in batch.items() if name != "labels"}
        length = batch["target" if "target" in batch else "tokens"].shape[1]
        if "prefix" in batch:
            batch["prefix"] = batch["prefix"] & (np.arange(length) < first)
        before = {name: batch[name] for name in ("source", "source_mask") if name in batch}

        def piece(start, end):
            return {name: array[:, start:end] for name, array in batch.items() if name not in before}

        apart = layers_apart(params, rows=rows)
        outputs = begin(apart, before | piece(0, first), length)
        parts = [outputs.logits]
        for start, end in pairwise(np.cumsum([first, *then, *[1] * (length - first - sum(then))]).tolist()):
            outputs = extend(apart, piece(start, end), outputs.cache)
            parts.append(outputs.logits)
        return jnp.concatenate(parts, axis=1), whole(params, batch)

    return read


@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_gives_the_logits_of_the_full_forward_pass(name, record):
    net, params = model_of(CONFIGS[name])
    read = reader(net)
    for padding in PADDINGS:
        # Kernels as they are, which are other programs, where the program is another one anyway.
        rows = 1000 if padding == "none" else 1
        record(name, of_cache(*read(params, batch_for(CONFIGS[name], padding), first=3, rows=rows)))
    # The products of a single row are other programs.
    batch = {key: array[:1] for key, array in batch_for(CONFIGS[name], "none").items()}
    record(name, of_cache(*read(params, batch, first=1)))


@pytest.mark.parametrize(
    "name, kind",
    [
        # An odd number of them, so that the pattern is cut off.
        ("layers by turns", "left prefix"),
        ("encoder-decoder, windows", "left"),
        *(deep("gpt2", f"{padding} prefix") for padding in PADDINGS),
        *(deep(name, padding) for name in WINDOWED for padding in ("none", "right")),
    ],
)
def test_windows_and_prefixes_from_a_cache(name, kind, record):
    """In pieces, step by step, and at once."""
    config = (CONFIGS | WINDOWED | {"layers by turns": GEMMA})[name]
    net, params = model_of(config)
    batch = batch_for(config, kind)
    read, everything = reader(net), batch["labels"].shape[1]
    for first, then in ((4 if "prefix" in kind else 1, (3,)), (everything, ())):
        record(name, of_cache(*read(params, batch, first, then)))


@pytest.mark.parametrize("name", ["switches-decoder-only", "switches-encoder-decoder"])
def test_far_from_the_start(name, record):
    """Rotation and sinusoids at positions beyond 500, most of them read at once."""
    net, params = model_of(CONFIGS[name])
    batch = batch_for(CONFIGS[name], "left", lengths=Lengths(batch=2, source=520, target=520))
    ours, full = reader(net)(params, batch, first=512)
    record(f"{name}, 520 positions", of_cache(ours[:, -8:], full[:, -8:]))


@pytest.mark.parametrize("name", [*DECODERS, *(deep(name) for name in WINDOWED)])
def test_tokens_of_the_reference(name, record):
    """Greedy and beams, from prompts (or sources) of uneven lengths, with an end token that comes."""
    config = (CONFIGS | WINDOWED)[name]
    weights = weights_for(config, 0.2)
    net, params = model_of(config, weights)
    model, prompts = drivable(config, weights), uneven_prompts(config)
    options = {"start_id": START} if config.encoder else {}
    free = huggingface_generate(model, prompts, end_id=None, max_new_tokens=room(config), **options)
    for figure in searched(net, params, model, prompts, free, **options):
        record(name, figure)


def searched(net, params, model, prompts, free, **options):
    """Greedy and beams; `free` are the answers without an end token, in whose middle one is found that does come."""
    given, end_id = (net, params, model, prompts), free[0][0].tokens[room(net.config) // 2]
    yield greedy_of(*given, end_id=None, **options)
    yield greedy_of(*given, end_id=end_id, **options)
    yield from beams_of(*given, BEAMS[0], end_id=end_id, **options)


def greedy_of(*given, penalty=1.0, **options):
    return differing(*answers_of(*given, {"num_beams": 1, "repetition_penalty": penalty}, **options))


def beams_of(*given, **options):
    return compared_beams(*answers_of(*given, **options))


def answers_of(net, params, model, prompts, settings, *, end_id, start_id=None, **options):
    """(ours, theirs)."""
    asked, ends = {"max_new_tokens": room(net.config), **settings}, {"end_id": end_id, "start_id": start_id}
    decoding = DecodingConfig(length_penalty_form="power", **asked)
    theirs = huggingface_generate(model, prompts, **ends, **options | asked)
    return generate(net, params, prompts, decoding, **ends), theirs


ENDS = {"gpt2": (END, 40, None), "bart": (24, 39, None)}
"""End tokens that some of the answers come to, and none."""
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
"""Those that a BART has by default: every call has to say otherwise."""


@cache
def checkpoint(name):
    """(ours, its parameters, a model of Hugging Face with these, what every call of `generate` is told).

    With sharp attention and small token tables: else many random answers are one token over and over.
    """
    sharp, small = {"gpt2": (1.0, 1.0), "bart": (4.0, 1.0)}.get(name, (4.0, 0.2))
    factors = {"query.weight": sharp, "key.weight": sharp, "tokens.weight": small}
    with jax.enable_x64(True):
        oracle = Oracle(name, **(IDS if name == "bart" else {}))
        raw = oracle.random_weights(0.2, 0)
        weights = from_huggingface(oracle.json, raw)[1]
        for path in weights:
            weights[path] = weights[path] * factors.get(".".join(path.split(".")[-2:]), 1.0)
        rows = FAMILIES[oracle.entry.kind.__name__].rows(oracle.config)
        # By the names of the model, which its files may not have.
        oracle.load({key: read(view) for key, view in Layout(rows, oracle.config).theirs(weights, raw).items()})
        options = {
            "use_cache": True,
            **oracle.entry.generation,
            **({"start_id": START} if oracle.config.encoder else {}),
        }
        return *model_of(oracle.config, weights), oracle.model, options


@pytest.mark.parametrize("name", ENDS)
def test_greedy_tokens_of_hugging_face(name, record):
    *given, options = checkpoint(name)
    prompts = uneven_prompts(given[0].config, rows=8)
    for penalty, end_id in product((1.0, 1.5), ENDS[name]):
        record(f"huggingface {name}", greedy_of(*given, prompts, end_id=end_id, penalty=penalty, **options))


@pytest.mark.parametrize("settings", BEAMS, ids=lambda settings: str([*settings.values()]))
@pytest.mark.parametrize("name", ["gpt2", deep("bart")])
def test_beams_of_hugging_face(name, settings, record):
    *given, options = checkpoint(name)
    prompts = uneven_prompts(given[0].config, rows=6, seed=7)
    for end_id in ENDS[name]:
        for figure in beams_of(*given, prompts, settings, end_id=end_id, **options):
            record(f"huggingface {name}", figure)


def test_the_gate_sees_one_wrong_token_where_the_choice_is_clear():
    """Of beams, the faults of test_faults.py turn tokens and scores red."""
    ours = Generated(np.array([[[1, 2, 3, 4]]]), np.array([[4]]), np.array([[-1.0]]))
    for margins, wrong in (((1.0,) * 4, 1), ((1.0, 1.0, 1.0, 1e-7), 0)):
        assert differing(ours, [[Hypothesis((1, 2, 3, 5), margins=margins)]]).worst == wrong
