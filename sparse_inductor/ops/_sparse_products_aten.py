"""ATen implementation of products with a matrix that is mostly zeros: the CPU path, fp64, and the reference of the
kernels.

Where the host may look, few entries are sums of bags of an embedding, in one order, in fp32 for 16 bits; many of them
are a dense product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..aten import looks_at

# Elements for each one that is not zero, from which on bags are faster than a dense product (fp32, AMD EPYC).
_SPARSE = 32


def capacity(N: int) -> int:
    """Entries of a row that kernels pack: several times those of rows that are worth it."""
    return min(-(-N // 32) * 32, max(64, -(-N // (64 * 32)) * 32))


def _entries(h: Tensor, other: Tensor) -> tuple[Tensor, Tensor] | None:
    """(row, column) of each entry, by row; None where they are many, none, or the host may not look, and where they are
    multiplied by what is not finite, which is NaN times a 0, too."""
    if not looks_at(h) or not 0 < h.count_nonzero() <= h.numel() // _SPARSE:
        return None
    if not other.sum().isfinite():
        return None
    row, column = h.nonzero().unbind(1)
    return row, column


def _sums(values: Tensor, table: Tensor, at: Tensor, bags: Tensor, number: int) -> Tensor:
    """For each bag the sum of value * table[at] over its entries; bags: that of each entry, in order."""
    starts = torch.searchsorted(bags, torch.arange(number, device=bags.device))
    return F.embedding_bag(
        at, table.contiguous(), starts, mode="sum", per_sample_weights=values.contiguous()
    )


def matmul(h: Tensor, weight: Tensor) -> Tensor:
    """h @ weight."""
    found = _entries(h, weight)
    if found is None:
        return h @ weight
    row, column = found
    return _sums(h[row, column], weight, column, row.contiguous(), len(h))


def outer(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(h^T @ x, the sums of h over its rows)."""
    found, total = _entries(h, x), h.sum(0)
    if found is None:
        return h.t() @ x, total
    column, order = found[1].sort(stable=True)
    row = found[0][order]
    return _sums(h[row, column], x, row, column, h.shape[1]), total
