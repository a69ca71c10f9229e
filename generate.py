"""Generate text with a trained model: `python generate.py FOLDER --prompt TEXT`; `--help` says more."""

from jax_tformer.cli.command_line import SMALLER_ANSWERS, run_program
from jax_tformer.cli.generate import main

if __name__ == "__main__":
    run_program(main, "generate.py", smaller=SMALLER_ANSWERS)
