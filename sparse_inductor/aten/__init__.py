"""ATen implementations that operators and kernels share."""

from __future__ import annotations

import torch


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """Return fp64 if any input is fp64, else fp32: half precisions are widened."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def all_finite(t: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. `aminmax` returns NaN if there is one, and converts no element."""
    return not t.numel() or all(bool(extreme.isfinite()) for extreme in t.aminmax())


def looks_at(t: torch.Tensor) -> bool:
    """Whether an ATen implementation may branch on the values of a tensor. On a GPU this would synchronise with the
    host and prevent the capture of CUDA graphs."""
    return t.device.type == "cpu"
