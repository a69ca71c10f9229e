"""Hugging Face's own `generate`, in float64, on its own models and on the reference: the oracle of decoding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from parity.gates.bridge import to_torch
from parity.islands import Float64
from torch_ref import reference

Ids = Sequence[int]


@dataclass(frozen=True)
class Hypothesis:
    """One answer to one prompt."""

    tokens: tuple[int, ...]
    """The new tokens, the end token included, nothing after it."""
    score: float | None = None
    """With beams: the sum of log-probabilities over (number of new tokens)^length_penalty."""
    margins: tuple[float, ...] = ()
    """Of greedy search: how clear each of the tokens was, the best logit less the second, after penalties."""


def as_tuples(value):
    """A setting of `generate` as our config has it."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def huggingface_generate(model, prompts, *, end_id, start_id=None, **settings):
    """For each prompt (source of an encoder-decoder, which begins with `start_id`) its num_return_sequences answers.

    Prompts may differ in length. `settings` are those of `generate`; without `max_new_tokens` it stops at 20 tokens,
    the prompt included. Beams come best first.

    - The penalty of repetition counts the prompt (of an encoder-decoder: the start token, not the source). Older
      versions of transformers count its padding as well: give them prompts of one length. Beams are penalised in their
      log-probabilities, which then no longer sum to one; greedy search and samples in their logits.
    - More beams than tokens in the vocabulary begin as duplicates with scores near -1e9, and may be returned.
    """
    translates = model.config.is_encoder_decoder
    rows, side = [torch.tensor(prompt) for prompt in prompts], "right" if translates else "left"
    ids, mask = (pad_sequence(of, True, padding_side=side) for of in (rows, [torch.ones_like(row) for row in rows]))
    with Float64():
        answer = model.generate(
            ids,
            attention_mask=mask,
            eos_token_id=end_id,
            pad_token_id=0,
            decoder_start_token_id=start_id,
            return_dict_in_generate=True,
            output_scores=True,
            **{"use_cache": False, "do_sample": False} | settings,
        )
    searched = answer.get("sequences_scores") is not None
    assert answer.scores[0].dtype == torch.float64
    new = answer.sequences[:, 1 if translates else ids.shape[1] :].tolist()
    scores = answer.sequences_scores.tolist() if searched else [None] * len(new)
    clear = [()] * len(new)
    if not searched and not settings.get("do_sample"):
        best, second = torch.stack(answer.scores, dim=1).topk(2, dim=-1).values.unbind(-1)
        clear = (best - second).tolist()
    hypotheses = [
        Hypothesis(tokens, score, tuple(margins[: len(tokens)]))
        for row, score, margins in zip(new, scores, clear, strict=True)
        for tokens in [_until(row, end_id)]
    ]
    each = len(hypotheses) // len(prompts)
    return [hypotheses[first : first + each] for first in range(0, len(hypotheses), each)]


def drivable(config, weights):
    """The reference of `config` with these weights, by its own names, in float64, as a model that `generate` drives."""
    return _Drivable(config, weights).eval()


class _Sources(nn.Module):
    """Stands for the encoder: hands the sources on as they are, since the reference encodes them itself."""

    def forward(self, input_ids, **_):
        return BaseModelOutput(last_hidden_state=input_ids)


class _Drivable(PreTrainedModel, GenerationMixin):
    """A reference model behind the names that `generate` calls; there is no cache, every step sees everything."""

    config_class = PreTrainedConfig
    main_input_name = "input_ids"

    def __init__(self, config, weights):
        super().__init__(PreTrainedConfig(is_encoder_decoder=config.encoder is not None, vocab_size=config.vocab_size))
        self.reference = reference(config.with_dtype("float64"))
        self.reference.load_state_dict({name: to_torch(array) for name, array in weights.items()})
        self.sources = _Sources()

    def get_encoder(self, *_):
        return self.sources

    def forward(self, input_ids=None, attention_mask=None, decoder_input_ids=None, encoder_outputs=None, **_):
        """Of an encoder-decoder the mask is that of the sources."""
        mask = None if attention_mask is None else attention_mask.bool()
        if encoder_outputs is None:
            output = self.reference(input_ids, mask)
        else:
            output = self.reference(encoder_outputs.last_hidden_state, decoder_input_ids, mask)
        return CausalLMOutput(logits=output.logits)


def _until(tokens, end_id):
    """The tokens up to the first end token, with it."""
    return tuple(tokens[: tokens.index(end_id) + 1] if end_id in tokens else tokens)
