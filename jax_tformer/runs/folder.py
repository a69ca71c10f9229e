"""The folder of a run: its files by name, what they must have in common, and the trained model in it, which is loaded
or written as a folder of Hugging Face.

Only data is loaded from it: JSON, text, Orbax arrays. Importing this is cheap: programs ask it before they import JAX.
"""

import fcntl
import hashlib
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import WHY, InputError, explained, require
from jax_tformer.config.experiment import ExperimentConfig, MaskedTextData, MeshConfig, PairData, TextData
from jax_tformer.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer, tokenizer_digests
from jax_tformer.decoding.texts import framing_of
from jax_tformer.files import (
    Json,
    changed_fields,
    combined_hash,
    differences,
    from_dict,
    list_files,
    named_errors,
    not_regular,
    parse_json,
    read_json,
    read_text,
    require_writable,
    user_path,
    value_in,
    write_json,
)

if TYPE_CHECKING:
    from jax_tformer.functional import AnyTransformer, Params
    from jax_tformer.hub.pretrained import StoredDtype
    from jax_tformer.runs.checkpoints import Which

_SEEN_WITHIN = 90
"""Seconds after which a file that one machine has made is seen by all: NFS keeps what was not there for up to 60."""
_BEFORE_CONFIG = re.compile(r"lock|origin|tokenizer(_config)?\.json(\.partial)?|config\.json\.partial")
"""Files that a job killed at its start may have left; a new job overwrites them."""


