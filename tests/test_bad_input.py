"""Whatever the user gets wrong: one line, exit status 2, no traceback, nothing written, nothing lost."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import generate
import train
from jax_tformer.errors import InputError
from jax_tformer.run import restoring, train_options
from jax_tformer.run.command_line import run_program
from jax_tformer.run.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 40
TINY = [
    *("--model.d-model", "16", "--model.decoder.num-layers", "1", "--model.decoder.num-heads", "2"),
    *("--model.decoder.feedforward-width", "16", "--data.context-length", "8", "--data.tokenizer.kind", "characters"),
    *("--data.tokenizer.vocab-size", "None", "--training.steps", "2", "--training.batch-size", "2"),
    *("--training.evaluate-batches", "1", "--sample.max-new-tokens", "4", "--sample.count", "1"),
]

Refuse = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


@pytest.fixture
def refuse(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Runs a program that must refuse, with status 2 and one line, and leave the folder as it was; returns the line."""

    def run(*arguments: str, program: str = "train.py") -> str:
        before = contents(folder)
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run_program(train.main if program == "train.py" else generate.main, program)
        output = capsys.readouterr()
        assert stop.value.code == 2, output
        assert output.err.startswith(f"{program}: error: ")
        assert output.err.count("\n") == 1, output.err
        assert output.out == ""
        assert contents(folder) == before
        return output.err

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text(TEXT)
    assert train.main(["text", "--data.path", str(folder / "text.txt"), "--run", str(folder / "run"), *TINY]) == 0
    return folder


@pytest.fixture
def run(finished: Path, folder: Path) -> Path:
    """A copy of the finished run, in the current folder."""
    subprocess.run(["cp", "-r", str(finished / "run"), str(finished / "text.txt"), str(folder)], check=True)
    return folder / "run"


def lose_checkpoints(run: Path) -> None:
    """As if the run had been killed before its first checkpoint."""
    shutil.rmtree(run / "checkpoints")
    for name in ("saved.json", "summary.json"):
        (run / name).unlink(missing_ok=True)


def again(*changes: str) -> list[str]:
    """The command that made the run."""
    return ["text", "--data.path", str(Path("text.txt")), "--run", "run", *TINY, *changes]


# Text and pairs.


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


# The command line.


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
        (["--model.decoder.activation", "gelu"], "'gelu_erf'"),
        (["masked-docs", "--data.context-length", "4096"], "max_positions is 128"),
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


# The run folder.


def test_a_run_folder_that_is_a_file(refuse: Refuse, folder: Path) -> None:
    (folder / "run").write_text("precious")
    assert "is a file" in refuse("dates", "--run", "run")


