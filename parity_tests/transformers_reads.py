"""What the code of `transformers` reads from a model's config: found in its source, so that no reader is forgotten."""

import ast
import inspect
import sys
from functools import cache

from transformers import (
    cache_utils,
    configuration_utils,
    masking_utils,
    modeling_rope_utils,
    modeling_utils,
)
from transformers.integrations.heterogeneity import configuration_utils as heterogeneity
from transformers.utils import generic, output_capturing

SHARED = (masking_utils, cache_utils, modeling_utils, output_capturing, generic, heterogeneity)
"""The modules that every model's code calls with its config."""


def attributes(kind):
    """The attributes that a model of this class reads: its classes, those of the modules it calls, its config's."""
    modeling, config = sys.modules[kind.__module__], kind.config_class
    found = {name for node in _reached(modeling, kind.__name__) for name in _read(node, "config")}
    configs = {configuration_utils: "PreTrainedConfig", sys.modules[config.__module__]: config.__name__}
    shared = [*SHARED]
    if hasattr(config, "rope_parameters"):
        configs[modeling_rope_utils] = "RotaryEmbeddingConfigMixin"
        shared.append(modeling_rope_utils)
    for module in shared:
        found |= set(_read(_tree(module), "config", "layer_config"))
    for module, name in configs.items():
        found |= set(_read(next(_definitions(module, name)), "config", "self"))
    # What Python and the class make of themselves is in no file.
    return {name for name in found if not (name.startswith("_") or callable(getattr(config, name, None)))}


def rotary_parameters(kind, rope_type):
    """The fields of `rope_parameters` that this class reads for this type of scaling."""
    compute = modeling_rope_utils.ROPE_INIT_FUNCTIONS.get(rope_type)
    nodes = [*_reached(sys.modules[kind.__module__], kind.__name__)]
    if compute is not None:
        nodes.extend(_definitions(modeling_rope_utils, compute.__name__))
    return {name for node in nodes for name in _fields(node, "rope_parameters", "rope_parameters_dict", "rope_params")}


@cache
def _tree(module):
    return ast.parse(inspect.getsource(module))


def _definitions(module, name):
    kinds = ast.ClassDef | ast.FunctionDef
    return (node for node in _tree(module).body if isinstance(node, kinds) and node.name == name)


def _reached(module, name):
    """The classes and functions of a module that this one names, and those that they name."""
    reached = {}
    waiting = [name]
    while waiting:
        for node in _definitions(module, waiting.pop()):
            reached[node.name] = node
            names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            waiting.extend(names - reached.keys())
    return list(reached.values())


@cache
def _read(tree, *owners):
    """X of every `config.X`, `self.config.X` and `getattr(config, "X", ...)`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _last(node.value) in owners:
            found.append(node.attr)
        if isinstance(node, ast.Call) and _last(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            name = node.args[1]
            if _last(node.args[0]) in owners and isinstance(name, ast.Constant):
                found.append(str(name.value))
    return tuple(found)


def _fields(tree, *owners):
    """Yields X of `rope_parameters["X"]` and `rope_parameters.get("X", ...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            owner, name = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            owner, name = node.func.value, node.args[0]
        else:
            continue
        # One of the objects by kind of layer is such an object too.
        owner = owner.value if isinstance(owner, ast.Subscript) else owner
        if _last(owner) in owners and isinstance(name, ast.Constant):
            yield str(name.value)


def _last(node):
    """The last name of `a.b.c`; empty for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
