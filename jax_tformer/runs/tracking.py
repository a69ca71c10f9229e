"""The door to trackio, which has wandb's interface; nothing else knows of it."""

from importlib.util import find_spec
from typing import Any

from jax_tformer.config.errors import require


def require_tracker() -> None:
    """Raises InputError if trackio is not installed."""
    require(find_spec("trackio") is not None, "--track needs trackio; pip install '.[track]' adds it, or leave it out")


def open_tracker(project: str, name: str, config: dict[str, Any]) -> Any:
    """Begins a run in a project, or goes on with that of this name; what it returns has `log` and `finish`."""
    import trackio

    return trackio.init(project=project, name=name, config=config, resume="allow")
