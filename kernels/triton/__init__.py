"""The portable GPU kernel: compute capability 8.0 or later; runs interpreted on a CPU too."""
