"""Write the weights of a Flax model of transformers (flax_model.msgpack) as safetensors, once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from jax_tformer.files import list_files, require_new_folder, user_path
from jax_tformer.terminal import parse


@dataclass(frozen=True)
class FromFlaxOptions:
    """What is written where."""

    folder: tyro.conf.Positional[Path]
    """The folder with config.json and flax_model.msgpack."""
    out: tyro.conf.Positional[Path]
    """A new or empty folder, which transformers and load_pretrained open."""
    max_shard_size: str = "5GB"
    """The largest file of weights; more of them go into shards with an index."""


def main(arguments: Sequence[str]) -> int:
    options = parse(FromFlaxOptions, arguments, prog="jax-tformer from-flax", description=__doc__ or "")
    out = user_path(options.out)
    require_new_folder(out)

    import optax

    from jax_tformer.hub.flax_weights import load_flax
    from jax_tformer.hub.pretrained import save_pretrained

    net, params, tokenizer = load_flax(options.folder)
    save_pretrained(out, net, params, tokenizer, max_shard_size=options.max_shard_size)
    count = optax.tree.size(params)
    print(f"{net.origin.architecture} of {count:,} parameters is in {out}/: {list_files(out)}")
    return 0
