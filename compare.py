"""Train in JAX and PyTorch side by side: `python compare.py [EXPERIMENT] [--FIELD VALUE ...]`; `--help` says more."""

from jax_tformer.terminal import run_program
from twin.compare import main

if __name__ == "__main__":
    run_program(main, "compare.py")
