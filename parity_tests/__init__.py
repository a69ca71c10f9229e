"""The gates of parity: what "the same" means between the JAX models and the PyTorch reference, and its proof."""
