"""Gates 1, 2 and 8 (its cache) on architectures that nobody chose: every field of the config, drawn at random.

There are 72 examples and 12 caches, always the same, of which `make test` sees a sixth. `--deep SEED` draws 3,000
examples from that seed, and 360 caches.
"""

from collections import defaultdict
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from parity.gates.measure import ParityError
from parity_tests.architectures import cases, configs
from parity_tests.depth import deep
from parity_tests.pairs import gates_1_and_2
from parity_tests.test_decoding import model_of, of_cache, reader
from twin.cases import batch_for, weights_for
from twin.pair import Pair

QUICK = settings(
    deadline=None,
    database=None,
    print_blob=False,
    # No shrinking: it takes minutes, and the examples are small.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
pytestmark = pytest.mark.usefixtures("short_blocks")
PARTS = 6
"""Tests that share the examples, so that several processes can."""


def figures(case):
    """Gates 1 and 2 of one case."""
    weights = weights_for(case.config, case.std, case.seed)
    pair = Pair(case.config, weights, dropout_seed=case.dropout_seed)
    batch = batch_for(case.config, case.kind, case.seed, case.lengths)
    ours, theirs = pair.run_jax(batch), pair.run_torch(batch)
    # Among random models are some whose attention cannot matter (all tokens alike, say), so that gradients cancel to a
    # rounding error. Below a thousandth of the global norm, a gradient is measured against that thousandth.
    norms = {name: float(np.linalg.norm(gradient)) for name, gradient in theirs.gradients.items()}
    floor = 1e-3 * float(np.linalg.norm(list(norms.values())))
    return gates_1_and_2(case.config, ours, theirs, {name: floor for name, norm in norms.items() if norm < floor})


def cached_figures(case):
    """Of gate 8: logits from a cache, a token at a time after the first one; after the first three, with a prefix."""
    net, params = model_of(case.config, weights_for(case.config, case.std, case.seed))
    batch = batch_for(case.config, case.kind, case.seed, case.lengths)
    first = 3 if "prefix" in batch else 1
    return [of_cache(*reader(net)(params, batch, first=first))]


SPEAKERS = cases().filter(
    lambda case: case.config.decoder is not None and case.config.predicts_tokens and "segments" not in case.kind
)


@pytest.mark.parametrize("part", [part if part == 0 else deep(part) for part in range(PARTS)])
@pytest.mark.parametrize(
    "figures, drawn, examples",
    [(figures, cases(), (72, 3000)), (cached_figures, SPEAKERS, (12, 360))],
    ids=["architectures", "caches"],
)
def test_random(figures, drawn, part, examples, record, pytestconfig):
    """The figures of one part of `examples` cases, the second number with --deep; records the worst."""
    start = pytestconfig.getoption("--deep")
    worst = {}

    @seed(part if start is None else 1000 + PARTS * start + part)
    @settings(QUICK, max_examples=examples[start is not None] // PARTS)
    @given(drawn)
    def gates_hold(case):
        try:
            for measured in figures(case):
                if measured.gate not in worst or not measured.worst <= worst[measured.gate].worst:
                    worst[measured.gate] = measured
                measured.require()
        except ParityError as error:
            # In the first line, which is all that the report shows; what else differs follows.
            first, *others = str(error).splitlines()
            again = f"{first.rstrip(':')}; to see it again: {figures.__name__}({case!r})"
            raise ParityError("\n".join([again, *others])) from None

    gates_hold()
    for measured in worst.values():
        record("random architectures", measured)


def test_no_field_is_always_the_same():
    """A field that is added to the config must be drawn too."""
    seen = defaultdict(set)

    @seed(0)
    @settings(QUICK, max_examples=400)
    @given(configs(5))
    def look(config):
        stacks = list(config.stacks.values())
        parts = [config, config.dropout, config.compute, config.lora, *stacks, *(stack.rotary for stack in stacks)]
        for part in filter(None, parts):
            for field in fields(part):
                seen[type(part).__name__, field.name].add(repr(getattr(part, field.name)))

    look()
    fixed = {("ComputeConfig", "parameter_dtype"), ("ComputeConfig", "dtype")}  # what the gates themselves choose
    assert {field for field, values in seen.items() if len(values) < 2} == fixed
