"""Checkpoints of a training run: saved in the background, checksummed, and never trusted without a check.

Orbax writes and reads the arrays. It does not notice bytes that changed, lists steps that are half deleted, and deletes
old steps before anyone has looked at the new one; so listing, checking and deleting are done here. In the folder:

    30/             a finished step: the arrays of each top-level key of the state in a subfolder of its own (so that
                    parameters load without the optimizer), extra.json and checksums.json
    40.pending*     a step on its way: it takes the name 40, in one rename, when it is complete and checksummed
    10.deleted      an old step on its way out: deletion begins with this rename

So a kill at any moment leaves only whole steps under plain numbers; the rest is ignored, and removed by the next save.
Which step is the best one is in no file of its own: each extra.json holds the held-out loss of its step, if it has one.
With several processes all must call the same methods in the same order, on a folder that all of them see; the first
one checks, lists and deletes.
"""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from jax_tformer.config_file import read_json, write_json
from jax_tformer.errors import InputError
from jax_tformer.paths import sync
from jax_tformer.training import checksums

HELD_OUT_LOSS = "val_loss"
"""The entry of `extra` that the best step is chosen by: the one where it is lowest."""
_EXTRA_FILE = "extra.json"
_STEP = re.compile(r"0|[1-9][0-9]*")
_LEFTOVER = re.compile(r"[0-9]+\.(pending|deleted).*")
_NO_STEP = -1
_LONGEST_REASON = 150


@dataclass(frozen=True)
class Restored:
    """What came back from a checkpoint."""

    step: int
    state: PyTree
    """The arrays, with the structure, shapes, dtypes and shardings that were asked for."""
    extra: dict[str, Any]
    """The JSON that was saved beside the arrays."""
    skipped: tuple[str, ...]
    """One line for each newer step that was passed over: which, and why. With several processes, on the first only."""


@dataclass(frozen=True)
class _Begun:
    """A save that Orbax is writing."""

    response: Any
    """Orbax's; its `result()` waits until all is written, and raises what went wrong."""
    pending: Path
    step: int
    extra: str


