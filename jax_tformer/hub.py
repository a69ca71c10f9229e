"""Folders from the Hugging Face hub: by name and commit, only the files asked for, kept in the hub's own cache."""

from collections.abc import Sequence
from pathlib import Path

from jax_tformer.errors import InputError


def hub_folder(what: str, name: str, revision: str | None, option: str, files: Sequence[str]) -> Path:
    """Returns the folder of a commit (`revision`), downloading those of its files that match the patterns `files`.

    `what` ("tokenizer") and `option` ("--data.tokenizer.revision") are for messages. Raises InputError if the hub does
    not give it, and without a revision: the message names the newest.
    """
    from huggingface_hub import model_info, snapshot_download

    try:
        if revision is None:
            newest = model_info(name).sha
        else:
            folder = snapshot_download(name, revision=revision, allow_patterns=list(files))
    except Exception as error:  # network, proxy, hub and name errors share no base class
        inside = "tokenizer.json" if what == "tokenizer" else "config.json"
        raise InputError(
            f"the {what} {name!r} is no folder here and the Hugging Face hub did not give it "
            f"({type(error).__name__}); expected a folder with {inside}, or a hub name and a network"
        ) from error
    if revision is None:
        raise InputError(
            f"the {what} {name!r} comes from the hub, where it may change; expected the commit to use; "
            f"the newest is {option} {newest}"
        )
    return Path(folder)
