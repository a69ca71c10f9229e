"""Verifies finished checkpoints by their checksums and restores the newest, the best or any other.

checkpoints.py writes them and describes the folder. The checksums are CRC-32 and not a cryptographic hash: they guard
against failing disks, not forgers. CRC-32 is several times faster, which matters for gigabytes that are read twice
while a training step shares the processor.
"""

import logging
import math
import re
import sys
import zlib
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.config.errors import InputError
from jax_tformer.files import combined_hash, read_json, read_text, sync, write_json
from jax_tformer.functional import AnyTransformer, Params, transformer
from jax_tformer.lora import join_adapters, merge_lora, split_adapters
from jax_tformer.runs.folder import RunFolder
from jax_tformer.runs.startup import for_other_shapes, set_up_jax

Which = int | Literal["best"] | None
"""The number of a step, the best by held-out loss, or None for the newest."""
FROZEN = "frozen"
"""The entry of `extra` with a digest of the parameters that do not train."""
HELD_OUT_LOSS = "val_loss"
"""The entry of `extra` that is lowest for the best step."""
EXTRA_FILE = "extra.json"
CHECKSUM_FILE = "checksums.json"
_CHUNK = 1 << 22
_STEP = re.compile(r"0|[1-9][0-9]*")
_NO_STEP = -1
_LONGEST_REASON = 150


class Restored(NamedTuple):
    """A restored checkpoint: the arrays, and the JSON saved beside them.

    `skipped` has a line for each newer step that was skipped; with several processes, on the first only.
    """

    step: int
    state: PyTree
    extra: dict[str, Any]
    skipped: tuple[str, ...]


class Trained(NamedTuple):
    """A model with the parameters of the checkpoint of `step`, its tokenizer, and a line for each skipped one.

    `fingerprint` is that of the data that it was trained on; None if unknown.
    """

    net: AnyTransformer
    params: Params
    tokenizer: Tokenizer
    step: int
    skipped: tuple[str, ...]
    fingerprint: str | None = None


def load_trained(run: RunFolder, step: Which = None, *, merge: bool = True) -> Trained:
    """Loads the model from its newest intact checkpoint, from that of `step`, or from the best by held-out loss.

    Adapters are merged into the parameters that they change, unless `merge` is False.

    Raises InputError if the run has no such checkpoint, if one of its files is damaged, or if config.json or the
    tokenizer are not those that the checkpoint was made with.
    """
    config = run.read_config().model
    tokenizer = run.read_tokenizer(config.vocab_size)
    set_up_jax(config)
    net = transformer(for_other_shapes(config))
    trained, frozen = split_adapters(net.shapes)
    restored = load_parameters(run.checkpoints, trained, step)
    run.require_recorded(restored.extra, restored.step)
    params = join_adapters(restored.state, load_frozen(run, frozen, restored.extra) if frozen else {})
    net, params = merge_lora(net, params) if merge else (net, params)
    fingerprint = restored.extra.get("fingerprint")
    return Trained(net, params, tokenizer, restored.step, restored.skipped, fingerprint)


def load_frozen(run: RunFolder, abstract_params: PyTree, extra: Mapping[str, Any]) -> Params:
    """Loads the parameters that the adapters of a checkpoint (its `extra`) were trained beside.

    Raises InputError if they are missing, damaged, or not those that the checkpoint recorded.
    """
    if not numbered(run.frozen):
        raise InputError(f"{run.frozen} is missing, and holds what the adapters of the run change; put back a copy")
    recorded, there = extra.get(FROZEN), frozen_digest(run)
    if recorded != there:
        raise InputError(f"{run.frozen} is not the one that the checkpoint was made with; put back a copy of that")
    restored = restore(run.frozen.absolute(), {"params": abstract_params})
    assert restored is not None  # or it would have raised
    params: Params = restored.state["params"]
    return params


def frozen_digest(run: RunFolder) -> str | None:
    """Returns a digest of what does not train in a run with adapters; None if it is not saved, or its list is gone."""
    try:
        return combined_hash([read_text(run.frozen / "0" / CHECKSUM_FILE)])
    except InputError:
        return None


def load_parameters(folder: Path, abstract_params: PyTree, step: Which = None) -> Restored:
    """Loads "params" from the newest checkpoint in which they are intact; neither reads nor checks the rest.

    `step`: of the given checkpoint, or of the best by held-out loss in which they are intact. `Restored.state` is the
    tree of parameters. Raises InputError if there is no checkpoint, no such one, none with intact parameters, or if
    these are not of the shapes in `abstract_params`.
    """
    found = restore(folder.absolute(), {"params": abstract_params}, step=step, only=("params",))
    if found is None:
        raise InputError(f"there is no checkpoint in {folder}; train first, or name a run folder that holds one")
    return found._replace(state=found.state["params"])


