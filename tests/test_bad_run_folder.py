"""A run folder that is damaged, taken, or of another run: refused in one line, or said; and nothing in it is lost."""

import dataclasses
import json
import shutil
from contextlib import contextmanager

import pytest

from jax_tformer.cli import generate, train
from jax_tformer.config.errors import InputError
from jax_tformer.runs.checkpoints import seal
from jax_tformer.runs.folder import RunFolder
from tests.small_runs import TEXT, again, contents, lose_checkpoints


@pytest.fixture
def refuse_to_speak(refuse):
    return lambda: refuse("run", "--prompt", "It", program="generate.py")


@contextmanager
def edit(path):
    """Gives the value of a JSON file, to be changed."""
    values = json.loads(path.read_text())
    yield values
    path.write_text(json.dumps(values))


@contextmanager
def edit_extra(run):
    """Edits what the checkpoint says beside its arrays, and seals it again."""
    step = run / "checkpoints" / "2"
    with edit(step / "extra.json") as values:
        yield values
    seal(step)


def test_a_folder_that_another_job_trains_in(refuse, run):
    (run / "summary.json").unlink()
    holder = RunFolder(run)
    holder.lock()
    try:
        assert "another job" in refuse(*again())
        assert "another job" in refuse(*again("--resume", "no"))
        lose_checkpoints(run)
        assert "another job" in refuse(*again("--training.steps", "3"))
    finally:
        holder.unlock()


def test_a_run_that_another_job_began_meanwhile(refuse, run, monkeypatch):
    """It may have saved and ended before this job takes the lock."""
    read = train.train_options
    monkeypatch.setattr(train, "train_options", lambda given: dataclasses.replace(read(given), before=None))
    assert "another job has begun a run in run meanwhile; the same command continues it" in refuse(*again())


def test_a_run_that_never_saved_may_be_corrected(run, capsys):
    lose_checkpoints(run)
    assert train.main(again("--training.steps", "3")) == 0
    assert "stopped before its first checkpoint, so it starts again at step 0" in capsys.readouterr().out
    assert json.loads((run / "config.json").read_text())["training"]["steps"] == 3


@pytest.mark.parametrize("lost", ["checksums", "folder", "contents"])
def test_a_run_whose_checkpoints_are_lost_does_not_begin_again(refuse, run, lost):
    message = "holds no checkpoint, although step 2 was saved there; nothing was changed"
    if lost == "checksums":
        (run / "checkpoints" / "2" / "checksums.json").unlink()
        message = "found only damaged checkpoints in"
    else:
        shutil.rmtree(run / "checkpoints")
    if lost == "contents":
        (run / "checkpoints").mkdir()
    assert message in refuse(*again())


