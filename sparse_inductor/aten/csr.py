"""Matrices in PyTorch's CSR layout."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor


def csr(offsets: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a sparse matrix [rows, columns]. Its parts are not checked."""
    _warn_once()
    return torch.sparse_csr_tensor(offsets, columns, values, size, check_invariants=False)


@functools.cache
def _warn_once() -> None:
    """Trigger and suppress PyTorch's warnings, once per process: that sparse CSR is beta, and in 2.11 that invariants
    are not checked. They do not concern the user of an operator."""
    none = torch.zeros(2, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(none, none[:0], none[:0], (1, 1), check_invariants=False)
