"""What the code of `transformers` reads from a model's config: found in its source, so that no reader is forgotten."""

import ast
import inspect
import re
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
    config = kind.config_class
    found = _read(_reached(kind), "config")
    configs = {configuration_utils: "PreTrainedConfig", sys.modules[config.__module__]: config.__name__}
    shared = [*SHARED]
    if hasattr(config, "rope_parameters"):
        configs[modeling_rope_utils] = "RotaryEmbeddingConfigMixin"
        shared.append(modeling_rope_utils)
    for module in shared:
        found |= _read("\n".join(_definitions(module).values()), "config|layer_config")
    for module, name in configs.items():
        found |= _read(_definitions(module)[name], "config|self")
    # What Python and the class make of themselves is in no file.
    return {name for name in found if not (name.startswith("_") or callable(getattr(config, name, None)))}


def rotary_parameters(kind, rope_type):
    """The fields of `rope_parameters` that this class reads for this type of scaling."""
    source, compute = _reached(kind), modeling_rope_utils.ROPE_INIT_FUNCTIONS.get(rope_type)
    if compute is not None:
        source += _definitions(modeling_rope_utils)[compute.__name__]
    # One of the objects by kind of layer is such an object too.
    return {*re.findall(r"\brope_param(?:eters|eters_dict|s)(?:\[\w+\])?(?:\[|\.get\()'(\w+)'", source)}


@cache
def _definitions(module):
    """The classes and functions of a module by name, in one form however they are written."""
    body = ast.parse(inspect.getsource(module)).body
    return {node.name: ast.unparse(node) for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def _reached(kind):
    """The source of a class, and of what it names in its module, and what that names."""
    sources, reached, waiting = _definitions(sys.modules[kind.__module__]), {}, {kind.__name__}
    while waiting:
        name = waiting.pop()
        reached[name] = sources[name]
        waiting |= (sources.keys() & re.findall(r"\w+", sources[name])) - reached.keys()
    return "\n".join(reached.values())


@cache
def _read(source, owners):
    """X of every `config.X`, `self.config.X` and `getattr(config, "X", ...)`, but for assignments and quotations."""
    loads = re.findall(rf"(?<!['`*])\b(?:{owners})\.(\w+)\b(?! = |`)", source)
    return {*loads, *re.findall(rf"(?:get|has)attr\((?:\w+\.)*(?:{owners}), '(\w+)'", source)}
