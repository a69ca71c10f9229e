"""Which checkpoints stay: the newest, the best, and whatever is not ours."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from jax_tformer.config.errors import InputError
from jax_tformer.runs import checkpoints as saving
from jax_tformer.runs import restoring
from jax_tformer.runs.checkpoints import Checkpoints
from jax_tformer.runs.restoring import load_parameters
from tests.checkpoint_damages import DAMAGES, cut, data_file
from tests.checkpoint_states import ABSTRACT, assert_same_bits, make_state, save_all, snapshot


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


def test_leftovers_of_a_kill_go_with_the_next_save(saved: Path) -> None:
    shutil.copytree(saved / "30", saved / "40.pending")
    shutil.copytree(saved / "30", saved / "40.pending.orbax-checkpoint-tmp")
    shutil.copytree(saved / "30", saved / "5.deleted")
    save_all(saved, 40)
    assert sorted(path.name for path in saved.iterdir()) == ["10", "20", "30", "40"]


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
