"""Checkpoints survive what happens to files: flipped bytes, lost files, other configurations."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from jax_tformer.config.errors import InputError
from jax_tformer.runs import restoring
from jax_tformer.runs.checkpoints import Checkpoints
from jax_tformer.runs.restoring import load_parameters
from tests.checkpoint_damages import DAMAGES, cut, data_file, flip_inside_array
from tests.checkpoint_states import ABSTRACT, assert_same_bits, make_state, snapshot


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


def test_lost_checkpoints_are_told_from_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, tmp_path / "saved.json")
    assert checkpoints.restore(ABSTRACT) is None
    for content, known in (('{"step": 7}', "step 7"), ("[" * 100_000, "one"), ("", "one")):
        (tmp_path / "saved.json").write_text(content)
        with pytest.raises(InputError, match=f"holds no checkpoint, although {known} was saved there"):
            checkpoints.restore(ABSTRACT)


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
