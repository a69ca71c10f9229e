"""Train a transformer: `python train.py [EXPERIMENT] [--FIELD VALUE ...]`; `--help` lists the experiments."""

from jax_tformer.cli.train import main
from jax_tformer.terminal import run_program

if __name__ == "__main__":
    run_program(main, "train.py")
