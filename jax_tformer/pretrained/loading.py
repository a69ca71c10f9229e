"""Opens a folder that Hugging Face's `save_pretrained` wrote."""

from pathlib import Path

import jax
import safetensors
from jax.sharding import Mesh
from safetensors.numpy import load_file

from jax_tformer.config import Dtype
from jax_tformer.data.tokenizer_sources import load_tokenizer
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.errors import InputError
from jax_tformer.files import user_path
from jax_tformer.model.functional import AnyTransformer, Params, transformer
from jax_tformer.pretrained.origin import read_origin
from jax_tformer.sharding import parameter_shardings
from jax_tformer.weights.huggingface import from_huggingface
from jax_tformer.weights.names import from_reference

WEIGHTS = "model.safetensors"


def load_pretrained(
    folder_or_name: str | Path, *, dtype: Dtype | None = None, mesh: Mesh | None = None, revision: str | None = None
) -> tuple[AnyTransformer, Params, Tokenizer | None]:
    """Loads a Hugging Face folder: returns the net, its parameters, and the tokenizer (None: the folder has none).

    `dtype` is the type of parameters and arithmetic; None keeps the stored one (float16 becomes float32, because our
    arithmetic has no float16). With a `mesh` (of `jax_tformer.sharding.make_mesh`) each device gets its part.
    `net.origin` holds what the folder says beyond our config.

    Raises InputError for folders that cannot be read in full, unsupported classes and settings, and weights that do
    not fit.
    """
    folder = user_path(folder_or_name)
    origin = read_origin(folder)
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"cannot read {folder / WEIGHTS}: {' '.join(str(error).split())}") from error
    config, reference = from_huggingface(origin.config, weights)
    config = config.with_dtype(dtype or "float32")
    net = transformer(config)
    net.origin = origin
    typed = {name: array.astype(config.compute.parameter_dtype) for name, array in reference.items()}
    params = from_reference(typed, net.shapes)
    placed = jax.device_put(params, None if mesh is None else parameter_shardings(mesh, net.shapes))
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").exists() else None
    return net, placed, tokenizer
