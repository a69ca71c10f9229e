"""`jax-tformer tokenize`: from every kind of source, on any number of processes, killed and gone on with."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jax_tformer.cli import tokenize, train
from jax_tformer.config.experiment import TextData, TokenizerConfig, TrainingConfig
from jax_tformer.data import sources, tokenizing
from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for
from jax_tformer.data.tokenizers import build_tokenizer, load_tokenizer
from jax_tformer.files import locked, read_json
from tests.memory import traced_peak
from tests.refusals import refused
from tests.small_runs import TINY, contents, lose, losses, succeed

BPE = "--data.tokenizer.kind bpe --data.tokenizer.vocab-size 300"
DRAW = random.Random(0)
TEXTS = [
    " ".join(DRAW.choices(["tea", "Käse", "夕食", "bread,", "and\n", "<|endoftext|>"], k=DRAW.randint(1, 60)))
    for _ in range(300)
]
PIECES = "--data.held-out 0.1 --data.shard-size 700"


def open_zst(path, _):
    return pyarrow.output_stream(str(path), compression="zstd")


PACKERS = {gzip.open: ".gz", open_zst: ".zst"}


def write_lines(path, texts=TEXTS, opened=open):
    with opened(path, "wb") as file:
        file.write("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts).encode())


def write_parquet(path, column=TEXTS, name="text"):
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(column)), name: column}), path, row_group_size=70)


SOURCES = {
    "a.jsonl": write_lines,
    **{f"a.jsonl{kind}": partial(write_lines, opened=packer) for packer, kind in PACKERS.items()},
    "a.parquet": write_parquet,
}


def is_held_out(text, fraction=0.1):
    return tokenizing.is_held_out(sha256(text.encode()).digest(), fraction)


@pytest.fixture(autouse=True, scope="module")
def small_groups():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "_TOGETHER", 6000)
        patch.setattr(tokenizing, "_SAVED_EVERY", 1)
        yield


def run(command):
    succeed(tokenize, f"{command} --workers 1")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with 300 documents, and shards of them."""
    place = tmp_path_factory.mktemp("written")
    write_lines(place / "a.jsonl")
    run(f"{place}/a.jsonl --out {place}/shards {BPE} {PIECES}")
    return place


@pytest.fixture
def shards(written, folder):
    """A copy of them, in the current folder."""
    shutil.copytree(written, folder, dirs_exist_ok=True)
    return folder / "shards"


def ids_in(shards, part):
    files = sorted(shards.glob(f"{part}_*.bin"))
    headers = [np.fromfile(path, np.int32, 256) for path in files]
    kind = {1: np.uint16, 7: np.uint32}[int(headers[0][1])]
    found = [np.fromfile(path, kind, offset=1024) for path in files]
    assert [int(header[2]) for header in headers] == [len(ids) for ids in found]
    return np.concatenate(found).tolist(), len(files)


def open_shards(shards, tokenizer):
    build_pipeline(TextData(path=str(shards), context_length=16), TrainingConfig(), tokenizer)