class Checkpoints:
    """The checkpoints of one run. Making this object writes nothing; only one job at a time may save to a folder."""

    def __init__(self, folder: Path, keep: int, record: Path | None = None) -> None:
        """`folder` need not exist yet; `keep`, at least 1, is how many of the newest intact steps stay, and the best.

        `record` is a file outside of it that says which step is the newest: with it, a folder whose steps are gone is
        told from one that never had any. Raises InputError if the folder could not be written.
        """
        self._folder = folder.absolute()
        self._keep, self._record = keep, record
        self._intact: dict[int, bool] = {}
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._begun: _Begun | None = None
        place = self._folder
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            raise InputError(
                f"checkpoints cannot be written to {folder}: {place} is not a writable folder; "
                "give a run folder that is, or change its permissions"
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes; after an error, that is what is raised, whatever else went wrong in the background."""
        try:
            self.close()
        except Exception:
            if error is None:
                raise

    def save(self, step: int, state: Mapping[str, PyTree], extra: Mapping[str, Any]) -> None:
        """`begin`, and `keep` at once."""
        self.begin(step, state, extra)
        self.keep()

    def begin(self, step: int, state: Mapping[str, PyTree], extra: Mapping[str, Any]) -> None:
        """Copies `state` off the devices, then returns; it is written behind, but no finished step before `keep`.

        `state` holds trees of arrays under names; it may be donated as soon as this returns. `extra` is JSON. A step
        that is there and intact is not written again. Drops a save that was not kept, waits for the previous one, and
        raises what `wait` does.
        """
        self.drop()
        self.wait()
        if _agreed(lambda: self._is_saved(step)):
            return
        _agreed(self._make_room)
        pending = self._folder / f"{step}.pending"
        # Orbax refuses a tree without arrays, such as an empty one: there is nothing to save in it.
        arrays = {name: tree for name, tree in state.items() if jax.tree.leaves(tree)}
        text = json.dumps(extra, indent=1)
        ocp = _orbax()
        context = ocp.Context()
        context.array.saving.use_compression = False
        with context:
            response = ocp.save_checkpointables_async(pending, arrays)
        self._begun = _Begun(response, pending, step, text)

    def keep(self) -> None:
        """Makes a finished step of what was begun, if anything was, in the background; then deletes old steps."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._running = self._background.submit(self._finish, begun)

    def drop(self) -> None:
        """Removes what was begun and not kept, if anything was; returns when nothing is being written any more."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        try:
            begun.response.result()
        finally:
            if jax.process_index() == 0:
                shutil.rmtree(begun.pending, ignore_errors=True)

    def wait(self) -> None:
        """Returns when the last save is checksummed and listed, and steps that are not to be kept are gone.

        Raises what went wrong in the background: InputError if the disk or the folder was the cause.
        """
        running, self._running = self._running, None
        if running is not None:
            _agreed(running.result)
            running.result()

    def saved_before(self) -> bool:
        """Whether a step was ever finished here, be it damaged or gone by now: such a run must not begin again."""
        return bool(_numbered(self._folder)) or (self._record is not None and self._record.exists())

    def steps(self) -> list[int]:
        """The finished steps on the disk, oldest first; their contents are not checked."""
        return [step for step in _numbered(self._folder) if checksums.is_sealed(self._folder / str(step))]

    def best_loss(self) -> float:
        """The held-out loss of the best finished step; infinity where no step has one."""
        losses = _held_out_losses(self._folder)
        whole = [step for step in losses if not checksums.damage(self._folder / str(step), sizes_only=True)]
        return min((losses[step] for step in whole), default=math.inf)

    def restore(self, abstract_state: Mapping[str, PyTree], step: int | None = None) -> Restored | None:
        """The newest step whose files are as they were written, or the given step; None if there is none at all.

        `abstract_state` has a jax.ShapeDtypeStruct for every array; those without a sharding go to the first local
        device. Raises InputError if steps exist and none is intact, if the given one is not, or if it holds other
        arrays than `abstract_state`, or if there is none and `record` says that there was; nothing is deleted then.
        """
        self.wait()
        found = _restore(self._folder, abstract_state, step=step)
        if found is None and self.saved_before():
            raise InputError(
                f"{self._folder} holds no checkpoint, although {self._newest_known()} was saved there; nothing was "
                "changed: put back a copy, or start afresh with another --run or --resume no"
            )
        if found is not None:
            self._intact[found.step] = True
            if step is None:
                self._intact |= {newer: False for newer in _numbered(self._folder) if newer > found.step}
        return found

    def close(self) -> None:
        """Drops what is not kept, waits for the last save, and raises what `wait` does; nothing can follow."""
        try:
            self.drop()
            self.wait()
        finally:
            self._background.shutdown()

    def _newest_known(self) -> str:
        assert self._record is not None
        try:
            return f"step {int(json.loads(self._record.read_text(encoding='utf-8'))['step'])}"
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return "one"

    def _is_saved(self, step: int) -> bool:
        if step not in self._intact:
            self._intact[step] = checksums.damage(self._folder / str(step)) is None
        return self._intact[step]

    def _make_room(self) -> None:
        """Makes the folder, and removes what a killed or failed save or deletion left in it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.iterdir():
                if _LEFTOVER.fullmatch(path.name):
                    shutil.rmtree(path)
        except OSError as error:
            raise InputError(f"checkpoints cannot be written to {self._folder}: {error}; mend the folder") from error

    def _finish(self, begun: _Begun) -> None:
        """Runs in the background thread: turns what Orbax has written into a finished step."""
        pending, step = begun.pending, begun.step
        try:
            begun.response.result()
            if jax.process_index() != 0:
                return
            (pending / _EXTRA_FILE).write_text(begun.extra, encoding="utf-8")
            checksums.seal(pending)
            final = self._folder / str(step)
            if final.exists():
                _delete(final)
            pending.rename(final)
            sync(self._folder)
            self._intact[step] = True
            if self._record is not None:
                write_json(self._record, {"step": step})
            self._prune(step)
        except Exception as error:
            # TensorStore reports a full disk as a ValueError that carries the system's error number in its text.
            if isinstance(error, OSError) or "os_error_code" in str(error):
                reason = " ".join(str(error).split())
                raise InputError(
                    f"the checkpoint of step {step} could not be written to {self._folder}: {reason}; "
                    "make room or mend the folder, then start again: older checkpoints are untouched"
                ) from error
            raise

    def _prune(self, saved: int) -> None:
        """Deletes the finished steps beyond `keep`, but for the best; a damaged one takes no intact one's place."""
        others = [step for step in reversed(self.steps()) if step != saved]
        intact = [
            step
            for step in others
            if self._intact.get(step, True) and not checksums.damage(self._folder / str(step), sizes_only=True)
        ]
        losses = _held_out_losses(self._folder)
        best = sorted((step for step in [saved, *intact] if step in losses), key=lambda step: (losses[step], step))
        for step in set(others) - set(intact[: self._keep - 1]) - set(best[:1]):
            self._intact[step] = False
            _delete(self._folder / str(step))


def load_parameters(folder: Path, abstract_params: PyTree, step: int | Literal["best"] | None = None) -> Restored:
    """The "params" of the newest checkpoint in which they are intact; the rest of it is neither read nor checked.

    `step`: of the given checkpoint, or of the best by held-out loss in which they are intact. `Restored.state` is the
    tree of parameters. Raises InputError if there is no checkpoint, no such one, none with intact parameters, or if
    these are not of the shapes in `abstract_params`.
    """
    found = _restore(folder.absolute(), {"params": abstract_params}, step=step, only=("params",))
    if found is None:
        raise InputError(f"there is no checkpoint in {folder}; train first, or name a run folder that holds one")
    return Restored(found.step, found.state["params"], found.extra, found.skipped)


def _restore(
    folder: Path,
    abstract: Mapping[str, PyTree],
    step: int | Literal["best"] | None = None,
    only: Collection[str] | None = None,
) -> Restored | None:
    skipped: list[str] = []
    chosen = _agreed(lambda: _first_intact(folder, step, only, skipped))
    if chosen == _NO_STEP:
        return None
    path = folder / str(chosen)
    ocp = _orbax()
    names = [part.name for part in path.iterdir() if part.is_dir() and (only is None or part.name in only)]
    try:
        extra = dict(read_json(path / _EXTRA_FILE))
        _require_same_arrays(path, {name: ocp.metadata(path, name).metadata for name in names}, abstract)
        wanted = {name: jax.tree.map(_placed, abstract[name]) for name in names}
        state = {**abstract, **ocp.load_checkpointables(path, wanted)}
    except InputError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # Its files are as they were sealed, and were not made by `save`.
        reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
        raise InputError(f"the checkpoint {path} is not one of this library ({reason}); use another copy") from error
    return Restored(chosen, state, extra, tuple(skipped))


def _first_intact(
    folder: Path, step: int | Literal["best"] | None, parts: Collection[str] | None, skipped: list[str]
) -> int:
    problems: list[str] = []
    for candidate in _candidates(folder, step):
        problem = checksums.damage(folder / str(candidate), parts)
        if problem is None:
            skipped.extend(f"skipped a damaged checkpoint in {folder}: {line}" for line in problems)
            return candidate
        problems.append(f"step {candidate}: {problem}")
    if problems:
        advice = "put back a copy of one, or start again in another run folder"
        if step is not None:
            advice = f"the steps there are {_listed(_numbered(folder))}"
        raise InputError(
            f"found only damaged checkpoints in {folder} ({'; '.join(problems)}) and deleted nothing; {advice}"
        )
    return _NO_STEP


def _candidates(folder: Path, step: int | Literal["best"] | None) -> list[int]:
    """The steps that may be taken, in the order in which they are wanted; without a `step`, the newest first."""
    present = _numbered(folder)
    if step is None:
        return present[::-1]
    if step != "best":
        if step not in present:
            raise InputError(
                f"there is no checkpoint of step {step} in {folder}; the steps there are {_listed(present)}"
            )
        return [step]
    losses = _held_out_losses(folder)
    # What cannot tell its loss might have been the best: first of all, so that it is told as damaged.
    silent = [candidate for candidate in present if checksums.damage(folder / str(candidate), parts=())]
    judged = sorted(set(losses) - set(silent), key=lambda candidate: (losses[candidate], candidate))
    if not (silent or judged):
        raise InputError(
            f"no checkpoint in {folder} has a held-out loss to be the best by; the steps there are {_listed(present)}"
        )
    return silent + judged


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _held_out_losses(folder: Path) -> dict[int, float]:
    """The held-out loss of each finished step that has one and can tell it."""
    losses = {}
    for step in _numbered(folder):
        try:
            loss = read_json(folder / str(step) / _EXTRA_FILE)[HELD_OUT_LOSS]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
        if isinstance(loss, float) and math.isfinite(loss):
            losses[step] = loss
    return losses


def _require_same_arrays(path: Path, saved: Mapping[str, PyTree], wanted: Mapping[str, PyTree]) -> None:
    saved_arrays, wanted_arrays = _described(saved), _described(wanted)
    for name in [*wanted_arrays, *saved_arrays]:
        there, here = saved_arrays.get(name, "nothing"), wanted_arrays.get(name, "nothing")
        if there != here:
            raise InputError(
                f"the checkpoint {path} has {there} at {name}, and this configuration expects {here}; "
                "use the configuration it was made with, or another run folder"
            )


def _described(tree: PyTree) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    # Without a sharding Orbax would ask for the devices that the array was saved from, which may not exist here.
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _numbered(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir())


def _delete(step_folder: Path) -> None:
    # Renamed first, because a kill in the middle of the deletion would leave half a step under its number.
    doomed = step_folder.with_name(f"{step_folder.name}.deleted")
    step_folder.rename(doomed)
    shutil.rmtree(doomed)


def _agreed(work: Callable[[], int | None]) -> int:
    """The result of `work` on the first process, for all processes; where it fails there, it fails for all."""
    if jax.process_count() == 1:
        return work() or 0
    answer, failure = 0, None
    if jax.process_index() == 0:
        try:
            answer = work() or 0
        except Exception as error:
            failure = error
    shared = multihost_utils.broadcast_one_to_all(np.array([answer, failure is not None], np.int32))
    if failure is not None:
        raise failure
    if shared[1]:
        raise InputError("the first process could not use the checkpoints; its own message says why")
    return int(shared[0])


def _orbax() -> Any:
    """Orbax, imported at first use because that takes up to half a second, and kept from writing to the terminal."""
    from orbax.checkpoint import v1

    logging.getLogger("absl").addFilter(_is_worth_showing)
    return v1


def _is_worth_showing(record: logging.LogRecord) -> bool:
    # What Orbax warns of is either raised as well or found by our own checks; whoever lowers the level sees it all.
    return "orbax" not in record.pathname or logging.getLogger("absl").isEnabledFor(logging.INFO)
