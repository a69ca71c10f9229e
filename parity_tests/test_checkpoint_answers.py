"""generate.py FOLDER chooses the tokens that `transformers` chooses with the folder's own generation settings."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from jax_tformer.cli import generate
from jax_tformer.files import write_json
from parity_tests.depth import deep
from parity_tests.huggingface import IDS, save_checkpoint
from parity_tests.small_tokenizers import TEXTS, byte_level

NEW = 12
MANY = list(range(3, 330, 4))
"""So many ends that answers come to one."""
FIRST = list(range(0, 330, 2))
"""Tokens that some answers would begin with."""
PAIRS = [[id, (7 * id + step) % 330] for id in range(330) for step in range(0, 330, 5)]
"""So many words that some would come."""
BEAMS = {"num_beams": 3, "repetition_penalty": 1.2}
DECODERS = {
    "greedy": {},
    "penalty, several ends": {"repetition_penalty": 1.3, "eos_token_id": MANY},
    "beams, never": BEAMS
    | {
        "suppress_tokens": [40, 41, 45],
        "begin_suppress_tokens": FIRST,
        # The end token among them does not count.
        "bad_words_ids": [[77], [80], [2], *PAIRS],
        "no_repeat_ngram_size": 3,
        "encoder_no_repeat_ngram_size": 1,
        "renormalize_logits": True,
    },
    "forced end": {"forced_eos_token_id": 2, "max_length": 40},
    "fewest": {"min_new_tokens": 6, "eos_token_id": MANY},
    "beams, several ends": {"num_beams": 3, "eos_token_id": MANY},
    "beams, penalties": BEAMS | {"length_penalty": 2.0},
}
TRANSLATORS = {
    "as BART for summaries": {
        "num_beams": 4,
        "length_penalty": -2.0,
        "early_stopping": True,
        "no_repeat_ngram_size": 3,
        "min_length": 7,
        "max_length": NEW,
        "forced_bos_token_id": 1,
        "forced_eos_token_id": 2,
        "eos_token_id": MANY,
    },
    "as Marian": {
        "num_beams": 2,
        "decoder_start_token_id": 0,
        # End tokens among them do not count.
        "bad_words_ids": [[0], *([id] for id in MANY), *PAIRS],
        "renormalize_logits": True,
        "max_length": NEW,
        "eos_token_id": MANY,
    },
}


def gpt2(folder):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": None, "n_positions": 96}
    return save_checkpoint("gpt2", folder, byte_level(), "float64", initializer_range=0.6, **sizes)


def bart(folder):
    sizes = {"d_model": 16, "max_position_embeddings": 96, "decoder_start_token_id": 2}
    return save_checkpoint("bart", folder, byte_level(adds="around"), "float64", init_std=0.6, **sizes)


@pytest.fixture
def answers(capsys):
    """Runs generate.py on a folder; returns what it says beside the answers, and the completions of each prompt."""

    def ask(folder, flags):
        capsys.readouterr()
        assert generate.main(f"{folder} --json {flags}".split()) == 0
        said = capsys.readouterr()
        return said.err, [json.loads(line)["completions"] for line in said.out.splitlines()]

    return ask


QUICK = ("penalty, several ends", "beams, several ends", "beams, never", "as BART for summaries")


@pytest.mark.parametrize(
    "make, variants, quick",
    [
        pytest.param(gpt2, DECODERS, True, id="GPT-2"),
        deep(gpt2, DECODERS, False, id="GPT-2, more"),
        deep(bart, TRANSLATORS, True, id="BART"),
        deep(bart, TRANSLATORS, False, id="BART, more"),
    ],
)
def test_answers(make, variants, quick, tmp_path, answers):
    folder = tmp_path / "checkpoint"
    model = make(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    translates = model.config.is_encoder_decoder
    texts = [text.replace("\n", " ").strip() for text in TEXTS]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    plain = IDS | ({"decoder_start_token_id": 2} if translates else {})
    lengths = set()
    for name, settings in variants.items():
        if (name in QUICK) != quick:
            continue
        limit = {} if "max_length" in settings else {"max_new_tokens": NEW}
        model.generation_config = type(model.generation_config)(**plain | limit | settings)
        model.generation_config.save_pretrained(folder)
        said, found = answers(folder, f"--file {tmp_path}/texts.txt --dtype float64")
        assert "not honoured" not in said
        for [answer], text in zip(found, texts, strict=True):
            # One by one: in a batch the lengths of transformers count padding.
            given = torch.tensor([tokenizer(text).input_ids])
            [made] = model.generate(given, attention_mask=torch.ones_like(given)).tolist()
            made = made[1 if translates else given.shape[1] :]
            assert answer["finished"] == (made[-1] in settings.get("eos_token_id", [IDS["eos_token_id"]])), name
            assert answer["tokens"] == made[: len(made) - answer["finished"]], name
            lengths.add(len(made))
    assert len(lengths) > 1, "answers should end at different places"


def test_what_is_not_honoured_is_said(tmp_path, answers):
    gpt2(tmp_path)
    odd = {"typical_p": 0.9, "encoder_repetition_penalty": 1.5, "top_p": 0.5, "penalty_alpha": 0.6}
    write_json(tmp_path / "generation_config.json", {**odd, "use_cache": True, "max_new_tokens": 2})
    note = answers(tmp_path, "--prompt It")[0].splitlines()[0]
    assert note.startswith("not honoured, of ")
    assert note.endswith("typical_p 0.9, encoder_repetition_penalty 1.5, penalty_alpha 0.6")


def test_draws_of_a_flag_have_the_bounds_of_the_checkpoint(tmp_path, answers):
    """A generation_config.json may say top_p and temperature without do_sample."""
    gpt2(tmp_path)
    said = [
        ({"temperature": 5.0, "top_p": 0.3}, ""),
        ({"temperature": 2.0, "top_p": 0.3}, "--temperature 5"),
        ({}, "--temperature 5 --top-p 0.3"),
        ({"top_p": 0.3}, ""),
        ({"temperature": 5.0}, ""),
    ]
    found = []
    for settings, flags in said:
        write_json(tmp_path / "generation_config.json", {**settings, "max_new_tokens": NEW})
        [drawn] = answers(tmp_path, f"--prompt It --num-samples 3 {flags}")[1]
        found.append([answer["tokens"] for answer in drawn])
    assert found[0] == found[1] == found[2]
    assert found[3] != found[0] != found[4]


def test_beams_of_a_flag_have_the_penalty_of_the_checkpoint(tmp_path, answers):
    """A generation_config.json may say length_penalty without num_beams."""
    model = gpt2(tmp_path)
    given = AutoTokenizer.from_pretrained(tmp_path)("It", return_tensors="pt").input_ids
    made = {}
    for penalty in (-10.0, 10.0):
        settings = {"length_penalty": penalty, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": MANY}
        # By hand: today's transformers reads such a file, but writes none.
        write_json(tmp_path / "generation_config.json", settings)
        model.generation_config = type(model.generation_config).from_pretrained(tmp_path)
        [[answer]] = answers(tmp_path, "--prompt It --beam 3 --dtype float64")[1]
        made[penalty] = model.generate(given, num_beams=3)[0, given.shape[1] :].tolist()
        assert answer["tokens"] == made[penalty][: len(made[penalty]) - answer["finished"]]
    assert made[-10.0] != made[10.0]
