"""Describes a transformer, for both implementations. Nothing in this folder imports jax or torch.

The configs are frozen dataclasses that check themselves when they are made. Every choice that changes a number is a
field, so nothing depends on a framework's default.
"""

import math
from dataclasses import astuple, replace
from typing import Any, Literal, get_args

from jax_tformer.config.errors import AboveZero, Count, Positive, Rate, checked, require, require_field

Activation = Literal["relu", "relu_squared", "gelu_erf", "gelu_tanh", "silu"]
AttentionImplementation = Literal["auto", "einsum", "blocks", "cudnn", "pallas"]
AttentionScale = Literal["head_width", "model_width", "none"]
CapForm = Literal["tanh", "root"]
Dtype = Literal["float64", "float32", "bfloat16"]
Head = Literal["none", "linear", "transform", "classify_tokens", "classify_text"]
Initializer = Literal["normal", "xavier_uniform"]
LoraTarget = Literal["query", "key", "value", "output", "gate", "up", "down", "all"]
NormKind = Literal["layernorm", "rmsnorm"]
NormPlacement = Literal["pre", "post", "sandwich"]
Pooler = Literal["none", "tanh", "relu"]
Positions = Literal["sinusoidal_interleaved", "sinusoidal_half", "learned", "rotary", "relative", "none"]
Remat = Literal["auto", "none", "dots", "full"]
RotaryScaling = Literal["none", "linear", "llama3"]

IGNORED = -100
"""The label of positions that the loss ignores."""


@checked
class RotaryConfig:
    """What rotary positions (Su et al., 2021) turn, and how their angles are stretched for texts beyond training."""

    width: Positive | None = None
    """Columns of each head that turn, from the first on; None: all."""
    scaling: RotaryScaling = "none"
    """linear: angles divided by `factor`; llama3: only those of long waves, and those between in part."""
    factor: AboveZero = 1.0
    """Divides the scaled angles."""
    low_frequency_factor: AboveZero = 1.0
    """llama3: waves that turn fewer times than this in `original_positions` are divided by the whole factor."""
    high_frequency_factor: AboveZero = 4.0
    """llama3: waves that turn more often than this in `original_positions` are not divided."""
    original_positions: Positive = 8192
    """llama3: length of the texts that the model was first trained on."""
    window_base: AboveZero | None = None
    """Base of the wavelengths in layers with the stack's window, which are never scaled; None: as in the others."""

    def __post_init__(self) -> None:
        require(
            self.low_frequency_factor < self.high_frequency_factor,
            f"low_frequency_factor is {self.low_frequency_factor} and high_frequency_factor is "
            f"{self.high_frequency_factor}; expected the first to be lower",
        )
        of_llama3 = ("low_frequency_factor", "high_frequency_factor", "original_positions")
        for name in {"linear": of_llama3, "none": ("factor", *of_llama3), "llama3": ()}[self.scaling]:
            value = getattr(self, name)
            unset = getattr(RotaryConfig, name)
            told = f"{name} is {value!r}, and scaling is {self.scaling!r}; expected {unset!r}, since nothing reads it"
            require(value == unset, told)


