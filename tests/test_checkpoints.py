"""Checkpoints give back what was saved, bit for bit; they survive what happens to files; the right ones stay."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_tformer.config.errors import InputError
from jax_tformer.runs import checkpoints as module
from jax_tformer.runs.checkpoints import Checkpoints, find_damage, load_parameters, seal
from jax_tformer.runs.checkpoints import restore as restore_from
from tests.checkpoint_states import ABSTRACT, assert_same_bits, make_state, save_all

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template") / "checkpoints"
    save_all(folder, 10, 20, 30, 40, losses=LOSSES)
    return folder


@pytest.fixture
def saved(template, tmp_path):
    """A folder with intact steps 10 to 40, of which 20 has the lowest held-out loss and 40 has none."""
    return shutil.copytree(template, tmp_path / "run" / "checkpoints")


def save(folder, step, keep=9, **extra):
    """Saves as a new session does."""
    with Checkpoints(folder, keep) as checkpoints:
        checkpoints.save(step, make_state(step), extra)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def snapshot(folder):
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [folder, *folder.rglob("*")]}


# What is saved is restored.


def test_an_error_waits_for_no_other_process(tmp_path, monkeypatch):
    """Another one may wait in a step for this one, and would never answer."""
    asked, checkpoints = [], Checkpoints(tmp_path, 1)
    checkpoints.save(10, make_state(10), {})
    monkeypatch.setattr(module, "ask_first", asked.append)
    checkpoints.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert (asked, names(tmp_path)) == ([], ["10"])


def test_all_processes_know_the_best_loss_of_the_first(saved, monkeypatch):
    monkeypatch.setattr(module, "ask_first", lambda work: work() / 2)
    assert Checkpoints(saved, 1).best_loss() == min(LOSSES.values()) / 2


def test_restores_the_same_bits_and_tree_and_writes_nothing(saved):
    (saved / "50.pending").mkdir()
    before = snapshot(saved)
    with Checkpoints(saved, 1) as checkpoints:
        assert checkpoints.steps() == [10, 20, 30, 40]
        restored = checkpoints.restore(ABSTRACT)
        assert (restored.step, restored.extra, restored.skipped) == (40, {"step": 40, "val_loss": None}, ())
        assert_same_bits(restored.state, make_state(40))
        assert_same_bits(checkpoints.restore(ABSTRACT, step=10).state, make_state(10))
    assert snapshot(saved) == before
    absent = saved.parent / "absent"
    with Checkpoints(absent, 1) as checkpoints:
        assert (checkpoints.steps(), checkpoints.restore(ABSTRACT)) == ([], None)
    assert not absent.exists()
    with pytest.raises(InputError, match="no checkpoint in"):
        load_parameters(absent, ABSTRACT["params"])


def test_state_and_extra_are_taken_when_save_is_called(tmp_path):
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state, extra = {"params": {str(index): jnp.zeros(500_000) for index in range(4)}}, {"name": "naïve", "step": 0}
    shapes = jax.eval_shape(lambda: state)
    with Checkpoints(tmp_path, 4) as checkpoints:
        for step in range(4):
            extra["step"] = step
            checkpoints.save(step, state, extra)
            for _ in range(3):
                state = advance(state)
        for step in range(4):
            restored = checkpoints.restore(shapes, step)
            assert restored.extra == {"name": "naïve", "step": step}
            for leaf in jax.tree.leaves(restored.state):
                np.testing.assert_array_equal(leaf, 3.0 * step)


def test_parameters_load_without_the_rest(saved):
    shutil.rmtree(saved / "40" / "opt_state")
    restored = load_parameters(saved, ABSTRACT["params"])
    assert (restored.step, restored.skipped) == (40, ())
    assert_same_bits(restored.state, make_state(40)["params"])
    flip_inside_array(saved / "40")
    assert load_parameters(saved, ABSTRACT["params"]).step == 30


def test_the_best_and_any_other_step_can_be_had(saved):
    for step, expected in (("best", 20), (10, 10), (None, 40)):
        restored = load_parameters(saved, ABSTRACT["params"], step)
        assert (restored.step, restored.skipped) == (expected, ())
        assert_same_bits(restored.state, make_state(expected)["params"])
    with pytest.raises(InputError, match=r"no checkpoint of step 25 .* are 10, 20, 30, 40$"):
        load_parameters(saved, ABSTRACT["params"], 25)
    for step in "10", "20", "30":
        shutil.rmtree(saved / step)
    with pytest.raises(InputError, match=r"has a held-out loss to be the best by; the steps there are 40$"):
        load_parameters(saved, ABSTRACT["params"], "best")


# What is damaged is passed over, and said.


def data_file(step_folder):
    return max((step_folder / "params").rglob("d/*"), key=lambda path: path.stat().st_size)


def flip_inside_array(step):
    path = data_file(step)
    content = bytearray(path.read_bytes())
    row = np.asarray(make_state(int(step.name))["params"]["w"])[7].tobytes()
    content[content.index(row) + 5] ^= 0x10
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


DAMAGES = {
    "flipped byte in an array": (flip_inside_array, "has changed since it was written"),
    "truncated data": (lambda step: cut(data_file(step)), "bytes instead of"),
    "missing data": (lambda step: data_file(step).unlink(), "is missing"),
    "half deleted": (lambda step: shutil.rmtree(step / "params"), "is missing"),
    "a folder in place of a file": (lambda step: replace_by_folder(step / "extra.json"), "extra.json"),
    "truncated metadata": (lambda step: cut(step / "params" / "_METADATA"), "bytes instead of"),
    "truncated extra": (lambda step: cut(step / "extra.json"), "extra.json has"),
    "truncated checksums": (lambda step: cut(step / "checksums.json"), "checksums.json is damaged"),
    "other JSON as checksums": (lambda step: (step / "checksums.json").write_text("[1]"), "checksums.json is damaged"),
    "binary checksums": (lambda step: (step / "checksums.json").write_bytes(b"\xff\x00"), "checksums.json is damaged"),
    "no checksums": (lambda step: (step / "checksums.json").unlink(), "it has no checksums.json"),
    "an empty folder": (empty, "it has no checksums.json"),
    "a pipe": (lambda step: os.mkfifo(step / "params" / "not_listed"), "params/not_listed is no regular file"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_falls_back_to_the_newest_intact_step(saved, kind):
    break_step, reason = DAMAGES[kind]
    break_step(saved / "40")
    before = snapshot(saved)
    with Checkpoints(saved, 9) as checkpoints:
        restored = checkpoints.restore(ABSTRACT)
        assert restored.step == 30
        assert_same_bits(restored.state, make_state(30))
        (line,) = restored.skipped
        assert all(part in line for part in ("step 40", reason, str(saved)))
        assert "\n" not in line
        with pytest.raises(InputError, match=r"step 40: "):
            checkpoints.restore(ABSTRACT, step=40)
    assert snapshot(saved) == before


@pytest.mark.parametrize("kind", ["flipped byte in an array", "truncated extra", "half deleted", "no checksums"])
def test_a_damaged_best_is_passed_over(saved, kind):
    break_step, reason = DAMAGES[kind]
    break_step(saved / "20")
    restored = load_parameters(saved, ABSTRACT["params"], "best")
    assert restored.step == 30
    (line,) = restored.skipped
    assert "step 20" in line
    assert reason in line
    for step in ("10", "30"):
        shutil.rmtree(saved / step)
    with pytest.raises(InputError, match=r"only damaged checkpoints .*step 20.* the steps there are 20, 40"):
        load_parameters(saved, ABSTRACT["params"], "best")


def test_passes_over_several_damaged_steps_and_junk_and_refuses_when_none_is_intact(saved):
    for junk in ("junk", "007", "50x", "60.pending", "60.pending.orbax-checkpoint-tmp", "5.deleted"):
        (saved / junk).mkdir()
    (saved / "99").write_text("not a folder")
    flip_inside_array(saved / "40")
    (saved / "30" / "_CHECKPOINT_METADATA").unlink()
    restored = restore_from(saved, ABSTRACT)
    assert [line.split("step ")[1].split(":")[0] for line in restored.skipped] == ["40", "30"]
    for step in ("10", "20"):
        flip_inside_array(saved / step)
    before = snapshot(saved)
    with pytest.raises(InputError, match=r"found only damaged checkpoints .*step 40: .*step 10: .* deleted nothing"):
        restore_from(saved, ABSTRACT)
    assert snapshot(saved) == before


W, B = ABSTRACT["params"]["w"], ABSTRACT["params"]["b"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"params": {"w": jax.ShapeDtypeStruct((20, 31), jnp.float32), "b": B}}, "expects float32[20, 31]"),
        ({"params": {"w": jax.ShapeDtypeStruct((20, 30), jnp.bfloat16), "b": B}}, "expects bfloat16[20, 30]"),
        ({"params": {"w": W, "b": B, "more": B}}, "has nothing at params.more"),
        ({"params": {"w": W}}, "has bfloat16[7] at params.b, and this configuration expects nothing"),
        ({"opt_state": optax.sgd(0.1, momentum=0.9).init({"w": W})}, "at opt_state."),
        ({"step": {}}, "has int32[] at step, and this configuration expects nothing"),
    ],
    ids=["shape", "dtype", "added", "removed", "optimizer", "top level"],
)
def test_another_configuration_is_refused_in_one_line(saved, changed, message):
    with pytest.raises(InputError) as caught:
        restore_from(saved, ABSTRACT | changed)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lost_checkpoints_are_told_from_none(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, tmp_path / "saved.json")
    assert checkpoints.restore(ABSTRACT) is None
    for content, known in (('{"step": 7}', "step 7"), ("[" * 100_000, "one"), ("", "one")):
        (tmp_path / "saved.json").write_text(content)
        with pytest.raises(InputError, match=f"holds no checkpoint, although {known} was saved there"):
            checkpoints.restore(ABSTRACT)


@pytest.mark.parametrize(
    ("content", "message"),
    [("[" * 100_000, r"40/extra\.json is damaged: it is not JSON"), ("7", "40 is not one of this library")],
)
def test_a_stranger_sealed_what_save_did_not_make(saved, content, message):
    (saved / "40" / "extra.json").write_text(content)
    seal(saved / "40")
    with pytest.raises(InputError, match=message):
        load_parameters(saved, ABSTRACT["params"])


@pytest.mark.parametrize("error", [RecursionError("too deep"), KeyError("shape"), ValueError("a\nb" * 900)])
def test_what_orbax_cannot_read_of_a_sealed_checkpoint(saved, error, monkeypatch):
    class Orbax:
        def metadata(self, path, name):
            raise error

    monkeypatch.setattr(module, "orbax", Orbax)
    with pytest.raises(InputError, match=r"40 is not one of this library \((too deep|'shape'|a b).*\); use") as told:
        load_parameters(saved, ABSTRACT["params"])
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 500


# What is written is whole, or said not to be.


@pytest.mark.parametrize("ask", ["wait", "save", "close"])
def test_a_failure_in_the_background_is_raised(tmp_path, monkeypatch, ask):
    save(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "seal", lambda folder: os.stat(folder / "gone"))
        checkpoints.save(2, make_state(2), {})
        arguments = (3, make_state(3), {}) if ask == "save" else ()
        with pytest.raises(InputError, match=r"step 2 could not be written .* older checkpoints are untouched"):
            getattr(checkpoints, ask)(*arguments)
    assert names(tmp_path) == ["1"]
    save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["2"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", Path("/proc")):
        with pytest.raises(InputError, match=f"cannot write to {place}"):
            Checkpoints(place / "checkpoints", 2)


@pytest.mark.parametrize("kept", [True, False])
def test_an_error_finishes_what_is_kept_and_drops_what_is_not(tmp_path, kept):
    record = tmp_path / "saved.json"
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, record)
    assert not checkpoints.saved_before()
    checkpoints.begin(1, make_state(1), {})
    checkpoints.wait()
    assert (checkpoints.steps(), record.exists()) == ([], False)
    if kept:
        checkpoints.keep()
    with pytest.raises(ZeroDivisionError), checkpoints:
        raise ZeroDivisionError
    assert names(tmp_path / "checkpoints") == (["1"] if kept else [])
    assert record.exists() == kept
    assert not kept or json.loads(record.read_text()) == {"step": 1}


def test_a_finished_step_is_on_the_disk_with_its_folders(tmp_path, monkeypatch):
    synced = set()

    def fsync(descriptor):
        synced.add(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path).removesuffix(".partial"))

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path, 5)
    written = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "5").rglob("*")} | {"5"}
    assert {name.replace("5", "5.pending", 1) for name in written} | {"."} <= synced


def test_saving_a_step_again_changes_nothing(saved):
    before = snapshot(saved)
    for restore_first in (True, False):
        with Checkpoints(saved, keep=1) as checkpoints:
            if restore_first:
                checkpoints.restore(ABSTRACT)
            checkpoints.save(40, make_state(99), {})
    assert snapshot(saved) == before


@pytest.mark.parametrize("restore_first", [True, False])
def test_a_damaged_step_is_written_again(saved, restore_first):
    flip_inside_array(saved / "40")
    with Checkpoints(saved, 9) as checkpoints:
        if restore_first:
            checkpoints.restore(ABSTRACT)
        checkpoints.save(40, make_state(40), {})
        restored = checkpoints.restore(ABSTRACT)
    assert (restored.step, restored.skipped) == (40, ())


# Which ones stay: the newest, the best, and whatever is not ours.


def test_the_newest_and_the_best_by_held_out_loss_stay(tmp_path):
    stays = {}
    for step, loss in {1: 3.0, 2: 2.0, 3: 2.5, 4: None, 5: 2.0, 6: 1.5, 7: 1.75}.items():
        save(tmp_path, step, keep=1, val_loss=loss)
        stays[step] = names(tmp_path), Checkpoints(tmp_path, 1).best_loss()
    assert stays == {
        1: (["1"], 3.0),
        2: (["2"], 2.0),
        3: (["2", "3"], 2.0),
        4: (["2", "4"], 2.0),
        5: (["2", "5"], 2.0),  # equal is not better
        6: (["6"], 1.5),
        7: (["6", "7"], 1.5),
    }


@pytest.mark.parametrize("restore_first", [True, False])
def test_a_damaged_step_takes_no_intact_ones_place(saved, restore_first):
    flip_inside_array(saved / "40") if restore_first else cut(data_file(saved / "40"))
    cut(data_file(saved / "20"))
    with Checkpoints(saved, keep=2) as checkpoints:
        if restore_first:
            checkpoints.restore(ABSTRACT)
        assert checkpoints.best_loss() == 2.0
        checkpoints.save(50, make_state(50), {"val_loss": 2.5})
    assert names(saved) == ["30", "50"]


def test_old_steps_go_only_when_the_new_one_is_whole(tmp_path, monkeypatch):
    save(tmp_path, 1)
    gone = []
    monkeypatch.setattr(module, "_delete", lambda folder: gone.append((folder.name, find_damage(tmp_path / "2"))))
    save(tmp_path, 2, keep=1)
    assert gone == [("1", None)]


def test_an_interrupted_deletion_leaves_no_half_step(saved, monkeypatch):
    def interrupt(folder):
        data_file(folder).unlink()
        raise OSError("interrupted")

    monkeypatch.setattr(shutil, "rmtree", interrupt)
    with pytest.raises(InputError, match="interrupted"):
        save(saved, 50, keep=1)
    left = [path for path in saved.iterdir() if path.name.isdigit()]
    assert saved / "50" in left
    assert all(find_damage(path) is None for path in left)


def test_leftovers_of_a_kill_go_with_the_next_save_and_other_folders_stay(saved):
    for leftover in ("50.pending", "50.pending.orbax-checkpoint-tmp", "5.deleted"):
        shutil.copytree(saved / "30", saved / leftover)
    (saved / "7").mkdir()
    (saved / "7" / "thesis.txt").write_text("precious")
    (saved / "junk.deleted").mkdir()
    save(saved, 60, keep=1, val_loss=0.5)
    assert names(saved) == ["60", "7", "junk.deleted"]
