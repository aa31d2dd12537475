"""Products with a matrix that is mostly zeros, whose entries are found on the way (`ops.sparse_products`).

Rows are packed as those of a feed-forward block: few entries are summed over by row and by column, rows that do not fit
are multiplied by tiles, so that any matrix will do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import launch, relaunched
from ..relu_ffn import listed, rows
from ..relu_ffn.columns import TokenLists, sums_by_neuron
from .sums import addressable, table_of

# Columns that the one warp of a program of `_pack_kernel` looks at at once.
BLOCK = 512


def capacity(N: int) -> int:
    """Entries of a row that are packed: several times those of rows that are worth it."""
    return min(-(-N // 32) * 32, max(64, -(-N // (64 * 32)) * 32))


class _Entries(NamedTuple):
    """count [M] of all entries of a row; index, values [M, capacity], where they fit."""

    count: Tensor
    index: Tensor
    values: Tensor


@relaunched
@triton.jit
def _pack_kernel(h, count, index, values, N, stride, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Program m counts the entries of row m that are not zero, and writes the first CAP, by column."""
    m = tl.program_id(0).to(tl.int64)
    total = tl.zeros([], tl.int32)
    for first in range(0, N, BLOCK):
        n = first + tl.arange(0, BLOCK)
        v = tl.load(h + m * stride + n, mask=n < N, other=0.0)
        some = (v.to(tl.float32) != 0.0).to(tl.int32)  # NaN is not zero
        here = tl.sum(some, 0)
        if here > 0:
            to = total + tl.cumsum(some, 0) - 1
            fits = (some > 0) & (to < CAP)
            tl.store(index + m * CAP + to, n.to(index.dtype.element_ty), mask=fits)
            tl.store(values + m * CAP + to, v, mask=fits)
        total += here
    tl.store(count + m, total)


def _pack(h: Tensor) -> _Entries:
    M, N = h.shape
    cap = capacity(N)
    found = _Entries(
        h.new_empty(M, dtype=torch.int32),
        h.new_empty(M, cap, dtype=torch.int16 if N <= 1 << 15 else torch.int32),
        h.new_empty(M, cap),
    )
    _pack_kernel[(M,)](
        h, *found, N, h.stride(0), CAP=cap, BLOCK=BLOCK if h.is_cuda else 32, num_warps=1
    )
    return found


def matmul(h: Tensor, weight: Tensor) -> Tensor:
    """h [M, N] @ weight [N, D]."""
    h, table = addressable(h), table_of(weight, launch)
    found = _pack(h)
    cap = found.index.shape[1]
    y = h.new_empty(len(h), table.shape[1])
    rows.weighted_rows(*found, table, y)
    listed.product(h, table.t(), y, listed.Listed.of(found.count, cap))
    return y


def outer(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(h^T @ x [N, D], the sums of h [M, N] over its rows)."""
    h, x = addressable(h), addressable(x)
    N, D = h.shape[1], x.shape[1]
    found = _pack(h)
    cap = found.index.shape[1]
    out, total = h.new_empty(N, D), h.new_empty(N)
    lists = TokenLists.of(found.count, found.index, N)
    sums_by_neuron(lists, x, found.values, out, total, cap)
    listed.add_sums([listed.Sum(h, x, out, total)], listed.Listed.of(found.count, cap))
    return out, total