@checked
class StackConfig:
    """One stack of layers, encoder or decoder, with the embedding that feeds it."""

    num_layers: Positive = 6
    """Number of layers."""
    num_heads: Positive = 8
    """Number of query heads."""
    feedforward_width: Positive = 2048
    """Inner width of the feed-forward layers."""
    key_value_heads: Positive | None = None
    """Number of key/value heads, shared by groups of query heads; None: num_heads."""
    head_width: Positive | None = None
    """Width of one head; None: d_model / num_heads."""
    window: Positive | None = None
    """Self-attention reaches positions less than this many places away; None: all."""
    window_layers: tuple[bool, ...] | None = None
    """Which layers the window applies to, repeated along the stack and cut off at its end; None: all."""
    attention_scale: AttentionScale | AboveZero = "head_width"
    """Multiplies attention scores by head_width^-0.5, d_model^-0.5, n^-0.5 for a number n, or 1 (none)."""
    score_cap: AboveZero | None = None
    """Bounds the scaled scores smoothly: cap * tanh(score / cap); None: no bound."""
    query_key_norm: bool = False
    """Normalise the queries and keys of each head, before they turn."""
    query_key_scale: bool = True
    """The normalisations of queries and keys have a scale, and a bias if the stack's have one."""
    query_bias: bool = True
    """Bias of the query projections."""
    key_bias: bool = True
    """Bias of the key projections."""
    value_bias: bool = True
    """Bias of the value projections."""
    output_bias: bool = True
    """Bias of the attention output projections."""
    feedforward_bias: bool = True
    """Biases of the feed-forward layers."""
    activation: Activation = "relu"
    """Activation of the feed-forward layers."""
    gated: bool = False
    """Gated feed-forward: down(activation(gate(x)) * up(x)) instead of down(activation(up(x)))."""
    norm: NormKind = "layernorm"
    """Kind of normalisation."""
    norm_placement: NormPlacement = "post"
    """pre: x + f(norm(x)); post: norm(x + f(x)); sandwich: x + norm'(f(norm(x)))."""
    parallel: bool = False
    """Attention and feed-forward read the same x: x + attention(norm(x)) + feedforward(norm'(x)); pre-norm."""
    norm_eps: AboveZero = 1e-5
    """Added to the variance (or the mean square) inside the root."""
    norm_bias: bool = True
    """Bias of the normalisations; must be False for RMSNorm, which has none."""
    norm_unit_offset: bool = False
    """Normalisations multiply by 1 + scale, and scale starts at 0, instead of scale, which starts at 1."""
    final_norm: bool = False
    """Normalise after the last layer."""
    embedding_norm: bool = False
    """Normalise the embedded input."""
    embedding_scale: bool = False
    """Multiply token embeddings by sqrt(d_model)."""
    positions: Positions = "sinusoidal_interleaved"
    """Sines in even and cosines in odd columns, all sines then all cosines, a learned table, rotary, a learned bias of
    the scores by distance (relative), or none."""
    max_positions: Positive | None = None
    """The most tokens in a text; learned positions have so many rows, and only for others it may be None: any."""
    position_offset: Count = 0
    """Rows before that of the first position in a learned table; nothing reads them."""
    position_base: AboveZero = 10000.0
    """Base of the sinusoidal and rotary wavelengths."""
    relative_buckets: Positive = 32
    """Rows of the table of relative positions; half of a side's are for one distance each (Raffel et al., 2020)."""
    relative_max_distance: Positive = 128
    """Relative positions: from this distance on all are alike; below, the other half's buckets grow with distance."""
    rotary: RotaryConfig = RotaryConfig()
    """Which columns rotary positions turn, and the scaling of their angles."""
    token_types: Count = 0
    """Rows of the token-type (segment) table; 0: no table."""

    def __post_init__(self) -> None:
        require(
            self.norm != "rmsnorm" or not self.norm_bias,
            "norm is 'rmsnorm' and norm_bias is True; expected norm_bias False, since RMSNorm has no bias",
        )
        key_value_heads = self.key_value_heads or self.num_heads
        require(
            self.num_heads % key_value_heads == 0,
            f"num_heads is {self.num_heads} and key_value_heads is {key_value_heads}; "
            "expected a number of heads that the key/value heads divide",
        )
        require(
            self.query_key_norm or self.query_key_scale,
            "query_key_scale is False and query_key_norm too; expected True, since there is nothing to scale",
        )
        require(
            self.positions != "learned" or self.max_positions is not None,
            "positions is 'learned' and max_positions is None; expected max_positions with learned positions",
        )
        require(
            self.positions == "learned" or not self.position_offset,
            f"positions is {self.positions!r} and position_offset is {self.position_offset}; expected 0, since only "
            "learned positions have a table",
        )
        require(
            self.positions == "rotary" or self.rotary == RotaryConfig(),
            f"positions is {self.positions!r} and rotary is set; expected rotary positions, or rotary left as it is",
        )
        require(
            self.window is not None or self.rotary.window_base is None,
            f"rotary.window_base is {self.rotary.window_base} and window is None; expected a window, or None",
        )
        require(
            not self.parallel or self.norm_placement == "pre",
            f"parallel is set and norm_placement is {self.norm_placement!r}; expected 'pre'",
        )
        pattern = self.window_layers
        if pattern is None:
            return
        require(self.window is not None, "window_layers is set and window is None; expected both, or neither")
        # A mixed pattern alone: with one kind of layer, window or no window says it.
        mixed = isinstance(pattern, tuple) and set(pattern[: self.num_layers]) == {True, False}
        require(
            mixed and len(pattern) <= self.num_layers and all(isinstance(each, bool) for each in pattern),
            f"window_layers is {pattern!r}; expected True and False, for at most {self.num_layers} layers",
        )

    def check_buckets(self, least: int) -> None:
        """Requires `least` buckets of relative positions: 4 for keys on both sides of a query, 2 for those on one."""
        buckets = self.relative_buckets
        single = self.relative_buckets // least
        require_field(
            buckets >= least and buckets % (least // 2) == 0,
            "relative_buckets",
            f"is {buckets}; expected at least {least}{', and an even number, in an encoder' if least == 4 else ''}",
        )
        most = self.relative_max_distance
        require_field(
            most > single,
            "relative_max_distance",
            f"is {most}; expected more than {single}, from where on buckets have several distances",
        )

    @property
    def table_positions(self) -> int:
        """The rows of a learned position table."""
        return (self.max_positions or 0) + self.position_offset

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer of the pattern, which the stack repeats; without a pattern, that of all layers."""
        return tuple(self.window if windowed else None for windowed in self.window_layers or (True,))


@checked
class DropoutConfig:
    """The dropout rates; all apply only where a dropout key is given."""

    embedding: Rate = 0.0
    """Of the embedded input."""
    attention: Rate = 0.0
    """Of the attention weights."""
    residual: Rate = 0.0
    """Of every sublayer's output, before it is added to the residual stream."""
    feedforward: Rate = 0.0
    """Of the activations inside the feed-forward layers."""
    final: Rate = 0.0
    """Of every stack's output, after the final norm if there is one, as T5."""
    pooler: Rate = 0.0
    """Of the first position, before the pooler."""
    classifier: Rate = 0.0
    """Of the input of a classification head."""
    attention_output: Rate | None = None
    """Instead of the residual rate, of the outputs of attention; None: the residual rate."""

    @property
    def of_attention_output(self) -> float:
        """The rate of the outputs of attention."""
        return self.residual if self.attention_output is None else self.attention_output

    @property
    def drops(self) -> bool:
        """Whether any rate is above 0."""
        return any(astuple(self))


@checked
class ComputeConfig:
    """In which arithmetic and in which order the layers are computed."""

    parameter_dtype: Dtype = "float32"
    """Type of the parameters."""
    dtype: Dtype = "float32"
    """Type of activations and matrix products; norms, softmax and loss use at least float32."""
    attention: AttentionImplementation = "auto"
    """Implementation of attention; auto: the one that suits platform, type and shapes (see model/fast.py). With a cache
    it is always blocks."""
    remat: Remat = "auto"
    """What the backward pass recomputes: nothing, all but products and attention (dots), or whole layers (full)."""
    unroll: Positive | None = None
    """Layers in one iteration of the scan over layers; None: one, but all in training on GPUs without --mesh.fsdp."""


@checked
class LoraConfig:
    """Low-rank adapters (LoRA; Hu et al., 2021): x W + scale * (x A) B, of which only A and B train."""

    rank: Positive = 8
    """R, the columns of A and rows of B."""
    alpha: AboveZero = 16.0
    """The adapters' scale is alpha / rank."""
    targets: tuple[LoraTarget, ...] = ("query", "value")
    """The projections with adapters, in every layer and both stacks; all: every one that the model has."""
    dropout: Rate = 0.0
    """Of the adapters' inputs."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA; Kalajdzievski, 2023)."""

    def __post_init__(self) -> None:
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


@checked
class TransformerConfig:
    """A transformer: an encoder-decoder if it has both stacks, or encoder-only or decoder-only."""

    vocab_size: Positive | None = None
    """Rows of the token table; None: as many as the experiment's tokenizer has ids."""
    d_model: Positive = 512
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
    classes: Positive | None = None
    """Number of classes of a classification head; None for the other heads."""
    tied_head: bool = False
    """Use the transposed token table of the last stack as vocabulary projection."""
    head_bias: bool = False
    """Bias of the vocabulary projection."""
    head_scale: bool = False
    """Multiply the input of the vocabulary projection by d_model^-0.5."""
    logit_cap: AboveZero | None = None
    """Bounds the logits smoothly: cap * tanh(logit / cap); None: no bound."""
    logit_cap_form: CapForm = "tanh"
    """root: cap * logit / sqrt(logit^2 + cap^2) instead."""
    initializer: Initializer = "normal"
    """normal: standard deviation initializer_std; xavier_uniform: by fan-in and fan-out, token tables d_model^-0.5."""
    initializer_std: AboveZero = 0.02
    """Standard deviation of the normal initializer, and of learned position and token-type tables under either."""
    residual_init_scale: bool = False
    """Initialise the last projection of each residual branch smaller, by (branches in the stack)^-0.5, as GPT-2."""
    dropout: DropoutConfig = DropoutConfig()
    """The dropout rates; all apply only where a dropout key is given."""
    lora: LoraConfig | None = None
    """Low-rank adapters. With them, nothing else trains; None: no adapters, and everything trains."""
    compute: ComputeConfig = ComputeConfig()
    """In which arithmetic and in which order the layers are computed."""

    def __post_init__(self) -> None:
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
        require(
            self.logit_cap is not None or self.logit_cap_form == "tanh",
            f"logit_cap_form is {self.logit_cap_form!r} and logit_cap is None; expected a cap",
        )
        require(
            self.encoder is None or self.decoder is None or not self.decoder.parallel,
            "decoder.parallel is set and there is an encoder; expected False, since cross-attention comes in between",
        )
        classifies = self.head.startswith("classify")
        pools = self.pooler != "none"
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
        for name, stack in self.stacks.items():
            require(
                stack.head_width is not None or self.d_model % stack.num_heads == 0,
                f"d_model is {self.d_model} and num_heads is {stack.num_heads}; "
                "expected a width divisible by the number of heads, or head_width set",
            )
            require(
                not stack.positions.startswith("sinusoidal") or self.d_model % 2 == 0,
                f"d_model is {self.d_model}; sinusoidal positions need an even width",
            )
            turned = stack.rotary.width
            width = self.head_width(stack)
            require(
                stack.positions != "rotary" or turned is not None or width % 2 == 0,
                f"{'d_model / num_heads' if stack.head_width is None else 'head_width'} is {width}; "
                "rotary positions need an even one",
            )
            require(
                turned is None or (turned % 2 == 0 and turned <= width),
                f"rotary.width is {turned}, of heads as wide as {width}; expected an even number of their columns",
            )
            if stack.positions == "relative":
                stack.check_buckets(4 if name == "encoder" else 2)
        lora = self.lora
        if lora is not None:
            sizes = [size for stack in self.stacks.values() for size in self.projections(stack).items()]
            require(
                "gate" not in lora.targets or "gate" in dict(sizes),
                "lora.targets has gate, and no stack is gated; expected other targets, or all",
            )
            for name, (inputs, outputs) in sizes:
                most = min(inputs, outputs)
                require(
                    lora.rank <= most or not lora.adapts(name),
                    f"lora.rank is {lora.rank}, and {name} has a matrix of {inputs} x {outputs}; "
                    f"expected a rank of at most {most}",
                )

    def projections(self, stack: StackConfig) -> dict[str, tuple[int, int]]:
        """The projections of each layer of `stack`, by name: (inputs, outputs)."""
        queries = stack.num_heads * self.head_width(stack)
        shared = (stack.key_value_heads or stack.num_heads) * self.head_width(stack)
        model = self.d_model
        inner = stack.feedforward_width
        attention = {"query": (model, queries), "key": (model, shared), "value": (model, shared)}
        gate = {"gate": (model, inner)} if stack.gated else {}
        return {**attention, "output": (queries, model), **gate, "up": (model, inner), "down": (inner, model)}

    @property
    def stacks(self) -> dict[str, StackConfig]:
        """The stacks by name, the encoder first."""
        both = {"encoder": self.encoder, "decoder": self.decoder}
        return {name: stack for name, stack in both.items() if stack is not None}

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

    @property
    def cap(self) -> tuple[float, CapForm] | None:
        """The bound of the logits and its form, if they are bounded."""
        return None if self.logit_cap is None else (self.logit_cap, self.logit_cap_form)

    def scale_width(self, stack: StackConfig) -> float:
        """The n of `attention_scale`: scores are multiplied by n^-0.5."""
        widths = {"head_width": self.head_width(stack), "model_width": self.d_model, "none": 1}
        return widths[stack.attention_scale] if isinstance(stack.attention_scale, str) else stack.attention_scale

    def with_vocab_size(self, vocab_size: int) -> "TransformerConfig":
        """This config with `vocab_size`, unless it already has a size."""
        return self if self.vocab_size is not None else replace(self, vocab_size=vocab_size)

    def with_compute(self, **changes: Any) -> "TransformerConfig":
        """This config with `changes` of its `compute`."""
        return replace(self, compute=replace(self.compute, **changes))

    def with_dtype(self, dtype: Dtype) -> "TransformerConfig":
        """This config with parameters and arithmetic in `dtype`."""
        return self.with_compute(parameter_dtype=dtype, dtype=dtype)

    def for_other_shapes(self) -> "TransformerConfig":
        """This config with attention "auto".

        The implementation for training's batches may not suit other lengths or numbers of rows, or another machine.
        """
        return self.with_compute(attention="auto")