@pytest.mark.parametrize("name", SOURCES)
def test_shards_hold_the_ids_of_the_documents_in_their_order(name, folder, capsys):
    SOURCES[name](folder / name)
    run(f"{name} --out shards {BPE} {PIECES}")
    tokenizer = load_tokenizer("shards")
    wanted = {False: [], True: []}
    for text in TEXTS:
        wanted[is_held_out(text)].append([tokenizer.start_id, *tokenizer.encode(text).tolist()])
    manifest = read_json(folder / "shards" / "manifest.json")
    for part, documents in (("train", wanted[False]), ("val", wanted[True])):
        ids, files = ids_in(folder / "shards", part)
        assert ids == [id for document in documents for id in document]
        assert files == -(-len(ids) // 700) > 1
        assert manifest[part]["documents"] == len(documents)
        assert manifest[part]["tokens"] == len(ids)
    assert sum(manifest[part]["text_bytes"] for part in ("train", "val")) == sum(len(text.encode()) for text in TEXTS)
    assert f"{len(wanted[False])} documents" in capsys.readouterr().out


@pytest.mark.parametrize("packer", [open, *PACKERS])
def test_folders_and_long_texts(packer, folder, monkeypatch):
    """A long text is read in blocks and encoded in pieces, whose ids are those of the whole, compressed or not."""
    monkeypatch.setattr(sources, "_BLOCK", 4001)
    (folder / "texts").mkdir()
    long = "\n".join(DRAW.choices(TEXTS, k=2000))
    with packer(folder / "texts" / f"b.txt{PACKERS.get(packer, '')}", "wb") as file:
        file.write(("\ufeff" + long).replace("\n", "\r\n").encode())
    (folder / "texts" / "a.md").write_text(TEXTS[0])
    (folder / "texts" / "c.py").write_text("no text")
    run(f"texts texts/*.py --out shards {BPE} --data.held-out 0")
    tokenizer = load_tokenizer("shards")
    wanted = [tokenizer.encode(text).tolist() for text in (TEXTS[0], long, "no text")]
    assert ids_in(folder / "shards", "train")[0] == [id for ids in wanted for id in (tokenizer.start_id, *ids)]
    assert not list((folder / "shards").glob("val*"))


def test_the_length_of_a_text_takes_no_memory(folder, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK", 2**16)
    tokenizer = build_tokenizer(TokenizerConfig("bytes"), [], {})

    def peak(times):
        (folder / "a.txt").write_text("some words, again and again\n" * 20_000 * times)
        groups = tokenizing._groups([folder / "a.txt"], tokenizing.ShardsConfig(), tokenizer, lambda size: None)
        # A queue without room, so that none of them is kept.
        return traced_peak(lambda: deque(groups, maxlen=0))

    assert peak(10) < 1.2 * peak(1) < 10 * 2**16


def test_a_vocabulary_beyond_uint16(folder):
    words = " ".join(f"w{number}" for number in range(2**16 + 1))
    (folder / "a.txt").write_text(words)
    run("a.txt --out shards --data.held-out 0 --data.tokenizer.kind words")
    ids, _ = ids_in(folder / "shards", "train")
    assert ids == load_tokenizer("shards").encode(words).tolist()
    assert sorted(ids) == list(range(2**16 + 1))
    assert np.fromfile(folder / "shards" / "train_000000.bin", np.int32, 2).tolist() == [20240801, 7]


SLOWLY = """
import time
from jax_tformer.cli import tokenize
from jax_tformer.data import tokenizing
tokenizing._TOGETHER, tokenizing._SAVED_EVERY = 6000, 1
append = tokenizing._Writer.write
tokenizing._Writer.write = lambda *given: (time.sleep(0.05), append(*given))
if __name__ == "__main__":
    import sys
    tokenize.main(sys.argv[1:])
"""


def test_killed_runs_go_on_where_they_were_in_any_number_of_processes(shards, folder):
    (folder / "slowly.py").write_text(SLOWLY)
    unfinished, groups = folder / "others" / "unfinished.json", []
    for more in (2, 4):
        command = f"slowly.py a.jsonl --out others {BPE} {PIECES} --workers 2"
        process = subprocess.Popen([sys.executable, *command.split()])
        while not groups or groups[-1] < more:
            time.sleep(0.01)
            assert process.poll() is None
            groups.append(read_json(unfinished)["groups"] if unfinished.exists() else 0)
        process.kill()
        process.wait()
        assert groups == sorted(groups)
    with refused("manifest.json is missing.* tokenize again"):
        open_shards(folder / "others", load_tokenizer(shards))
    with refused("was begun with another tokenizer or other settings"):
        run(f"a.jsonl --out others {BPE} --data.held-out 0.1")
    # One process has made those.
    succeed(tokenize, f"a.jsonl --out others {BPE} {PIECES} --workers 3")
    assert [*contents(folder / "others").values()] == [*contents(shards).values()]


LATE = """
import multiprocessing
import os
import signal
import time
from jax_tformer.data import tokenizing

def work():
    os.kill(parent := os.getppid(), signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.01)
    tokenizing._end_with_parent()
    time.sleep(600)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
"""


def test_a_worker_that_begins_after_its_parent_was_killed_ends(folder):
    (folder / "late.py").write_text(LATE)
    # Its output ends with the last of the processes.
    killed = subprocess.run([sys.executable, "late.py"], capture_output=True, timeout=100)
    assert killed.returncode == -signal.SIGKILL


AROUND = {"0.jsonl": TEXTS[:100], "b.jsonl": TEXTS[100:]}
PLAIN = "--data.held-out 0.1 --data.tokenizer.kind bytes --out"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What shards hold of the documents, before and behind which others stand."""
    place = tmp_path_factory.mktemp("undisturbed")
    for name, texts in {"a.jsonl": TEXTS, **AROUND}.items():
        write_lines(place / name, texts)
    run(f"{place}/0.jsonl {place}/a.jsonl {place}/b.jsonl {PLAIN} {place}/shards")
    return [*contents(place / "shards").values()]


def other(write_source, *given, **options):
    """Writes something else in place of a source."""
    return lambda path: write_source(path, *given, **options)


def shorter(by):
    return lambda path: os.truncate(path, path.stat().st_size - by)


@pytest.mark.parametrize(
    "name, spoil, told",
    [
        ("a.parquet", other(write_parquet, name="texts"), "has the columns id, texts; exp"),
        ("a.parquet", other(write_parquet, range(300)), "the column 'text' holds int64"),
        ("a.parquet", other(write_parquet, [*TEXTS, None]), "row 301: the text is empty"),
        ("a.parquet", other(Path.write_bytes, b"PAR1"), "a.parquet is damaged"),
        ("a.jsonl", other(write_lines, [*TEXTS, " "]), "a.jsonl, line 301: the text is empty"),
        ("a.jsonl", shorter(9), "a.jsonl, line 300: not JSON"),
        ("a.jsonl", lambda path: path.write_bytes(path.read_bytes() + b"\xe9"), "a.jsonl is not UTF-8"),
        ("a.jsonl", Path.unlink, "a.jsonl does not exist"),
        *((name, shorter(50), f"{name} is damaged") for name in ("a.jsonl.gz", "a.jsonl.zst")),
    ],
)
def test_a_source_that_cannot_be_read_is_named_and_then_gone_on_with(name, spoil, told, undisturbed, folder, end_of):
    """With status 2, one line, and all that stands before it written."""
    for beside, texts in AROUND.items():
        write_lines(folder / beside, texts)
    SOURCES[name](folder / name)
    spoil(folder / name)
    command = f"0.jsonl {name} b.jsonl {PLAIN} shards"
    status, _, said = end_of(f"tokenize {command} --workers 1", program="jax-tformer")
    assert (status, told in said, said.count("\n")) == (2, True, 1), said
    SOURCES[name](folder / name)
    run(command)
    assert [*contents(folder / "shards").values()] == undisturbed


@pytest.mark.parametrize("length", [0, -1, None])
@pytest.mark.parametrize(
    "name", ["manifest.json", "tokenizer.json", "tokenizer_config.json", "train_000003.bin", "val_000001.bin"]
)
def test_damage_to_any_file_is_named(name, length, shards):
    tokenizer, path = load_tokenizer(shards), shards / name
    content = path.read_bytes()
    if length is None:
        path.unlink()
    else:
        # Cut off; or one bit of a digit, a letter or an id is another.
        path.write_bytes(content[:-3] if length else content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
    with refused(f"{name} is "):
        open_shards(shards, tokenizer)
    path.write_bytes(content)
    open_shards(shards, tokenizer)


def test_shards_of_another_tokenizer_or_with_others_beside_them(shards):
    with refused("were written with another tokenizer; expected that of the model"):
        open_shards(shards, build_tokenizer_for(TextData()))
    (shards / "other.bin").write_bytes(b"")
    with refused("manifest.json does not name"):
        open_shards(shards, load_tokenizer(shards))


def test_a_folder_that_holds_something_or_is_being_written(shards, folder):
    with refused("shards is there already"):
        run("a.jsonl --out shards")
    with locked(shards, shards), refused("another process is writing shards"):
        run("a.jsonl --out shards")
    (folder / "empty").mkdir()
    with refused("no source was named"):
        run("--out c")
    with refused("is a folder without"):
        run("empty --out c")


def test_texts_that_have_changed_are_not_gone_on_with(shards, folder, monkeypatch):
    """Neither those that were read already, nor fewer of them."""
    with monkeypatch.context() as patch:
        patch.setattr(tokenizing._Writer, "finish", lambda *_: "")
        run("a.jsonl --out others --data.held-out 0.1")
    for texts in (["other", *TEXTS[1:]], TEXTS[:30]):
        write_lines(folder / "a.jsonl", texts)
        with refused("the texts are not those that others was begun with"):
            run("a.jsonl --out others --data.held-out 0.1")


def test_a_run_on_shards_goes_on_to_the_bit(shards, folder):
    """With the tokenizer of the shards, wherever they are by then."""
    tiny = TINY.replace("--data.tokenizer.kind characters --data.tokenizer.vocab-size None", "")
    flags = "--steps 4 --training.checkpoint-every 2 --optimizer.schedule constant"
    succeed(train, f"text --data.path shards --run run {tiny} {flags}")
    run, whole = folder / "run", losses(folder / "run")
    assert read_json(run / "config.json")["data"]["tokenizer"]["name"] == "shards"
    lose(run, 4)
    shards.rename(folder / "elsewhere")
    succeed(train, "--run run --data.path elsewhere")
    assert losses(run) == whole
    assert (run / "checkpoints" / "4").exists()
