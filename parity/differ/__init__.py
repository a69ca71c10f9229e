"""The first difference: the place where a JAX function and a PyTorch module part. README.md says how it is found."""
