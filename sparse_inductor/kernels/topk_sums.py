"""Sums over the entries of rows, and over those of columns, where every row has k (`ops.sparse_rows`).

By rows they are those of a feed-forward block whose rows are packed with k active neurons each. By columns a program
takes the entries of one, in the order of the rows; a column of very many is taken in pieces, whose sums are added in
their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import relu_ffn_dots as dot_rows
from . import relu_ffn_gather as gather
from . import relu_ffn_rows as rows
from .launch import relaunched
from .relu_ffn_backward import TokenLists

__all__ = ["columns", "decode", "dots", "outer"]

# Columns of a sum that a program holds.
WIDTH = 1024
# Bytes of the bit masks that `TokenLists` counts in; a sort takes their place where they would be larger.
MASKS = 256 << 20
# Entries of a column that one program sums; of more there are pieces of so many.
PIECE = 256


def _counts(indices: Tensor) -> Tensor:
    return torch.full((len(indices),), indices.shape[1], dtype=torch.int32, device=indices.device)


def _table(weight: Tensor) -> Tensor:
    """The weight [N, D] with unit stride along a column's row."""
    return weight if weight.stride(1) == 1 else rows.by_neuron(weight.t())[0]


def _rows(t: Tensor) -> Tensor:
    return t if t.stride(1) == 1 else t.contiguous()


def decode(values: Tensor, indices: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y[m] = bias + the sum of values[m, i] * weight[indices[m, i]]."""
    y = values.new_empty(len(values), weight.shape[1])
    bias = None if bias is None else bias.contiguous()
    entries = _counts(indices), indices.contiguous(), values.contiguous()
    rows.weighted_rows(*entries, _table(weight), y, bias=bias)
    return y


def dots(x: Tensor, weight: Tensor, indices: Tensor) -> Tensor:
    """values[m, i] = x[m] . weight[indices[m, i]]."""
    values = x.new_empty(indices.shape)
    unused = torch.empty_like(values)
    packed = _counts(indices), indices.contiguous(), unused
    out = values, None, unused
    dot_rows.gradients(_rows(x), _table(weight), packed, None, None, out, (), ())
    return values


def columns(indices: Tensor, N: int) -> tuple[Tensor, Tensor, Tensor]:
    """(entry [M * k], start [N], total [N]), int32, of rows whose columns differ: see `_sparse_rows_aten.Columns`."""
    indices = indices.contiguous()
    if triton.cdiv(len(indices), 32) * N * 4 > MASKS:
        found, entry = indices.view(-1).sort(stable=True)
        edges = torch.arange(N + 1, device=indices.device)
        edges = torch.searchsorted(found, edges, out_int32=True)
        return entry.int(), edges[:-1].clone(), edges.diff()
    lists = TokenLists(_counts(indices), indices, N)
    lists.fill()
    return lists.entry, lists.start, lists.total


@triton.jit
def _sum_entries(
    entry, first, count, x, values, d, D, stride, side,
    K: tl.constexpr, FLIGHT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """(the sum over entries of value * x[row, d], that of the values)."""
    r = tl.arange(0, FLIGHT)
    total = tl.zeros([d.shape[0]], tl.float32)
    for e in tl.range(0, count, FLIGHT, num_stages=1):
        at = tl.load(entry + first + tl.minimum(e + r, count - 1))  # past the end, the last again
        v = tl.load(values + at, mask=e + r < count, other=0.0).to(tl.float32)
        source = x + (at // K).to(tl.int64)[:, None] * stride + d[None, :]
        t = tl.load(source) if EVEN else tl.load(source, mask=(d < D)[None, :], other=0.0)
        total += tl.sum(t.to(tl.float32) * v[:, None], 0)
        side += tl.sum(v, 0)
    return total, side


@triton.jit
def _add_pieces(sums, sides, first, count, d, D):
    """The sums of some pieces, in their order."""
    total = tl.zeros([d.shape[0]], tl.float32)
    side = tl.zeros([], tl.float32)
    for i in range(0, count):
        p = (first + i).to(tl.int64)
        total += tl.load(sums + p * D + d, mask=d < D, other=0.0)
        side += tl.load(sides + p)
    return total, side


@relaunched
@triton.jit
def _pieces_kernel(
    entry, start, total, ends, x, values, sums, sides, N, D, stride,
    K: tl.constexpr, PIECE: tl.constexpr, FLIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Program (p, part) sums piece p of the columns that have several. ends [N]: pieces of all columns up to n."""
    p = tl.program_id(0)
    if p >= tl.load(ends + N - 1):
        return
    low = tl.zeros([], tl.int32)
    high = tl.full([], 0, tl.int32) + N
    while low < high:  # the first column whose pieces end behind p
        middle = (low + high) // 2
        behind = tl.load(ends + middle) > p
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, middle + 1)
    count = tl.load(total + low)
    piece = p - (tl.load(ends + low) - tl.cdiv(count, PIECE))
    first = tl.load(start + low) + piece * PIECE
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    side = tl.zeros([], tl.float32)
    found, side = _sum_entries(
        entry, first, tl.minimum(count - piece * PIECE, PIECE), x, values, d, D, stride, side, K, FLIGHT, EVEN
    )  # fmt: skip
    tl.store(sums + p.to(tl.int64) * D + d, found, mask=d < D)
    tl.store(sides + p, side, mask=tl.program_id(1) == 0)


