"""The Triton kernel is interpreted where there is no GPU; read when its module is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
