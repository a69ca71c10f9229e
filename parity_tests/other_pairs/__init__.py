"""Pairs that are not ours: six PyTorch modules, each with an honest port to JAX, and faults planted in either side.

A file holds both sides of one pair and the map between their weights; `pair()` makes it. `planting.py` reads a file
with one line of it changed, so that every fault has a line of its own that an answer can be held against.
"""
