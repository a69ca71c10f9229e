"""The research comparison behind compare.py: both frameworks train on the same batches, and a report says how close.

It stands outside of `jax_tformer` because it needs torch, and outside of `torch_ref` because it needs jax.
"""
