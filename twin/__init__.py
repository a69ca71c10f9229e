"""Both frameworks as one pair: the same weights and batches in the JAX models and in `torch_ref`, side by side.

It is outside of `jax_tformer` because it needs torch, and outside of `torch_ref` because it needs jax.
"""
