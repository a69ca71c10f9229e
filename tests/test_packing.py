"""Documents packed into rows: each is read once, sees only itself, and has the loss that it has alone."""

import numpy as np
import pytest

from jax_tformer.config import IGNORED
from jax_tformer.config.experiment import MaskedTextData, TextData, TokenizerConfig, TrainingConfig
from jax_tformer.data.pipeline import build_tokenizer_for
from jax_tformer.data.text import text_source
from tests.refusals import refused
from tests.test_shards import write_llm_c, write_megatron, write_nanogpt
from tests.test_tokenizing import write_lines

END, LENGTH = 256, 32
DRAW = np.random.default_rng(0)
DOCUMENTS = [DRAW.integers(97, 123, 1 + n * n % 23).tolist() for n in range(50)]
IDS = [END, *(id for text in DOCUMENTS for id in (*text, END))]
WHOLE = [[[END, *text], [*text, END]] for text in DOCUMENTS]


def write_texts(path, _):
    """With a long document behind the others, of which the end is held out."""
    write_lines(path.with_name("a.jsonl"), [bytes(text).decode() for text in [*DOCUMENTS, [90] * 2000]])


def rows_of(folder, packing, write=write_llm_c, ids=IDS, **changes):
    for name in ("val.bin", "train.bin"):
        write(folder / name, np.array(ids))
    data = TextData(path=str(folder), context_length=LENGTH, packing=packing, **changes)
    source = text_source(data, TrainingConfig(), build_tokenizer_for(data))
    train = source.shapes[0].parts[0].train
    return train.read(np.arange(train.count)), source.notes


def pieces_of(batch):
    """The tokens and labels of each piece of a document, in each row."""
    both = batch["tokens"], batch["labels"]
    return [
        [[of[row, segments == number].tolist() for of in both] for number in range(1, segments.max() + 1)]
        for row, segments in enumerate(batch["segments"])
    ]


@pytest.mark.parametrize(
    "write, ids",
    [
        (write_texts, IDS),
        # llm.c begins documents with the token; nanoGPT and Megatron end them with it.
        (write_llm_c, IDS[:-1]),
        (write_nanogpt, IDS[1:]),
        (write_megatron, IDS[1:]),
    ],
)
def test_documents_are_the_same_whoever_wrote_them(write, ids, tmp_path):
    """But for the ends of the first and the last one, which a file may not tell."""
    batch, _ = rows_of(tmp_path, "best_fit", write, ids)
    found = [piece for row in pieces_of(batch) for piece in row if 90 not in piece[1]]
    assert len(found) == len(DOCUMENTS)
    assert all(piece in found for piece in WHOLE[1:-1])


@pytest.mark.parametrize("packing", ["concatenate", "best_fit", "crop"])
def test_every_policy_reads_each_document_once(packing, tmp_path):
    (batch, _), left = rows_of(tmp_path, packing), list(WHOLE)
    for row in pieces_of(batch):
        assert sum(len(tokens) for tokens, _ in row) == LENGTH or packing == "best_fit"
        for place, piece in enumerate(row):
            # The document that it is of begins with it, or goes on with it.
            (of,) = [text for text in left if [side[: len(piece[0])] for side in text] == piece][:1]
            left.remove(of)
            rest = [side[len(piece[0]) :] for side in of]
            if rest[0] and packing != "crop":
                left.insert(0, rest)
            assert not rest[0] or place == len(row) - 1
    assert (not left) == (packing == "best_fit")
    assert sum(len(tokens) for tokens, _ in left) < LENGTH
    assert ("mask" in batch) == (packing == "best_fit")
    assert (batch["labels"][batch["segments"] == 0] == IGNORED).all()


def test_what_is_packed_is_said(tmp_path):
    assert rows_of(tmp_path, "crop", ids=IDS[:61])[1] == [
        "61 ids to train on, 61 held out",
        *(
            f"{part} part, packed by crop: 8 documents in 1 rows of 32; 0.0% of the places are padding, 46.7% of the "
            "tokens are cut off, 0 pieces begin inside a document"
            for part in ("training", "held-out")
        ),
    ]


def test_what_cannot_be_packed_is_refused(tmp_path):
    with refused("stride is 2 and packing 'crop', which reads each document once; expected stride 1"):
        TextData(packing="crop", stride=2)
    with refused("packing is 'crop'; expected None: text is masked"):
        MaskedTextData(packing="crop")
    with refused("context_length is 1; expected at least 2 tokens"):
        TextData(context_length=1)
    with refused("has neither a start nor an end token"):
        rows_of(tmp_path, "crop", write_texts, tokenizer=TokenizerConfig("characters"))
    (tmp_path / "a.jsonl").unlink()
    with refused("the training part of the text has 31 tokens in documents; expected at least 32, for one row"):
        rows_of(tmp_path, "crop", ids=[END] + [97] * 31)
