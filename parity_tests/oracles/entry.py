"""What the harness has to know of a class of Hugging Face models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

Settings = Mapping[str, Any]
"""Fields of a config.json."""


@dataclass(frozen=True)
class Entry:
    """One class of Hugging Face models: how it is built small, and where its parts are."""

    kind: type[PreTrainedModel]
    auto: Any
    """The AutoModel that opens its folders."""
    settings: Settings
    """Those of its reduced config: at most 32 wide, no token with a meaning of its own, no dropout that matters."""
    stacks: Mapping[str, tuple[str, Mapping[str, str]]]
    """Side of ours -> where its layers are in their base model, and which modules of a layer return which of our
    attention weights."""
    variants: Mapping[str, Settings] = field(default_factory=dict)
    """Name -> changes of `settings`; each has to change our config."""
    further: bool = False
    """Whether all its parts are in another entry's too: it needs gates 1 and 2 only, in the longer suite."""
    weights_at: int = 1
    """Which of the things that these modules return the weights are, counted from 0."""
    prepare: Callable[[PreTrainedModel], object] = lambda model: None
    """Does to a new or loaded model what its class does only on the way from a file, or only in float32."""
    islands: bool = False
    """Whether it computes some things in float32 whatever its type, so that the float64 oracle needs `Float64`."""
    position_tables: Mapping[str, str] = field(default_factory=dict)
    """Ids of the batch -> the position table that counts from the start of the row and has to be told otherwise; the
    model takes no positions then."""
    to_logits: Callable[[Any, Tensor], Tensor] = lambda model, output: output
    """Makes logits of the first output of a class without the head that ours has."""
    first_position: int = 0
    """The position that it gives to the first token."""
    unused_untied: frozenset[str] = frozenset()
    """Arrays that it saves, and only a tied model uses; untied, they are written and not read."""
    no_longer_written: frozenset[str] = frozenset()
    """Settings that we write and the installed version does not (no longer, or never did), or writes as null."""
    generation: Settings = field(default_factory=dict)
    """What `generate` has to be told, so that it does nothing which ours does not do."""
