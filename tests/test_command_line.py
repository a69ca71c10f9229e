"""The command line of train.py, as far as it goes without training."""

import pytest

from jax_tformer.cli.command_line import parse
from jax_tformer.cli.generate_options import GenerateOptions
from jax_tformer.cli.train_options import train_options
from jax_tformer.config.errors import InputError


def test_short_names_and_numbers_as_people_write_them() -> None:
    arguments = ["--steps", "1e3", "--lr=2e-3", "--batch_size", "1_6", "--mesh.data", "2.0"]
    experiment = train_options(["dates", *arguments, "--model.vocab-size", "1e3"]).experiment
    assert experiment.training.steps == 1000
    assert type(experiment.training.steps) is int
    assert experiment.optimizer.learning_rate == 2e-3
    assert experiment.training.batch_size == 16
    assert experiment.mesh.data == 2
    assert experiment.model.vocab_size == 1000
    experiment = train_options(["dates", "--model.vocab-size", "None"]).experiment
    assert experiment.model.vocab_size is None


@pytest.mark.parametrize("number", ["1.5", "nan", "1e999999999", ""])
def test_what_is_no_whole_number(number: str) -> None:
    with pytest.raises(InputError, match=r"^--training.steps: '.*' is not a whole number; see train.py dates --help$"):
        train_options(["dates", "--steps", number])


def test_what_is_neither_a_whole_number_nor_none() -> None:
    with pytest.raises(InputError, match=r"--mesh.data: '1.5' is not a whole number"):
        train_options(["dates", "--mesh.data", "1.5"])


def test_a_mistyped_option_is_told_with_the_one_that_was_meant() -> None:
    with pytest.raises(InputError, match=r"unrecognized options: --training.stps.* perhaps you meant --training.steps"):
        train_options(["dates", "--training.stps", "5"])


@pytest.mark.parametrize(
    ("typed", "meant"), [("--stpes", "--steps"), ("--lrr=3", "--lr"), ("--batchsize", "--batch-size")]
)
def test_a_mistyped_short_name_too(typed: str, meant: str) -> None:
    with pytest.raises(InputError, match=rf"unrecognized options: {typed}.* perhaps you meant {meant}[ ;]"):
        train_options(["dates", typed, "5"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "PATH is missing: The folder of a run, or of a Hugging Face model; see generate.py --help"),
        (["runs/dates", "--prompt"], "--prompt has no value; see generate.py --help"),
        (
            ["runs/dates", "--dtype", "int8"],
            "invalid choice 'int8' for argument '--dtype'; expected one of None, bfloat16, float32, float64; "
            "see generate.py --help",
        ),
    ],
)
def test_what_is_missing_is_told_in_a_sentence(arguments: list[str], said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(GenerateOptions, arguments, prog="generate.py", description="")
    assert str(caught.value) == said


def test_help_tells_the_short_names(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["dates", "--help"]):
        with pytest.raises(SystemExit):
            train_options(arguments)
        told = capsys.readouterr().out
        assert all(name in told for name in ("--steps", "--lr", "--batch-size")), arguments