def test_a_run_folder_with_something_else_in_it(refuse: Refuse, folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.tex").write_text("precious")
    assert "no config.json" in refuse("dates", "--run", "run")
    assert "no config.json" in refuse("dates", "--run", "run", "--resume", "no")


def test_a_run_folder_that_cannot_be_written(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write everywhere: the answer of the system is played.
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    assert "cannot write" in refuse("dates", "--run", "locked/run")


@pytest.mark.parametrize("path", ["~nobody-of-this-name/run", "x" * 300])
def test_paths_that_cannot_be(refuse: Refuse, path: str) -> None:
    refuse("dates", "--run", path)
    refuse("text", "--data.path", path)
    refuse(path, "--prompt", "It", program="generate.py")


def test_a_folder_that_another_job_trains_in(refuse: Refuse, run: Path) -> None:
    (run / "summary.json").unlink()
    (run / "lock").touch()
    holder = RunFolder(run)
    holder.lock()
    try:
        assert "another job" in refuse(*again())
        assert "another job" in refuse(*again("--resume", "no"))
        lose_checkpoints(run)
        assert "another job" in refuse(*again("--training.steps", "3"))
    finally:
        holder.unlock()


def test_a_run_that_another_job_began_meanwhile(refuse: Refuse, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have saved and ended before this job takes the lock."""
    read = train_options.train_options
    monkeypatch.setattr(train_options, "train_options", lambda given: dataclasses.replace(read(given), before=None))
    assert "another job has begun a run in run meanwhile; the same command continues it" in refuse(*again())


def test_a_run_that_never_saved_may_be_corrected(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lose_checkpoints(run)
    assert train.main(again("--training.steps", "3")) == 0
    assert "stopped before its first checkpoint, so it starts again at step 0" in capsys.readouterr().out
    assert json.loads((run / "config.json").read_text())["training"]["steps"] == 3


@pytest.mark.parametrize(
    "lost", ["the checksums", "the checkpoints", "what the checkpoints hold"], ids=["checksums", "folder", "contents"]
)
def test_a_run_whose_checkpoints_are_lost_does_not_begin_again(refuse: Refuse, run: Path, lost: str) -> None:
    if lost == "the checksums":
        for file in run.glob("checkpoints/*/checksums.json"):
            file.unlink()
        message = "found only damaged checkpoints in"
    else:
        shutil.rmtree(run / "checkpoints")
        message = "holds no checkpoint, although step 2 was saved there; nothing was changed"
    if lost == "what the checkpoints hold":
        (run / "checkpoints").mkdir()
    assert message in refuse(*again())


def test_a_job_that_was_killed_while_it_began_a_run_is_forgotten(run: Path) -> None:
    for path in run.iterdir():
        if path.name not in ("lock", "tokenizer.json", "tokenizer_config.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (run / f"{name}.partial").write_text("{")
    RunFolder(run).check()
    (run / "lock").unlink()
    with pytest.raises(InputError, match=r"no config.json"):
        RunFolder(run).check()


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


def test_another_config(refuse: Refuse, run: Path) -> None:
    line = refuse(*again("--training.steps", "3", "--optimizer.beta2", "0.9"))
    assert "would have been others with optimizer.beta2: 0.99 -> 0.9; leave that out" in line
    wider = [*("--model.d-model", "32"), *(word for name in ("1", "2") for word in (f"--optimizer.beta{name}", "0.5"))]
    assert "model.d_model: 16 -> 32" in (line := refuse("--run", "run", *wider, "--training.seed", "7"))
    assert "1 more" in line
    assert "the run has done 2 steps, and 1 are wanted" in refuse("--run", "run", "--steps", "1")


def test_another_experiment_in_an_old_folder(refuse: Refuse, run: Path) -> None:
    line = refuse("dates", "--run", "run")
    assert "run holds a run of text, not of dates; continue it without a name, with --run alone" in line
    assert len(line) < 160
    # Of runs that were begun when that was not recorded, the kind of data is known.
    (run / "sessions.jsonl").write_text("[" * 100_000)
    assert "run holds a run of another experiment, not of dates" in refuse("dates", "--run", "run")
    assert "name the experiment" in refuse("--run", "run", "--resume", "no")


def test_a_mistyped_run_begins_no_other(refuse: Refuse, run: Path) -> None:
    line = refuse("--run", "rnu", "--steps", "9")
    assert "there is no run in rnu to continue; check the path, or name the experiment" in line
    assert not run.with_name("rnu").exists()


def test_what_a_report_cannot_show(refuse: Refuse, run: Path) -> None:
    assert "--report trains nothing, so that training.steps cannot be changed" in refuse(
        *again("--report", "--steps", "9")
    )
    assert "there is no run in nowhere to report on" in refuse("--run", "nowhere", "--report")
    (run / "metrics.jsonl").unlink()
    assert "has logged nothing yet" in refuse("--run", "run", "--report")


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"model": 3}', "\x00"])
def test_a_damaged_config(refuse: Refuse, run: Path, damage: str) -> None:
    (run / "config.json").write_text(damage)
    assert "config.json" in refuse(*again())
    assert "config.json" in refuse("run", "--prompt", "It", program="generate.py")


@pytest.mark.parametrize("damage", ["", "{", '{"model": {}}', "\x00"])
def test_a_damaged_tokenizer(refuse: Refuse, run: Path, damage: str) -> None:
    (run / "tokenizer.json").write_text(damage)
    assert "tokenizer.json" in refuse(*again())
    assert "tokenizer.json" in refuse("run", "--prompt", "It", program="generate.py")


def test_a_tokenizer_with_more_ids_than_the_vocabulary(refuse: Refuse, run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    config["model"]["vocab_size"] -= 1
    (run / "config.json").write_text(json.dumps(config))
    assert "ids and the model a vocabulary of" in refuse("run", "--prompt", "It", program="generate.py")


def test_a_checkpoint_of_another_shape(refuse: Refuse, run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    config["model"]["decoder"]["feedforward_width"] = 24
    (run / "config.json").write_text(json.dumps(config))
    assert "float32[1, 16, 16]" in refuse("run", "--prompt", "It", program="generate.py")
    assert "float32[1, 24, 16]" in refuse(*again("--model.decoder.feedforward-width", "24"))


def test_a_model_that_the_checkpoint_was_not_made_with(refuse: Refuse, run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    config["model"]["decoder"]["norm_eps"] *= 10
    config["model"]["compute"]["attention"] = "einsum"
    config["training"]["steps"] = 3
    (run / "config.json").write_text(json.dumps(config))
    message = "run/config.json is not the config that the checkpoint of step 2 was made with (model.decoder.norm_eps: "
    told = refuse("run", "--prompt", "It", program="generate.py")
    assert message in told
    assert "compute" not in told
    assert "training" not in told
    assert message in refuse("--run", "run")


def test_a_tokenizer_that_the_checkpoint_was_not_made_with(refuse: Refuse, run: Path) -> None:
    content = (run / "tokenizer.json").read_text()
    # Written in another way it is the same one.
    (run / "tokenizer.json").write_text(json.dumps(json.loads(content)))
    assert generate.main(["run", "--prompt", "It", "--max-new-tokens", "1"]) == 0
    values = json.loads(content)
    ids = values["model"]["vocab"]
    ids["a"], ids["t"] = ids["t"], ids["a"]
    (run / "tokenizer.json").write_text(json.dumps(values))
    message = "run/tokenizer.json is not the one that the checkpoint of step 2 was made with"
    assert message in refuse("run", "--prompt", "It", program="generate.py")
    assert message in refuse(*again("--steps", "3"))
    (run / "tokenizer.json").write_text(content)
    (run / "tokenizer_config.json").write_text('{"eos_token": "."}')
    message = "run/tokenizer_config.json is not the one that the checkpoint of step 2 was made with"
    assert message in refuse("run", "--prompt", "It", program="generate.py")


def test_checkpoints_that_did_not_record_what_they_were_made_with(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = run / "checkpoints" / "2" / "extra.json"
    values = json.loads(extra.read_text())
    assert set(values.pop("tokenizer")) == {"tokenizer.json", "tokenizer_config.json"}
    extra.write_text(json.dumps(values))
    restoring.seal(extra.parent)
    assert train.main(again()) == 0
    extra.write_text("{}")
    restoring.seal(extra.parent)
    assert generate.main(["run", "--prompt", "It", "--max-new-tokens", "1"]) == 0
    capsys.readouterr()
    with pytest.raises(InputError, match=r"step 2 does not say all that training goes on with \('fingerprint'\)"):
        train.main(again())


@pytest.mark.parametrize(
    ("name", "value"),
    [("batches", {"next_index": "x"}), ("batches", {"next_index": -5}), ("batches", 3), ("seconds", ""), ("config", 3)],
)
def test_checkpoints_that_hold_something_else(refuse: Refuse, run: Path, name: str, value: object) -> None:
    extra = run / "checkpoints" / "2" / "extra.json"
    extra.write_text(json.dumps(json.loads(extra.read_text()) | {name: value}))
    restoring.seal(extra.parent)
    assert "step 2 does not say all that training goes on with" in refuse(*again())


def test_changed_data(refuse: Refuse, run: Path, folder: Path) -> None:
    (folder / "text.txt").write_text(TEXT + TEXT)
    assert "has changed since the run began" in refuse(*again())


def test_no_run_to_generate_from(refuse: Refuse, folder: Path) -> None:
    assert "there is no run" in refuse("nowhere", "--prompt", "It", program="generate.py")


# Prompts.


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


def test_a_finished_run_says_so_and_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    assert train.main(again()) == 0
    assert "is complete" in capsys.readouterr().out
    assert contents(run) == before


def test_lines_that_are_lost_are_left_out_of_the_summary(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    held_out = [line for line in lines if "val_loss" in line]
    assert [json.loads(line)["step"] for line in held_out] == [2]
    earlier = json.dumps({"step": 1, "val_loss": 9.0}) + "\n"
    for kept, best in (([earlier], {"best_step": 1, "best_val_loss": 9.0}), ([], {})):
        (run / "summary.json").unlink()
        (run / "metrics.jsonl").write_text("".join(kept))
        assert train.main(again()) == 0
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["steps"], "val_loss" in summary, summary["train_loss"]) == (2, False, None)
        assert {name: summary[name] for name in ("best_step", "best_val_loss") if name in summary} == best
        assert RunFolder(run).ended_at() == 2


def test_starting_afresh_keeps_the_old_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: content for name, content in contents(run).items() if content}
    assert train.main(again("--resume", "no")) == 0
    kept = {name.replace("/run.1/", "/run/"): content for name, content in contents(run.parent / "run.1").items()}
    assert {name: content for name, content in kept.items() if content} == before
    assert (run / "summary.json").exists()


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
