"""Describes a transformer, for both implementations.

The configs are frozen dataclasses that check themselves when they are made. Every choice that changes a number is a
field, so nothing depends on a framework's default.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from jax_tformer.config.described import described
from jax_tformer.config.errors import (
    InputError,
    require,
    require_choice,
    require_field,
    require_finite,
    require_fraction,
    require_positive,
)
from jax_tformer.config.stack import StackConfig

AttentionImplementation = Literal["auto", "einsum", "blocks", "cudnn", "pallas"]
Dtype = Literal["float64", "float32", "bfloat16"]
Head = Literal["none", "linear", "transform", "classify_tokens", "classify_text"]
Initializer = Literal["normal", "xavier_uniform"]
LoraTarget = Literal["query", "key", "value", "output", "gate", "up", "down", "all"]
Pooler = Literal["none", "tanh", "relu"]
Remat = Literal["auto", "none", "dots", "full"]


@described
@dataclass(frozen=True)
class DropoutConfig:
    """The dropout rates; all apply only where a dropout key is given."""

    embedding: float = 0.0
    """Of the embedded input."""
    attention: float = 0.0
    """Of the attention weights."""
    residual: float = 0.0
    """Of every sublayer's output, before it is added to the residual stream."""
    feedforward: float = 0.0
    """Of the activations inside the feed-forward layers."""
    final: float = 0.0
    """Of every stack's output, after the final norm if there is one, as T5."""
    pooler: float = 0.0
    """Of the first position, before the pooler."""
    classifier: float = 0.0
    """Of the input of a classification head."""
    attention_output: float | None = None
    """Instead of the residual rate, of the outputs of attention; None: the residual rate."""

    def __post_init__(self) -> None:
        rates = (field.name for field in dataclasses.fields(self))
        require_fraction(self, *(name for name in rates if getattr(self, name) is not None))

    @property
    def of_attention_output(self) -> float:
        """The rate of the outputs of attention."""
        return self.residual if self.attention_output is None else self.attention_output

    @property
    def drops(self) -> bool:
        """Whether any rate is above 0."""
        return any(dataclasses.astuple(self))


@described
@dataclass(frozen=True)
class ComputeConfig:
    """In which arithmetic and in which order the layers are computed."""

    parameter_dtype: Dtype = "float32"
    """Type of the parameters."""
    dtype: Dtype = "float32"
    """Type of activations and matrix products; norms, softmax and loss use at least float32."""
    attention: AttentionImplementation = "auto"
    """Implementation of attention; auto: the one that suits platform, type and shapes (see model/fast)."""
    remat: Remat = "auto"
    """What the backward pass recomputes: nothing, all but products and attention (dots), or whole layers (full)."""
    unroll: int = 1
    """Layers computed in one iteration of the scan over layers."""

    def __post_init__(self) -> None:
        require_choice(self, "parameter_dtype", Dtype)
        require_choice(self, "dtype", Dtype)
        require_choice(self, "attention", AttentionImplementation)
        require_choice(self, "remat", Remat)
        require_positive(self, "unroll")


