"""What the library costs, side by side with PyTorch in one run: `python -m benchmarks.decoding`."""
