"""`jax-tformer parity` sees a fault, and refuses what it cannot do."""

import os
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from jax_tformer.config.errors import InputError
from parity.gates.measure import Measured
from torch_ref import reference
from twin import pair, prove


@pytest.fixture(autouse=True)
def own_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])


def test_a_fault_is_red(monkeypatch, capsys):
    def faulty(config):
        return reference(replace(config, encoder=replace(config.encoder, norm_eps=1e-6)))

    monkeypatch.setattr(pair, "reference", faulty)
    assert prove.main(["article-encoder"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("article-encoder: RED: gate 9 numbers lost 0.0e+00, gate 1 activations ")
    # And where the two part.
    assert "torch_ref/layers.py" in said
    assert "another constant is added: 1e-05 in ours, 1e-06 in theirs" in said


def test_what_is_no_number_is_red_whatever_was_before_it(monkeypatch, capsys):
    batches = count()

    def broken(models, batch):
        yield Measured("1 activations", [1e-15, np.nan, 1e-14][next(batches) % 3], 1e-12, "logits")

    monkeypatch.setattr(pair, "identity", broken)
    monkeypatch.setattr(pair, "where_they_part", lambda *given: "")
    assert prove.main(["article-encoder"]) == 1
    assert "RED: gate 9 numbers lost 0.0e+00, gate 1 activations nan" in capsys.readouterr().out


def test_an_unknown_preset_is_refused():
    with pytest.raises(InputError, match="there is no preset 'gpt3'; expected some of article-encoder-decoder, "):
        prove.main(["gpt2", "gpt3"])
