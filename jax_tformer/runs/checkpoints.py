"""Checkpoints: trees of arrays under the numbers of steps, saved in the background and verified on restore.

The life of one: the loop of `jax_tformer.runs.session` calls `Session.save` there, which says what is in it, and
`begin` writes it. It counts once `Reporter` (`jax_tformer.runs.metrics`) knows the next step to be finite: then `keep`
gives it its checksums and its number, and deletes those that are neither new nor best. `restore` verifies it: for a
training that goes on in `Session.restore`, for all else in `load_trained` (`jax_tformer.runs.folder`).

Orbax writes and reads the arrays. It does not notice bytes that changed, lists steps that are half deleted, and deletes
old steps before anyone has looked at the new one; so this file lists, checks and deletes. In the folder:

    30/             a finished step: the arrays of each top-level key of the state in a subfolder of its own (so that
                    parameters load without the optimizer), extra.json and checksums.json
    40.pending*     a step on its way: it takes the name 40, in one rename, when it is complete and checksummed
    10.deleted      an old step on its way out: deletion begins with this rename

So a kill at any moment leaves only whole steps under plain numbers; the next save removes the rest. The best step is
found from each extra.json, which holds the held-out loss of its step, if it has one.

The checksums are CRC-32 and not a cryptographic hash: they guard against failing disks, not forgers. CRC-32 is several
times faster, which matters for gigabytes that are read twice while a training step shares the processor.

With several processes, all must call the same methods in the same order on a shared folder. All write their arrays; the
first one alone does the rest, and decides for all (`ask_first`).
"""

import contextlib
import json
import logging
import math
import re
import shutil
import sys
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jax_tformer.config.errors import WHY, InputError, explained, reason_of, require
from jax_tformer.files import Json, changed_fields, read_json, require_writable, sync, value_in, write_json
from jax_tformer.model.parameters import accumulator
from jax_tformer.training.processes import active, ask_first, is_first

Which = int | str | None
"""The number of a step; "best" by held-out loss; "average", which the newest may have; "last-N", the mean of the
parameters of the newest N; or None, the newest."""
Trees = Mapping[str, PyTree]
"""Trees of arrays under names."""
HELD_OUT_LOSS = "val_loss"
"""The entry of `extra` that is lowest for the best step."""
CHECKSUM_FILE = "checksums.json"
_EXTRA_FILE = "extra.json"
_STEP = re.compile(r"0|[1-9][0-9]*")
_LEFTOVER = re.compile(r"[0-9]+\.(pending|deleted).*")
_CHUNK = 1 << 22
_LONGEST_REASON = 150


class Restored(NamedTuple):
    """A restored checkpoint: the arrays, and the JSON saved beside them.

    `skipped` has a line for each newer step that was skipped; with several processes, on the first only.
    """

    step: int
    state: PyTree
    extra: Json
    skipped: tuple[str, ...]


class _Begun(NamedTuple):
    """A save that Orbax is writing; `response.result()` waits until all is written, and raises what went wrong."""

    response: Any
    pending: Path
    step: int
    extra: str


