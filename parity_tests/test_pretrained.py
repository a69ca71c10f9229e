"""A folder that Hugging Face wrote, opened by `load_pretrained`, computes what `transformers` computes."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from jax_tformer import load_pretrained
from parity_tests.huggingface import Oracle


def save_vocabulary(folder: Path, size: int) -> None:
    """A tokenizer of `size` words."""
    Backend(models.WordLevel({f"w{id}": id for id in range(size)}, "w0")).save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", ["gpt2", "bert masked", "bart"])
def test_a_folder_opens(name: str, tmp_path: Path) -> None:
    oracle = Oracle(name)
    oracle.model.save_pretrained(tmp_path)
    save_vocabulary(tmp_path, 61)
    net, params, tokenizer = load_pretrained(tmp_path, dtype="float64")
    tokens = np.arange(2 * 7).reshape(2, 7)
    inputs = (tokens, tokens) if net.config.encoder and net.config.decoder else (tokens,)
    with torch.no_grad():
        theirs = oracle.model(*map(torch.from_numpy, inputs[:1]), **_target(inputs)).logits
    ours = net.apply(params, *map(jnp.asarray, inputs))
    np.testing.assert_allclose(ours, theirs, atol=1e-12, rtol=0)
    assert tokenizer is not None
    assert tokenizer.vocab_size == 61
    assert net.origin.architecture == type(oracle.model).__name__


def _target(inputs: tuple[np.ndarray, ...]) -> dict[str, torch.Tensor]:
    return {"decoder_input_ids": torch.from_numpy(inputs[1])} if len(inputs) == 2 else {}
