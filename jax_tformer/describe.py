"""What a model says of itself: a summary of its stacks, and a table of its parameters."""

import math
from typing import Any

import jax
from flax import traverse_util

from jax_tformer.config import StackConfig, TransformerConfig


def short_summary(config: TransformerConfig, shapes: dict[str, Any]) -> str:
    """Lists the stacks with their widths, the types, and the number of parameters of each part, a line each."""
    stacks = [
        f"  {name}: {_stack(config, stack)}"
        for name, stack in (("encoder", config.encoder), ("decoder", config.decoder))
        if stack is not None
    ]
    chosen = f"{config.vocab_size:,} tokens" if config.predicts_tokens else f"{config.classes} classes"
    head = "none" if config.head == "none" else f"{config.head}, {chosen}"
    head += "" if config.pooler == "none" else f", of the text pooled with {config.pooler}"
    tied = ", tied to the token table" if config.tied_head else ""
    types = f"  parameters in {config.compute.parameter_dtype}, computed in {config.compute.dtype}"
    parts = {name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree)) for name, tree in shapes.items()}
    counts = ", ".join(f"{name} {count:,}" for name, count in parts.items())
    return "\n".join([*stacks, f"  head: {head}{tied}", types, f"  {sum(parts.values()):,} parameters: {counts}"])


def parameter_table(shapes: dict[str, Any]) -> str:
    """Lists each parameter with its shape, number and bytes, and then the sums of each part and of all."""
    flat = {".".join(path): leaf for path, leaf in traverse_util.flatten_dict(shapes).items()}
    rows = [("parameter", "shape", "number", "bytes")]
    rows += [(name, str(list(leaf.shape)), *_sizes(leaf)) for name, leaf in flat.items()]
    rows += [("", "", "", "")]
    rows += [(name, "", *_sizes(tree)) for name, tree in shapes.items()] if len(shapes) > 1 else []
    rows += [("all", "", *_sizes(shapes))]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = (
        f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {number:>{widths[2]}}  {size:>{widths[3]}}"
        for name, shape, number, size in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _stack(config: TransformerConfig, stack: StackConfig) -> str:
    groups = "" if stack.key_value_heads is None else f" ({stack.key_value_heads} of keys and values)"
    inner = f"{'gated ' if stack.gated else ''}feed-forward {stack.feedforward_width:,} {stack.activation}"
    rows = "" if stack.max_positions is None else f"{stack.max_positions:,} "
    positions = f"{rows}{'no' if stack.positions == 'none' else stack.positions} positions"
    return (
        f"{stack.num_layers} layers of {config.d_model:,}, {stack.num_heads} heads of "
        f"{config.head_width(stack)}{groups}, {inner}, {stack.norm_placement}-{stack.norm}, {positions}"
    )


def _sizes(tree: dict[str, Any] | jax.ShapeDtypeStruct) -> tuple[str, str]:
    leaves = jax.tree.leaves(tree)
    numbers = [math.prod(leaf.shape) for leaf in leaves]
    size = sum(number * leaf.dtype.itemsize for number, leaf in zip(numbers, leaves, strict=True))
    return f"{sum(numbers):,}", f"{size:,}"
