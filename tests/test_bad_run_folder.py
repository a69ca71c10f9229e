"""A run folder that is damaged, taken, or of another run: refused in one line, or said; and nothing in it is lost."""

import dataclasses
import json
import re
import shutil
from functools import reduce

import pytest

from jax_tformer.cli import generate, train
from jax_tformer.files import read_json, value_in
from jax_tformer.runs.checkpoints import write_checksums
from jax_tformer.runs.folder import RunFolder
from tests.damages import say, write
from tests.refusals import refused
from tests.small_runs import TEXT, again, contents, lose_checkpoints, succeed


@pytest.fixture
def refuse_to_speak(refuse):
    return lambda: refuse("run --prompt It", program="generate.py")


def record(run, **values):
    """Changes what the checkpoint says beside its arrays, and seals it again."""
    step = run / "checkpoints" / "2"
    say("extra.json", **values)(step)
    write_checksums(step)


def configure(run, path, value):
    """Changes a field of config.json."""
    values = read_json(run / "config.json")
    *places, name = path.split(".")
    reduce(dict.__getitem__, places, values)[name] = value
    write("config.json", json.dumps(values))(run)


def test_a_folder_that_another_job_trains_in(refuse, run):
    (run / "summary.json").unlink()
    holder = RunFolder(run)
    holder.lock()
    try:
        assert "another job" in refuse(again())
        assert "another job" in refuse(again("--resume no"))
        lose_checkpoints(run)
        assert "another job" in refuse(again("--training.steps 3"))
    finally:
        holder.unlock()


def test_a_run_that_another_job_began_meanwhile(refuse, run, monkeypatch):
    """It may have saved and ended before this job takes the lock."""
    read = train.train_options
    monkeypatch.setattr(train, "train_options", lambda given: dataclasses.replace(read(given), before=None))
    assert "another job has begun a run in run meanwhile; the same command continues it" in refuse(again())


def test_a_run_that_never_saved_may_be_corrected(run, capsys):
    lose_checkpoints(run)
    succeed(train, again("--training.steps 3"))
    assert "stopped before its first checkpoint, so it starts again at step 0" in capsys.readouterr().out
    assert read_json(run / "config.json")["training"]["steps"] == 3


@pytest.mark.parametrize(
    "damage, message",
    [
        (write("checkpoints/2/checksums.json", None), "found only damaged checkpoints in"),
        (
            lambda run: shutil.rmtree(run / "checkpoints"),
            "holds no checkpoint, although step 2 was saved there; nothin",
        ),
        # tests/test_strangers.py asks generate.py of more.
        (write("config.json", "{"), "run/config.json is damaged"),
        (write("tokenizer.json", "{}"), "run/tokenizer.json is not a tokenizer"),
    ],
)
def test_a_damaged_run_does_not_begin_again(refuse, run, damage, message):
    damage(run)
    assert message in refuse(again())


def test_a_job_that_was_killed_while_it_began_a_run_is_forgotten(folder):
    for name in ("lock", "tokenizer.json", "config.json.partial", "tokenizer.json.partial"):
        (folder / name).touch()
    RunFolder(folder).check()
    (folder / "lock").unlink()
    with refused(r"no config.json"):
        RunFolder(folder).check()


def test_another_config(refuse, run):
    line = refuse(again("--training.steps 3 --optimizer.beta2 0.9"))
    assert "would be different with optimizer.beta2: 0.99 -> 0.9; leave that out" in line
    wider = "--model.d-model 32 --optimizer.beta1 0.5 --optimizer.beta2 0.5 --training.seed 7"
    assert "model.d_model: 16 -> 32" in (line := refuse(f"--run run {wider}"))
    assert "1 more" in line
    assert "the run has done 2 steps, and 1 are wanted" in refuse("--run run --steps 1")


def test_another_experiment_in_an_old_folder(refuse, run):
    line = refuse("dates --run run")
    assert "run holds a run of text, not of dates; continue it without a name, with --run alone" in line
    assert len(line) < 160
    # Of runs that were begun when that was not recorded, the kind of data is known.
    (run / "sessions.jsonl").write_text("[" * 100_000)
    assert "run holds a run of another experiment, not of dates" in refuse("dates --run run")
    assert "name the experiment" in refuse("--run run --resume no")


def test_a_mistyped_run_begins_no_other(refuse, run):
    told = "there is no run in rnu to continue; check the path, or name the experiment"
    assert told in refuse("--run rnu --steps 9")


def test_a_tokenizer_with_more_ids_than_the_vocabulary(refuse_to_speak, run):
    configure(run, "model.vocab_size", 10)
    assert "ids and the model a vocabulary of 10" in refuse_to_speak()


