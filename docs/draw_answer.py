"""Draws docs/first-difference.svg: what `first_difference` says where our GPT-2 takes another eps than Hugging Face's.

Run `python docs/draw_answer.py` after the words of the answer have changed.
"""

import dataclasses
import io
import re
from pathlib import Path

import jax
import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from torch import nn
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from jax_tformer import ComputeConfig, transformer
from jax_tformer.functional import DecoderOnlyTransformer
from jax_tformer.hub import names
from jax_tformer.hub.families import from_huggingface
from parity import Difference, first_difference
from parity.differ.answer import folded

COLUMNS = 100


def answer() -> Difference:
    """The answer for a reduced GPT-2 whose norms add 1e-6 in ours."""
    torch.manual_seed(0)
    given = GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=97, n_positions=64)
    given.bos_token_id = given.eos_token_id = None
    given._attn_implementation = "eager"
    module: nn.Module = GPT2LMHeadModel(given)
    module.eval().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    described = dict(given.to_dict(), architectures=["GPT2LMHeadModel"])
    config, weights = from_huggingface(described, {name: x.numpy() for name, x in module.state_dict().items()})
    assert config.decoder is not None
    decoder = dataclasses.replace(config.decoder, norm_eps=1e-6)
    compute = ComputeConfig(parameter_dtype="float64", dtype="float64", attention="einsum")
    net = transformer(dataclasses.replace(config, decoder=decoder, compute=compute))
    assert isinstance(net, DecoderOnlyTransformer)
    params = names.from_reference(weights, net.shapes)
    tokens = np.random.default_rng(0).integers(0, 97, (2, 13))
    return first_difference(lambda p, x: net.apply(p, x), module, None, [tokens], params=params, name="GPT-2")


def drawn(said: str) -> str:
    """A terminal with the call and its answer, as SVG that loads nothing."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO())
    console.print(Text(">>> print(first_difference(ours, gpt2, None, [tokens], params=params, name='GPT-2'))", "bold"))
    for line in said.splitlines():
        style = "bold" if line.startswith(("GPT-2", "  JAX", "  PyTorch", "  what")) else ""
        console.print(Text(folded(line, COLUMNS), style), soft_wrap=True)
    svg = console.export_svg(title="Where do they part?")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    with jax.enable_x64(True):
        found = answer()
    (Path(__file__).parent / "first-difference.svg").write_text(drawn(str(found)), encoding="utf-8")
