"""A run is a folder, and everything in it that is loaded is data: JSON, text, Orbax arrays."""

import fcntl
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from jax_tformer.config_file import differences, from_dict, read_json, to_dict, write_json
from jax_tformer.data.ids import check_vocabulary
from jax_tformer.data.tokenizers import Tokenizer, load_run_tokenizer
from jax_tformer.errors import InputError
from jax_tformer.experiment import ExperimentConfig


@dataclass(frozen=True)
class RunFolder:
    """The files of one run, by name."""

    path: Path
    _locks: list[IO[str]] = field(default_factory=list, compare=False, repr=False)

    @property
    def config(self) -> Path:
        """The experiment, complete: what decides every number of the run."""
        return self.path / "config.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer, in Hugging Face's format."""
        return self.path / "tokenizer.json"

    @property
    def checkpoints(self) -> Path:
        """Parameters, optimizer state and position in the data, by step."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: training steps and evaluations."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files of TensorBoard."""
        return self.path / "tensorboard"

    @property
    def picture(self) -> Path:
        """The loss curves."""
        return self.path / "loss.png"

    @property
    def samples(self) -> Path:
        """What the finished model says."""
        return self.path / "samples.txt"

    @property
    def summary(self) -> Path:
        """The figures of the finished run."""
        return self.path / "summary.json"

    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.exists()

    def check(self) -> None:
        """Raises InputError if the folder is a file, holds something else, or could not be written to."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; expected a folder: choose another --run")
        existing = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise InputError(f"cannot write to {existing}; choose another --run or change its permissions")
        try:
            # Some systems (/proc, a disk without room) say that one may write and do not let one. Leaves no trace.
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            raise InputError(f"cannot write to {existing} ({error.strerror}); choose another --run") from error
        if self.path.is_dir() and any(self.path.iterdir()) and not self.holds_run():
            raise InputError(f"{self.path} holds files but no run (no config.json); choose an empty or new folder")
        if self.holds_run():
            # A config that is damaged is said when it is needed: --resume no moves it aside.
            try:
                values = read_json(self.config)
            except InputError:
                return
            self._refuse_other_models(values)

    def read_config(self) -> ExperimentConfig:
        """The experiment of the run; raises InputError if config.json is missing or damaged."""
        if not self.path.exists():
            raise InputError(f"there is no run in {self.path}; expected a folder that train.py has written")
        if not self.path.is_dir():
            raise InputError(f"{self.path} is a file and no run; expected a folder that train.py has written")
        if not self.holds_run():
            raise InputError(f"{self.path} holds no run (no {self.config.name}); {self._where_runs_are()}")
        values = read_json(self.config)
        self._refuse_other_models(values)
        return from_dict(ExperimentConfig, values, where=str(self.config))

    def _refuse_other_models(self, values: Any) -> None:
        if isinstance(values, dict) and ("model_type" in values or "architectures" in values):
            raise InputError(
                f"{self.path} holds a Hugging Face model ({values.get('model_type')}) and no run; expected a folder "
                "that train.py has written; jax_tformer.weights.huggingface loads GPT-2, BERT and BART in Python"
            )

    def _where_runs_are(self) -> str:
        """What to do about a folder that is no run: name the one that it is part of, or those that are in it."""
        here = self.path.absolute()
        near = [folder for folder in here.parents[:2] if (folder / self.config.name).is_file()]
        near = near[:1] or sorted(file.parent for file in here.glob(f"*/{self.config.name}"))
        if not near:
            return "expected a folder that train.py has written"
        names = [min(str(folder), os.path.relpath(folder), key=len) for folder in near]
        return f"did you mean {' or '.join(names[:3])}{' or another one in it' if len(names) > 3 else ''}?"

    def read_tokenizer(self, vocab_size: int | None) -> Tokenizer:
        """The tokenizer of the run, for its model; raises InputError if a file of it is missing, damaged or does not
        suit `vocab_size`, the config's."""
        tokenizer = load_run_tokenizer(self.path)
        if vocab_size is None:
            raise InputError(f"{self.config} has no model.vocab_size; expected the number of the run's tokenizer")
        check_vocabulary(tokenizer, vocab_size)
        return tokenizer

    def require_same(self, wanted: ExperimentConfig) -> None:
        """Raises InputError, naming every field that differs, unless the run here is the one wanted.

        Where the data lies may differ: the fingerprint of its content is compared when the run is restored.
        """
        old, new = to_dict(self.read_config()), to_dict(wanted)
        for config in (old, new):
            config["data"] |= {"path": None, "target_path": None}
            config["data"]["tokenizer"]["name"] = None
        changed = differences(old, new)
        if changed:
            raise InputError(
                f"{self.path} holds a run with another config ({'; '.join(changed)}); "
                "repeat its flags to continue it, or start afresh with a new --run or --resume no"
            )

    def create(self, experiment: ExperimentConfig, tokenizer: Tokenizer) -> None:
        """Makes the folder and writes the tokenizer and, last, config.json, which makes it a run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            tokenizer.save(self.path)
            write_json(self.config, to_dict(experiment))
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}; choose another --run") from error

    def lock(self) -> None:
        """Makes the folder and keeps other jobs out of it until `unlock`, or until this process ends.

        Raises InputError if one is at work there.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._locks.append(open(self.path / "lock", "w"))  # noqa: SIM115 (open for as long as it is held)
        try:
            fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"another job is training in {self.path}; stop it first, or give a new --run") from error

    def unlock(self) -> None:
        """Gives the folder free again."""
        while self._locks:
            self._locks.pop().close()

    def move_aside(self) -> Path:
        """Renames a folder with a run in it to the first free PATH.1, PATH.2 ...; returns the new name."""
        self.lock()
        number, path = 1, self.path.absolute()
        while (aside := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        try:
            path.rename(aside)
        except OSError as error:
            raise InputError(
                f"cannot move {path} to {aside.name}: {error.strerror}; give a new --run instead of --resume no"
            ) from error
        finally:
            self.unlock()
        return aside

    def write_summary(self, figures: dict[str, Any]) -> None:
        """Writes summary.json."""
        write_json(self.summary, figures)
