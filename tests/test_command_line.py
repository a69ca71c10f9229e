"""The command line: numbers and names as people write them, `jax-tformer PROGRAM`, and export, which has no script."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import jax
import pytest

from jax_tformer import __main__ as console
from jax_tformer import __version__, load_weights, transformer
from jax_tformer.cli.train import train_options
from jax_tformer.config.experiment import TextData
from jax_tformer.data.tokenizers import load_tokenizer
from jax_tformer.files import read_json
from jax_tformer.runs.folder import RunFolder
from tests.several_processes import run_alone
from tests.small_models import assert_same_bits
from tests.small_runs import names
from tests.speaking import write_run


def test_short_names_and_numbers_as_people_write_them():
    arguments = ["--steps", "1e3", "--lr=2e-3", "--batch_size", "1_6", "--mesh.data", "2.0"]
    experiment = train_options(["dates", *arguments, "--model.vocab-size", "1e3"]).experiment
    assert type(experiment.training.steps) is int
    training, optimizer = experiment.training, experiment.optimizer
    assert (training.steps, training.batch_size, optimizer.learning_rate) == (1000, 16, 2e-3)
    assert (experiment.mesh.data, experiment.model.vocab_size) == (2, 1000)
    assert train_options(["dates", "--model.vocab-size", "None"]).experiment.model.vocab_size is None


@pytest.fixture
def call(end_of):
    """`jax-tformer ARGUMENTS` in an empty folder, found in a folder of programs."""
    return partial(end_of, program="/somewhere/bin/jax-tformer")


@pytest.mark.parametrize(
    "arguments, names",
    [
        *((arguments, [f"\n  {name} " for name in console.PROGRAMS]) for arguments in ("", "--help", "-h")),
        ("train --help", ["usage: jax-tformer train [EXPERIMENT]", "--steps", "--lr", "--batch-size"]),
        ("train dates --help", ["--steps", "--lr", "--batch-size"]),
        ("generate --help", ["`jax-tformer generate FOLDER --prompt TEXT`"]),
    ],
)
def test_help_names_programs_as_the_user_does_and_flags_by_their_short_names(arguments, names, call):
    status, out, err = call(arguments)
    assert (status, err) == (0, "")
    assert all(name in out for name in names)
    assert "train.py" not in out


@pytest.mark.parametrize("program", sorted(console.PROGRAMS.keys() - {"train", "generate"}))
def test_programs_of_one_process_refuse_several(program, call, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    told = f"jax-tformer {program}: error: 2 processes were started, and jax-tformer {program} runs in one; start one, "
    status, out, err = call(program)
    assert (status, out, err[: len(told)]) == (2, "", told)


@pytest.mark.parametrize("program", ["train", "generate"])
def test_help_comes_before_numpy_starts_its_threads(program):
    code = (
        "import atexit, sys; atexit.register(lambda: print('numpy' in sys.modules)); import jax_tformer.__main__ as m"
    )
    output, _ = run_alone(["-c", f"{code}; m.main()", program, "--help"])
    assert output.endswith("\nFalse\n")


@pytest.mark.parametrize("program", ["", *console.PROGRAMS])
def test_every_program_says_its_version(program, call):
    assert call(f"{program} --version") == (0, f"jax-tformer {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments, begin, end",
    [
        ("trian dates", "jax-tformer: error: there is no program 'trian'; expected one of train, ", "export\n"),
        (
            "train dates --steps -1",
            "jax-tformer train: error: training: steps is -1",
            "jax-tformer train dates --help\n",
        ),
        ("generate nowhere --prompt It", "jax-tformer generate: error: ", "\n"),
    ],
)
def test_a_program_is_called_as_the_user_called_it(arguments, begin, end, refuse):
    told = refuse(arguments, program="jax-tformer")
    assert told.startswith(begin)
    assert told.endswith(end)
    assert ".py" not in told


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    write_run(path := tmp_path_factory.mktemp("run") / "text", TextData(context_length=16))
    return path


def test_what_is_exported_is_the_model(run, call):
    files = "config.json, model.safetensors, tokenizer.json, tokenizer_config.json"
    assert call(f"export {run} model") == (0, f"step 0 of {run} is in model/: {files}\n", "")
    params, config = load_weights("model/model.safetensors")
    assert config == RunFolder(run).read_config().model
    assert read_json(Path("model/config.json")) == asdict(config)
    assert list(load_tokenizer("model").encode("It is")) == list(load_tokenizer(run).encode("It is"))
    assert_same_bits(params, transformer(config).init(jax.random.key(1)))
    assert names(Path.cwd()) == ["model"]


@pytest.mark.parametrize(
    "arguments, message",
    {
        "RUN": "error: PATH is missing: A new or empty folder, for model.safetensors, config.json and the files of the "
        "tokenizer; see jax-tformer export --help",
        "nowhere model": "nowhere",
        "RUN full": "full is there already; expected a new or empty folder",
        "RUN full/file": "full/file is there already; expected a new or empty folder",
        "RUN full/file/model": "full/file",
        "RUN /proc/x": "cannot write to /proc (",
        "RUN model --checkpoint last": "--checkpoint is 'last'; expected newest, best, average, last-N, or the",
        "RUN model --checkpoint 7": "7",
        "RUN model --dtype float16": "--dtype is 'float16' without --huggingface; expected both, or neither",
        "RUN model --huggingface --adapters": "there are --huggingface and --adapters; expected one of them",
        "RUN model --adapters": "has no adapters; leave --adapters out",
    }.items(),
)
def test_an_export_that_cannot_be(arguments, message, run, refuse):
    Path("full").mkdir()
    Path("full/file").touch()
    assert message in refuse(f"export {arguments}".replace("RUN", str(run)), program="jax-tformer")
