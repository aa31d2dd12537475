"""ATen implementation of products with a mostly zero matrix: the CPU path, fp64, and the reference for the kernels.

With few entries, and if the host may read the data, a product is an `embedding_bag` with sums in a fixed order, in fp32
for 16-bit operands. Otherwise it is a dense product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..aten import all_finite, looks_at

# The ratio of elements to non-zeros from which on `embedding_bag` is faster than a dense product (fp32, AMD EPYC).
_SPARSE = 32


def capacity(N: int) -> int:
    """The number of entries per row that kernels pack: several times the count up to which packing pays off."""
    return min(-(-N // 32) * 32, max(64, -(-N // (64 * 32)) * 32))


def _entries(h: Tensor, other: Tensor) -> tuple[Tensor, Tensor] | None:
    """(row, column) of each entry, by row. None, for a dense product, if there are many entries, if the host may not
    read the data, or if `other` is not finite, because 0 times such an element is NaN."""
    if not looks_at(h) or h.count_nonzero() > h.numel() // _SPARSE or not all_finite(other):
        return None
    row, column = h.nonzero().unbind(1)
    return row, column


def _sums(values: Tensor, table: Tensor, at: Tensor, bags: Tensor, number: int) -> Tensor:
    """The sum of value * table[at] over the entries of each bag. bags: the bag of each entry, in ascending order."""
    if not len(values):
        return table.new_zeros(number, table.shape[1])
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
