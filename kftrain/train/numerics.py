"""The switches of a process that decide how torch computes what formats leave open."""

from __future__ import annotations

import os

import torch

from kftrain.parallel.settings import PrecisionConfig

WORKSPACE_ENV = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACE = ":4096:8"
"""Eight buffers of 4 MiB: one of the two sizes with which cuBLAS is deterministic (CUDA toolkit, cuBLAS, 2.1.4)."""


def set_numerics(precision: PrecisionConfig) -> None:
    """Set torch's switches for this process, before its first matrix product; a model's own code may still set them."""
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32
    torch.backends.cudnn.benchmark = precision.cudnn_benchmark
    torch.backends.cudnn.deterministic = precision.deterministic
    if precision.deterministic:  # read when a process first asks cuBLAS for something
        os.environ.setdefault(WORKSPACE_ENV, WORKSPACE)
    torch.use_deterministic_algorithms(precision.deterministic)
