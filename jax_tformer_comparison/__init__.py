"""The research comparison behind compare.py: both frameworks train on the same batches, and a report says how close.

It is outside `jax_tformer` because it needs torch, and outside `torch_ref` because it needs jax.
"""
