"""Whatever the user gets wrong: one line, exit status 2, no traceback, nothing written, nothing lost."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jax_tformer.cli import train
from jax_tformer.cli.command_line import run_program
from tests.small_runs import TINY, Refuse, again

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "text.txt"),
        (b"", "empty"),
        (b"abc\x00def" * 100, "binary"),
        (b"caf\xe9 " * 100, "UTF-8"),
        (b"short", "expected at least"),
    ],
)
def test_text(refuse: Refuse, folder: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (folder / "text.txt").write_bytes(content)
    assert message in refuse("text", "--data.path", "text.txt", "--run", "run", *TINY)


def test_text_without_a_path(refuse: Refuse) -> None:
    assert "--data.path" in refuse("text")


def test_a_pair_without_a_tab_on_line_1234(refuse: Refuse, folder: Path) -> None:
    lines = [f"source {i}\ttarget {i}" for i in range(2000)]
    lines[1233] = "one column only"
    (folder / "pairs.tsv").write_text("\n".join(lines))
    line = refuse("pairs", "--data.path", "pairs.tsv", "--run", "run")
    assert "1,234" in line or "1234" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no experiment 'nothing'; expected one of python-docs, dates"),
        (["dates", "--model.depth", "3"], "--model.depth"),
        (["--training.steps", "many"], "--training.steps"),
        (["--training.steps"], "--training.steps"),
        (["dates", "--model.d-model", "130"], "divisible by the number of heads"),
        (["--training.steps", "0"], "steps is 0"),
        (["--training.batch-size", "-4"], "batch_size is -4"),
        (["--training.batch-size", "1e9"], "batches of 1,000,000,000 rows take "),
        (["dates", "--batch-size", "1e12"], "make the batch (--training.batch-size), "),
        (["--sample.max-new-tokens", "1e12"], "max_new_tokens is 1000000000000; expected fewer than 2^31"),
        (["--data.tokenizer.vocab-size", "1e9"], "vocab_size is 1000000000; expected at most 2^24"),
        (["--model.decoder.activation", "gelu"], "expected one of gelu_erf, gelu_tanh, relu, silu"),
        (["masked-docs", "--data.context-length", "4096"], "max_positions is 128"),
        (
            ["masked-docs", "--model.encoder.positions", "none", "--export", "out"],
            "of type 'bert' is trained with --model.encoder.positions learned; begin a run with these flags",
        ),
        (["--model.compute.attention", "cudnn"], "attention is 'cudnn', which cannot compute this here"),
        (["--model.compute.attention", "pallas", "--data.context-length", "100"], "for lengths that 128 divides"),
        (["--model.compute.attention", "pallas", "--model.dropout.attention", "0.1"], "cannot drop attention weights"),
        (["--training.batch-size", "10", "--training.accumulation", "4"], "accumulation divides"),
        (["--optimizer.learning-rate", "nan"], "learning_rate is nan"),
        (["--optimizer.learning-rate", "-1"], "learning_rate is -1"),
        (["--mesh.tensor", "3"], "devices, but there are"),
        (["dates", "--data.path", "dates.txt"], "dates needs no file"),
        (["dates", "--data.source-length", "5"], "at least"),
        (["--model.vocab-size", "100"], "1024 ids and the model a vocabulary of 100"),
        (["--resume", "perhaps"], "--resume"),
    ],
)
def test_flags(refuse: Refuse, arguments: list[str], message: str) -> None:
    assert message in refuse(*arguments)


def test_a_run_folder_that_is_a_file(refuse: Refuse, folder: Path) -> None:
    (folder / "run").write_text("precious")
    assert "is a file" in refuse("dates", "--run", "run")


def test_a_run_folder_with_something_else_in_it(refuse: Refuse, folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.tex").write_text("precious")
    assert "no config.json" in refuse("dates", "--run", "run")
    assert "no config.json" in refuse("dates", "--run", "run", "--resume", "no")


def test_a_run_folder_that_cannot_be_written(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(dir: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # Root may write everywhere: the answer of the system is played.
    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    assert "cannot write" in (line := refuse("dates", "--run", "locked/run"))
    assert "(Permission denied); choose another folder, or change its permissions" in line


@pytest.mark.parametrize("path", ["~nobody-of-this-name/run", "x" * 300])
def test_paths_that_cannot_be(refuse: Refuse, path: str) -> None:
    refuse("dates", "--run", path)
    refuse("text", "--data.path", path)
    refuse(path, "--prompt", "It", program="generate.py")


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = again("--resume", "no", "--optimizer.learning-rate", "1e38", "--optimizer.warmup-steps", "0")
    arguments += ["--optimizer.schedule", "constant", "--training.steps", "20", "--training.checkpoint-every", "1"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        run_program(train.main, "train.py")
    assert stop.value.code == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "step 2 is nan" in errors
    assert "decoder.blocks.0" in errors
    assert "in row 1 of 2, which begins '" in errors
    assert "try a lower --optimizer.learning-rate" in errors
    assert not list((run / "checkpoints").iterdir())
    assert not (run / "saved.json").exists()


def test_what_a_report_cannot_show(refuse: Refuse, run: Path) -> None:
    assert "--report trains nothing, so that training.steps cannot be changed" in refuse(
        *again("--report", "--steps", "9")
    )
    assert "there is no run in nowhere to report on" in refuse("--run", "nowhere", "--report")
    (run / "metrics.jsonl").unlink()
    assert "has logged nothing yet" in refuse("--run", "run", "--report")


def test_no_run_to_generate_from(refuse: Refuse, folder: Path) -> None:
    assert "there is no run" in refuse("nowhere", "--prompt", "It", program="generate.py")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "It was a bright cold day"], "expected at most 7"),
        (["--prompt", "§"], "§"),
        (["--source", "It"], "holds a language model"),
        (["--prompt", "It", "--temperature", "-1"], "--temperature is -1"),
        (["--prompt", "It", "--temperature", "nan"], "--temperature is nan"),
        (["--prompt", "It", "--top-k", "0"], "--top-k is 0"),
        (["--prompt", "It", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--prompt", "It", "--words", "3"], "--words"),
    ],
)
def test_prompts(refuse: Refuse, run: Path, arguments: list[str], message: str) -> None:
    assert message in refuse("run", *arguments, program="generate.py")


def test_the_real_process() -> None:
    done = subprocess.run(
        [sys.executable, "train.py", "--training.steps", "-1"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "train.py: error: training: steps is -1; expected a whole number of at least 1; "
        "see train.py python-docs --help\n"
    )


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[1-2]"}, "2 processes were started"),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1", "OMPI_COMM_WORLD_SIZE": "4"}, "4 processes were started"),
        ({"PMI_SIZE": "8"}, "8 processes were started"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": ""}, None),
    ],
)
def test_several_processes_do_not_train_alone_each(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (count or "nowhere.txt does not exist") in refuse("text", "--data.path", "nowhere.txt")
