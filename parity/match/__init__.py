"""Proposes which of a PyTorch module's numbers each JAX parameter holds, and proves the proposal by running both."""
