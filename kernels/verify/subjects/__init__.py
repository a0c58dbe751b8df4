"""Kernels that the interpreter is tried on: ours, FlashAttention-4 and FlashInfer."""
