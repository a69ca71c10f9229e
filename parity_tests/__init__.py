"""The proof of our models: the gates of `parity` on the JAX models and the PyTorch reference."""
