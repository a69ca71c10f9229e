"""train.py --init: a run begins with a Hugging Face folder, needs it no more, and is written back.

Low-rank adapters: what trains, what a run keeps, and what is refused.
"""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jax_tformer import (
    EXPERIMENTS,
    DropoutConfig,
    LoraConfig,
    load_adapters,
    load_pretrained,
    save_pretrained,
    transformer,
)
from jax_tformer.cli import export, generate, train
from jax_tformer.cli.chat import chat_template
from jax_tformer.config.experiment import OptimizerConfig, TokenizerConfig
from jax_tformer.data.tokenizers import build_tokenizer
from jax_tformer.files import read_json
from jax_tformer.hub.families import t5
from jax_tformer.lora import add_lora, merge_lora, split_adapters, trained
from jax_tformer.runs.folder import RunFolder, load_trained
from jax_tformer.runs.session import experiment_from, save_frozen
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import init_state, train_step
from tests.damages import flip_bit, say, write
from tests.pretrained_folders import CONFIG, STACK
from tests.refusals import refused
from tests.small_models import GPT, assert_same_bits
from tests.small_runs import TEXT, TINY, succeed

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
SHORT = (
    "--data.context-length 16 --training.batch-size 2 --training.evaluate-batches 1 --sample.max-new-tokens 4 "
    "--sample.count 1 --optimizer.schedule constant"
)


