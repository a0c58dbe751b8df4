"""Prefill attention for Blackwell (compute capability 10.x), in the CuTe DSL."""
