"""Runs the installed programs: `jax-tformer PROGRAM ...` or `python -m jax_tformer PROGRAM ...`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from jax_tformer.config.errors import require
from jax_tformer.terminal import SMALLER_ANSWERS, SMALLER_TRAINING, run_program

PROGRAMS = {
    "train": ("jax_tformer.cli.train", "train a transformer, or continue a run"),
    "generate": ("jax_tformer.cli.generate", "let a trained model complete or translate"),
    "compare": ("twin.compare", "train in JAX and PyTorch side by side; a report"),
    "parity": ("twin.prove", "prove here that the models equal the PyTorch reference"),
    "tokenize": ("jax_tformer.cli.tokenize", "write text of any size as shards of ids to train on"),
    "from-flax": ("jax_tformer.cli.from_flax", "write a flax_model.msgpack as safetensors"),
    "export": ("jax_tformer.cli.export", "write a run's model as safetensors, config and tokenizer"),
}
"""Program -> the module with its `main`, and what it does. compare and parity need torch."""


def main() -> None:
    """Runs the program that the first argument names, and exits with its status."""
    name = "".join(sys.argv[1:2])
    arguments = sys.argv[2:]
    if name in ("", "-h", "--help"):
        lines = [f"  {name:<9}  {what}" for name, (_, what) in PROGRAMS.items()]
        print("usage: jax-tformer PROGRAM ...", "", *lines, "", "jax-tformer PROGRAM --help says more.", sep="\n")
        raise SystemExit(0)
    if name in PROGRAMS:
        # The name that error messages and --help use.
        sys.argv = [f"jax-tformer {name}", *arguments]

    def program(arguments: Sequence[str]) -> int:
        require(name in PROGRAMS, f"there is no program {name!r}; expected one of {', '.join(PROGRAMS)}")
        # Imported here, so that `run_program` also handles a Ctrl-C during the import; and only where it is needed,
        # because training limits the heaps of threads before it imports NumPy.
        if name not in ("train", "generate"):
            from jax_tformer.training.processes import require_alone

            require_alone(sys.argv[0])
        return import_module(PROGRAMS[name][0]).main(arguments)

    smaller = SMALLER_ANSWERS if name == "generate" else SMALLER_TRAINING
    run_program(program, sys.argv[0] if name in PROGRAMS else "jax-tformer", smaller=smaller)


if __name__ == "__main__":
    main()
