"""Checkpoints give back what was saved, bit for bit; they survive what happens to files; the right ones stay."""

import json
import math
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_tformer.files import read_json
from jax_tformer.runs import checkpoints as module
from jax_tformer.runs.checkpoints import Checkpoints, find_damage, load_parameters, write_checksums
from jax_tformer.runs.checkpoints import restore as restore_from
from tests.damages import cut, every, flip_bit, link, pipe, write
from tests.refusals import refused
from tests.small_models import assert_same_bits
from tests.small_runs import names

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.masked(optax.sgd(0.1), {"w": True, "b": False})
)
BITS = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)


def make_state(step):
    params = {"w": jnp.arange(600, dtype=jnp.float32).reshape(20, 30) + step, "b": jnp.full((7,), step, jnp.bfloat16)}
    bits = {name: jnp.asarray(BITS.view(name)) for name in ("float32", "bfloat16", "int32")}
    bits["scalar"] = jnp.float32(-0.0)
    return {"params": params, "opt_state": OPTIMIZER.init(params), "step": jnp.int32(step), "bits": bits, "average": ()}


ABSTRACT = jax.eval_shape(lambda: make_state(0))
LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: None}
PARAMS = ABSTRACT["params"]
flip_array_bit = flip_bit("params")


def save(folder, step, keep=9, **extra):
    """Saves as a new session does."""
    with Checkpoints(folder, keep) as checkpoints:
        checkpoints.save(step, make_state(step), extra)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template") / "checkpoints"
    for step, loss in LOSSES.items():
        save(folder, step, val_loss=loss)
    return folder


@pytest.fixture
def saved(template, tmp_path):
    """A folder with intact steps 10 to 40, of which 20 has the lowest held-out loss and 40 has none."""
    return shutil.copytree(template, tmp_path / "run" / "checkpoints")


def snapshot(folder):
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in [folder, *folder.rglob("*")]}


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
    assert Checkpoints(saved, 1).best_loss() == LOSSES[20] / 2


def test_restores_the_same_bits_and_tree_and_writes_nothing(saved):
    (saved / "50.pending").mkdir()
    before, absent = snapshot(saved), saved.parent / "absent"
    with Checkpoints(saved, 1) as checkpoints:
        assert checkpoints.steps() == [10, 20, 30, 40]
        restored = checkpoints.restore(ABSTRACT)
        assert (restored.step, restored.extra, restored.skipped) == (40, {"val_loss": None}, ())
        assert_same_bits(restored.state, make_state(40))
        assert_same_bits(restore_from(saved, ABSTRACT, 10).state, make_state(10))
    assert snapshot(saved) == before
    with Checkpoints(absent, 1) as checkpoints:
        assert (checkpoints.steps(), checkpoints.restore(ABSTRACT)) == ([], None)
    with refused("no checkpoint in"):
        load_parameters(absent, PARAMS)
    assert not absent.exists()


def test_state_and_extra_are_taken_when_save_is_called(tmp_path):
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state, extra = {"params": {"w": jnp.zeros(2_000_000)}}, {"name": "naïve"}
    with Checkpoints(tmp_path, 4) as checkpoints:
        for step in range(4):
            extra["step"] = step
            checkpoints.save(step, state, extra)
            state = advance(advance(state))
        for step in range(4):
            checkpoints.wait()
            restored = restore_from(tmp_path, jax.eval_shape(lambda: state), step)
            assert restored.extra == {"name": "naïve", "step": step}
            np.testing.assert_array_equal(restored.state["params"]["w"], 2 * step)


def test_parameters_load_without_the_rest(saved):
    shutil.rmtree(saved / "40" / "opt_state")
    restored = load_parameters(saved, PARAMS)
    assert (restored.step, restored.skipped) == (40, ())
    assert_same_bits(restored.state, make_state(40)["params"])
    flip_array_bit(saved / "40")
    assert load_parameters(saved, PARAMS).step == 30


def test_the_best_and_any_other_step_can_be_had(saved):
    for step, expected in (("best", 20), (10, 10), (None, 40)):
        restored = load_parameters(saved, PARAMS, step)
        assert (restored.step, restored.skipped) == (expected, ())
        assert_same_bits(restored.state, make_state(expected)["params"])
    with refused(r"no checkpoint of step 25 .* are 10, 20, 30, 40$"):
        load_parameters(saved, PARAMS, 25)
    for step in "10", "20", "30":
        shutil.rmtree(saved / step)
    with refused(r"has a held-out loss to be the best by; the steps there are 40$"):
        load_parameters(saved, PARAMS, "best")


# What is damaged is passed over, and said.


def data_file(step):
    return max((step / "params").rglob("d/*"), key=lambda path: path.stat().st_size)


