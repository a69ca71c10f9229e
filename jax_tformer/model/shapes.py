"""The shapes that the model's functions share, by name: B rows, T target or only text, S source, D model width."""

from jaxtyping import Array, Bool, Float, Int, Key

DropoutKey = Key[Array, ""] | None
"""Turns dropout on: of the forward pass or, inside a layer, of the layer."""
Ids = Int[Array, "B T"]
Marks = Bool[Array, "B T"] | None
"""True at tokens, or at those of a prefix; None: all, or none."""
Numbers = Int[Array, "B T"] | None
"""Of segments, or token types."""
SourceIds = Int[Array, "B S"]
SourceMarks = Bool[Array, "B S"] | None
SourceNumbers = Int[Array, "B S"] | None
Positions = Int[Array, "#B T"]
Stream = Float[Array, "B T D"]
"""The residual stream, and what enters and leaves the parts of a layer."""
Memory = Float[Array, "B S D"] | None
"""The encoder's output; None: the cache holds its keys and values."""
