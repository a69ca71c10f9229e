"""Generate text with a trained model: `python generate.py FOLDER --prompt TEXT`; `--help` says more."""

from jax_tformer.cli.generate import main
from jax_tformer.terminal import SMALLER_ANSWERS, run_program

if __name__ == "__main__":
    run_program(main, "generate.py", smaller=SMALLER_ANSWERS)
