"""Low-rank adapters: what trains, what is merged, what a run keeps, and what is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jax_tformer import load_adapters, load_pretrained
from jax_tformer.cli import export, generate, train
from jax_tformer.config import LoraConfig, StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import OptimizerConfig
from jax_tformer.functional import transformer
from jax_tformer.lora import add_lora, is_adapter, join_adapters, merge_lora, split_adapters, trained
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import init_state, train_step
from tests.small_runs import TEXT, TINY
from tests.test_fine_tuning import SHORT, save_gpt2

STACK = StackConfig(
    num_layers=2, num_heads=2, feedforward_width=40, norm_placement="pre", gated=True, activation="silu"
)
CONFIG = TransformerConfig(vocab_size=23, d_model=16, decoder=STACK)
LORA = LoraConfig(rank=3, alpha=6.0, targets=("all",), dropout=0.1)
TX = optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant"), 100)


def batch():
    tokens = np.random.default_rng(0).integers(0, 23, (4, 9))
    return {"tokens": jnp.asarray(tokens, jnp.int32), "labels": jnp.asarray(np.roll(tokens, -1, 1), jnp.int32)}


def flat(params):
    return {path: np.asarray(leaf) for path, leaf in traverse_util.flatten_dict(params).items()}


def test_a_hundred_steps_change_the_adapters_alone():
    net = transformer(replace(CONFIG, lora=LORA))
    state = init_state(net, TX, jax.random.key(0))
    before = flat(state.params)
    adapters = sum(leaf.size for leaf in jax.tree.leaves(trained(state.params)))
    # Adam's two moments and its count.
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) <= 2 * adapters + 4
    step, losses = jax.jit(train_step(net, TX), donate_argnums=0), []
    for _ in range(100):
        state, metrics = step(state, batch())
        losses.append(float(metrics.loss))
    after = flat(state.params)
    assert before.keys() == after.keys()
    for path, array in before.items():
        assert is_adapter(path) != (array.tobytes() == after[path].tobytes()), path
    assert losses[-1] < losses[0] - 0.5


def products(config):
    """The shapes of all matrix products of a training step."""
    net = transformer(config)
    state = jax.eval_shape(lambda: init_state(net, TX, jax.random.key(0)))
    found = set()

    def look(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                found.add(tuple(sorted(equation.outvars[0].aval.shape)))
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    look(inner)

    look(jax.make_jaxpr(train_step(net, TX))(state, batch()).jaxpr)
    return found


def test_the_backward_pass_computes_no_gradient_of_the_frozen_weights():
    matrix = (16, 40)
    assert matrix in products(CONFIG)
    assert matrix not in products(replace(CONFIG, lora=LORA))


def test_merged_weights_compute_the_same():
    net = transformer(replace(CONFIG, lora=replace(LORA, rank_stabilized=True)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), jnp.float32), net.shapes)
    plain, merged = merge_lora(net, params)
    assert plain.config == CONFIG
    assert jax.tree.structure(merged) == jax.tree.structure(plain.shapes)
    tokens = batch()["tokens"]
    with jax.default_matmul_precision("highest"):
        ours, theirs = plain.apply(merged, tokens), net.apply(params, tokens)
        without = plain.apply(split_adapters(params)[1], tokens)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    assert float(jnp.abs(theirs - without).max()) > 0.1
    assert merge_lora(plain, merged) == (plain, merged)


def test_fresh_adapters_change_nothing_yet():
    net = transformer(CONFIG)
    params = net.init(jax.random.key(0))
    adapted, more = add_lora(net, params, LORA, jax.random.key(1))
    assert adapted.config.lora == LORA
    assert jax.tree.map(lambda leaf: leaf.shape, more) == jax.tree.map(lambda leaf: leaf.shape, adapted.shapes)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), split_adapters(more)[1], params))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), join_adapters(*split_adapters(more)), more))
    np.testing.assert_array_equal(adapted.apply(more, batch()["tokens"]), net.apply(params, batch()["tokens"]))
    with pytest.raises(InputError, match="has adapters already"):
        add_lora(adapted, more, LORA, jax.random.key(1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank is 0; expected a whole number of at least 1"),
        ({"rank": 17}, "lora.rank is 17, and query has a matrix of 16 x 16; expected a rank of at most 16"),
        ({"alpha": float("nan")}, "alpha is nan; expected a finite number above 0"),
        ({"alpha": float("inf")}, "alpha is inf; expected a finite number above 0"),
        ({"dropout": 1.0}, "dropout is 1.0; expected a number from 0 to below 1"),
        (
            {"targets": ("c_attn",)},
            r"targets is \('c_attn',\); expected all, or some of query, key, value, output, gate",
        ),
        ({"targets": ()}, r"targets is \(\); expected all, or some"),
        ({"targets": ("query", "query")}, "each once"),
        ({"targets": ("all", "up")}, "expected all, or some"),
    ],
)
def test_adapters_that_cannot_be(fields, message):
    with pytest.raises(InputError, match=message):
        replace(CONFIG, lora=replace(LORA, **fields))


def test_a_target_that_the_model_does_not_have():
    with pytest.raises(InputError, match="no stack is gated; expected other targets, or all"):
        replace(CONFIG, decoder=replace(STACK, gated=False), lora=LoraConfig(targets=("gate",)))


COMMAND = [
    "--lora.rank",
    "2",
    "--lora.targets",
    "value,down",
    "--lora.dropout",
    "0.1",
    "--optimizer.schedule",
    "constant",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`whole`, four steps in one go, and `parts`, the same in two sessions."""
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "text.txt").write_text(TEXT)
    for run, *sessions in (("whole", 4), ("parts", 2, 4)):
        for steps in sessions:
            where = ["--data.path", str(folder / "text.txt"), "--run", str(folder / run)]
            assert train.main(["text", *where, *TINY, *COMMAND, "--training.steps", str(steps)]) == 0
    return folder