@dataclass
class Checkpoints:
    """The checkpoints in one folder. Making this object writes nothing; only one job at a time may save to a folder.

    Raises InputError if the folder is not writable.
    """

    folder: Path
    """It need not exist yet."""
    keep_newest: int
    """How many of the newest intact steps stay, at least 1, beside the best."""
    record: Path | None = None
    """A file outside the folder with the newest step's number. It tells a folder that lost its steps from one that
    never had any."""

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        self._damaged: set[int] = set()
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._begun: _Begun | None = None
        require_writable(self.folder)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Closes; an error from inside the block takes precedence over one from the background.

        After an error it asks no other process: none answers that waits elsewhere for this one.
        """
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):
            self.drop()
        self._background.shutdown()

    def save(self, step: int, state: Trees, extra: Json) -> None:
        """Calls `begin`, then `keep`."""
        self.begin(step, state, extra)
        self.keep()

    def begin(self, step: int, state: Trees, extra: Json) -> None:
        """Copies `state` off the devices and writes it in the background; `keep` makes it a finished step.

        `state` holds trees of arrays under names; it may be donated as soon as this returns. `extra` is JSON. An intact
        step is not written again. Drops a save that was not kept, waits for the previous one, and raises what `wait`
        does.
        """
        self.drop()
        self.wait()
        if ask_first(lambda: find_damage(self.folder / str(step)) is None):
            return
        ask_first(self._make_room)
        pending = self.folder / f"{step}.pending"
        # Orbax refuses a tree without arrays, such as an empty one: there is nothing to save in it.
        arrays = {name: tree for name, tree in state.items() if jax.tree.leaves(tree)}
        ocp = orbax()
        context = ocp.Context()
        context.array.saving.use_compression = False
        with context:
            response = ocp.save_checkpointables_async(pending, arrays)
        self._begun = _Begun(response, pending, step, json.dumps(extra, indent=1))

    def keep(self, before: float = math.inf) -> None:
        """Finishes what `begin` started, if its step is below `before`, in the background; then deletes old steps."""
        begun = self._begun
        if begun is not None and begun.step < before:
            self._begun = None
            self._running = self._background.submit(self._finish, begun)

    def drop(self) -> None:
        """Removes a save that was begun and not kept, if any; returns when nothing is being written."""
        begun = self._begun
        self._begun = None
        if begun is not None:
            try:
                begun.response.result()
            finally:
                _remove_unfinished(begun.pending)

    def wait(self) -> None:
        """Waits until the last save is finished and old steps are deleted.

        Raises what went wrong in the background: InputError if the disk or the folder was the cause.
        """
        running = self._running
        self._running = None
        if running is not None:
            # First its own: another process, which waits for this one to have written, would wait in vain.
            running.result()
            ask_first(running.result)

    def close(self) -> None:
        """Drops what is not kept, waits for the last save, and raises what `wait` does. Call nothing after it."""
        try:
            self.drop()
            self.wait()
        finally:
            self._background.shutdown()

    def saved_before(self) -> bool:
        """Whether a step was ever finished here, even if it is damaged or gone: such a run must not start over."""
        return bool(list_steps(self.folder)) or (self.record is not None and self.record.exists())

    def steps(self) -> list[int]:
        """The finished steps on the disk, oldest first; their contents are not checked."""
        return [step for step in list_steps(self.folder) if (self.folder / str(step) / CHECKSUM_FILE).is_file()]

    def best_loss(self) -> float:
        """The held-out loss of the best finished step; infinity where no step has one."""
        # All processes save a better state, or none.
        return ask_first(lambda: min(self._losses(list_steps(self.folder)).values(), default=math.inf))

    def restore(self, abstract: Trees) -> Restored | None:
        """Restores the newest intact step, as the function `restore` does.

        Raises InputError, too, if there is no step and `record` says that there was.
        """
        self.wait()
        found = restore(self.folder, abstract)
        if found is None and self.saved_before():
            step = value_in(self.record, "step") if self.record else None
            raise InputError(
                f"{self.folder} holds no checkpoint, although {'one' if step is None else f'step {step}'} was saved "
                "there; nothing was "
                "changed: put back a copy, or start again with another --run or --resume no"
            )
        if found is not None:
            self._damaged |= {newer for newer in list_steps(self.folder) if newer > found.step}
        return found

    def _losses(self, steps: list[int]) -> dict[int, float]:
        """The held-out losses of those `steps` that have one, and whose files exist with the right sizes."""
        losses = {step: _held_out_loss(self.folder / str(step)) for step in steps if self._has_all(step)}
        return {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}

    def _has_all(self, step: int) -> bool:
        """Whether a step's files exist with the right sizes; does not read their contents."""
        return find_damage(self.folder / str(step), sizes_only=True) is None

    def _make_room(self) -> None:
        """Makes the folder, and removes what a killed or failed save or deletion left in it."""
        with explained(f"checkpoints cannot be written to {self.folder}: {WHY}; mend the folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.iterdir():
                if _LEFTOVER.fullmatch(path.name):
                    shutil.rmtree(path)

    def _finish(self, begun: _Begun) -> None:
        """Runs in the background thread: turns what Orbax has written into a finished step."""
        response, pending, step, extra = begun
        try:
            response.result()
            if not is_first():
                return
            (pending / _EXTRA_FILE).write_text(extra, encoding="utf-8")
            write_checksums(pending)
            final = self.folder / str(step)
            if final.exists():
                _delete(final)
            pending.rename(final)
            sync(self.folder)
            self._damaged.discard(step)
            if self.record is not None:
                write_json(self.record, {"step": step})
            self._prune(step)
        except Exception as error:
            _remove_unfinished(pending)
            # TensorStore reports a full disk as a ValueError that carries the system's error number in its text.
            if isinstance(error, OSError) or "os_error_code" in str(error):
                raise InputError(
                    f"the checkpoint of step {step} could not be written to {self.folder}: {reason_of(error)}; "
                    "make room or mend the folder, then start again: older checkpoints are untouched"
                ) from error
            raise

    def _prune(self, saved: int) -> None:
        """Deletes the finished steps beyond `keep`, but for the best; a damaged one takes no intact one's place."""
        others = [step for step in reversed(self.steps()) if step != saved]
        intact = [step for step in others if step not in self._damaged and self._has_all(step)]
        losses = self._losses([saved, *intact])
        best = min(losses, key=lambda step: (losses[step], step), default=saved)
        for step in set(others) - set(intact[: self.keep_newest - 1]) - {best}:
            _delete(self.folder / str(step))


def _remove_unfinished(pending: Path) -> None:
    """Removes a failed save, to free its room on a full disk."""
    if is_first():
        for path in pending.parent.glob(f"{pending.name}*"):
            shutil.rmtree(path, ignore_errors=True)


def _delete(step_folder: Path) -> None:
    # Renamed first, because a kill in the middle of the deletion would leave half a step under its number.
    doomed = step_folder.with_name(f"{step_folder.name}.deleted")
    step_folder.rename(doomed)
    shutil.rmtree(doomed)


def list_steps(folder: Path) -> list[int]:
    """Lists the steps that have a folder, whatever is in it, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir())


def load_parameters(folder: Path, abstract: PyTree, step: Which = None) -> Restored:
    """Loads "params" from the newest checkpoint in which they are intact; neither reads nor checks the rest.

    `step`: of which checkpoint, or which average of them, where those are intact that it needs. `Restored.state` is the
    tree of parameters. Raises InputError if there is no checkpoint, no such one, none with intact parameters, or if
    these are not of the shapes in `abstract`.
    """
    if str(step).startswith("last-"):
        count = int(str(step).removeprefix("last-"))
        steps = ask_first(lambda: list_steps(folder))
        require(
            len(steps) >= count,
            f"{step} is the mean of {count} checkpoints, and {folder} has {len(steps)}; expected as many: a run "
            f"with --training.keep-checkpoints {count} keeps them",
        )
        total: PyTree = None
        for each in steps[-count:]:
            found = load_parameters(folder, abstract, each)
            # In at least float32.
            wide = jax.tree.map(lambda p: p.astype(accumulator(p.dtype)), found.state)
            total = wide if total is None else jax.tree.map(jnp.add, total, wide)
        told = f"the mean of the checkpoints of steps {', '.join(map(str, steps[-count:]))}"
        mean = jax.tree.map(lambda x, p: (x / count).astype(p.dtype), total, abstract)
        return found._replace(state=mean, skipped=(told,))
    name = "average" if step == "average" else "params"
    wide = jax.tree.map(lambda leaf: leaf.update(dtype=accumulator(leaf.dtype)), abstract)
    loaded = restore(folder, {name: wide if name == "average" else abstract}, None if step == "average" else step)
    if loaded is None:
        raise InputError(f"there is no checkpoint in {folder}; train first, or name a run folder that holds one")
    return loaded._replace(state=jax.tree.map(lambda x, p: x.astype(p.dtype), loaded.state[name], abstract))


def restore(folder: Path, abstract: Trees, step: Which = None) -> Restored | None:
    """Restores the newest intact step, the given one, or the best; returns None if there is none at all.

    `abstract` has a jax.ShapeDtypeStruct for every array; those without a sharding go to the first local device. Other
    top-level keys of the state than it has are neither read nor checked. Raises InputError if steps exist
    and none is intact, if the given one is not, or if it holds other arrays than `abstract`; nothing is deleted then.
    """
    folder = folder.absolute()
    skipped = list[str]()
    number = ask_first(lambda: _find_intact(folder, step, abstract, skipped))
    if number is None:
        return None
    path = folder / str(number)
    ocp = orbax()
    names = [name for name in abstract if (path / name).is_dir()]
    try:
        extra = dict(read_json(path / _EXTRA_FILE))
        there, here = (
            {
                jax.tree_util.keystr(place, simple=True, separator="."): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
                for place, leaf in jax.tree_util.tree_leaves_with_path(tree)
            }
            for tree in ({name: ocp.metadata(path, name).metadata for name in names}, abstract)
        )
        for name, (saved, expected) in changed_fields(there, here).items():
            raise InputError(
                f"the checkpoint {path} has {saved or 'nothing'} at {name}, and this configuration expects "
                f"{expected or 'nothing'}; use the configuration it was made with, or another run folder"
            )
        # Without a sharding Orbax would ask for the devices that the array was saved from, which may not exist here.
        local = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        parts = {name: abstract[name] for name in names}
        wanted = jax.tree.map(lambda leaf: leaf.update(sharding=leaf.sharding or local), parts)
        working = ocp.options.MultiprocessingOptions(active_processes=active())
        with ocp.Context(multiprocessing_options=working):
            state = {**abstract, **ocp.load_checkpointables(path, wanted)}
    except InputError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # Its files are as their checksums say, and were not made by `save`.
        raise InputError(
            f"the checkpoint {path} is not one of this library ({reason_of(error)[:_LONGEST_REASON]}); use another copy"
        ) from error
    return Restored(number, state, extra, tuple(skipped))


def _find_intact(folder: Path, wanted: Which, parts: Collection[str], skipped: list[str]) -> int | None:
    """Returns the first intact step of those to try, or None; adds to `skipped` a line for each before it."""
    steps = list_steps(folder)
    listed = f"the steps there are {', '.join(map(str, steps)) or 'none'}"
    candidates = steps[::-1]
    problems = list[str]()
    if wanted == "best":
        losses = {step: _held_out_loss(folder / str(step)) for step in steps}
        candidates = [step for _, step in sorted((loss, step) for step, loss in losses.items() if loss is not None)]
        require(candidates, f"no checkpoint in {folder} has a held-out loss to be the best by; {listed}")
    elif isinstance(wanted, int):
        candidates = [wanted]
        require(wanted in steps, f"there is no checkpoint of step {wanted} in {folder}; {listed}")
    for step in candidates:
        problem = find_damage(folder / str(step), parts)
        if problem is None:
            skipped += [f"skipped a damaged checkpoint in {folder}: {line}" for line in problems]
            return step
        problems.append(f"step {step}: {problem}")
    if not problems:
        return None
    advice = "put back a copy of one, or start again in another run folder" if wanted is None else listed
    found = f"found only damaged checkpoints in {folder} ({'; '.join(problems)})"
    raise InputError(f"{found} and deleted nothing; {advice}")


def _held_out_loss(step_folder: Path) -> float | None:
    """Returns the held-out loss of a finished step; None if it has none, minus infinity if it cannot be read.

    A step whose loss is unreadable might be the best, and is then reported as damaged.
    """
    try:
        loss = read_json(step_folder / _EXTRA_FILE).get(HELD_OUT_LOSS)
    except (OSError, ValueError, AttributeError):
        return -math.inf
    return loss if isinstance(loss, float) else None


@cache
def orbax() -> Any:
    """Orbax, imported at first use because that takes up to half a second, and kept from writing to the terminal."""
    from orbax.checkpoint import v1

    def is_worth_showing(record: logging.LogRecord) -> bool:
        # What Orbax warns of is either raised as well or found by our own checks; whoever lowers the level sees it all.
        return "orbax" not in record.pathname or logging.getLogger("absl").isEnabledFor(logging.INFO)

    def show_unless_closed(what: Any) -> None:
        if str(what.exc_value) != "Event loop is closed":
            show(what)

    logging.getLogger("absl").addFilter(is_worth_showing)
    # After a failed save, TensorStore's threads report to an event loop that is closed, each with its own traceback.
    show = sys.unraisablehook
    sys.unraisablehook = show_unless_closed
    return v1


def write_checksums(folder: Path) -> None:
    """Lists every file below `folder`, with its size in bytes and its CRC-32, in `folder`/checksums.json.

    Returns once all of it is on the disk. Raises OSError if a file cannot be read or the list cannot be written.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        sync(path)
        if path.is_file() and path.name != CHECKSUM_FILE:
            name = path.relative_to(folder).as_posix()
            files[name] = {"bytes": path.stat().st_size, "crc32": f"{_crc32(path):08x}"}
    write_json(folder / CHECKSUM_FILE, {"files": files})


def find_damage(folder: Path, parts: Collection[str] | None = None, sizes_only: bool = False) -> str | None:
    """Describes the first damage found in a folder with checksums in a few words; None if it is intact.

    `parts` limits the check to these subfolders and to the files at the top; `sizes_only` leaves out reading the files.
    Ignores files that were added since. Never raises for what it finds on the disk.
    """
    if not (folder / CHECKSUM_FILE).exists():
        return f"it has no {CHECKSUM_FILE}"
    try:
        listed = read_json(folder / CHECKSUM_FILE)["files"]
        expected = {str(name): (int(entry["bytes"]), int(entry["crc32"], 16)) for name, entry in listed.items()}
        # Also what is not listed: whoever reads the arrays may open it.
        for path in folder.rglob("*"):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                return f"{path.relative_to(folder)} is no regular file"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"its {CHECKSUM_FILE} is damaged"
    for name, (size, checksum) in expected.items():
        if "\0" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return f"its {CHECKSUM_FILE} names {name!r}, which is not in the folder"
        if parts is not None and "/" in name and name.split("/")[0] not in parts:
            continue
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if not sizes_only and _crc32(path) != checksum:
                return f"{name} has changed since it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:
            return f"{name} cannot be read ({getattr(error, 'strerror', error)})"
    return None


def _crc32(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
