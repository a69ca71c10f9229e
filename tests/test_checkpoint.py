"""Checkpoints give back what was saved, bit for bit, and say what could not be written."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config.errors import InputError
from jax_tformer.runs import restoring
from jax_tformer.runs.checkpoints import Checkpoints
from jax_tformer.runs.restoring import load_parameters
from tests.checkpoint_states import ABSTRACT, abstract, assert_same_bits, make_state, save_all, snapshot


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


@pytest.mark.parametrize("kept", [True, False])
def test_an_error_finishes_what_is_kept_and_drops_what_is_not(tmp_path: Path, kept: bool) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.begin(1, make_state(1), {})
    if kept:
        checkpoints.keep()
    with pytest.raises(ZeroDivisionError), checkpoints:
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == (["1"] if kept else [])


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