def cut_data(step):
    cut(data_file(step))(step)


def listed(name, size=6, checksum="0"):
    """Lists this file alone, as a stranger may."""
    return write("checksums.json", json.dumps({"files": {name: {"bytes": size, "crc32": checksum}}}))


EXTRA, CHECKSUMS = "extra.json", "its checksums.json is damaged"
DAMAGES = [
    (flip_array_bit, "has changed since it was written"),
    (cut_data, "bytes instead of"),
    (lambda step: data_file(step).unlink(), "is missing"),
    (lambda step: shutil.rmtree(step / "params"), "is missing"),
    (every(write(EXTRA, None), lambda step: (step / EXTRA).mkdir()), EXTRA),
    (cut("params/_METADATA"), "bytes instead of"),
    (cut(EXTRA), "extra.json has"),
    (write("checksums.json", None), "it has no checksums.json"),
    (every(shutil.rmtree, lambda step: step.mkdir()), "it has no checksums.json"),
    (pipe("params/not_listed"), "params/not_listed is no regular file"),
    (link(EXTRA, "../30/extra.json"), "extra.json is no regular file"),
    (link("checksums.json"), CHECKSUMS),
    *((write("checksums.json", text), CHECKSUMS) for text in (b"\xff\x00", "[1]", '{"files": []}', "[" * 100_000)),
    *((listed(EXTRA, size), CHECKSUMS) for size in (math.inf, "many", [])),
    (listed(EXTRA, 6, "x"), CHECKSUMS),
    (listed("../30/extra.json"), "names '../30/extra.json', which is not in the folder"),
    *((listed(name), "which is not in the folder") for name in ("params/../../x", "/etc/hostname", "a\0b")),
    *((listed(name), "cannot be read") for name in ("\ud800", "x" * 300)),
]


@pytest.mark.parametrize("damage, reason", DAMAGES)
def test_falls_back_to_the_newest_intact_step(saved, damage, reason):
    damage(saved / "40")
    before = snapshot(saved)
    with Checkpoints(saved, 9) as checkpoints:
        restored = checkpoints.restore(ABSTRACT)
        assert restored.step == 30
        assert_same_bits(restored.state, make_state(30))
        (line,) = restored.skipped
        assert all(part in line for part in ("step 40", reason, str(saved)))
        assert "\n" not in line
        with refused(r"step 40: "):
            restore_from(saved, ABSTRACT, 40)
    assert snapshot(saved) == before


@pytest.mark.parametrize("damage", [flip_array_bit, cut(EXTRA)])
def test_a_damaged_best_is_passed_over(saved, damage):
    damage(saved / "20")
    restored = load_parameters(saved, PARAMS, "best")
    assert restored.step == 30
    assert "step 20" in restored.skipped[0]
    for step in ("10", "30"):
        shutil.rmtree(saved / step)
    with refused(r"only damaged checkpoints .*step 20.* the steps there are 20, 40"):
        load_parameters(saved, PARAMS, "best")


def test_passes_over_several_damaged_steps_and_junk_and_refuses_when_none_is_intact(saved):
    for junk in ("junk", "007", "50x", "60.pending.orbax-checkpoint-tmp", "5.deleted"):
        (saved / junk).mkdir()
    (saved / "99").write_text("not a folder")
    for step in ("40", "30"):
        cut_data(saved / step)
    restored = restore_from(saved, ABSTRACT)
    assert [line.split("step ")[1].split(":")[0] for line in restored.skipped] == ["40", "30"]
    for step in ("10", "20"):
        cut_data(saved / step)
    before = snapshot(saved)
    with refused(r"found only damaged checkpoints .*step 40: .*step 10: .* deleted nothing"):
        restore_from(saved, ABSTRACT)
    assert snapshot(saved) == before


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"params": PARAMS | {"w": jax.ShapeDtypeStruct((20, 31), jnp.float32)}}, "expects float32[20, 31]"),
        ({"params": PARAMS | {"w": jax.ShapeDtypeStruct((20, 30), jnp.bfloat16)}}, "expects bfloat16[20, 30]"),
        ({"params": PARAMS | {"more": PARAMS["b"]}}, "has nothing at params.more"),
        ({"params": {"w": PARAMS["w"]}}, "has bfloat16[7] at params.b, and this configuration expects nothing"),
        ({"opt_state": optax.sgd(0.1, momentum=0.9).init(PARAMS)}, "at opt_state."),
        ({"step": {}}, "has int32[] at step, and this configuration expects nothing"),
    ],
)
def test_another_configuration_is_refused_in_one_line(saved, changed, message):
    with refused(re.escape(message)):
        restore_from(saved, ABSTRACT | changed)


