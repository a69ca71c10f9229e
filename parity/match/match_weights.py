"""Proposes which of a torch module's numbers each JAX parameter holds, and runs both to be sure."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from parity.gates.jax_side import exactly
from parity.gates.pytrees import is_floating, paths
from parity.gates.weight_map import Weight
from parity.match.candidates import Parameter, Proposal, Tensor, numbers_of, parameters
from parity.match.module_tensors import is_constant, tensors
from parity.match.proposals import proposed
from parity.match.runs import Runs
from parity.match.verification import verified
from parity.match.weight_match import Confidence, MatchRow, WeightMatch, as_row, as_weights


def match_weights(
    params: Any,
    module: nn.Module,
    *,
    ours: Callable[..., Any] | None = None,
    inputs: Sequence[Any] | Mapping[str, Any] = (),
) -> WeightMatch:
    """Proposes, for each floating array in `params`, which of the numbers of `module` it holds.

    `params` is any pytree: nested dicts, an nnx.State, variables of Linen, an Equinox module; arrays or only their
    shapes. Layers may be stacked on a leading axis. What decides: equal numbers, where both sides have them already;
    else names by their parts (`q_proj`, `query`, `wq`), shapes up to permuted, merged, split and fused axes, and order.

    With `ours(params, *inputs)` and `inputs` (arrays, or a dict of them for keyword arguments, as `module` takes them
    too) both are run in float64, on other weights than the module's own: the match is `verified` where gate 1 is
    green. Where it is red, every row is put to the test by itself, also against its name. Neither side is changed.
    Outputs that are not compared (of one side alone, or no floating-point arrays) are named in `figures`.

    Raises TypeError for params without floating arrays and for what is no module, ValueError for `ours` without inputs
    or inputs without `ours`, and ParityError where running fails or what is returned cannot be compared.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; expected a torch.nn.Module, which holds the weights")
    flat = {path: leaf for path, leaf in paths(params).items() if is_floating(leaf)}
    if not flat:
        raise TypeError(
            f"params, a {type(params).__name__}, has no floating array; expected a pytree of arrays or shapes"
        )
    if (ours is None) != (not inputs):
        given, missing = ("inputs", "ours") if ours is None else ("ours", "inputs")
        raise ValueError(f"{given} without {missing}; expected both, to run the two sides, or neither")
    module = getattr(module, "_orig_mod", module)  # as it was before torch.compile
    if ours is not None and any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError("module is on the meta device, without numbers; expected one that can be run")
    theirs, arrays = tensors(module)
    sides = parameters(flat), theirs
    proposals = proposed(*sides, numbers_of(flat), arrays)
    without = _without_equal(*sides, proposals)
    green, matters = False, dict[str, bool]()
    if ours is None:
        figures = "names and shapes alone; give ours= and inputs= to run both"
    elif without:
        figures = f"not run: {len(without)} of ours have no equal in the module"
    else:
        with exactly():
            proposals, green, figures, matters = verified(Runs(ours, params, module, inputs), proposals, sides)
    rest = _left_over(module, proposals, matters)
    if needed := [name for name, matter in matters.items() if matter]:
        green = False
        figures += f"; but the module's outputs depend on {', '.join(needed)}, which no row takes"
    rows = tuple(row for proposal in proposals for row in _rows(proposal, green))
    idle = _idle(module, proposals) if green else ()
    return WeightMatch(rows, without, rest, green, figures, idle)


def _idle(module: nn.Module, proposals: Sequence[Proposal]) -> tuple[str | Weight, ...]:
    """The parameters that no row takes, and the rows of tables around those that one takes."""
    taken = {name for one in proposals for name in one.chosen.tensor.members}
    found: list[str | Weight] = [name for name, _ in module.named_parameters() if name not in taken]
    for chosen in (one.chosen for one in proposals if one.chosen.role is None and one.chosen.layout.part):
        [(rows, cut)] = chosen.layout.part
        start, stop = cut if isinstance(cut, tuple) else (cut, cut + 1)
        for end in ((0, start), (stop, chosen.layout.sizes[rows])):
            if end[0] < end[1]:
                found += as_weights(replace(chosen, layouts=(replace(chosen.layout, part=((rows, end),)),)))
    return tuple(found)


def _rows(proposal: Proposal, green: bool) -> Iterator[MatchRow]:
    reason, ours = proposal.reason, proposal.chosen.ours
    confidence: Confidence = "likely" if proposal.sure else "unsure"
    if green and proposal.free:
        reason += "; the outputs do not depend on it"
    elif green:
        confidence = "verified"
        if not proposal.sure:
            reason = "tie broken by running both"
    for path, numbers in ours.each_layer():
        yield MatchRow(path, ours.shape, as_row(as_weights(proposal.chosen, numbers)), confidence, reason)


def _without_equal(
    ours: Sequence[Parameter], theirs: Sequence[Tensor], proposals: Sequence[Proposal]
) -> dict[str, str]:
    """Our parameters that no row is for, and why that may be."""
    found = {path for one in proposals for path in one.chosen.ours.members}
    tied = [tensor.name for tensor in theirs for other in tensor.aliases if "head" in other.words]
    why = "nothing that fits its shape and its name is left"
    shared = f"the module shares its head with {tied[0]}: tie yours too, or untie theirs" if tied else why
    return {
        one.name: f"{list(one.shape)}; {shared if 'head' in one.meaning.words else why}"
        for one in ours
        if one.name not in found
    }


def _left_over(module: nn.Module, proposals: Sequence[Proposal], matters: Mapping[str, bool]) -> dict[str, str]:
    """What of the module no row takes, and why that may be."""
    held = Counter[str]()
    for one in proposals:
        ours = one.chosen.ours
        numbers = math.prod((*ours.layers, *ours.shape)) // math.prod(one.chosen.tensor.layers)
        held.update(dict.fromkeys(one.chosen.tensor.members, numbers))
    said = {}
    parameters = dict(module.named_parameters())
    for name, tensor in [*parameters.items(), *module.named_buffers()]:
        shape = list(tensor.shape)
        if name in held:
            if held[name] < tensor.numel():
                said[name] = f"{shape}; {tensor.numel() - held[name]} of its numbers are in no row"
        elif is_constant(name, tensor):
            said[name] = f"{shape}; a constant that the module makes itself"
        elif name not in parameters or not tensor.requires_grad:
            said[name] = f"{shape}; not trained: yours has to make the same numbers itself"
        elif name in matters:
            said[name] = f"{shape}; " + (
                "the outputs depend on it" if matters[name] else "the outputs do not depend on it"
            )
        else:
            said[name] = f"{shape}; nothing of yours fits it"
    return said
