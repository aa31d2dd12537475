"""Matrices for the bulk copy engine."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .arch import capability

__all__ = ["addressable", "boxes"]


def boxes(t: torch.Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """`t` in boxes of rows x columns; None where the GPU has no such engine or the strides do not allow it."""
    aligned = (
        t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0
    )
    able = t.is_cuda and capability(t.device)[0] >= 9 and t.element_size() == 2
    return TensorDescriptor.from_tensor(t, [rows, columns]) if able and aligned else None


def addressable(rows: torch.Tensor) -> bool:
    """Whether the copy engine can address a matrix [R, D] of 16-bit elements."""
    stride = rows.stride(0)
    return (
        rows.stride(1) == 1
        and stride % 8 == 0  # 16 bytes
        and stride >= rows.shape[1]
        and rows.data_ptr() % 16 == 0
    )