def arrays(run, step):
    """The files of the arrays of a checkpoint."""
    from jax_tformer.runs.begin import arrays_to_save
    from jax_tformer.runs.checkpoints import restore
    from jax_tformer.runs.folder import RunFolder

    config = RunFolder(run).read_config()
    net = transformer(config.model)
    state = jax.eval_shape(lambda: init_state(net, optimizer(config.optimizer, 4), jax.random.key(0)))
    wanted, frozen = arrays_to_save(state)
    found = restore(run / "checkpoints", wanted, step)
    kept = restore(run / "frozen", {"params": frozen})
    assert found is not None
    assert kept is not None
    leaves = jax.tree_util.tree_leaves_with_path({**found.state, "frozen": kept.state})
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def test_a_continued_run_is_the_same_to_the_bit(runs):
    assert arrays(runs / "parts", 4) == arrays(runs / "whole", 4)


def test_a_run_speaks_with_its_adapters(runs, capsys):
    assert generate.main([str(runs / "whole"), "--prompt", "It was", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("It was")


@pytest.fixture
def adapted(runs, folder):
    shutil.copy(runs / "text.txt", folder)
    return Path(shutil.copytree(runs / "whole", folder / "run"))


def lose(run):
    shutil.rmtree(run / "frozen")


def flip(run):
    largest = max((run / "frozen" / "0" / "params").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def exchange(run):
    (run / "frozen" / "0" / "checksums.json").write_text('{"files": {}}')


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose, "frozen is missing, and holds what the adapters of the run change; put back a copy"),
        (flip, "has changed since it was written"),
        (exchange, "frozen is not the one that the checkpoint was made with; put back a copy of that"),
    ],
)
def test_what_the_adapters_change_is_lost(damage, said, adapted, refuse):
    damage(adapted)
    assert said in refuse("run", "--prompt", "It", program="generate.py")
    assert said in refuse("--run", "run", "--training.steps", "5")


def test_other_adapters_need_another_run(adapted, refuse):
    assert "model.lora.rank: 2 -> 3; leave that out" in refuse("--run", "run", "--lora.rank", "3")


def test_a_run_without_adapters_gets_none(run, refuse):
    message = refuse("--run", "run", "--lora.rank", "2", "--training.steps", "3")
    assert "the results of this run so far would be different with model.lora: null -> " in message


def test_a_checkpoint_is_adapted_and_its_adapters_are_exported(folder):
    """With --init: the folder's weights stay as they are, and come back merged, or with the adapters beside them."""
    save_gpt2(folder / "gpt2")
    (folder / "text.txt").write_text(TEXT)
    arguments = ["text", "--init", "gpt2", "--data.path", "text.txt", *SHORT, "--steps", "3", "--lr", "1e-2"]
    assert train.main([*arguments, "--run", "run", *COMMAND, "--export", "merged"]) == 0
    assert export.main(["run", "adapters", "--adapters"]) == 0

    net, params, _ = load_pretrained(folder / "gpt2")
    adapted, more = load_adapters(folder / "adapters", net, params)
    assert adapted.config.lora == LoraConfig(2, 16.0, ("value", "down"), 0.1)
    expected = flat(load_pretrained(folder / "merged")[1])
    found = flat(merge_lora(adapted, more)[1])
    assert all((expected[path] == array).all() for path, array in found.items())
    changed = {path[-2] for path, array in flat(params).items() if (expected[path] != array).any()}
    assert changed == {"value", "down"}

    with pytest.raises(InputError, match="expected one of them"):
        export.main(["run", "other", "--adapters", "--huggingface"])
    with pytest.raises(InputError, match=r"has no adapter_config\.json"):
        load_adapters(folder / "merged", net, params)
