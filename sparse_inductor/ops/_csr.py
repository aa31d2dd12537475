"""Matrices in PyTorch's CSR layout."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

__all__ = ["csr"]


def csr(offsets: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """A sparse matrix [rows, columns]; nothing about its parts is checked."""
    _say_beta_once()
    return torch.sparse_csr_tensor(offsets, columns, values, size, check_invariants=False)


@functools.cache
def _say_beta_once() -> None:
    """PyTorch warns once a process that sparse CSR is beta: that is no news for the user of an operator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.zeros(1, 1).to_sparse_csr()