def save_gpt2(folder):
    """A tiny GPT-2 on bytes with a chat template, as somebody might have put it on the hub."""
    tokenizer = build_tokenizer(TokenizerConfig("bytes"), [], {"start": "<|endoftext|>", "end": "<|endoftext|>"})
    rates, layer = DropoutConfig(embedding=0.1, attention=0.1, residual=0.1), replace(STACK, max_positions=64)
    size = tokenizer.vocab_size
    net = transformer(replace(CONFIG, vocab_size=size, decoder=layer, initializer_std=0.3, dropout=rates))
    save_pretrained(folder, net, net.init(jax.random.key(1)), tokenizer)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A folder with the checkpoint gpt2, a text, and the run of two steps that began with the one on the other."""
    place = tmp_path_factory.mktemp("fine-tuned")
    save_gpt2(place / "gpt2")
    (place / "text.txt").write_text(TEXT)
    command = f"text --init {place}/gpt2 --data.path {place}/text.txt {SHORT} --steps 2"
    succeed(train, f"{command} --run {place}/run --export {place}/out")
    return place


def weights(folder):
    return load_pretrained(folder)[1]


def params_of(run):
    return load_trained(RunFolder(Path(run))).params


def test_a_run_begins_with_the_weights_and_needs_its_folder_no_more(made, folder):
    shutil.copytree(made / "gpt2", "gpt2")
    command = f"text --init gpt2 --data.path {made}/text.txt {SHORT}"
    still = "--lr 1e-30 --steps 1 --mesh.data 1 --model.dropout.residual 0.3"
    succeed(train, f"{command} {still} --run still --export same")
    net, params, _ = load_pretrained("same")
    # A step of this rate changes zeros alone.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-25), params, weights("gpt2"))
    assert net.config.dropout.residual == 0.3
    succeed(train, f"{command} --run run --steps 1")
    shutil.rmtree("gpt2")
    # The same command.
    succeed(train, f"{command} --run run --steps 2")
    assert_same_bits(params_of("run"), params_of(made / "run"))
    assert read_json(Path("run/config.json"))["init"] == "gpt2"


def test_what_is_exported_is_what_was_trained(made):
    assert_same_bits(weights(made / "out"), params_of(made / "run"))
    # The weights alone are others.
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (made / "out" / name).read_bytes() == (made / "gpt2" / name).read_bytes()
    assert read_json(made / "out" / "config.json") == read_json(made / "gpt2" / "config.json")


def test_runs_and_folders_answer_alike(made, capsys):
    said = []
    for name in ("run", "out"):
        for flags in ([], ["--chat", "--system", "Be brief"]):
            capsys.readouterr()
            succeed(generate, f"{made}/{name} --json --prompt", "It was", *flags)
            said.append(capsys.readouterr().out)
    assert said[:2] == said[2:]
    assert said[0] != said[1]


@pytest.mark.parametrize(
    "name, content",
    [
        ("generation_config.json", '{"eos_token_id": 7}'),
        ("config.json", '{"architectures": ["GPT2LMHeadModel"], "eos_token_id": 7}'),
        ("chat_template.jinja", None),
        ("special_tokens_map.json", "{}"),
    ],
)
def test_what_the_run_keeps_of_the_folder_is_sealed(made, folder, name, content):
    shutil.copytree(made / "run", "run")
    write(name, content)(Path("run/origin"))
    told = rf"run/origin/{name} is not the one that the checkpoint of step 2 was made with; put it back"
    for program, command in (
        (export, "run new --huggingface"),
        (generate, "run --prompt It"),
        (train, "--run run --steps 3"),
    ):
        with refused(told):
            succeed(program, command)
    assert not Path("new").exists()


def test_the_arrays_tell_whether_t5_has_a_head_of_its_own(folder):
    """transformers 5 writes tie_word_embeddings as true, whatever the model is."""
    small = {"num_layers": 1, "num_heads": 2, "head_width": 8, "feedforward_width": 16}
    stack = replace(t5.SMALL.output_stack, **small)
    config = replace(t5.SMALL, vocab_size=260, d_model=16, encoder=stack, decoder=stack, tied_head=False)
    net, tokenizer = transformer(config), build_tokenizer(TokenizerConfig("bytes"), [], {"end": "</s>"})
    save_pretrained("t5", net, net.init(jax.random.key(1)), tokenizer, architecture="T5ForConditionalGeneration")
    assert read_json(Path("t5/config.json"))["tie_word_embeddings"] is False
    say("config.json", tie_word_embeddings=True)(Path("t5"))
    begun = experiment_from(EXPERIMENTS["pairs"].config, "t5").model
    assert begun == load_pretrained("t5")[0].config
    assert not begun.tied_head


@pytest.mark.parametrize(
    "arguments, message",
    {
        "text --init nowhere": "there is no folder nowhere; expected that of a Hugging Face model",
        "text --init .": "has no config.json",
        "text --init gpt2 --model.d-model 32": "model.d_model is 32 and there 16",
        "text --init gpt2 --data.tokenizer.name other": "leave --data.tokenizer out",
        "text --init gpt2 --data.context-length 65": "context_length is 65",
        "pairs --init gpt2": "holds a GPT2LMHeadModel, which trains on text; expected a model for pairs",
        "masked --init gpt2": "name the experiment text",
        "text --init gpt2 --run run": "holds a run that began with ",
        "--run gpt2": "train.py --init trains it",
        "text --init gpt2 --export gpt2": "gpt2 is there already; expected a new or empty folder",
        "text --init unknown": "'SomeModel', not a known Hugging Face class; expected one of",
        "text --init silent": "silent/tokenizer.json does not exist; expected a tokenizer there",
        "text --init broken": "model.safetensors",
    }.items(),
)
def test_what_cannot_be_fine_tuned(made, folder, refuse, arguments, message):
    subprocess.run(["cp", "-r", *(str(made / name) for name in ("gpt2", "run", "text.txt")), "."], check=True)
    for name in ("unknown", "silent", "broken"):
        shutil.copytree("gpt2", name)
    say("config.json", architectures=["SomeModel"])(Path("unknown"))
    write("tokenizer.json", None)(Path("silent"))
    write("model.safetensors", "")(Path("broken"))
    assert message in refuse(f"{arguments} {'--data.path text.txt' if '--init' in arguments else ''}")


CHAT, GENERATION = "chat_template.jinja", "generation_config.json"
ENCODER = '{"architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 257}'


@pytest.mark.parametrize(
    "changed, arguments, message",
    [
        ({}, "--prompt It --checkpoint best", "--checkpoint is for runs"),
        ({}, f"--prompt {'x' * 70}", "70 tokens, and one new token follows; expected at most 64 together"),
        ({}, "--prompt It --system x", "--system is given without --chat"),
        ({CHAT: None}, "--prompt It --chat", "has no chat template"),
        ({CHAT: "{{ raise_exception('only users here') }}"}, "--prompt It --chat", "refuses this (only users here)"),
        ({CHAT: "{% for"}, "--prompt It --chat", "is damaged"),
        ({CHAT: "{{ messages.__class__.__mro__ }}"}, "--prompt It --chat", "refuses this (access to attribute '__cl"),
        ({GENERATION: '{"top_k": "many"}'}, "--prompt It", "top_k is 'many' in model/generation_config.json"),
        ({GENERATION: '{"eos_token_id": [256, 999]}'}, "--prompt It", "eos_token_id is 999 in model/generation_conf"),
        ({"config.json": ENCODER}, "--prompt It", "holds an encoder (BertForMaskedLM)"),
        ({"tokenizer.json": None}, "--prompt It", "tokenizer.json does not exist; expected a tokenizer there"),
    ],
)
def test_what_cannot_be_asked(made, folder, refuse, changed, arguments, message):
    shutil.copytree(made / "gpt2", "model")
    for name, content in changed.items():
        write(name, content)(Path("model"))
    assert message in refuse(f"model {arguments}", program="generate.py")


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more time or memory"),
        ("{{ 9 ** (9 ** 9) }}", "takes more time or memory"),
        ("{{ 'a' * 5000000000 }}", "refuses this (MemoryError)"),
        ("{{ 'a' * 5000000 }}", "refuses this (it made 5,000,000 characters; expected at most 4,194,304)"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "maximum recursion depth"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "is damaged (maximum recursion depth"),
        ("{{ 'a'" + "|e" * 20000 + "}}", "is damaged (maximum recursion depth"),
    ],
)
def test_templates_without_end(template, message):
    with refused(re.escape(message)):
        chat_template(template, {}, "chat_template.jinja")([{"role": "user", "content": "It"}])


# Low-rank adapters.

GATED = replace(GPT, decoder=replace(GPT.decoder, feedforward_width=40, gated=True))
LORA = LoraConfig(rank=3, alpha=6.0, targets=("all",), dropout=0.1)
TOKENS = jnp.arange(36).reshape(4, 9) % 23


@pytest.mark.parametrize("lora", [None, LORA])
def test_frozen_weights_have_neither_moments_nor_a_gradient(lora):
    net, tx = transformer(replace(GATED, lora=lora)), optimizer(OptimizerConfig(), 100)
    state = jax.eval_shape(lambda: init_state(net, tx, jax.random.key(0)))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state.opt_state, trained(state.params))]
    # Adam's two moments and its count.
    assert 0 <= sizes[0] - 2 * sizes[1] <= 4
    program = jax.make_jaxpr(train_step(net, tx))(state, {"tokens": TOKENS, "labels": TOKENS})
    assert bool(re.search(r"f32\[(16,40|40,16)\] = dot_general", str(program))) == (lora is None)


def test_fresh_adapters_change_nothing_yet():
    net = transformer(GATED)
    params = net.init(jax.random.key(0))
    assert merge_lora(net, params) == (net, params)
    adapted, more = add_lora(net, params, LORA, jax.random.key(1))
    assert_same_bits(split_adapters(more)[1], params)
    assert_same_bits(*(jax.jit(net.apply)(given, TOKENS) for net, given in ((adapted, more), (net, params))))
    with refused("has adapters already"):
        add_lora(adapted, more, LORA, jax.random.key(1))


def test_what_another_start_has_frozen_is_replaced(tmp_path):
    """A run that was stopped before its first checkpoint may begin again with another seed."""
    net, tx, run = transformer(replace(GATED, lora=LORA)), optimizer(OptimizerConfig(), 10), RunFolder(tmp_path)
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