@described
@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA; Hu et al., 2021): x W + scale * (x A) B, of which only A and B train."""

    rank: int = 8
    """R, the columns of A and rows of B."""
    alpha: float = 16.0
    """The adapters' scale is alpha / rank."""
    targets: tuple[LoraTarget, ...] = ("query", "value")
    """The projections with adapters, in every layer and both stacks; all: every one that the model has."""
    dropout: float = 0.0
    """Of the adapters' inputs."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA; Kalajdzievski, 2023)."""

    def __post_init__(self) -> None:
        require_positive(self, "rank")
        require_finite(self, "alpha", above=0)
        require_fraction(self, "dropout")
        allowed = get_args(LoraTarget)
        require_field(
            isinstance(self.targets, tuple)
            and 0 < len(self.targets) == len(set(self.targets))
            and set(self.targets) <= set(allowed)
            and (self.targets == ("all",) or "all" not in self.targets),
            "targets",
            f"is {self.targets!r}; expected all, or some of {', '.join(allowed[:-1])}, each once",
        )

    @property
    def scale(self) -> float:
        """What the product of the adapters is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def adapts(self, target: str | None) -> bool:
        """Whether the projections of this name have adapters; False for None."""
        return target is not None and (target in self.targets or "all" in self.targets)


@described
@dataclass(frozen=True)
class TransformerConfig:
    """A transformer: an encoder-decoder if it has both stacks, or encoder-only or decoder-only."""

    vocab_size: int | None = None
    """Rows of the token table; None: as many as the experiment's tokenizer has ids."""
    d_model: int = 512
    """Width of the residual stream."""
    encoder: StackConfig | None = None
    """The encoder: every position attends to every other."""
    decoder: StackConfig | None = None
    """The decoder: causal, with cross-attention if there is an encoder."""
    shared_embedding: bool = False
    """Encoder and decoder share one token table."""
    head: Head = "linear"
    """Nothing, a vocabulary projection, BERT's transform and that projection, or classes of tokens or of the text."""
    pooler: Pooler = "none"
    """Dense layer and activation on the encoder's first position, as in BERT (tanh) and DistilBERT (relu)."""
    classes: int | None = None
    """Number of classes of a classification head; None for the other heads."""
    tied_head: bool = False
    """Use the transposed token table of the last stack as vocabulary projection."""
    head_bias: bool = False
    """Bias of the vocabulary projection."""
    head_scale: bool = False
    """Multiply the input of the vocabulary projection by d_model^-0.5."""
    logit_cap: float | None = None
    """Bounds the logits smoothly: cap * tanh(logit / cap); None: no bound."""
    initializer: Initializer = "normal"
    """normal: standard deviation initializer_std; xavier_uniform: by fan-in and fan-out, token tables d_model^-0.5."""
    initializer_std: float = 0.02
    """Standard deviation of the normal initializer, and of learned position and token-type tables under either."""
    residual_init_scale: bool = False
    """Initialise the last projection of each residual branch smaller, by (branches in the stack)^-0.5, as GPT-2."""
    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    """The dropout rates; all apply only where a dropout key is given."""
    lora: LoraConfig | None = None
    """Low-rank adapters. With them, nothing else trains; None: no adapters, and everything trains."""
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    """In which arithmetic and in which order the layers are computed."""

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            require_positive(self, "vocab_size")
        require_positive(self, "d_model")
        require_choice(self, "head", Head)
        require_choice(self, "pooler", Pooler)
        require_choice(self, "initializer", Initializer)
        require_finite(self, "initializer_std", above=0)
        require(
            self.encoder is not None or self.decoder is not None,
            "a transformer has neither encoder nor decoder; expected at least one stack",
        )
        require(
            not self.shared_embedding or (self.encoder is not None and self.decoder is not None),
            "shared_embedding is set, but there is only one stack; expected an encoder and a decoder",
        )
        of_head = ("tied_head", "head_bias", "head_scale", "logit_cap")
        require(
            self.predicts_tokens or not any(getattr(self, name) for name in of_head),
            f"one of {', '.join(of_head)} is set, but head is {self.head!r}; expected 'linear' or 'transform'",
        )
        if self.logit_cap is not None:
            require_finite(self, "logit_cap", above=0)
        require(
            self.encoder is None or self.decoder is None or not self.decoder.parallel,
            "decoder.parallel is set and there is an encoder; expected False, since cross-attention comes in between",
        )
        self._check_classification()
        for stack in filter(None, (self.encoder, self.decoder)):
            self._check_widths(stack)
        for side, least in ((self.encoder, 4), (self.decoder, 2)):
            if side is not None and side.positions == "relative":
                side.check_buckets(least)

    def _check_classification(self) -> None:
        classifies, pools = self.head.startswith("classify"), self.pooler != "none"
        if self.classes is not None:
            require_positive(self, "classes")
        require(
            classifies == (self.classes is not None),
            f"head is {self.head!r} and classes is {self.classes}; "
            "expected a number of classes with a classification head, and None otherwise",
        )
        require(
            self.decoder is None or not (classifies or pools),
            f"head is {self.head!r} and pooler is {self.pooler!r}, and there is a decoder; "
            "expected an encoder alone for classification and for a pooler",
        )
        require(
            pools in {"none": (False, True), "classify_text": (True,)}.get(self.head, (False,)),
            f"head is {self.head!r} and pooler is {self.pooler!r}; "
            "expected a pooler with head 'classify_text', none or one with head 'none', and none with other heads",
        )
        for rate, reader in (("pooler", pools), ("classifier", classifies)):
            require(
                reader or getattr(self.dropout, rate) == 0,
                f"dropout.{rate} is {getattr(self.dropout, rate)}, but head is {self.head!r} and pooler is "
                f"{self.pooler!r}; expected 0 for a part that the model does not have",
            )
        if self.lora is not None:
            self._check_lora(self.lora)

    def _check_widths(self, stack: StackConfig) -> None:
        require(
            stack.head_width is not None or self.d_model % stack.num_heads == 0,
            f"d_model is {self.d_model} and num_heads is {stack.num_heads}; "
            "expected a width divisible by the number of heads, or head_width set",
        )
        require(
            not stack.positions.startswith("sinusoidal") or self.d_model % 2 == 0,
            f"d_model is {self.d_model}; sinusoidal positions need an even width",
        )
        turned, width = stack.rotary.width, self.head_width(stack)
        require(
            stack.positions != "rotary" or turned is not None or width % 2 == 0,
            f"{'d_model / num_heads' if stack.head_width is None else 'head_width'} is {width}; "
            "rotary positions need an even one",
        )
        require(
            turned is None or (turned % 2 == 0 and turned <= width),
            f"rotary.width is {turned} and the head width is {width}; expected an even number of its columns",
        )

    def _check_lora(self, lora: LoraConfig) -> None:
        stacks = [stack for stack in (self.encoder, self.decoder) if stack is not None]
        require(
            "gate" not in lora.targets or any(stack.gated for stack in stacks),
            "lora.targets has gate, and no stack is gated; expected other targets, or all",
        )
        adapted = {
            name: sizes
            for stack in stacks
            for name, sizes in self.projections(stack).items()
            if lora.adapts(name) and lora.rank > min(sizes)
        }
        for name, (inputs, outputs) in adapted.items():
            raise InputError(
                f"lora.rank is {lora.rank}, and {name} has a matrix of {inputs} x {outputs}; "
                f"expected a rank of at most {min(inputs, outputs)}"
            )

    def projections(self, stack: StackConfig) -> dict[str, tuple[int, int]]:
        """The projections of each layer of `stack`, by name: (inputs, outputs)."""
        queries = stack.num_heads * self.head_width(stack)
        shared = (stack.key_value_heads or stack.num_heads) * self.head_width(stack)
        model, inner = self.d_model, stack.feedforward_width
        found = {
            "query": (model, queries),
            "key": (model, shared),
            "value": (model, shared),
            "output": (queries, model),
        }
        found |= {"gate": (model, inner)} if stack.gated else {}
        return found | {"up": (model, inner), "down": (inner, model)}

    @property
    def predicts_tokens(self) -> bool:
        """Whether the logits are those of the vocabulary."""
        return self.head in ("linear", "transform")

    @property
    def output_stack(self) -> StackConfig:
        """The stack below the head: the decoder if there is one."""
        stack = self.decoder or self.encoder
        assert stack is not None  # checked on construction
        return stack

    @property
    def drops(self) -> bool:
        """Whether any rate of dropout is above 0."""
        return self.dropout.drops or (self.lora is not None and self.lora.dropout > 0)

    def head_width(self, stack: StackConfig) -> int:
        """C, the width of one head of `stack`."""
        return stack.head_width or self.d_model // stack.num_heads

    def scale_width(self, stack: StackConfig) -> int:
        """The n of `attention_scale`: scores are multiplied by n^-0.5."""
        widths = {"head_width": self.head_width(stack), "model_width": self.d_model, "none": 1}
        return widths[stack.attention_scale] if isinstance(stack.attention_scale, str) else stack.attention_scale

    def with_vocab_size(self, vocab_size: int) -> "TransformerConfig":
        """This config with `vocab_size`, unless it already has a size."""
        return self if self.vocab_size is not None else dataclasses.replace(self, vocab_size=vocab_size)

    def with_dtype(self, dtype: Dtype) -> "TransformerConfig":
        """This config with parameters and arithmetic in `dtype`."""
        compute = dataclasses.replace(self.compute, parameter_dtype=dtype, dtype=dtype)
        return dataclasses.replace(self, compute=compute)
