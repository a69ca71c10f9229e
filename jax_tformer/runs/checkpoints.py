"""Checkpoints of a training run: saved in the background, with checksums that are verified on restore.

Orbax writes and reads the arrays. It does not notice bytes that changed, lists steps that are half deleted, and deletes
old steps before anyone has looked at the new one; so this file lists, checks and deletes. In the folder:

    30/             a finished step: the arrays of each top-level key of the state in a subfolder of its own (so that
                    parameters load without the optimizer), extra.json and checksums.json
    40.pending*     a step on its way: it takes the name 40, in one rename, when it is complete and checksummed
    10.deleted      an old step on its way out: deletion begins with this rename

So a kill at any moment leaves only whole steps under plain numbers; the next save removes the rest. The best step is
found from each extra.json, which holds the held-out loss of its step, if it has one. With several processes, all must
call the same methods in the same order on a shared folder; the first one checks, lists and deletes.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from jax_tformer.config.errors import InputError
from jax_tformer.files import read_json, sync, write_json
from jax_tformer.runs import restoring
from jax_tformer.runs.restoring import CHECKSUM_FILE, EXTRA_FILE, Restored, agreed, damage, held_out_losses, numbered

_LEFTOVER = re.compile(r"[0-9]+\.(pending|deleted).*")


class _Begun(NamedTuple):
    """A save that Orbax is writing; `response.result()` waits until all is written, and raises what went wrong."""

    response: Any
    pending: Path
    step: int
    extra: str


class Checkpoints:
    """The checkpoints of one run. Making this object writes nothing; only one job at a time may save to a folder."""

    def __init__(self, folder: Path, keep: int, record: Path | None = None) -> None:
        """`folder` need not exist yet; `keep`, at least 1, is how many of the newest intact steps stay, and the best.

        `record` is a file outside the folder with the newest step's number. It tells a folder that lost its steps from
        one that never had any. Raises InputError if the folder is not writable.
        """
        self._folder = folder.absolute()
        self._keep, self._record = keep, record
        self._intact: dict[int, bool] = {}
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._begun: _Begun | None = None
        place = next(path for path in (self._folder, *self._folder.parents) if os.path.lexists(path))
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            raise InputError(
                f"checkpoints cannot be written to {folder}: {place} is not a writable folder; "
                "give a run folder that is, or change its permissions"
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes; an error from inside the block takes precedence over one from the background."""
        try:
            self.close()
        except Exception:
            if error is None:
                raise

    def save(self, step: int, state: Mapping[str, PyTree], extra: Mapping[str, Any]) -> None:
        """Calls `begin`, then `keep`."""
        self.begin(step, state, extra)
        self.keep()

    def begin(self, step: int, state: Mapping[str, PyTree], extra: Mapping[str, Any]) -> None:
        """Copies `state` off the devices and writes it in the background; `keep` makes it a finished step.

        `state` holds trees of arrays under names; it may be donated as soon as this returns. `extra` is JSON. An intact
        step is not written again. Drops a save that was not kept, waits for the previous one, and raises what `wait`
        does.
        """
        self.drop()
        self.wait()
        if agreed(lambda: self._is_saved(step)):
            return
        agreed(self._make_room)
        pending = self._folder / f"{step}.pending"
        # Orbax refuses a tree without arrays, such as an empty one: there is nothing to save in it.
        arrays = {name: tree for name, tree in state.items() if jax.tree.leaves(tree)}
        text = json.dumps(extra, indent=1)
        ocp = restoring.orbax()
        context = ocp.Context()
        context.array.saving.use_compression = False
        with context:
            response = ocp.save_checkpointables_async(pending, arrays)
        self._begun = _Begun(response, pending, step, text)

    def keep(self) -> None:
        """Finishes the step that `begin` started, if any, in the background; then deletes old steps."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._running = self._background.submit(self._finish, begun)

    def drop(self) -> None:
        """Removes a save that was begun and not kept, if any; returns when nothing is being written."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        try:
            begun.response.result()
        finally:
            _remove_unfinished(begun.pending)

    def wait(self) -> None:
        """Waits until the last save is finished and old steps are deleted.

        Raises what went wrong in the background: InputError if the disk or the folder was the cause.
        """
        running, self._running = self._running, None
        if running is not None:
            agreed(running.result)
            running.result()

    def saved_before(self) -> bool:
        """Whether a step was ever finished here, even if it is damaged or gone: such a run must not start over."""
        return bool(numbered(self._folder)) or (self._record is not None and self._record.exists())

    def steps(self) -> list[int]:
        """The finished steps on the disk, oldest first; their contents are not checked."""
        return [step for step in numbered(self._folder) if (self._folder / str(step) / CHECKSUM_FILE).is_file()]

    def best_loss(self) -> float:
        """The held-out loss of the best finished step; infinity where no step has one."""
        losses = held_out_losses(self._folder)
        return min((loss for step, loss in losses.items() if self._has_all(step)), default=math.inf)

    def restore(self, abstract_state: Mapping[str, PyTree], step: int | None = None) -> Restored | None:
        """Restores the newest intact step, or the given one; returns None if there is none at all.

        `abstract_state` has a jax.ShapeDtypeStruct for every array; those without a sharding go to the first local
        device. Raises InputError if steps exist and none is intact, if the given one is not, or if it holds other
        arrays than `abstract_state`, or if there is none and `record` says that there was; nothing is deleted then.
        """
        self.wait()
        found = restoring.restore(self._folder, abstract_state, step=step)
        if found is None and self.saved_before():
            try:
                lost = f"step {int(read_json(self._record)['step'])}" if self._record else "one"
            except (OSError, ValueError, LookupError, TypeError):
                lost = "one"
            raise InputError(
                f"{self._folder} holds no checkpoint, although {lost} was saved there; nothing was "
                "changed: put back a copy, or start again with another --run or --resume no"
            )
        if found is not None:
            self._intact[found.step] = True
            if step is None:
                self._intact |= {newer: False for newer in numbered(self._folder) if newer > found.step}
        return found

    def close(self) -> None:
        """Drops what is not kept, waits for the last save, and raises what `wait` does. Call nothing after it."""
        try:
            self.drop()
            self.wait()
        finally:
            self._background.shutdown()

    def _has_all(self, step: int) -> bool:
        """Whether a step's files exist with the right sizes; does not read their contents."""
        return damage(self._folder / str(step), sizes_only=True) is None

    def _is_saved(self, step: int) -> bool:
        if step not in self._intact:
            self._intact[step] = damage(self._folder / str(step)) is None
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
            (pending / EXTRA_FILE).write_text(begun.extra, encoding="utf-8")
            restoring.seal(pending)
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
            _remove_unfinished(pending)
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
        intact = [step for step in others if self._intact.get(step, True) and self._has_all(step)]
        losses = held_out_losses(self._folder)
        best = sorted((step for step in [saved, *intact] if step in losses), key=lambda step: (losses[step], step))
        for step in set(others) - set(intact[: self._keep - 1]) - set(best[:1]):
            self._intact[step] = False
            _delete(self._folder / str(step))


def _remove_unfinished(pending: Path) -> None:
    """Removes a failed save, to free its room on a full disk."""
    if jax.process_index() == 0:
        for path in pending.parent.glob(f"{pending.name}*"):
            shutil.rmtree(path, ignore_errors=True)


def _delete(step_folder: Path) -> None:
    # Renamed first, because a kill in the middle of the deletion would leave half a step under its number.
    doomed = step_folder.with_name(f"{step_folder.name}.deleted")
    step_folder.rename(doomed)
    shutil.rmtree(doomed)