class RunFolder:
    """The files of one run, by name. Making this object writes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        """The complete experiment, which decides all results of the run."""
        self.checkpoints = path / "checkpoints"
        """Parameters, optimizer state and position in the data, by step."""
        self.frozen = path / "frozen"
        """The parameters that do not train, saved once beside the checkpoints of a run with adapters."""
        self.saved = path / "saved.json"
        """The step of the newest checkpoint, which tells a run that lost its checkpoints from a new one."""
        self.metrics = path / "metrics.jsonl"
        """One JSON object per line: training steps and evaluations."""
        self.tensorboard = path / "tensorboard"
        """Event files of TensorBoard."""
        self.sessions = path / "sessions.jsonl"
        """One JSON object per line: when each session of the run began, at which step, and what it changed."""
        self.picture = path / "loss.png"
        """The loss curves."""
        self.samples = path / "samples.txt"
        """Samples of the finished model."""
        self.summary = path / "summary.json"
        """The figures of the finished run."""
        self.origin = path / "origin"
        """What the Hugging Face folder said that the run began with: its config, generation settings, tokenizer."""
        self._lock: IO[str] | None = None

    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.exists()

    def holds_checkpoint(self) -> bool:
        """Whether the folder is a Hugging Face model's."""
        return any(value_in(self.config, name) is not None for name in ("model_type", "architectures"))

    def check(self) -> None:
        """Raises InputError if the folder is a file, holds something else, or is not writable."""
        require(
            not self.path.exists() or self.path.is_dir(),
            f"{self.path} is a file; expected a folder: choose another --run",
        )
        require_writable(self.path)
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        begun = "lock" in names and all(map(_BEFORE_CONFIG.fullmatch, names))
        require(
            not names or self.holds_run() or begun,
            f"{self.path} holds files but no run (no config.json); choose an empty or new folder",
        )
        # All of it may be written to or deleted, and a stranger's link may point to anything of the user's; a pipe
        # would block.
        for path in self.path.rglob("*"):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                kind = "is a link" if path.is_symlink() else not_regular(path)
                raise InputError(f"{path} {kind}; expected a file or a folder; remove it, or choose another --run")
        self._refuse_checkpoint()

    def read_config(self, expected: str = "a folder that train.py has written") -> ExperimentConfig:
        """Reads the experiment of the run; raises InputError if config.json is missing or damaged.

        `expected` is what the caller takes, for the message where there is no run.
        """
        if not self.path.is_dir():
            found = f"{self.path} is a file, not a run" if self.path.exists() else f"there is no run in {self.path}"
            raise InputError(f"{found}; expected {expected}")
        if not self.holds_run():
            raise InputError(f"{self.path} holds no run (no {self.config.name}); {self._where_runs_are(expected)}")
        self._refuse_checkpoint()
        return from_dict(ExperimentConfig, read_json(self.config), where=str(self.config))

    def _refuse_checkpoint(self) -> None:
        require(
            not self.holds_checkpoint(),
            f"{self.path} holds a Hugging Face model ({value_in(self.config, 'model_type')}), not a run; expected a "
            "folder that train.py has written; generate.py opens it as it is, and train.py --init trains it",
        )

    def _where_runs_are(self, expected: str) -> str:
        """Suggests the run that this folder is part of, or the runs in it."""
        here = self.path.absolute()
        near = [folder for folder in here.parents[:2] if (folder / self.config.name).is_file()]
        near = near[:1] or sorted(file.parent for file in here.glob(f"*/{self.config.name}"))
        if not near:
            return f"expected {expected}"
        names = [min(str(folder), os.path.relpath(folder), key=len) for folder in near]
        return f"did you mean {' or '.join(names[:3])}{' or another one in it' if len(names) > 3 else ''}?"

    def read_tokenizer(self, vocab_size: int | None) -> Tokenizer:
        """Reads the run's tokenizer; raises InputError if it is missing, damaged or does not fit the `vocab_size`."""
        tokenizer = load_tokenizer(self.path)
        roles = self.path / "tokenizer_config.json"
        require(roles.exists(), f"{roles} is missing; restore it, or start a new run")
        if vocab_size is None:
            raise InputError(f"{self.config} has no model.vocab_size; expected that of the run's tokenizer")
        check_vocabulary(tokenizer, vocab_size)
        return tokenizer

    def began_as(self) -> str | None:
        """Returns the name of the experiment that the run began as; None if unknown."""
        try:
            name = parse_json(read_text(self.sessions).partition("\n")[0])["experiment"]
        except (ValueError, LookupError, TypeError):
            return None
        return name if isinstance(name, str) else None

    def require_recorded(self, extra: Json, step: int) -> None:
        """Raises InputError, naming what differs, if the model or the tokenizer here are not those that the checkpoint
        of `step` recorded in `extra`. Old checkpoints did not record all of it.

        How it is computed may differ, and so may all that concerns training.
        """
        made = f"that the checkpoint of step {step} was made with"
        recorded = extra.get("config")
        if isinstance(recorded, dict):
            then = from_dict(TransformerConfig, recorded.get("model"), where=f"the config {made}")
            now = replace(self.read_config().model, compute=then.compute)
            changed = differences({"model": then}, {"model": now})
            require(not changed, f"{self.config} is not the config {made} ({'; '.join(changed)}); put it back")
        places = {"tokenizer": self.path, "origin": self.origin, "frozen": self.frozen}
        digests = self.digests()
        for kind, place in places.items():
            recorded = extra.get(kind)
            known = self.frozen.exists() if kind == "frozen" else recorded is not None
            for name in changed_fields(recorded, digests.get(kind)) if known else ():
                away = ", or take it away" if kind == "origin" else ""
                raise InputError(f"{place / name} is not the one {made}; put it back{away}")

    def digests(self) -> Json:
        """Returns digests of the files of "tokenizer" and of "origin", by their names, and of what does not train in a
        run with adapters, "frozen"; a checkpoint records them."""
        found: Json = {"tokenizer": tokenizer_digests(self.path), "origin": {}}
        if self.origin.exists():
            from jax_tformer.hub.folder import read_origin

            origin = read_origin(self.origin)
            said = {**origin.files, "config.json": json.dumps(origin.config, sort_keys=True).encode()}
            found["origin"] = {name: hashlib.sha256(content).hexdigest() for name, content in said.items()}
        with suppress(InputError):
            found["frozen"] = combined_hash([read_text(self.frozen / "0" / "checksums.json")])
        return found

    def load_frozen(self, abstract: "Params") -> "Params":
        """Loads the parameters that the adapters of a checkpoint were trained beside, if there are any.

        Raises InputError if they are missing or damaged; `require_recorded` knows whether they are others.
        """
        if not abstract:
            return {}
        from jax_tformer.runs.checkpoints import list_steps, load_parameters

        require(
            list_steps(self.frozen),
            f"{self.frozen} is missing, and holds what the adapters of the run change; put back a copy",
        )
        return load_parameters(self.frozen, abstract).state

    def record_session(self, experiment: ExperimentConfig, *, name: str | None, **told: Any) -> None:
        """Adds a line with `name` and `told` to sessions.jsonl, then updates config.json.

        In this order, no value that config.json ever had is lost.
        """
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds"), "experiment": name, **told})
        with named_errors(self.sessions), open(self.sessions, "a", encoding="utf-8") as stream:
            stream.write(line + "\n")
        write_json(self.config, asdict(experiment))

    def create(self, experiment: ExperimentConfig, tokenizer: Tokenizer) -> None:
        """Makes the folder and writes the tokenizer, what the run begins with and, last, config.json, which makes it
        a run."""
        with explained(f"cannot write to {self.path}: {WHY}; choose another --run"):
            self.path.mkdir(parents=True, exist_ok=True)
            tokenizer.save(self.path)
            if experiment.init is not None:
                # Imported here because only such runs need it.
                from jax_tformer.hub.folder import read_origin, write_origin

                self.origin.mkdir(exist_ok=True)
                write_origin(self.origin, read_origin(user_path(experiment.init)))
            write_json(self.config, asdict(experiment))

    def require_begun(self) -> None:
        """Raises InputError unless this process sees the run that the first process has created."""
        deadline = time.monotonic() + _SEEN_WITHIN
        while not self.holds_run():
            require(
                time.monotonic() <= deadline,
                f"{self.path} is not the folder in which the first process has begun the run; give --run a folder "
                "that all processes see",
            )
            time.sleep(1)

    def lock(self) -> None:
        """Makes the folder and locks it against other jobs until `unlock` or the end of this process.

        Raises InputError if another job holds the lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        # Opened to write, without which file systems of a network lock nothing.
        self._lock = open(self.path / "lock", "w")  # noqa: SIM115 (open for as long as it is held)
        with explained(f"another job is training in {self.path}; stop it first, or give a new --run"):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self) -> None:
        """Releases the folder."""
        if self._lock is not None:
            self._lock.close()

    def take(self, resume: bool, before: ExperimentConfig | None) -> Path | None:
        """Locks the folder for the run `before`, or for a new one; without `resume`, first moves an old run aside.

        Returns the old run's new path. Raises InputError if another job holds the lock or has begun a run meanwhile.
        """
        moved = self._move_aside() if self.holds_run() and not resume else None
        require(
            not self.holds_run() or before is not None,
            f"another job has begun a run in {self.path} meanwhile; the same command continues it",
        )
        self.lock()
        return moved

    def _move_aside(self) -> Path:
        """Renames the folder to the first free PATH.1, PATH.2 ...; returns the new path."""
        self.lock()
        number = 1
        path = self.path.absolute()
        while (aside := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        try:
            with explained(f"cannot move {path} to {aside.name}: {WHY}; give a new --run instead of --resume no"):
                path.rename(aside)
        finally:
            self.unlock()
        return aside


class Trained(NamedTuple):
    """A model with the parameters of the checkpoint of `step`, and its tokenizer.

    `notes` are for the user: a line for each checkpoint that was skipped, or of which a mean was taken. `fingerprint`
    is that of the data that it was trained on; None if unknown.
    """

    net: "AnyTransformer"
    params: "Params"
    tokenizer: Tokenizer
    step: int
    notes: tuple[str, ...]
    fingerprint: str | None = None


def parse_checkpoint(asked: str) -> "Which":
    """Parses the value of --checkpoint for `load_trained`; raises InputError if it is not valid."""
    require(
        re.fullmatch("newest|best|average|last-[1-9][0-9]{0,17}|[0-9]{1,18}", asked) is not None,
        f"--checkpoint is {asked!r}; expected newest, best, average, last-N, or the number of a step",
    )
    return int(asked) if asked.isdecimal() else None if asked == "newest" else asked


def load_trained(
    run: RunFolder, step: "Which" = None, *, merge: bool = True, devices: MeshConfig | None = None
) -> Trained:
    """Loads the model from its newest intact checkpoint, or from the one, or the average, that `step` says.

    Adapters are merged into the parameters that they change, unless `merge` is False. Parameters are spread over the
    mesh that `devices` describes; None: one device has all.

    Raises InputError if the run has no such checkpoint, if one of its files is damaged, or if config.json or the
    tokenizer are not those that the checkpoint was made with.
    """
    from jax_tformer.functional import transformer
    from jax_tformer.lora import join_adapters, merge_lora, split_adapters
    from jax_tformer.runs.checkpoints import load_parameters
    from jax_tformer.startup import set_up_jax
    from jax_tformer.training.sharding import make_mesh, on_mesh

    experiment = run.read_config()
    config = experiment.model
    require(
        step != "average" or experiment.training.average,
        f"{run.path} has no average of weights: it was trained without --training.average",
    )
    tokenizer = run.read_tokenizer(config.vocab_size)
    set_up_jax(config)
    net = transformer(config.for_other_shapes())
    mesh = None if devices is None else make_mesh(devices)
    trained, frozen = split_adapters(on_mesh(mesh, net.shapes))
    restored = load_parameters(run.checkpoints, trained, step)
    run.require_recorded(restored.extra, restored.step)
    params = join_adapters(restored.state, run.load_frozen(frozen))
    net, params = merge_lora(net, params) if merge else (net, params)
    return Trained(net, params, tokenizer, restored.step, restored.skipped, restored.extra.get("fingerprint"))


def require_expressible(experiment: ExperimentConfig, architecture: str | None = None) -> None:
    """Raises InputError if no class of `transformers`, or not this one, can express the model of a run."""
    if experiment.init is not None:
        return
    import jax

    from jax_tformer.functional import transformer
    from jax_tformer.hub.families import CannotExpress
    from jax_tformer.hub.pretrained import described
    from jax_tformer.lora import without_adapters

    try:
        model = _bound_positions(experiment.model.with_vocab_size(1), experiment.data)
        with jax.enable_x64(True):  # not all of JAX is set up yet
            described(transformer(without_adapters(model)), architecture)
    except CannotExpress as error:
        flags = []
        for name, (value, _) in error.changed.items():
            before, _, last = f"--model.{name.replace('_', '-')}".rpartition(".")
            switch = last if value else f"no-{last}"
            flags.append(f"{before}.{switch}" if isinstance(value, bool) else f"{before}.{last} {value}")
        raise InputError(
            f"{f'{architecture} cannot' if architecture else 'no class of transformers can'} express this model; one "
            f"of type {error.model_type!r} is trained with {' '.join(flags)}; begin a run with these flags, or "
            "export in PyTorch's names: jax-tformer export without --huggingface"
        ) from error


def export_pretrained(
    run: RunFolder,
    out: Path,
    step: "Which" = None,
    *,
    architecture: str | None = None,
    dtype: "StoredDtype | None" = None,
) -> str:
    """Writes the model of a checkpoint to the new folder `out`; returns a line that says so.

    A run that began with a Hugging Face folder keeps its class, its settings, its tokenizer's files and its chat
    template. Raises InputError as `load_trained` and `save_pretrained` do.
    """
    from jax_tformer.functional import transformer
    from jax_tformer.hub.folder import read_origin
    from jax_tformer.hub.pretrained import save_pretrained

    experiment = run.read_config()
    trained = load_trained(run, step)
    net = trained.net
    tokenizer = trained.tokenizer
    if run.origin.exists():
        tokenizer = load_tokenizer(run.origin)
        net.origin = replace(read_origin(run.origin), tokenizer=tokenizer)
    else:
        net = transformer(_bound_positions(net.config, experiment.data))
        if not isinstance(experiment.data, MaskedTextData):
            tokenizer = tokenizer.adding(framing_of(tokenizer, isinstance(experiment.data, PairData)))
    save_pretrained(out, net, trained.params, tokenizer, architecture=architecture, dtype=dtype)
    return f"step {trained.step} of {run.path} is in {out}/: {list_files(out)}"


def _bound_positions(model: TransformerConfig, data: TextData | PairData) -> TransformerConfig:
    """Returns the model of a run with a limit of positions where it has none: the length of what it was trained on.

    Every class with computed positions must say a limit, and no number depends on it.
    """
    length = max(data.source_length, data.target_length) if isinstance(data, PairData) else data.context_length

    limited: dict[str, Any] = {
        name: replace(stack, max_positions=stack.max_positions or length)
        for name, stack in model.stacks.items()
        if stack.positions.startswith(("rotary", "sinusoidal"))
    }
    return replace(model, **limited)