def test_lost_checkpoints_are_told_from_none(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, tmp_path / "saved.json")
    assert checkpoints.restore(ABSTRACT) is None
    for content, known in (('{"step": 7}', "step 7"), ("[" * 100_000, "one"), ("", "one")):
        (tmp_path / "saved.json").write_text(content)
        with refused(f"holds no checkpoint, although {known} was saved there"):
            checkpoints.restore(ABSTRACT)


@pytest.mark.parametrize(
    "content, message",
    [("[" * 100_000, r"40/extra\.json is damaged: it is not JSON"), ("7", "40 is not one of this library")],
)
def test_a_stranger_sealed_what_save_did_not_make(saved, content, message):
    (saved / "40" / EXTRA).write_text(content)
    write_checksums(saved / "40")
    with refused(message):
        load_parameters(saved, PARAMS)


@pytest.mark.parametrize("error", [RecursionError("too deep"), KeyError("shape"), ValueError("a\nb" * 900)])
def test_what_orbax_cannot_read_of_a_sealed_checkpoint(saved, error, monkeypatch):
    class Orbax:
        def metadata(self, path, name):
            raise error

    monkeypatch.setattr(module, "orbax", Orbax)
    with refused(r"40 is not one of this library \((too deep|'shape'|a b).*\); use") as told:
        load_parameters(saved, PARAMS)
    assert len(str(told.value)) < 500


# What is written is whole, or said not to be.


@pytest.mark.parametrize("ask, given", [("wait", ()), ("save", (3, make_state(3), {})), ("close", ())])
def test_a_failure_in_the_background_is_raised(tmp_path, monkeypatch, ask, given):
    save(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_checksums", lambda folder: os.stat(folder / "gone"))
        checkpoints.save(2, make_state(2), {})
        with refused(r"step 2 could not be written .* older checkpoints are untouched"):
            getattr(checkpoints, ask)(*given)
    assert names(tmp_path) == ["1"]
    save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["2"]


@pytest.mark.parametrize("kept", [True, False])
def test_an_error_finishes_what_is_kept_and_drops_what_is_not(tmp_path, kept):
    record = tmp_path / "saved.json"
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, record)
    checkpoints.begin(1, make_state(1), {})
    checkpoints.wait()
    assert (checkpoints.steps(), checkpoints.saved_before()) == ([], False)
    if kept:
        checkpoints.keep()
    with pytest.raises(ZeroDivisionError), checkpoints:
        raise ZeroDivisionError
    assert names(tmp_path / "checkpoints") == (["1"] if kept else [])
    assert (read_json(record) == {"step": 1}) if kept else not record.exists()


def test_a_finished_step_is_on_the_disk_with_its_folders(tmp_path, synced):
    save(tmp_path, 5)
    pending = tmp_path / "5.pending"
    written = {str(pending / path.relative_to(tmp_path / "5")) for path in (tmp_path / "5").rglob("*")}
    assert written | {str(pending), str(tmp_path)} <= {path.removesuffix(".partial") for path in synced}


@pytest.mark.parametrize("restore_first", [True, False])
def test_an_intact_step_is_not_written_again_but_a_damaged_one_is(saved, restore_first):
    before = snapshot(saved)
    for keep, value in ((1, 99), (9, 40)):
        with Checkpoints(saved, keep) as checkpoints:
            if restore_first:
                checkpoints.restore(ABSTRACT)
            checkpoints.save(40, make_state(value), {})
        if value == 99:
            assert snapshot(saved) == before
            flip_array_bit(saved / "40")
    restored = restore_from(saved, ABSTRACT)
    assert (restored.step, restored.skipped) == (40, ())


# Which ones stay: the newest, the best, and whatever is not ours.


def test_the_newest_and_the_best_by_held_out_loss_stay(tmp_path):
    stays = []
    # Equal is not better.
    for step, loss in enumerate([3.0, 2.0, 2.5, None, 2.0, 1.5, 1.75], 1):
        save(tmp_path, step, keep=1, val_loss=loss)
        stays.append((" ".join(names(tmp_path)), Checkpoints(tmp_path, 1).best_loss()))
    best_of_first = [("1", 3.0), ("2", 2.0), ("2 3", 2.0), ("2 4", 2.0), ("2 5", 2.0)]
    assert stays == [*best_of_first, ("6", 1.5), ("6 7", 1.5)]


@pytest.mark.parametrize("restore_first", [True, False])
def test_a_damaged_step_takes_no_intact_ones_place(saved, restore_first):
    (flip_array_bit if restore_first else cut_data)(saved / "40")
    cut_data(saved / "20")
    with Checkpoints(saved, 2) as checkpoints:
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
    with refused("interrupted"):
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
