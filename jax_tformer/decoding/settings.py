"""How tokens are chosen: the settings of `generate`, under the names of Hugging Face's."""

from dataclasses import dataclass
from typing import Literal

from jax_tformer.config import require, require_choice, require_finite, require_positive
from jax_tformer.field_docs import described

LengthPenaltyForm = Literal["paper", "power"]


@described
@dataclass(frozen=True)
class DecodingConfig:
    """Greedy search, sampling or beam search, each with a repetition penalty."""

    max_new_tokens: int = 200
    """Tokens of a row at most; it may end before."""
    temperature: float = 0.0
    """Divides the logits before a token is drawn; 0: the most probable token, nothing is drawn."""
    top_k: int | None = None
    """Draw from the k most probable tokens only (and those as probable as the k-th)."""
    top_p: float | None = None
    """Draw from the most probable tokens only, as many as it takes for a sum of p (Holtzman et al., 2020)."""
    min_p: float | None = None
    """Draw only tokens at least p times as probable as the most probable one (Nguyen et al., 2024)."""
    repetition_penalty: float = 1.0
    """Divides the positive, and multiplies the negative scores of tokens that have occurred (Keskar et al., 2019)."""
    num_return_sequences: int = 1
    """Samples for every prompt; of a beam search, the n best."""
    num_beams: int = 1
    """Unfinished sequences that a beam search goes on with; 1: no beam search."""
    length_penalty: float = 0.6
    """Alpha: a finished beam's log-probability is divided by a power of its length; 0: as it is."""
    length_penalty_form: LengthPenaltyForm = "paper"
    """Of n tokens. paper: ((5 + n) / 6)^alpha, of Wu et al. (2016), which Vaswani et al. use; power: n^alpha."""
    early_stopping: bool | Literal["never"] = False
    """True: a beam search ends with num_beams finished sequences. False: when no unfinished one would be better if it
    ended at once. never: when none can become better, whatever follows."""

    def __post_init__(self) -> None:
        require_positive(self, "max_new_tokens", "num_return_sequences", "num_beams")
        require_finite(self, "temperature", minimum=0)
        require_finite(self, "length_penalty")
        require_finite(self, "repetition_penalty", above=0)
        require_choice(self, "length_penalty_form", LengthPenaltyForm)
        require(
            isinstance(self.early_stopping, bool) or self.early_stopping == "never",
            f"early_stopping is {self.early_stopping!r}; expected True, False or 'never'",
        )
        if self.top_k is not None:
            require_positive(self, "top_k")
        if self.top_p is not None:
            require_finite(self, "top_p", above=0)
            require(self.top_p <= 1, f"top_p is {self.top_p}; expected a number above 0 and at most 1")
        if self.min_p is not None:
            require_finite(self, "min_p", minimum=0)
            require(self.min_p <= 1, f"min_p is {self.min_p}; expected a number from 0 to 1")
        filters = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        require(
            self.temperature > 0 or not filters,
            f"{' and '.join(filters)} choose what is drawn from, and at temperature 0 nothing is drawn; "
            "expected a temperature above 0",
        )
        self._check_sequences()

    def _check_sequences(self) -> None:
        beams, wanted = self.num_beams, self.num_return_sequences
        if beams > 1:
            require(
                self.temperature == 0,
                f"num_beams is {beams} and temperature is {self.temperature:g}; expected one of them: "
                "a beam search draws nothing",
            )
            require(wanted <= beams, f"num_return_sequences is {wanted}; expected at most num_beams, {beams}")
        else:
            require(
                wanted == 1 or self.temperature > 0,
                f"num_return_sequences is {wanted} and temperature is 0; expected a temperature above 0, or beams: "
                "greedy search finds one sequence",
            )