@relaunched
@triton.jit
def _outer_kernel(
    entry, start, total, ends, x, values, sums, sides, out, bias, D, stride,
    K: tl.constexpr, PIECE: tl.constexpr, FLIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Program (n, part) writes out[n, part] = the sum over the entries of column n of value * x[row], and bias[n]."""
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    count = tl.load(total + n)
    side = tl.zeros([], tl.float32)
    if count > PIECE:
        pieces = tl.cdiv(count, PIECE)
        found, side = _add_pieces(sums, sides, tl.load(ends + n) - pieces, pieces, d, D)
    else:
        found, side = _sum_entries(
            entry, tl.load(start + n), count, x, values, d, D, stride, side, K, FLIGHT, EVEN
        )  # fmt: skip
    tl.store(out + n * D + d, found.to(out.dtype.element_ty), mask=d < D)
    tl.store(bias + n, side.to(bias.dtype.element_ty), mask=tl.program_id(1) == 0)


def outer(
    values: Tensor, x: Tensor, entry: Tensor, start: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """(sums [N, D] over each column's entries of value * x[row], sums [N] of the values)."""
    values, x = values.contiguous(), _rows(x)
    N, D = len(start), x.shape[1]
    k = values.shape[1]
    piece = PIECE if x.is_cuda else 8
    width = gather.width(D, WIDTH, not x.is_cuda)
    # Two pieces for so many entries at the least.
    most = 2 * values.numel() // (piece + 1)
    several = torch.where(total > piece, (total + (piece - 1)) // piece, 0)
    ends = several.cumsum(0, dtype=torch.int32)
    sums = torch.empty(most, D, dtype=torch.float32, device=x.device)
    sides = torch.empty(most, dtype=torch.float32, device=x.device)
    out, bias = x.new_empty(N, D), x.new_empty(N)
    constants = {
        "K": k, "PIECE": piece, "FLIGHT": gather.FLIGHT, "WIDTH": width, "EVEN": D % width == 0,
    }  # fmt: skip
    parts = triton.cdiv(D, width)
    if most:
        _pieces_kernel[(most, parts)](
            entry, start, total, ends, x, values, sums, sides, N, D, x.stride(0),
            **constants, num_warps=2,
        )  # fmt: skip
    _outer_kernel[(N, parts)](
        entry, start, total, ends, x, values, sums, sides, out, bias, D, x.stride(0),
        **constants, num_warps=2,
    )  # fmt: skip
    return out, bias
