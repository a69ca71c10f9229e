"""Checkpoints survive what happens to files and processes: kills, flipped bytes, lost files, other configurations."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_tformer.errors import InputError
from jax_tformer.run import checkpoints as saving
from jax_tformer.run import restoring
from jax_tformer.run.checkpoints import Checkpoints
from jax_tformer.run.restoring import load_parameters
from tests.checkpoint_states import ABSTRACT, abstract, assert_same_bits, make_state, save_all


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [folder, *folder.rglob("*")]}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "checkpoints"
    save_all(folder, 10, 20, 30)
    return folder


@pytest.fixture
def saved(template: Path, tmp_path: Path) -> Path:
    """A folder with intact steps 10, 20 and 30."""
    return Path(shutil.copytree(template, tmp_path / "run" / "checkpoints"))


@pytest.fixture
def open_checkpoints() -> Iterator[Callable[..., Checkpoints]]:
    opened: list[Checkpoints] = []

    def open_(folder: Path, keep: int = 9) -> Checkpoints:
        opened.append(Checkpoints(folder, keep))
        return opened[-1]

    yield open_
    for checkpoints in opened:
        checkpoints.close()


def test_restores_the_same_bits_and_tree(saved: Path, open_checkpoints: Callable[..., Checkpoints]) -> None:
    checkpoints = open_checkpoints(saved)
    assert checkpoints.steps() == [10, 20, 30]
    restored = checkpoints.restore(ABSTRACT)
    assert restored is not None
    assert (restored.step, restored.extra, restored.skipped) == (30, {"step": 30}, ())
    assert_same_bits(restored.state, make_state(30))
    older = checkpoints.restore(ABSTRACT, step=10)
    assert older is not None
    assert_same_bits(older.state, make_state(10))


def test_every_bit_pattern_survives(tmp_path: Path, open_checkpoints: Callable[..., Checkpoints]) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    state = {
        "params": {
            "float32": jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32),
            "bfloat16": jax.lax.bitcast_convert_type(jnp.asarray(bits.view(np.uint16)), jnp.bfloat16),
            "int32": jnp.asarray(bits.view(np.int32)),
            "uint32": jnp.asarray(bits),
            "scalar": jnp.float32(-0.0),
        }
    }
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    restored = checkpoints.restore(abstract(state))
    assert restored is not None
    assert_same_bits(restored.state, state)


def test_extra_is_taken_when_save_is_called(tmp_path: Path, open_checkpoints: Callable[..., Checkpoints]) -> None:
    extra = {"iterator": {"next": 3, "name": "naïve"}, "fingerprint": "ab12", "list": [1, 2.5, None, True]}
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, make_state(1), extra)
    extra["fingerprint"] = "later"
    restored = checkpoints.restore(ABSTRACT)
    assert restored is not None
    assert restored.extra == {**extra, "fingerprint": "ab12"}


def test_state_may_be_donated_right_after_save(tmp_path: Path, open_checkpoints: Callable[..., Checkpoints]) -> None:
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = {"params": {str(index): jnp.zeros(500_000) for index in range(4)}}
    shapes = abstract(state)
    checkpoints = open_checkpoints(tmp_path, keep=4)
    for step in range(4):
        checkpoints.save(step, state, {})
        for _ in range(3):
            state = advance(state)
    for step in range(4):
        restored = checkpoints.restore(shapes, step)
        assert restored is not None
        for leaf in jax.tree.leaves(restored.state):
            np.testing.assert_array_equal(leaf, 3.0 * step)


def test_opening_and_reading_write_nothing(
    saved: Path, tmp_path: Path, open_checkpoints: Callable[..., Checkpoints]
) -> None:
    (saved / "40.pending").mkdir()
    before = snapshot(saved)
    checkpoints = open_checkpoints(saved, keep=1)
    assert checkpoints.steps() == [10, 20, 30]
    assert checkpoints.restore(ABSTRACT) is not None
    load_parameters(saved, ABSTRACT["params"])
    assert snapshot(saved) == before
    absent = open_checkpoints(tmp_path / "absent" / "checkpoints")
    assert absent.steps() == []
    assert absent.restore(ABSTRACT) is None
    assert not (tmp_path / "absent").exists()


def data_file(step_folder: Path) -> Path:
    return max((step_folder / "params").rglob("d/*"), key=lambda path: path.stat().st_size)


def flip_inside_array(step: Path) -> None:
    path = data_file(step)
    content = bytearray(path.read_bytes())
    row = np.asarray(make_state(int(step.name))["params"]["w"])[7].tobytes()
    position = content.index(row) + 5
    content[position] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def replace_by_folder(step: Path) -> None:
    (step / "extra.json").unlink()
    (step / "extra.json").mkdir()


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte in an array": (flip_inside_array, "has changed since it was written"),
    "truncated data": (lambda step: cut(data_file(step)), "bytes instead of"),
    "emptied data": (lambda step: data_file(step).write_bytes(b""), "has 0 bytes instead of"),
    "missing data": (lambda step: data_file(step).unlink(), "is missing"),
    "half deleted": (lambda step: shutil.rmtree(step / "params"), "is missing"),
    "a folder in place of a file": (replace_by_folder, "extra.json"),
    "truncated metadata": (lambda step: cut(step / "params" / "_METADATA"), "bytes instead of"),
    "truncated extra": (lambda step: cut(step / "extra.json"), "extra.json has"),
    "truncated checksums": (lambda step: cut(step / "checksums.json"), "checksums.json is damaged"),
    "other JSON as checksums": (lambda step: (step / "checksums.json").write_text("[1]"), "checksums.json is damaged"),
    "binary checksums": (lambda step: (step / "checksums.json").write_bytes(b"\xff\x00"), "checksums.json is damaged"),
    "no checksums": (lambda step: (step / "checksums.json").unlink(), "it has no checksums.json"),
    "an empty folder": (empty, "it has no checksums.json"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_falls_back_to_the_newest_intact_step(
    saved: Path, kind: str, open_checkpoints: Callable[..., Checkpoints]
) -> None:
    break_step, reason = DAMAGES[kind]
    break_step(saved / "30")
    before = snapshot(saved)
    checkpoints = open_checkpoints(saved)
    restored = checkpoints.restore(ABSTRACT)
    assert restored is not None
    assert restored.step == 20
    assert_same_bits(restored.state, make_state(20))
    (line,) = restored.skipped
    assert "step 30" in line
    assert reason in line
    assert str(saved) in line
    assert "\n" not in line
    with pytest.raises(InputError, match=r"step 30: "):
        checkpoints.restore(ABSTRACT, step=30)
    assert snapshot(saved) == before


def test_passes_over_several_damaged_steps_and_junk(saved: Path, open_checkpoints: Callable[..., Checkpoints]) -> None:
    flip_inside_array(saved / "30")
    (saved / "20" / "_CHECKPOINT_METADATA").unlink()
    for junk in ("junk", "007", "50x", "60.pending", "60.pending.orbax-checkpoint-tmp", "5.deleted"):
        (saved / junk).mkdir()
    (saved / "99").write_text("not a folder")
    (saved / "notes.txt").write_text("mine")
    restored = open_checkpoints(saved).restore(ABSTRACT)
    assert restored is not None
    assert restored.step == 10
    assert [line.split("step ")[1].split(":")[0] for line in restored.skipped] == ["30", "20"]


def test_refuses_when_no_step_is_intact(saved: Path, open_checkpoints: Callable[..., Checkpoints]) -> None:
    for step in ("10", "20", "30"):
        flip_inside_array(saved / step)
    before = snapshot(saved)
    for attempt in (
        lambda: open_checkpoints(saved).restore(ABSTRACT),
        lambda: load_parameters(saved, ABSTRACT["params"]),
    ):
        with pytest.raises(InputError, match="found only damaged checkpoints") as caught:
            attempt()
        assert "\n" not in str(caught.value)
        assert "step 30" in str(caught.value)
    assert snapshot(saved) == before


def test_refuses_a_step_that_does_not_exist(saved: Path, open_checkpoints: Callable[..., Checkpoints]) -> None:
    with pytest.raises(InputError, match=r"no checkpoint of step 25 .* are 10, 20, 30$"):
        open_checkpoints(saved).restore(ABSTRACT, step=25)


def with_params(**params: jax.ShapeDtypeStruct) -> dict:
    return {**ABSTRACT, "params": params}


W, B = ABSTRACT["params"]["w"], ABSTRACT["params"]["b"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            with_params(w=jax.ShapeDtypeStruct((20, 31), jnp.float32), b=B),
            r"float32\[20, 30\] at params.w.* expects float32\[20, 31\]",
        ),
        (
            with_params(w=jax.ShapeDtypeStruct((20, 30), jnp.bfloat16), b=B),
            r"float32\[20, 30\] at params.w.* expects bfloat16\[20, 30\]",
        ),
        (with_params(w=W, b=B, more=B), r"nothing at params.more.* expects bfloat16\[7\]"),
        (with_params(w=W), r"bfloat16\[7\] at params.b.* expects nothing"),
        ({**ABSTRACT, "opt_state": optax.sgd(0.1, momentum=0.9).init({"w": W})}, r"at opt_state\."),
        ({key: tree for key, tree in ABSTRACT.items() if key != "step"}, r"int32\[\] at step, .* expects nothing"),
    ],
    ids=["shape", "dtype", "added", "removed", "optimizer", "top level"],
)
def test_another_configuration_is_refused_in_one_line(
    saved: Path, wanted: dict, message: str, open_checkpoints: Callable[..., Checkpoints]
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        open_checkpoints(saved).restore(wanted)
    assert "\n" not in str(caught.value)


def test_parameters_load_without_the_rest(saved: Path) -> None:
    shutil.rmtree(saved / "30" / "opt_state")
    restored = load_parameters(saved, ABSTRACT["params"])
    assert (restored.step, restored.extra, restored.skipped) == (30, {"step": 30}, ())
    assert_same_bits(restored.state, make_state(30)["params"])
    with pytest.raises(InputError, match=r"params.w.*float32\[3\]"):
        load_parameters(saved, {"w": jax.ShapeDtypeStruct((3,), jnp.float32), "b": B})


def test_damaged_parameters_are_passed_over(saved: Path, tmp_path: Path) -> None:
    flip_inside_array(saved / "30")
    restored = load_parameters(saved, ABSTRACT["params"])
    assert restored.step == 20
    assert len(restored.skipped) == 1
    with pytest.raises(InputError, match="no checkpoint in"):
        load_parameters(tmp_path / "absent", ABSTRACT["params"])


def test_keeps_the_newest(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    save_all(tmp_path, 5, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5"]


def test_the_best_by_held_out_loss_is_kept_until_a_better_one(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 2.0, 3: 2.5, 4: None, 5: 2.0, 6: 1.5, 7: 1.75}
    kept = {}
    for step, loss in losses.items():
        # As a new session each time: what is the best is known from the disk alone.
        with closing(Checkpoints(tmp_path, keep=1)) as checkpoints:
            checkpoints.save(step, make_state(step), {"val_loss": loss})
            checkpoints.wait()
            kept[step] = checkpoints.steps(), checkpoints.best_loss()
    assert kept == {
        1: ([1], 3.0),
        2: ([2], 2.0),
        3: ([2, 3], 2.0),
        4: ([2, 4], 2.0),
        5: ([2, 5], 2.0),  # equal is not better
        6: ([6], 1.5),
        7: ([6, 7], 1.5),
    }


@pytest.fixture(scope="module")
def judged_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged") / "checkpoints"
    with closing(Checkpoints(folder, 9)) as checkpoints:
        for step, loss in {10: 3.0, 20: 1.0, 30: 2.0, 40: None}.items():
            checkpoints.save(step, make_state(step), {"val_loss": loss})
    return folder


@pytest.fixture
def judged(judged_template: Path, tmp_path: Path) -> Path:
    """A folder with intact steps 10 to 40, of which 20 has the lowest held-out loss and 40 has none."""
    return Path(shutil.copytree(judged_template, tmp_path / "judged"))


def test_the_best_and_any_other_step_can_be_had(judged: Path, saved: Path) -> None:
    for step, expected in (("best", 20), (10, 10), (None, 40)):
        restored = load_parameters(judged, ABSTRACT["params"], step)
        assert (restored.step, restored.skipped) == (expected, ())
        assert_same_bits(restored.state, make_state(expected)["params"])
    with pytest.raises(InputError, match=r"no checkpoint of step 25 .* are 10, 20, 30, 40$"):
        load_parameters(judged, ABSTRACT["params"], 25)
    with pytest.raises(InputError, match=r"has a held-out loss to be the best by; the steps there are 10, 20, 30$"):
        load_parameters(saved, ABSTRACT["params"], "best")


@pytest.mark.parametrize("kind", ["flipped byte in an array", "truncated extra", "half deleted", "no checksums"])
def test_a_damaged_best_is_passed_over(judged: Path, kind: str, open_checkpoints: Callable[..., Checkpoints]) -> None:
    break_step, reason = DAMAGES[kind]
    break_step(judged / "20")
    restored = load_parameters(judged, ABSTRACT["params"], "best")
    assert restored.step == 30
    (line,) = restored.skipped
    assert "step 20" in line
    assert reason in line
    for step in ("10", "30"):
        shutil.rmtree(judged / step)
    with pytest.raises(InputError, match=r"only damaged checkpoints .*step 20.* the steps there are 20, 40"):
        load_parameters(judged, ABSTRACT["params"], "best")


def test_a_damaged_best_is_not_kept(judged: Path, open_checkpoints: Callable[..., Checkpoints]) -> None:
    cut(data_file(judged / "20"))
    checkpoints = open_checkpoints(judged, keep=1)
    assert checkpoints.best_loss() == 2.0
    checkpoints.save(50, make_state(50), {"val_loss": 2.5})
    checkpoints.wait()
    assert checkpoints.steps() == [30, 50]


def test_old_steps_go_only_when_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, 1)
    seen: list[str] = []

    def watch(folder: Path) -> None:
        assert restoring.damage(tmp_path / "2") is None
        seen.append(folder.name)

    monkeypatch.setattr(saving, "_delete", watch)
    save_all(tmp_path, 2, keep=1)
    assert seen == ["1"]


def test_an_interrupted_deletion_leaves_no_half_step(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> None:
        data_file(folder).unlink()
        raise OSError("interrupted")

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(InputError, match="interrupted"):
        save_all(saved, 40, keep=1)
    numbered = [path for path in saved.iterdir() if path.name.isdigit()]
    assert saved / "40" in numbered
    assert all(restoring.damage(path) is None for path in numbered)


@pytest.mark.parametrize("restore_first", [True, False])
def test_a_damaged_step_takes_no_intact_ones_place(
    saved: Path, restore_first: bool, open_checkpoints: Callable[..., Checkpoints]
) -> None:
    checkpoints = open_checkpoints(saved, keep=2)
    if restore_first:
        flip_inside_array(saved / "30")
        checkpoints.restore(ABSTRACT)
    else:
        cut(data_file(saved / "30"))
    checkpoints.save(40, make_state(40), {})
    checkpoints.wait()
    assert checkpoints.steps() == [20, 40]


def test_folders_that_are_not_ours_are_left_alone(saved: Path) -> None:
    (saved / "7").mkdir()
    (saved / "7" / "thesis.txt").write_text("precious")
    (saved / "junk.deleted").mkdir()
    save_all(saved, 40, keep=1)
    assert sorted(path.name for path in saved.iterdir()) == ["40", "7", "junk.deleted"]


def test_saving_a_step_again_changes_nothing(saved: Path, open_checkpoints: Callable[..., Checkpoints]) -> None:
    before = snapshot(saved)
    checkpoints = open_checkpoints(saved, keep=1)
    checkpoints.restore(ABSTRACT)
    checkpoints.save(30, make_state(99), {})
    checkpoints.wait()
    without_restore = open_checkpoints(saved, keep=1)
    without_restore.save(30, make_state(99), {})
    without_restore.wait()
    assert snapshot(saved) == before


@pytest.mark.parametrize("restore_first", [True, False])
def test_a_damaged_step_is_written_again(
    saved: Path, restore_first: bool, open_checkpoints: Callable[..., Checkpoints]
) -> None:
    flip_inside_array(saved / "30")
    checkpoints = open_checkpoints(saved)
    if restore_first:
        checkpoints.restore(ABSTRACT)
    checkpoints.save(30, make_state(30), {})
    restored = checkpoints.restore(ABSTRACT)
    assert restored is not None
    assert (restored.step, restored.skipped) == (30, ())


def test_leftovers_of_a_kill_go_with_the_next_save(saved: Path) -> None:
    shutil.copytree(saved / "30", saved / "40.pending")
    shutil.copytree(saved / "30", saved / "40.pending.orbax-checkpoint-tmp")
    shutil.copytree(saved / "30", saved / "5.deleted")
    save_all(saved, 40)
    assert sorted(path.name for path in saved.iterdir()) == ["10", "20", "30", "40"]


@pytest.mark.parametrize("ask", ["wait", "save", "close"])
def test_a_failure_in_the_background_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    save_all(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(restoring, "seal", lambda folder: os.stat(folder / "gone"))
        checkpoints.save(2, make_state(2), {})
        calls = {
            "wait": checkpoints.wait,
            "save": lambda: checkpoints.save(3, make_state(3), {}),
            "close": checkpoints.close,
        }
        with pytest.raises(InputError, match=r"step 2 could not be written .* older checkpoints are untouched"):
            calls[ask]()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    if ask != "close":
        checkpoints.save(2, make_state(2), {})
        checkpoints.close()
        assert [path.name for path in tmp_path.iterdir()] == ["2"]


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """File permissions mean nothing to root, under which containers often run the tests."""
    if os.getuid() != 0:
        yield
        return
    os.setreuid(65534, -1)
    try:
        yield
    finally:
        os.setreuid(0, -1)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="not a writable folder"):
        Checkpoints(tmp_path / "file" / "checkpoints", 2)
    locked = tmp_path / "locked"
    locked.mkdir()
    Checkpoints(locked / "checkpoints", 2)
    locked.chmod(0o555)
    with as_ordinary_user(), pytest.raises(InputError, match=r"is not a writable folder"):
        Checkpoints(locked / "checkpoints", 2)


def test_what_was_begun_is_a_step_only_once_it_is_kept(tmp_path: Path) -> None:
    record = tmp_path / "saved.json"
    with Checkpoints(tmp_path / "checkpoints", 2, record) as checkpoints:
        assert not checkpoints.saved_before()
        checkpoints.begin(1, make_state(1), {})
        checkpoints.wait()
        assert (checkpoints.steps(), record.exists()) == ([], False)
        checkpoints.begin(2, make_state(2), {})
        checkpoints.keep()
        checkpoints.wait()
        assert checkpoints.steps() == [2]
        assert json.loads(record.read_text()) == {"step": 2}
        checkpoints.begin(3, make_state(3), {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]


@pytest.mark.parametrize("kept", [True, False])
def test_an_error_finishes_what_is_kept_and_drops_what_is_not(tmp_path: Path, kept: bool) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.begin(1, make_state(1), {})
    if kept:
        checkpoints.keep()
    with pytest.raises(ZeroDivisionError), checkpoints:
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == (["1"] if kept else [])


def test_lost_checkpoints_are_told_from_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, tmp_path / "saved.json")
    assert checkpoints.restore(ABSTRACT) is None
    for content, known in (('{"step": 7}', "step 7"), ("[" * 100_000, "one"), ("", "one")):
        (tmp_path / "saved.json").write_text(content)
        with pytest.raises(InputError, match=f"holds no checkpoint, although {known} was saved there"):
            checkpoints.restore(ABSTRACT)


def test_a_finished_step_is_on_the_disk_with_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()

    def fsync(descriptor: int) -> None:
        synced.add(
            os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{tmp_path}").lstrip("/").removesuffix(".partial")
        )

    monkeypatch.setattr(os, "fsync", fsync)
    save_all(tmp_path, 5)
    written = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "5").rglob("*")} | {"5"}
    assert {name.replace("5", "5.pending", 1) for name in written} | {""} <= synced


@pytest.mark.parametrize(
    ("content", "message"),
    [("[" * 100_000, r"30/extra\.json is damaged: it is not JSON"), ("7", "30 is not one of this library")],
)
def test_a_stranger_sealed_what_save_did_not_make(saved: Path, content: str, message: str) -> None:
    step = saved / "30"
    (step / "extra.json").write_text(content)
    restoring.seal(step)
    with pytest.raises(InputError, match=message):
        load_parameters(saved, ABSTRACT["params"])


@pytest.mark.parametrize("error", [RecursionError("too deep"), KeyError("shape"), ValueError("a\nb" * 900)])
def test_what_cannot_be_read_of_a_sealed_checkpoint(
    saved: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Orbax:
        def metadata(self, path: Path, name: str) -> None:
            raise error

    monkeypatch.setattr(restoring, "orbax", Orbax)
    with pytest.raises(InputError, match=r"30 is not one of this library \((too deep|'shape'|a b).*\); use") as told:
        load_parameters(saved, ABSTRACT["params"])
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 500


def test_a_pipe_in_a_checkpoint_is_a_damage(saved: Path, open_checkpoints: Callable[..., Checkpoints]) -> None:
    os.mkfifo(saved / "30" / "params" / "not_listed")
    restored = open_checkpoints(saved).restore(ABSTRACT)
    assert restored is not None
    assert restored.step == 20
    assert "step 30: params/not_listed is no regular file" in restored.skipped[0]