def test_a_model_that_the_checkpoint_was_not_made_with(refuse, refuse_to_speak, run):
    configure(run, "model.decoder.norm_eps", 1e-4)
    configure(run, "model.compute.attention", "einsum")
    configure(run, "training.steps", 3)
    message = "run/config.json is not the config that the checkpoint of step 2 was made with (model.decoder.norm_eps: "
    told = refuse_to_speak()
    assert message in told
    assert not re.search("compute|training", told)
    assert message in refuse("--run run")
    configure(run, "model.decoder.feedforward_width", 24)
    assert "float32[1, 16, 16]" in refuse_to_speak()
    assert "float32[1, 24, 16]" in refuse(again("--model.decoder.feedforward-width 24"))


def test_a_tokenizer_that_the_checkpoint_was_not_made_with(refuse, refuse_to_speak, run):
    content = read_json(run / "tokenizer.json")
    # Written in another way it is the same one.
    write("tokenizer.json", json.dumps(content, indent=3))(run)
    succeed(generate, "run --prompt It --max-new-tokens 1")
    write("tokenizer_config.json", '{"eos_token": "."}')(run)
    message = "is not the one that the checkpoint of step 2 was made with"
    assert f"run/tokenizer_config.json {message}" in refuse_to_speak()
    ids = content["model"]["vocab"]
    ids["a"], ids["t"] = ids["t"], ids["a"]
    write("tokenizer.json", json.dumps(content))(run)
    assert f"run/tokenizer.json {message}" in refuse_to_speak()
    assert f"run/tokenizer.json {message}" in refuse(again("--steps 3"))


def test_checkpoints_that_did_not_record_what_they_were_made_with(run, refuse):
    record(run, tokenizer=None)
    succeed(train, again())
    write("checkpoints/2/extra.json", "{}")(run)
    record(run)
    succeed(generate, "run --prompt It --max-new-tokens 1")
    assert "step 2 does not hold all that training continues from ('fingerprint')" in refuse(again())


@pytest.mark.parametrize(
    "values",
    [
        {"batches": {"next_index": "x"}},
        {"batches": {"next_index": -5}},
        {"seconds": ""},
        {"config": 3},
        *({"remembered": x} for x in ([1], [6, 3, 0, 1], [6, 3, -1, 0, 0, 0], [-1, 0, 0, 0, 0, 0], "123456", {"a": 1})),
    ],
)
def test_checkpoints_that_hold_something_else(refuse, run, values):
    record(run, **values)
    assert "step 2 does not hold all that training continues from" in refuse(again())


def test_a_checkpoint_holds_what_those_of_earlier_versions_do(run):
    """Folders of earlier versions open, and those of this one open in them, as long as this stays."""
    step = run / "checkpoints" / "2"
    assert {path.name for path in step.iterdir() if path.is_dir()} == {"params", "opt_state", "step", "key"}
    extra = {"batches", "fingerprint", "seconds", "config", "tokenizer", "origin", "val_loss", "remembered"}
    assert set(read_json(step / "extra.json")) == extra
    assert read_json(run / "saved.json") == {"step": 2}


def test_changed_data(refuse, run, folder):
    (folder / "text.txt").write_text(TEXT + TEXT)
    assert "has changed since the run began" in refuse(again())


def test_a_report_shows_nothing_of_data_that_is_not_the_runs(run, folder, capsys):
    """Its config may name any file, if the run is a stranger's."""
    (run / "samples.txt").unlink()
    (folder / "text.txt").write_text("that cold clock was bright. " * 150)
    succeed(train, "--run run --report --data.path text.txt")
    told = capsys.readouterr().out
    assert told.splitlines()[-1].startswith("no samples: the data is not that of the run")
    assert "cold" not in told
    assert not (run / "samples.txt").exists()


def test_a_finished_run_says_so_and_changes_nothing(run, capsys):
    before = contents(run)
    succeed(train, again())
    assert "is complete; --steps N continues it" in capsys.readouterr().out
    assert contents(run) == before


@pytest.mark.parametrize("best", [{"best_step": 1, "best_val_loss": 9.0}, {}])
def test_lines_that_are_lost_are_left_out_of_the_summary(run, best):
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text('{"step": 1, "val_loss": 9.0}\n' if best else "")
    succeed(train, again())
    summary = read_json(run / "summary.json")
    assert (summary["steps"], "val_loss" in summary, summary["train_loss"]) == (2, False, None)
    assert {name: summary[name] for name in ("best_step", "best_val_loss") if name in summary} == best
    assert value_in(RunFolder(run).summary, "steps") == 2


def test_starting_afresh_keeps_the_old_run(run):
    before = contents(run)
    succeed(train, again("--resume no"))
    kept = {name.replace("/run.1/", "/run/"): content for name, content in contents(run.parent / "run.1").items()}
    assert {**kept, **before} == kept
    assert (run / "summary.json").exists()
