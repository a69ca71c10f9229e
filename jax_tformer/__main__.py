"""Runs the installed programs: `jax-tformer PROGRAM ...` or `python -m jax_tformer PROGRAM ...`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from jax_tformer.cli.command_line import SMALLER_ANSWERS, SMALLER_TRAINING, as_called, run_program, say_version
from jax_tformer.config.errors import InputError, TrainingFailed

PROGRAMS = {
    "train": ("jax_tformer.cli.train", "train a transformer, or continue a run"),
    "generate": ("jax_tformer.cli.generate", "let a trained model complete or translate"),
    "compare": ("twin.compare", "train in JAX and PyTorch side by side; a report"),
    "parity": ("twin.prove", "prove here that the models equal the PyTorch reference"),
    "from-flax": ("jax_tformer.cli.from_flax", "write a flax_model.msgpack as safetensors"),
    "export": ("jax_tformer.cli.export", "write a run's model as safetensors, config and tokenizer"),
}
"""Program -> the module with its `main`, and what it does. compare and parity need torch."""


def main() -> None:
    """Runs the program that the first argument names, and exits with its status."""
    name, arguments = "".join(sys.argv[1:2]), sys.argv[2:]
    if name not in PROGRAMS:
        raise SystemExit(_refused(name))
    # The name that error messages and --help use.
    sys.argv = [f"jax-tformer {name}", *arguments]

    def program(arguments: Sequence[str]) -> int:
        # Imported here, so that `run_program` also handles a Ctrl-C during the import.
        try:
            status: int = import_module(PROGRAMS[name][0]).main(arguments)
        except (InputError, TrainingFailed) as error:
            raise type(error)(as_called(str(error))) from error
        return status

    run_program(program, sys.argv[0], smaller=SMALLER_ANSWERS if name == "generate" else SMALLER_TRAINING)


def _refused(name: str) -> int:
    lines = [f"  {name:<9}  {what}" for name, (_, what) in PROGRAMS.items()]
    usage = "\n".join(["usage: jax-tformer PROGRAM ...", "", *lines, "", "jax-tformer PROGRAM --help says more."])
    if name == "--version":
        return say_version()
    if name in ("", "-h", "--help"):
        print(usage)
        return 0
    print(f"jax-tformer: error: there is no program {name!r}; expected one of {', '.join(PROGRAMS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
