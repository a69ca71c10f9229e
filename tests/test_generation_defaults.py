"""What generation_config.json says becomes a DecodingConfig, or is refused in one line."""

from typing import Any

import pytest

from jax_tformer.cli.generate_options import read_options
from jax_tformer.config.errors import InputError
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.hub.origin import read_defaults


def test_what_is_never_said() -> None:
    never = {"suppress_tokens": [4], "begin_suppress_tokens": [3, 2], "bad_words_ids": [[5], [6, 7]]}
    given = never | {"encoder_no_repeat_ngram_size": 3, "no_repeat_ngram_size": 2}
    found = read_defaults(given, translates=True, where="a file")
    assert found.ignored == ()
    expected = DecodingConfig(
        suppress_tokens=(4,),
        begin_suppress_tokens=(3, 2),
        bad_words_ids=((5,), (6, 7)),
        encoder_no_repeat_ngram_size=3,
        no_repeat_ngram_size=2,
    )
    assert DecodingConfig(**found.decoding) == expected
    nothing = {"suppress_tokens": [], "begin_suppress_tokens": None, "bad_words_ids": []}
    assert DecodingConfig(**read_defaults(nothing, translates=True, where="a file").decoding) == DecodingConfig()


def test_drawing_is_kept_for_a_flag() -> None:
    given = {"temperature": 0.7, "top_k": 0, "min_p": 0.1}
    found = read_defaults(given, translates=False, where="a file")
    assert (found.decoding, found.drawing) == ({}, {"temperature": 0.7, "top_k": None, "min_p": 0.1})
    found = read_defaults({"do_sample": True, "top_p": 0.9}, translates=False, where="a file")
    assert found.decoding == {"temperature": 1.0, "top_k": 50, "top_p": 0.9}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"bad_words_ids": [[5], []]},
            r"bad_words_ids is \[\[5\], \[\]\] in a file; expected lists of one or more ids",
        ),
        ({"bad_words_ids": [5, 6]}, r"bad_words_ids is \[5, 6\] in a file; expected lists of one or more ids"),
        ({"bad_words_ids": [[5, -6]]}, "expected lists of one or more ids"),
        ({"begin_suppress_tokens": 5}, "begin_suppress_tokens is 5 in a file; expected a list of ids"),
        ({"suppress_tokens": 5}, "suppress_tokens is 5 in a file; expected a list of ids"),
        (
            {"encoder_no_repeat_ngram_size": 2.5},
            "encoder_no_repeat_ngram_size is 2.5 in a file; expected a whole number",
        ),
    ],
)
def test_wrong_values(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_defaults(given, translates=False, where="a file")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "top_k"], set()),
        (["--prompt=temperature", "--system", "min_p", "--chat"], set()),
        (["--file", "repetition-penalty"], set()),
        (["--no-early-stopping"], {"early_stopping"}),
        (["--source", "num_beams", "--length-penalty", "0.6", "--beam", "2"], {"length_penalty", "num_beams"}),
        (["--top-k", "None", "--repetition_penalty=1"], {"top_k", "repetition_penalty"}),
    ],
)
def test_flags_alone_overrule(arguments: list[str], said: set[str]) -> None:
    assert read_options(["folder", *arguments], "").said == said


def test_more_new_tokens_than_a_flag_allows_are_not_asked_for() -> None:
    defaults = read_defaults({"min_new_tokens": 9}, translates=False, where="a file")
    decoding = read_options(["folder", "--max-new-tokens", "3"], "").decoding_of_checkpoint(defaults, "a file", None)
    assert (decoding.min_new_tokens, decoding.max_new_tokens) == (3, 3)
