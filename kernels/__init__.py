"""Attention that skips blocks: reference, CPU and GPU kernels behind one call, `prefill_attention`.

Nothing is imported until it is used: `blasst.kernels.threshold` and `blasst.kernels.exchange` need
the standard library alone, everything else needs torch, device code also its own tool chain.
"""
