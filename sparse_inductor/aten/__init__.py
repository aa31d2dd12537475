"""ATen implementations that both operators and kernels call."""

from __future__ import annotations

import torch

__all__ = ["looks_at"]


def looks_at(t: torch.Tensor) -> bool:
    """Whether an ATen implementation may decide by what a tensor holds: for a GPU's the host would wait, and no CUDA
    graph could be captured."""
    return t.device.type == "cpu"
