"""Low-rank adapters: what trains, what a run keeps, and what is refused."""

import re
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import traverse_util

from jax_tformer import LoraConfig, load_adapters, load_pretrained, transformer
from jax_tformer.cli import export, train
from jax_tformer.config.experiment import OptimizerConfig
from jax_tformer.lora import add_lora, merge_lora, split_adapters, trained
from jax_tformer.runs.folder import RunFolder
from jax_tformer.runs.session import save_frozen
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import init_state, train_step
from tests.damages import flip_bit, write
from tests.refusals import refused
from tests.small_models import GPT, STACK, assert_same_bits
from tests.small_runs import TEXT, TINY, succeed
from tests.test_fine_tuning import SHORT, save_gpt2

CONFIG = replace(GPT, decoder=replace(STACK, feedforward_width=40, gated=True))
LORA = LoraConfig(rank=3, alpha=6.0, targets=("all",), dropout=0.1)
TOKENS = jnp.arange(36).reshape(4, 9) % 23


@pytest.mark.parametrize("lora", [None, LORA])
def test_frozen_weights_have_neither_moments_nor_a_gradient(lora):
    net, tx = transformer(replace(CONFIG, lora=lora)), optimizer(OptimizerConfig(), 100)
    state = jax.eval_shape(lambda: init_state(net, tx, jax.random.key(0)))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state.opt_state, trained(state.params))]
    # Adam's two moments and its count.
    assert 0 <= sizes[0] - 2 * sizes[1] <= 4
    program = jax.make_jaxpr(train_step(net, tx))(state, {"tokens": TOKENS, "labels": TOKENS})
    assert bool(re.search(r"f32\[(16,40|40,16)\] = dot_general", str(program))) == (lora is None)


def test_fresh_adapters_change_nothing_yet():
    net = transformer(CONFIG)
    params = net.init(jax.random.key(0))
    assert merge_lora(net, params) == (net, params)
    adapted, more = add_lora(net, params, LORA, jax.random.key(1))
    assert_same_bits(split_adapters(more)[1], params)
    assert_same_bits(*(jax.jit(net.apply)(given, TOKENS) for net, given in ((adapted, more), (net, params))))
    with refused("has adapters already"):
        add_lora(adapted, more, LORA, jax.random.key(1))


def test_what_another_start_has_frozen_is_replaced(tmp_path):
    """A run that was stopped before its first checkpoint may begin again with another seed."""
    net, tx, run = transformer(replace(CONFIG, lora=LORA)), optimizer(OptimizerConfig(), 10), RunFolder(tmp_path)
    for seed in (0, 1):
        state = jax.jit(init_state, static_argnums=(0, 1))(net, tx, jax.random.key(seed))
        save_frozen(run, state)
    found = run.load_frozen(split_adapters(net.shapes)[1])
    assert_same_bits(found, split_adapters(state.params)[1])


ADAPT = "--lora.rank 2 --lora.targets value,down --lora.dropout 0.1"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run of two steps, and its text."""
    folder = tmp_path_factory.mktemp("adapted")
    (folder / "text.txt").write_text(TEXT)
    succeed(train, f"text --data.path {folder}/text.txt {TINY} {ADAPT} --run {folder}/run")
    return folder


@pytest.mark.parametrize(
    "damage, said",
    [
        (shutil.rmtree, "frozen is missing, and holds what the adapters of the run change; put back a copy"),
        (flip_bit(), "has changed since it was written"),
        (
            write("0/checksums.json", '{"files": {}}'),
            "frozen is not the one that the checkpoint of step 2 was made with; put it back",
        ),
        (
            lambda frozen: (frozen / "0").rename(frozen / "1"),
            "frozen is not the one that the checkpoint of step 2 was made with; put it back",
        ),
    ],
)
def test_what_the_adapters_change_is_lost(damage, said, adapted, folder, refuse):
    shutil.copytree(adapted, folder, dirs_exist_ok=True)
    damage(folder / "run" / "frozen")
    assert said in refuse("run --prompt It", program="generate.py")
    assert said in refuse("--run run --training.steps 5")


def test_other_adapters_need_another_run(adapted, run, refuse):
    without = refuse("--run run --lora.rank 2 --training.steps 3")
    assert "the results of this run so far would be different with model.lora: null -> " in without
    assert "model.lora.rank: 2 -> 3; leave that out" in refuse(f"--run {adapted}/run --lora.rank 3")


def test_a_checkpoint_is_adapted_and_its_adapters_are_exported(folder):
    """With --init: the folder's weights stay as they are, and come back merged, or with the adapters beside them."""
    save_gpt2(folder / "gpt2")
    (folder / "text.txt").write_text(TEXT)
    command = f"text --init gpt2 --data.path text.txt {SHORT} {ADAPT} --steps 3 --lr 1e-2"
    succeed(train, f"{command} --run run --export merged")
    succeed(export, "run adapters --adapters")

    net, params, _ = load_pretrained(folder / "gpt2")
    adapted, more = load_adapters(folder / "adapters", net, params)
    assert adapted.config.lora == LoraConfig(2, 16.0, ("value", "down"), 0.1)
    expected = load_pretrained(folder / "merged")[1]
    assert_same_bits(merge_lora(adapted, more)[1], expected)
    changed = jax.tree.map(lambda before, after: bool((before != after).any()), params, expected)
    assert {path[-2] for path, new in traverse_util.flatten_dict(changed).items() if new} == {"value", "down"}

    with refused(r"has no adapter_config\.json"):
        load_adapters(folder / "merged", net, params)
