"""Train a transformer: `python train.py [EXPERIMENT] [--FIELD VALUE ...]`; `--help` lists the experiments."""

from jax_tformer.cli.command_line import run_program
from jax_tformer.cli.train import main

if __name__ == "__main__":
    run_program(main, "train.py")
