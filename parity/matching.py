"""Proposes which of a torch module's numbers each JAX parameter holds; says what it is unsure of; runs both to be sure."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import nn

from parity.module_tensors import made_by_the_module, tensors
from parity.proposals import Candidate, Matcher, Proposal, leaves
from parity.weight_maps import Weight, WeightMap, paths

Confidence = Literal["verified", "likely", "unsure"]


@dataclass(frozen=True)
class MatchRow:
    """One of our parameters, and which of the module's numbers it holds."""

    ours: str
    shape: tuple[int, ...]
    theirs: str | Weight
    confidence: Confidence
    reason: str


@dataclass(frozen=True)
class WeightMatch:
    """What `match_weights` proposes."""

    rows: tuple[MatchRow, ...]
    unmatched_ours: Mapping[str, str]
    """Our parameters that have no equal in the module, each with what is known of it."""
    unmatched_theirs: Mapping[str, str]
    """The module's parameters and buffers that no row takes, each with what is known of it."""
    verified: bool
    """Whether gate 1, run on both with this map, was green, and every one of our parameters has a row."""
    figures: str = "not run"
    """What running both has shown."""

    @property
    def weights(self) -> WeightMap:
        """The map, for `check_parity` and `first_difference`."""
        return {row.ours: row.theirs for row in self.rows}

    @property
    def unsure(self) -> tuple[MatchRow, ...]:
        """The rows to look at."""
        return tuple(row for row in self.rows if row.confidence == "unsure")

    def table(self) -> str:
        """The map to read and approve, at most 80 columns wide."""
        lines = [self._head(), ""]
        for row in self.rows:
            lines += _wrapped(f"{row.ours}  {list(row.shape)}", "")
            lines += _wrapped(f"= {_said(row.theirs)}", "    ")
            lines += _wrapped(f"{row.confidence}: {row.reason}", "    ")
        for title, rest in (
            ("no equal in the module:", self.unmatched_ours),
            ("of the module, taken by no row:", self.unmatched_theirs),
        ):
            if rest:
                lines += ["", title]
                for name, what in rest.items():
                    lines += _wrapped(f"{name}: {what}", "    ")
        return "\n".join(lines)

    def python(self) -> str:
        """The map as Python to paste; run, it is the same map."""
        lines = ["from parity import Weight", "", "weights = {"]
        for row in self.rows:
            note = f"  # {row.reason}" if row.confidence == "unsure" else ""
            lines.append(f"    {row.ours!r}: {_literal(row.theirs)},{note}")
        lines.append("}")
        lines += [f"# no equal in the module: {name}: {what}" for name, what in self.unmatched_ours.items()]
        lines += [f"# of the module, taken by no row: {name}: {what}" for name, what in self.unmatched_theirs.items()]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.table()

    def _head(self) -> str:
        state = "verified" if self.verified else "not verified"
        return f"{len(self.rows)} rows, {len(self.unsure)} unsure; {state}: {self.figures}"


def match_weights(
    params: Any,
    module: nn.Module,
    *,
    ours: Callable[..., Any] | None = None,
    inputs: Sequence[np.ndarray] | Mapping[str, np.ndarray] = (),
) -> WeightMatch:
    """Proposes which of the module's numbers each leaf of `params` holds."""
    flat = {path: leaf for path, leaf in paths(params).items() if hasattr(leaf, "shape")}
    if not flat:
        raise TypeError(f"params is a {type(params).__name__} without arrays; expected a pytree of arrays or shapes")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; expected a torch.nn.Module, which holds the weights")
    found, arrays = tensors(module)
    here = leaves(flat)
    proposals = Matcher(here, [one for one in found if not made_by_the_module(one.name, one.members and module.get_parameter(one.members[0]) if not one.buffer else module.get_buffer(one.members[0]))], arrays).proposals()
    rows = tuple(_row(proposal) for proposal in proposals)
    return WeightMatch(rows, {}, {}, False)


def _row(proposal: Proposal) -> MatchRow:
    confidence: Confidence = "likely" if proposal.sure else "unsure"
    return MatchRow(proposal.leaf.path, proposal.leaf.shape, as_weight(proposal.chosen), confidence, proposal.reason)


def as_weight(candidate: Candidate) -> str | Weight:
    """The row of the map that a candidate stands for: a name where nothing moves."""
    pattern, sizes, part = candidate.layout.pattern()
    before, after = pattern.split(" -> ")
    if before == after and not part:
        if candidate.tensor.layers is None:
            return candidate.tensor.name
        return Weight(candidate.tensor.name)
    return Weight(candidate.tensor.name, pattern, sizes, part)


def _said(row: str | Weight) -> str:
    if isinstance(row, str):
        return row
    moved = "" if row.axes == "... -> ..." else f", {row.axes}"
    sizes = "".join(f", {name}={size}" for name, size in row.sizes.items())
    part = "".join(f", {name} {rows}" for name, rows in row.part.items())
    return f"{row.name}{moved}{sizes}{part}"


def _literal(row: str | Weight) -> str:
    if isinstance(row, str):
        return repr(row)
    given = [repr(row.name)]
    if row.axes != "... -> ...":
        given.append(repr(row.axes))
    given += [f"sizes={dict(row.sizes)!r}"] if row.sizes else []
    given += [f"part={dict(row.part)!r}"] if row.part else []
    return f"Weight({', '.join(given)})"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, 80, initial_indent=indent, subsequent_indent=indent + "    ", break_long_words=True, break_on_hyphens=False
    )
