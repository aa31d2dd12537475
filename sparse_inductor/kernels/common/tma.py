"""Tensor descriptors for TMA, the bulk copies of Hopper and later GPUs."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .arch import capability, shared_memory


def tma_descriptor(t: torch.Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """The descriptor of `t` by tiles of rows x columns; None without TMA or where the strides forbid it."""
    aligned = (
        t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0
    )
    # Consumer cards from compute capability 12.0 on have TMA, and not the shared memory that its tiles take here.
    able = (
        t.is_cuda
        and t.element_size() == 2
        and capability(t.device)[0] >= 9
        and shared_memory(t.device) >= 160 * 1024
    )
    return TensorDescriptor.from_tensor(t, [rows, columns]) if able and aligned else None


def tma_addressable(rows: torch.Tensor) -> bool:
    """Whether TMA can address a matrix [R, D] of 16-bit elements."""
    stride = rows.stride(0)
    return (
        rows.stride(1) == 1
        and stride % 8 == 0  # 16 bytes
        and stride >= rows.shape[1]
        and rows.data_ptr() % 16 == 0
    )
