"""The programs as modules, so that an installed package has them too.

`train.py` and `generate.py` are the scripts at the top of the source tree: links to them, and files of their own in an
installed package. `compare.py` is `jax_tformer_comparison.program` in the same way, since it needs torch. `export.py`
is here alone.
"""
