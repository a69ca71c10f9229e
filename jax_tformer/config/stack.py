"""Describes one stack of layers: attention, feed-forward, norms and positions."""

from dataclasses import dataclass, field
from typing import Literal

from jax_tformer.config.described import described
from jax_tformer.config.errors import require, require_choice, require_field, require_finite, require_positive

Activation = Literal["relu", "gelu_erf", "gelu_tanh", "silu"]
AttentionScale = Literal["head_width", "model_width", "none"]
Norm = Literal["layernorm", "rmsnorm"]
NormPlacement = Literal["pre", "post", "sandwich"]
Positions = Literal["sinusoidal_interleaved", "sinusoidal_half", "learned", "rotary", "relative", "none"]
RotaryScaling = Literal["none", "linear", "llama3"]


@described
@dataclass(frozen=True)
class RotaryConfig:
    """What rotary positions (Su et al., 2021) turn, and how their angles are stretched for texts beyond training."""

    width: int | None = None
    """Columns of each head that turn, from the first on; None: all."""
    scaling: RotaryScaling = "none"
    """linear: angles divided by `factor`; llama3: only those of long waves, and those between in part."""
    factor: float = 1.0
    """Divides the scaled angles."""
    low_frequency_factor: float = 1.0
    """llama3: waves that turn fewer times than this in `original_positions` are divided by the whole factor."""
    high_frequency_factor: float = 4.0
    """llama3: waves that turn more often than this in `original_positions` are not divided."""
    original_positions: int = 8192
    """llama3: length of the texts that the model was first trained on."""
    window_base: float | None = None
    """Base of the wavelengths in layers with the stack's window, which are never scaled; None: as in the others."""

    def __post_init__(self) -> None:
        if self.width is not None:
            require_positive(self, "width")
        require_choice(self, "scaling", RotaryScaling)
        require_finite(self, "factor", "low_frequency_factor", "high_frequency_factor", above=0)
        require_positive(self, "original_positions")
        if self.window_base is not None:
            require_finite(self, "window_base", above=0)
        require(
            self.low_frequency_factor < self.high_frequency_factor,
            f"low_frequency_factor is {self.low_frequency_factor} and high_frequency_factor is "
            f"{self.high_frequency_factor}; expected the first to be lower",
        )
        of_llama3 = ("low_frequency_factor", "high_frequency_factor", "original_positions")
        unread = {"linear": of_llama3, "none": ("factor", *of_llama3), "llama3": ()}[self.scaling]
        for name in unread:
            value, unset = getattr(self, name), getattr(RotaryConfig, name)
            because = f"and scaling is {self.scaling!r}; expected {unset!r}, since nothing reads it"
            require(value == unset, f"{name} is {value!r}, {because}")


@described
@dataclass(frozen=True)
class StackConfig:
    """One stack of layers, encoder or decoder, with the embedding that feeds it."""

    num_layers: int = 6
    """Number of layers."""
    num_heads: int = 8
    """Number of query heads."""
    feedforward_width: int = 2048
    """Inner width of the feed-forward layers."""
    key_value_heads: int | None = None
    """Number of key/value heads, shared by groups of query heads; None: num_heads."""
    head_width: int | None = None
    """Width of one head; None: d_model / num_heads."""
    window: int | None = None
    """Self-attention reaches positions less than this many places away; None: all."""
    window_layers: tuple[bool, ...] | None = None
    """Which layers the window applies to, repeated along the stack and cut off at its end; None: all."""
    attention_scale: AttentionScale | int = "head_width"
    """Multiplies attention scores by head_width^-0.5, d_model^-0.5, n^-0.5 for a whole number n, or 1 (none)."""
    score_cap: float | None = None
    """Bounds the scaled scores smoothly: cap * tanh(score / cap); None: no bound."""
    query_key_norm: bool = False
    """Normalise the queries and keys of each head, before they turn."""
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
    norm: Norm = "layernorm"
    """Kind of normalisation."""
    norm_placement: NormPlacement = "post"
    """pre: x + f(norm(x)); post: norm(x + f(x)); sandwich: x + norm'(f(norm(x)))."""
    parallel: bool = False
    """Attention and feed-forward read the same x: x + attention(norm(x)) + feedforward(norm'(x)); pre-norm."""
    norm_eps: float = 1e-5
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
    max_positions: int | None = None
    """The most tokens in a text; learned positions have so many rows, and only for others it may be None: any."""
    position_offset: int = 0
    """Rows before that of the first position in a learned table; nothing reads them."""
    position_base: float = 10000.0
    """Base of the sinusoidal and rotary wavelengths."""
    relative_buckets: int = 32
    """Rows of the table of relative positions; half of a side's are for one distance each (Raffel et al., 2020)."""
    relative_max_distance: int = 128
    """Relative positions: from this distance on all are alike; below, the other half's buckets grow with distance."""
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    """Which columns rotary positions turn, and the scaling of their angles."""
    token_types: int = 0
    """Rows of the token-type (segment) table; 0: no table."""

    def __post_init__(self) -> None:
        require_positive(self, "num_layers", "num_heads", "feedforward_width")
        for name in ("key_value_heads", "head_width", "window", "max_positions"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        if isinstance(self.attention_scale, str):
            require_choice(self, "attention_scale", AttentionScale)
        else:
            require_positive(self, "attention_scale")
        if self.score_cap is not None:
            require_finite(self, "score_cap", above=0)
        require_choice(self, "activation", Activation)
        require_choice(self, "norm", Norm)
        require_choice(self, "norm_placement", NormPlacement)
        require_choice(self, "positions", Positions)
        require_finite(self, "norm_eps", "position_base", above=0)
        require_positive(self, "relative_buckets", "relative_max_distance")
        require(
            self.norm == "layernorm" or not self.norm_bias,
            "norm is 'rmsnorm' and norm_bias is True; expected norm_bias False, since RMSNorm has no bias",
        )
        for name in ("token_types", "position_offset"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole and value >= 0, f"{name} is {value!r}; expected a whole number of at least 0")
        key_value_heads = self.key_value_heads or self.num_heads
        require(
            self.num_heads % key_value_heads == 0,
            f"num_heads is {self.num_heads} and key_value_heads is {key_value_heads}; "
            "expected a number of heads that the key/value heads divide",
        )
        self._check_positions()
        self._check_layers()

    def _check_positions(self) -> None:
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

    def _check_layers(self) -> None:
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
        buckets, single = self.relative_buckets, self.relative_buckets // least
        require_field(
            buckets >= least and buckets % (least // 2) == 0,
            "relative_buckets",
            f"is {buckets}; expected at least {least}{', and an even number, in an encoder' if least == 4 else ''}",
        )
        most = self.relative_max_distance
        alike = f"is {most}; expected more than {single}, from where on buckets have several distances"
        require_field(most > single, "relative_max_distance", alike)

    @property
    def table_positions(self) -> int:
        """The rows of a learned position table."""
        return (self.max_positions or 0) + self.position_offset

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer of the pattern, which the stack repeats; without a pattern of one layer alone."""
        return tuple(self.window if windowed else None for windowed in self.window_layers or (True,))
