"""The door to trackio, which has wandb's interface; nothing else knows of it."""

from importlib.util import find_spec
from typing import Any

from jax_tformer.config.errors import require
from jax_tformer.training.processes import is_first


def require_tracker() -> None:
    """Raises InputError if trackio is not installed."""
    require(find_spec("trackio") is not None, "--track needs trackio; pip install '.[track]' adds it, or leave it out")


class Tracker:
    """A run in a project of trackio, which goes on if it has one of this name; of several processes, the first's."""

    def __init__(self, project: str | None, name: str, config: dict[str, Any]) -> None:
        self._run: Any = None
        if project is not None and is_first():
            import trackio

            self._run = trackio.init(project=project, name=name, config=config, resume="allow")

    def write(self, row: dict[str, Any]) -> None:
        """Logs the figures of a row of metrics.jsonl."""
        if self._run is not None:
            self._run.log({name: x for name, x in row.items() if name != "step"}, step=row["step"])

    def close(self) -> None:
        """Waits until all is stored."""
        if self._run is not None:
            self._run.finish()
