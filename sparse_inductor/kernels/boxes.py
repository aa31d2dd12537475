"""Matrices for the bulk copy engine."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .arch import capability

__all__ = ["addressable", "boxes", "sliceable"]


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


def sliceable(x: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether slices of a table's rows [N, D], of x's type, can be held in shared memory: 16 bits, a Hopper GPU, and 16
    bytes to copy at a time, which Triton sees in a stride of 16 elements."""
    return (
        x.is_cuda
        and x.element_size() == 2
        and x.dtype.is_floating_point
        and capability(x.device) == (9, 0)
        and addressable(table)
        and table.stride(0) % 16 == 0
    )
