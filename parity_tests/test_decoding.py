"""Gate 8: greedy tokens are those of the reference and of Hugging Face's `generate`, wherever the choice is clear."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_tformer.config import TransformerConfig
from jax_tformer.decoding import completer, translator
from jax_tformer.models.transformer import transformer
from jax_tformer.nn.arrays import Params
from jax_tformer.weights.huggingface import from_huggingface
from jax_tformer.weights.names import from_reference
from parity_tests.bridge import Tensors, to_torch
from parity_tests.cases import CONFIGS, batch_for, weights_for
from parity_tests.huggingface import Oracle
from parity_tests.measure import Measured, worst
from torch_ref import reference

Record = Callable[[str, Measured], None]

CLEAR = 1e-6
"""Of two best logits nearer than this, rounding may choose."""
NEW = 24
DECODERS = [name for name, config in CONFIGS.items() if config.encoder is None and config.head != "none"]
TRANSLATORS = [name for name, config in CONFIGS.items() if config.encoder is not None and config.decoder is not None]


def differing(ours: np.ndarray, theirs: np.ndarray, margins: np.ndarray) -> Measured:
    """How many tokens `[B, N]` differ before the first unclear choice of their row (`margins`: best less second)."""
    clear = np.logical_and.accumulate(margins > CLEAR, axis=1)
    assert clear.mean() > 0.5, "the choices must be clear, or nothing is compared"
    return worst("8 decoding", {"greedy tokens": float(((ours != theirs) & clear).sum())}, 0.0)


def margins_of(logits: torch.Tensor) -> torch.Tensor:
    """The best of each row's logits `[B, V]` less the second."""
    best = logits.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def greedy(
    next_logits: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, new: int
) -> tuple[np.ndarray, ...]:
    """(new tokens, margins), `[B, new]` each, choosing the best of `next_logits(tokens so far)` again and again."""
    start, margins = tokens.shape[1], []
    for _ in range(new):
        with torch.no_grad():
            logits = next_logits(tokens)[:, -1]
        margins.append(margins_of(logits))
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens[:, start:].numpy(), torch.stack(margins, dim=1).numpy()


def ours_of(config: TransformerConfig, weights: Tensors) -> tuple[TransformerConfig, Params]:
    config = config.with_dtype("float64")
    return config, jax.device_put(from_reference(weights, transformer(config).shapes))


def complete(config: TransformerConfig, params: Params, prompt: np.ndarray, new: int) -> np.ndarray:
    run = completer(transformer(config), context=prompt.shape[1] + new, new_tokens=new, temperature=0.0, top_k=None)
    return np.asarray(run(params, jnp.asarray(prompt), jax.random.key(0)))


def reference_completions(
    config: TransformerConfig, weights: Tensors, prompt: np.ndarray, new: int
) -> tuple[np.ndarray, ...]:
    """(new tokens, margins) of the reference."""
    model = reference(config).eval()
    model.load_state_dict({key: to_torch(array) for key, array in weights.items()})
    return greedy(lambda tokens: model(tokens).logits, torch.from_numpy(prompt).long(), new)


@pytest.mark.parametrize("name", DECODERS)
def test_completions(name: str, record: Record) -> None:
    weights = weights_for(CONFIGS[name], 0.2)
    config, params = ours_of(CONFIGS[name], weights)
    new = min(NEW, (config.output_stack.max_positions or 99) - 3)
    prompt = batch_for(config, "none")["tokens"][:, :3]
    theirs, margins = reference_completions(config, weights, prompt, new)
    record(name, differing(complete(config, params, prompt, new), theirs, margins))


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", TRANSLATORS)
def test_translations(name: str, padding: str, record: Record) -> None:
    weights = weights_for(CONFIGS[name], 0.2)
    config, params = ours_of(CONFIGS[name], weights)
    batch = batch_for(config, padding)
    source, mask = batch["source"], batch["source_mask"]
    model = reference(config).eval()
    model.load_state_dict({key: to_torch(array) for key, array in weights.items()})
    start = torch.full((len(source), 1), 1)

    def next_logits(target: torch.Tensor) -> torch.Tensor:
        return model(torch.from_numpy(source), target, torch.from_numpy(mask)).logits

    theirs, margins = greedy(next_logits, start, NEW)
    # An end token that never comes, and one that does.
    for end in (-1, int(theirs[0, 3])):
        run = translator(transformer(config), length=NEW, start_id=1, end_id=end)
        ours = np.asarray(run(params, jnp.asarray(source), jnp.asarray(mask), jax.random.key(0)))
        ended = np.logical_or.accumulate(theirs == end, axis=1)
        record(name, differing(ours, np.where(ended, end, theirs), margins))


def test_hugging_face_generates_the_same(record: Record) -> None:
    oracle = Oracle("gpt2")
    raw = oracle.random_weights(0.2, 0)
    oracle.load(raw)
    config, params = ours_of(*from_huggingface(oracle.json, raw))
    prompt = batch_for(config, "none")["tokens"][:, :5]
    answer = oracle.model.generate(
        torch.from_numpy(prompt).long(),
        attention_mask=torch.ones(prompt.shape, dtype=torch.long),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    margins = torch.stack([margins_of(logits) for logits in answer.logits], dim=1).numpy()
    theirs = answer.sequences[:, prompt.shape[1] :].numpy()
    record("huggingface gpt2", differing(complete(config, params, prompt, NEW), theirs, margins))


def test_the_gate_sees_one_wrong_token() -> None:
    tokens, margins = np.arange(12).reshape(2, 6), np.ones((2, 6))
    wrong = tokens.copy()
    wrong[1, 4] += 1
    assert differing(wrong, tokens, margins).worst == 1
    assert not differing(wrong, tokens, margins).passed
    margins[1, 3] = 1e-7
    assert differing(wrong, tokens, margins).passed
