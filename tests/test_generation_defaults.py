"""What generation_config.json says becomes a DecodingConfig, or is refused in one line; flags overrule it."""

import re

import pytest

from jax_tformer.cli.generate import read_options
from jax_tformer.hub.folder import read_defaults
from tests.refusals import refused


def read(**given):
    return read_defaults(given, translates=False, where="a file")


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("bad_words_ids", [[5], []], "lists of one or more ids"),
        ("bad_words_ids", [5, 6], "lists of one or more ids"),
        ("bad_words_ids", [[5, -6]], "lists of one or more ids"),
        ("begin_suppress_tokens", 5, "a list of ids"),
        ("suppress_tokens", 5, "a list of ids"),
        ("encoder_no_repeat_ngram_size", 2.5, "a whole number"),
    ],
)
def test_wrong_values(name, value, expected):
    with refused("^" + re.escape(f"{name} is {value} in a file; expected {expected}")):
        read(**{name: value})


@pytest.mark.parametrize(
    "arguments, given",
    [
        (["--prompt", "top_k"], set()),
        (["--prompt=temperature", "--system", "min_p", "--chat"], set()),
        (["--file", "repetition-penalty"], set()),
        (["--no-early-stopping"], {"early_stopping"}),
        (["--source", "num_beams", "--length-penalty", "0.6", "--beam", "2"], {"length_penalty", "num_beams"}),
        (["--top-k", "None", "--repetition_penalty=1"], {"top_k", "repetition_penalty"}),
    ],
)
def test_flags_alone_overrule(arguments, given):
    assert read_options(["folder", *arguments], "").given == given


def test_more_new_tokens_than_a_flag_allows_are_not_asked_for():
    asked = read_options(["folder", "--max-new-tokens", "3"], "")
    assert asked.decoding_config(read(min_new_tokens=9), "a file").min_new_tokens == 3
