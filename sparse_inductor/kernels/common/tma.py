"""Requirements of TMA, the asynchronous tile copies of Hopper and later GPUs."""

from __future__ import annotations

import torch


def tma_addressable(rows: torch.Tensor) -> bool:
    """Whether TMA can address a matrix [R, D] of 16-bit elements."""
    stride = rows.stride(0)
    return (
        rows.stride(1) == 1
        and stride % 8 == 0  # 16 bytes
        and stride >= rows.shape[1]
        and rows.data_ptr() % 16 == 0
    )
