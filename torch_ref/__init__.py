"""The reference: the same transformers in plain PyTorch, written to be read.

It shares nothing with `jax_tformer` but the configuration; the parity tests compare the two. Every module has the
name of its JAX counterpart.
"""

from torch_ref.transformer import DecoderOnly, EncoderDecoder, EncoderOnly, Outputs, reference

__all__ = ["DecoderOnly", "EncoderDecoder", "EncoderOnly", "Outputs", "reference"]
