"""A corpus of gigabytes: how fast it is tokenized, and what training on it keeps: `python -m benchmarks.corpus`."""

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.session import Options, Report, Session, by_turns, make_table, run_benchmark, spreads
from jax_tformer.config.errors import Positive
from jax_tformer.files import batched
from twin.sides import SideFailed

_WORDS, _DOCUMENT, _TOGETHER = 50_000, 150, 1000
_MARKS = (100, 300, 600)
_MODEL = (
    "--data.context-length 64 --training.batch-size 8 --training.log-every 1 --training.evaluate-batches 2 "
    "--training.evaluate-every 10000 --training.checkpoint-every 100 --sample.count 1 --model.d-model 64 "
    "--model.decoder.num-layers 2 --model.decoder.num-heads 2 --model.decoder.feedforward-width 128"
)
_NOTES = (
    "By turns: encode_batch of the library tokenizers on all documents, a thousand at a time, without what "
    "else there is to do; then jax-tformer tokenize, the whole command. Both take all cores. In brackets min..max.",
    "processor: seconds of all threads and processes, which neighbours change less than the clock.",
    "memory: of train.py at steps 100, 300 and 600, what is its own (RssAnon) and pages of files (RssFile), MiB; each "
    "run once before, since compiling leaves memory behind that a program from the cache does not take.",
)


@dataclass(frozen=True)
class CorpusOptions(Options):
    """The options of this benchmark."""

    bytes: Positive = 2_000_000_000
    """Of the corpus, as JSON lines."""
    folder: Path | None = None
    """Where the corpus is made, or is already; None: a temporary folder."""


def _measure(session: Session) -> Report:
    size = 2_000_000 if session.quick else session.options.bytes
    with tempfile.TemporaryDirectory() as temporary:
        folder = session.options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in {"small": max(size // 100, 2_000_000), "corpus": size}.items():
            session.say(f"{part:,} bytes ...")
            make_corpus(folder / f"{name}.jsonl", part)
        _train_tokenizer(folder)
        session.say("encode_batch and tokenize, by turns ...")
        calls = {"encode_batch": partial(_encode, folder), "jax-tformer tokenize": partial(_tokenize, folder, "corpus")}
        turns = by_turns(calls, session.rounds(1))
        _tokenize(folder, "small")
        session.say("training, watched ...")
        marks = (4, 8, 12) if session.quick else _MARKS
        memory = {name: _train(folder, name, marks) for name in ("small", "corpus", "small", "corpus")}
    found = {name: spreads(taken) for name, taken in turns.items()}
    one, ours = found.values()
    speeds = {
        name: {"s": taken["whole"], "processor s": taken["processor"], "MB/s": size / 1e6 / taken["whole"]["median"]}
        for name, taken in found.items()
    }
    ratios = [one[figure]["median"] / ours[figure]["median"] for figure in ("whole", "processor")]
    speeds["encode_batch / tokenize"] = {"s": ratios[0], "processor s": ratios[1], "MB/s": None}
    kept = {
        name: {f"step {mark}": f"{own} + {files}" for mark, (own, files) in zip(marks, taken, strict=False)}
        for name, taken in memory.items()
    }
    shown = [
        make_table(f"{size:,} bytes of JSON lines", speeds),
        make_table("memory of train.py, MiB", kept),
    ]
    return Report({"tokenizing": speeds, "memory": kept}, {"tokenize": ours["whole"]}, shown, _NOTES)


def make_corpus(path: Path, size: int) -> None:
    """Writes JSON lines of about so many bytes, always the same: words of a large vocabulary, frequent ones often."""
    if path.exists():
        return
    draw, written = np.random.default_rng(0), 0
    syllables = np.array([a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "er", "an", "th")])
    parts = [syllables[draw.integers(0, len(syllables), _WORDS)] for _ in range(3)]
    words = np.array([a + b * (n > 200) + c * (n > 5000) for n, (a, b, c) in enumerate(zip(*parts, strict=True))])
    unfinished = path.with_suffix(".partial")
    with open(unfinished, "w") as file:
        while written < size:
            lengths = draw.geometric(1 / _DOCUMENT, 1000)
            said = words[np.minimum(draw.zipf(1.2, lengths.sum()) - 1, _WORDS - 1)]
            for document in np.split(said, np.cumsum(lengths)[:-1]):
                sentences = (" ".join(document[at : at + 12]) for at in range(0, len(document), 12))
                written += file.write(json.dumps({"text": ". ".join(sentences)}) + "\n")
    unfinished.rename(path)


def _train_tokenizer(folder: Path) -> None:
    from jax_tformer.config.experiment import TokenizerConfig
    from jax_tformer.data.tokenizers import Role, build_tokenizer

    special: dict[Role, str] = {"start": "<|endoftext|>", "end": "<|endoftext|>"}
    with open(folder / "corpus.jsonl") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, 4 * _TOGETHER)]
    build_tokenizer(TokenizerConfig("bpe", 2000), texts, special).save(folder / "tokenizer")


def _encode(folder: Path) -> dict[str, float]:
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    seconds = processor = 0.0
    with open(folder / "corpus.jsonl") as lines:
        for group in batched(lines, _TOGETHER):
            texts = [json.loads(line)["text"] for line in group]
            began, busy = time.perf_counter(), time.process_time()
            backend.encode_batch_fast(texts)
            seconds, processor = seconds + time.perf_counter() - began, processor + time.process_time() - busy
    return {"whole": seconds, "processor": processor}


def _tokenize(folder: Path, name: str) -> dict[str, float]:
    out = folder / f"shards {name}"
    shutil.rmtree(out, ignore_errors=True)
    tokenizer = ["--data.tokenizer.kind", "huggingface", "--data.tokenizer.name", str(folder / "tokenizer")]
    command = ["-m", "jax_tformer", "tokenize", str(folder / f"{name}.jsonl"), "--out", str(out), *tokenizer]
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"whole": seconds, "processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def _train(folder: Path, name: str, marks: Sequence[int]) -> list[tuple[int, int]]:
    """Trains on shards anew; returns MiB of RssAnon and RssFile at each mark."""
    from jax_tformer.runs.metrics import read_metrics  # which imports JAX

    run = folder / f"run {name}"
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, "-m", "jax_tformer", "train", "text", "--data.path", str(folder / f"shards {name}")]
    command += ["--run", str(run), *f"{_MODEL} --steps {marks[-1] + 10}".split()]
    memory, waiting = list[tuple[int, int]](), list(marks)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as program:
        while program.poll() is None:
            if waiting and len(read_metrics(run / "metrics.jsonl")) >= waiting[0]:
                told = dict(line.split(":", 1) for line in Path(f"/proc/{program.pid}/status").read_text().splitlines())
                own, files = (int(told[kind].split()[0]) // 1024 for kind in ("RssAnon", "RssFile"))
                memory.append((own, files))
                waiting.pop(0)
            time.sleep(0.05)
    if program.returncode:
        raise SideFailed(f"train.py on the shards of {name} ended with status {program.returncode}")
    return memory


main = partial(run_benchmark, "corpus", __doc__, measure=_measure, kind=CorpusOptions)
"""Status 1 where a program fails."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
