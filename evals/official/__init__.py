"""RULER's samples as NVIDIA's generators make them: the same random stream, the same bytes.

The reference is the PyPI package nvidia-long-context-eval 26.3; tests compare with its program.
"""
