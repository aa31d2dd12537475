"""Products with a matrix that is mostly zeros. Its non-zeros are found at run time (`ops.sparse_products`).

Rows are packed as in a feed-forward block (`relu_ffn.packing`). Products are sums over the entries, by row or by
column. Rows that overflow are computed by dense tiles, so that the result is correct for any density of the matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import relaunched
from ..common.transpose import along_rows, row_major
from ..relu_ffn import dots, listed, packing, rows
from ..relu_ffn.columns import TokenLists, sums_by_neuron

# (count [M], the number of a row's non-zeros; index and values [M, capacity] of rows that fit)
Entries = tuple[Tensor, Tensor, Tensor]


def pack(h: Tensor, entries: Entries) -> None:
    """Write the non-zeros of h [M, N] to `entries`, ascending by column."""
    h = h.contiguous()
    state, _ = packing.new_state(h.device)
    packing.pack(h, None, entries, entries[0].new_empty(len(h)), state.zero_(), None)


def _listed(entries: Entries) -> listed.Listed:
    return listed.Listed.of(entries[0], entries[1].shape[1])


def matmul(h: Tensor, entries: Entries, weight: Tensor) -> Tensor:
    """Return h [M, N] @ weight [N, D]."""
    h, table = along_rows(h), row_major(weight)
    y = h.new_empty(len(h), table.shape[1])
    rows.weighted_rows(*entries, table, y)
    listed.product(h, table.t(), y, _listed(entries))
    return y


def outer(h: Tensor, entries: Entries, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (h^T @ x [N, D], the column sums of h [M, N])."""
    h, x = along_rows(h), along_rows(x)
    N, D = h.shape[1], x.shape[1]
    count, index, values = entries
    out, total = h.new_empty(N, D), h.new_empty(N)
    sums_by_neuron(TokenLists.of(count, index, N), x, values, out, total, index.shape[1])
    listed.add_sums([listed.Sum(h, x, out, total)], _listed(entries))
    return out, total


@relaunched
@triton.jit
def _put_kernel(count, index, values, out, N, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """out[m, index] = values of packed row m."""
    m = tl.program_id(0).to(tl.int64)
    c = tl.load(count + m)
    if c <= CAP:
        i = tl.arange(0, BLOCK)
        n = tl.load(index + m * CAP + i, mask=i < c, other=0).to(tl.int64)
        tl.store(out + m * N + n, tl.load(values + m * CAP + i, mask=i < c), mask=i < c)


def masked_matmul(entries: Entries, x: Tensor, weight: Tensor) -> Tensor:
    """Return x [M, D] @ weight [N, D]^T at the entries, 0 elsewhere. Rows that overflow are computed at all columns."""
    x, table = along_rows(x), row_major(weight)
    count, index, values = entries
    cap = index.shape[1]
    out, found = x.new_zeros(len(x), len(weight)), torch.empty_like(values)
    dots.gradients(
        x, table, entries, None, None, None, (found, None, torch.empty_like(values)), (), ()
    )
    block = triton.next_power_of_2(cap)
    _put_kernel[(len(x),)](count, index, found, out, out.shape[1], CAP=cap, BLOCK=block)
    listed.product(x, table, out, _listed(entries))
    return out
