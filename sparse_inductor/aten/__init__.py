"""ATen implementations that both operators and kernels call."""

from __future__ import annotations

import torch


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """fp64 if any input is, else fp32: half precisions are widened."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def looks_at(t: torch.Tensor) -> bool:
    """Whether an ATen implementation may decide by what a tensor holds: for a GPU's the host would wait, and no CUDA
    graph could be captured."""
    return t.device.type == "cpu"