def test_a_job_that_was_killed_while_it_began_a_run_is_forgotten(run):
    for path in run.iterdir():
        if path.name not in ("lock", "tokenizer.json", "tokenizer_config.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (run / f"{name}.partial").write_text("{")
    RunFolder(run).check()
    (run / "lock").unlink()
    with pytest.raises(InputError, match=r"no config.json"):
        RunFolder(run).check()


def test_another_config(refuse, run):
    line = refuse(*again("--training.steps", "3", "--optimizer.beta2", "0.9"))
    assert "would be different with optimizer.beta2: 0.99 -> 0.9; leave that out" in line
    wider = ["--model.d-model", "32", "--optimizer.beta1", "0.5", "--optimizer.beta2", "0.5", "--training.seed", "7"]
    assert "model.d_model: 16 -> 32" in (line := refuse("--run", "run", *wider))
    assert "1 more" in line
    assert "the run has done 2 steps, and 1 are wanted" in refuse("--run", "run", "--steps", "1")


def test_another_experiment_in_an_old_folder(refuse, run):
    line = refuse("dates", "--run", "run")
    assert "run holds a run of text, not of dates; continue it without a name, with --run alone" in line
    assert len(line) < 160
    # Of runs that were begun when that was not recorded, the kind of data is known.
    (run / "sessions.jsonl").write_text("[" * 100_000)
    assert "run holds a run of another experiment, not of dates" in refuse("dates", "--run", "run")
    assert "name the experiment" in refuse("--run", "run", "--resume", "no")


def test_a_mistyped_run_begins_no_other(refuse, run):
    line = refuse("--run", "rnu", "--steps", "9")
    assert "there is no run in rnu to continue; check the path, or name the experiment" in line


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["", "{", '{"model": {}}', "\x00"])
def test_a_damaged_file(refuse, refuse_to_speak, run, name, damage):
    (run / name).write_text(damage)
    assert name in refuse(*again())
    assert name in refuse_to_speak()


def test_a_tokenizer_with_more_ids_than_the_vocabulary(refuse_to_speak, run):
    with edit(run / "config.json") as config:
        config["model"]["vocab_size"] -= 1
    assert "ids and the model a vocabulary of" in refuse_to_speak()


def test_a_model_that_the_checkpoint_was_not_made_with(refuse, refuse_to_speak, run):
    with edit(run / "config.json") as config:
        config["model"]["decoder"]["norm_eps"] *= 10
        config["model"]["compute"]["attention"] = "einsum"
        config["training"]["steps"] = 3
    message = "run/config.json is not the config that the checkpoint of step 2 was made with (model.decoder.norm_eps: "
    told = refuse_to_speak()
    assert message in told
    assert "compute" not in told
    assert "training" not in told
    assert message in refuse("--run", "run")
    with edit(run / "config.json") as config:
        config["model"]["decoder"]["feedforward_width"] = 24
    assert "float32[1, 16, 16]" in refuse_to_speak()
    assert "float32[1, 24, 16]" in refuse(*again("--model.decoder.feedforward-width", "24"))


def test_a_tokenizer_that_the_checkpoint_was_not_made_with(refuse, refuse_to_speak, run):
    content = (run / "tokenizer.json").read_text()
    # Written in another way it is the same one.
    (run / "tokenizer.json").write_text(json.dumps(json.loads(content)))
    assert generate.main(["run", "--prompt", "It", "--max-new-tokens", "1"]) == 0
    with edit(run / "tokenizer.json") as values:
        ids = values["model"]["vocab"]
        ids["a"], ids["t"] = ids["t"], ids["a"]
    message = "is not the one that the checkpoint of step 2 was made with"
    assert f"run/tokenizer.json {message}" in refuse_to_speak()
    assert f"run/tokenizer.json {message}" in refuse(*again("--steps", "3"))
    (run / "tokenizer.json").write_text(content)
    (run / "tokenizer_config.json").write_text('{"eos_token": "."}')
    assert f"run/tokenizer_config.json {message}" in refuse_to_speak()


def test_checkpoints_that_did_not_record_what_they_were_made_with(run, refuse):
    with edit_extra(run) as extra:
        assert set(extra.pop("tokenizer")) == {"tokenizer.json", "tokenizer_config.json"}
    assert train.main(again()) == 0
    with edit_extra(run) as extra:
        extra.clear()
    assert generate.main(["run", "--prompt", "It", "--max-new-tokens", "1"]) == 0
    assert "step 2 does not hold all that training continues from ('fingerprint')" in refuse(*again())


@pytest.mark.parametrize(
    ("name", "value"),
    [("batches", {"next_index": "x"}), ("batches", {"next_index": -5}), ("batches", 3), ("seconds", ""), ("config", 3)],
)
def test_checkpoints_that_hold_something_else(refuse, run, name, value):
    with edit_extra(run) as extra:
        extra[name] = value
    assert "step 2 does not hold all that training continues from" in refuse(*again())


def test_a_checkpoint_holds_what_those_of_earlier_versions_do(run):
    """Folders of earlier versions open, and those of this one open in them, as long as this stays."""
    step = run / "checkpoints" / "2"
    assert {path.name for path in step.iterdir() if path.is_dir()} == {"params", "opt_state", "step", "key"}
    extra = json.loads((step / "extra.json").read_text())
    assert set(extra) == {"batches", "fingerprint", "seconds", "config", "tokenizer", "origin", "val_loss"}
    assert json.loads((run / "saved.json").read_text()) == {"step": 2}


def test_changed_data(refuse, run, folder):
    (folder / "text.txt").write_text(TEXT + TEXT)
    assert "has changed since the run began" in refuse(*again())


def test_a_report_shows_nothing_of_data_that_is_not_the_runs(run, folder, capsys):
    """Its config may name any file, if the run is a stranger's."""
    (run / "samples.txt").unlink()
    (folder / "text.txt").write_text("that cold clock was bright. " * 150)
    assert train.main(["--run", "run", "--report", "--data.path", "text.txt"]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[-1].startswith("no samples: the data is not that of the run")
    assert "cold" not in told
    assert not (run / "samples.txt").exists()


def test_a_finished_run_says_so_and_changes_nothing(run, capsys):
    before = contents(run)
    assert train.main(again()) == 0
    assert "is complete" in capsys.readouterr().out
    assert contents(run) == before


def test_lines_that_are_lost_are_left_out_of_the_summary(run):
    earlier = json.dumps({"step": 1, "val_loss": 9.0}) + "\n"
    for kept, best in ((earlier, {"best_step": 1, "best_val_loss": 9.0}), ("", {})):
        (run / "summary.json").unlink()
        (run / "metrics.jsonl").write_text(kept)
        assert train.main(again()) == 0
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["steps"], "val_loss" in summary, summary["train_loss"]) == (2, False, None)
        assert {name: summary[name] for name in ("best_step", "best_val_loss") if name in summary} == best
        assert RunFolder(run).ended_at() == 2


def test_starting_afresh_keeps_the_old_run(run):
    before = {name: content for name, content in contents(run).items() if content}
    assert train.main(again("--resume", "no")) == 0
    kept = {name.replace("/run.1/", "/run/"): content for name, content in contents(run.parent / "run.1").items()}
    assert {name: content for name, content in kept.items() if content} == before
    assert (run / "summary.json").exists()