def restore(
    folder: Path, abstract: Mapping[str, PyTree], step: Which = None, only: Collection[str] | None = None
) -> Restored | None:
    """Restores the newest intact step, the given one, or the best; returns None if there is none at all.

    `only`: these top-level keys of the state; the others are neither read nor checked. Raises InputError if steps exist
    and none is intact, if the given one is not, or if it holds other arrays than `abstract`.
    """
    skipped: list[str] = []
    chosen = agreed(lambda: _first_intact(folder, step, only, skipped))
    if chosen == _NO_STEP:
        return None
    path = folder / str(chosen)
    ocp = orbax()
    names = [part.name for part in path.iterdir() if part.is_dir() and (only is None or part.name in only)]
    try:
        extra = dict(read_json(path / EXTRA_FILE))
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


def _first_intact(folder: Path, step: Which, parts: Collection[str] | None, skipped: list[str]) -> int:
    problems = list[str]()
    for candidate in _candidates(folder, step):
        problem = damage(folder / str(candidate), parts)
        if problem is None:
            skipped.extend(f"skipped a damaged checkpoint in {folder}: {line}" for line in problems)
            return candidate
        problems.append(f"step {candidate}: {problem}")
    if not problems:
        return _NO_STEP
    others = f"the steps there are {_listed(numbered(folder))}"
    advice = "put back a copy of one, or start again in another run folder" if step is None else others
    found = f"found only damaged checkpoints in {folder} ({'; '.join(problems)})"
    raise InputError(f"{found} and deleted nothing; {advice}")


def _candidates(folder: Path, step: Which) -> list[int]:
    """The steps to try, in order; the newest first unless `step` says otherwise."""
    present = numbered(folder)
    if step is None:
        return present[::-1]
    if step in present:
        return [step]
    if step != "best":
        raise InputError(f"there is no checkpoint of step {step} in {folder}; the steps there are {_listed(present)}")
    losses = held_out_losses(folder)
    # A step whose loss is unreadable might be the best: it comes first, so that it is reported as damaged.
    silent = [candidate for candidate in present if damage(folder / str(candidate), parts=())]
    judged = sorted(set(losses) - set(silent), key=lambda candidate: (losses[candidate], candidate))
    if not (silent or judged):
        raise InputError(
            f"no checkpoint in {folder} has a held-out loss to be the best by; the steps there are {_listed(present)}"
        )
    return silent + judged


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def held_out_losses(folder: Path) -> dict[int, float]:
    """The held-out loss of each finished step that has a readable one."""
    losses = {}
    for step in numbered(folder):
        try:
            loss = read_json(folder / str(step) / EXTRA_FILE)[HELD_OUT_LOSS]
        except (OSError, ValueError, LookupError, TypeError):
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


def numbered(folder: Path) -> list[int]:
    """The steps that have a folder, whatever is in it, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir())


def agreed(work: Callable[[], int | None]) -> int:
    """The result of `work` on the first process, for all processes; where it fails there, it fails for all."""
    if jax.process_count() == 1:
        return work() or 0
    answer, failure = 0, None
    try:
        answer = (work() or 0) if jax.process_index() == 0 else 0
    except Exception as error:
        failure = error
    shared = multihost_utils.broadcast_one_to_all(np.array([answer, failure is not None], np.int32))
    if failure is not None:
        raise failure
    if shared[1]:
        raise InputError("the first process could not use the checkpoints; its own message says why")
    return int(shared[0])


@cache
def orbax() -> Any:
    """Orbax, imported at first use because that takes up to half a second, and kept from writing to the terminal."""
    from orbax.checkpoint import v1

    logging.getLogger("absl").addFilter(_is_worth_showing)
    # After a failed save, TensorStore's threads report to an event loop that is closed, each with its own traceback.
    sys.unraisablehook = partial(_show_unless_closed, sys.unraisablehook)
    return v1


def _show_unless_closed(show: Callable[[Any], object], what: Any) -> None:
    if str(what.exc_value) != "Event loop is closed":
        show(what)


def _is_worth_showing(record: logging.LogRecord) -> bool:
    # What Orbax warns of is either raised as well or found by our own checks; whoever lowers the level sees it all.
    return "orbax" not in record.pathname or logging.getLogger("absl").isEnabledFor(logging.INFO)


def seal(folder: Path) -> None:
    """Lists every file below `folder`, with its size in bytes and its CRC-32, in `folder`/checksums.json.

    Returns once all of it is on the disk. Raises OSError if a file cannot be read or the list cannot be written.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        sync(path)
        if path.is_file() and path.name != CHECKSUM_FILE:
            size = path.stat().st_size
            files[path.relative_to(folder).as_posix()] = {"bytes": size, "crc32": f"{_crc32(path):08x}"}
    write_json(folder / CHECKSUM_FILE, {"files": files})


def damage(folder: Path, parts: Collection[str] | None = None, sizes_only: bool = False) -> str | None:
    """The first damage found in a sealed folder, in a few words; None if it is intact.

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
