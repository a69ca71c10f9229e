"""What a name on the Hugging Face hub stands for: the files of one commit, which the user has named."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from jax_tformer import load_pretrained
from jax_tformer.cli import tokenize
from jax_tformer.config.experiment import TokenizerConfig
from jax_tformer.data.tokenizers import build_tokenizer
from tests.pretrained_folders import save_small
from tests.refusals import refused
from tests.small_runs import succeed

NAME, COMMIT = "someone/something", "0123456789abcdef" * 2 + "01234567"


def open_tokenizer(revision):
    return build_tokenizer(TokenizerConfig("huggingface", name=NAME, revision=revision), [], {})


def open_texts(revision):
    succeed(tokenize, f"{NAME} --out shards --workers 1", *(["--revision", revision] if revision else []))


def open_model(revision):
    return load_pretrained(NAME, revision=revision)


KINDS = {
    "tokenizer": ("model", open_tokenizer, "--data.tokenizer.revision", {"tokenizer.json", "tokenizer_config.json"}),
    "data set": ("dataset", open_texts, "--revision", {"*.jsonl", "*.parquet"}),
    "model": ("model", open_model, "revision", {"config.json", "tokenizer.json", "model*.safetensors"}),
}
"""What the hub calls it, how it is opened, the option that names the commit, and some of the files that it needs."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_is_that_of_one_commit(kind, folder, monkeypatch):
    """In the hub's cache, the files of a commit are links to blobs beside it."""
    blobs, snapshot = folder / "models--someone" / "blobs", folder / "models--someone" / "snapshots" / COMMIT
    blobs.parent.mkdir()
    save_small(blobs)
    (blobs / "a.jsonl").write_text('{"text": "It was a bright cold day"}\n' * 30)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    repo_type, opens, option, files = KINDS[kind]

    def download(name, **asked):
        assert (name, asked["repo_type"], asked["revision"]) == (NAME, repo_type, COMMIT)
        assert files <= set(asked["allow_patterns"])
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    commits = {(NAME, repo_type): SimpleNamespace(sha=COMMIT)}
    monkeypatch.setattr(huggingface_hub, "repo_info", lambda name, repo_type: commits[name, repo_type])
    with refused(rf"the {kind} '{NAME}' .* expected the commit to use; the newest is {option} {COMMIT}$"):
        opens(None)
    opens(COMMIT)


@pytest.mark.parametrize("revision", [COMMIT, None])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hub_that_does_not_answer_is_said_in_one_line(kind, revision, folder, monkeypatch):
    def silent(*_, **__):
        raise ConnectionError("first line\nsecond line")

    for function in ("snapshot_download", "repo_info"):
        monkeypatch.setattr(huggingface_hub, function, silent)
    with refused(rf"the {kind} '{NAME}' is no folder here and the .* hub did not give it \(ConnectionError\)"):
        KINDS[kind][1](revision)
