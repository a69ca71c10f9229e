"""A trained model from its run folder, ready to be used."""

from dataclasses import dataclass
from typing import Literal

from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.models.transformer import Transformer, transformer
from jax_tformer.nn.arrays import Params
from jax_tformer.run.fitting import for_other_shapes
from jax_tformer.run.restoring import load_parameters
from jax_tformer.run.run_folder import RunFolder
from jax_tformer.run.startup import set_up_jax


@dataclass(frozen=True)
class Trained:
    """A model with the parameters of a checkpoint, and its tokenizer."""

    net: Transformer
    params: Params
    tokenizer: Tokenizer
    step: int
    """Of the checkpoint."""
    skipped: tuple[str, ...]
    """A line for each damaged checkpoint that was passed over."""


def load_trained(run: RunFolder, step: int | Literal["best"] | None = None) -> Trained:
    """The model at its newest intact checkpoint, at the one of `step`, or at the best by held-out loss.

    Raises InputError if the run has no such checkpoint, if one of its files is damaged, or if config.json or the
    tokenizer are not those that the checkpoint was made with.
    """
    config = run.read_config().model
    tokenizer = run.read_tokenizer(config.vocab_size)
    set_up_jax(config)
    net = transformer(for_other_shapes(config))
    restored = load_parameters(run.checkpoints, net.shapes, step)
    run.require_recorded(restored.extra, restored.step)
    return Trained(net, restored.state, tokenizer, restored.step, restored.skipped)
