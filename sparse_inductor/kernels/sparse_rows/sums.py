"""Sums over the entries of each row or each column of a matrix with k entries per row (`ops.sparse_rows`).

Row sums are computed as in a feed-forward block with k active neurons per row. For column sums, one program per column
adds its entries in the order of the rows. A column with very many entries is cut into pieces, and the sums of the
pieces are added in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...aten import sparse_rows as aten
from ..common.launch import Launcher, launch
from ..common.transpose import along_rows, buffered_rows, row_major, transpose
from ..relu_ffn.columns import TokenLists, sum_entries, sum_options

# Candidate numbers of columns of a weight per program. All rows process these columns before the next ones, so the
# columns should stay in L2 (50 MB on an H100); the largest suitable number is used. RESIDENT is the limit in bytes.
WIDTHS = 1024, 512, 256
RESIDENT = 36 << 20
# Rows of a weight per program of `_dots_kernel`. Their products are accumulated in registers.
ENTRIES = 8
# Maximum bytes of the bit masks of `TokenLists`. If they would be larger, the entries are sorted instead.
MASKS = 256 << 20
# Bytes of a column-major gradient that are buffered before they are transposed.
BUFFER = 128 << 20


def _width(table: Tensor) -> int:
    """Return the number of columns of a table's rows per program."""
    if not table.is_cuda:
        return 32
    N, D = table.shape
    fits = [w for w in WIDTHS if N * w * table.element_size() <= RESIDENT] or [WIDTHS[-1]]
    even = [w for w in fits if D % w == 0]
    return (even or [min(fits[0], max(WIDTHS[-1], triton.next_power_of_2(D)))])[0]


@triton.jit
def _decode_kernel(
    values, indices, table, bias, out, D, stride,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, FLIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Program (m, part) writes out[m, part] = bias + the sum over a row's entries of value * table row."""
    m = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    r = tl.arange(0, FLIGHT)
    total = tl.zeros([WIDTH], tl.float32)
    for e in tl.range(0, K, FLIGHT, num_stages=1):
        n = tl.load(indices + m * K + tl.minimum(e + r, K - 1)).to(tl.int64)
        v = tl.load(values + m * K + e + r, mask=e + r < K, other=0.0).to(tl.float32)
        at = table + n[:, None] * stride + d[None, :]
        w = tl.load(at) if EVEN else tl.load(at, mask=(d < D)[None, :], other=0.0)
        total += tl.sum(tl.where((e + r < K)[:, None], w.to(tl.float32) * v[:, None], 0.0), 0)
    if HAS_BIAS:
        total += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + m * D + d, total.to(out.dtype.element_ty), mask=d < D)


def decode(
    values: Tensor,
    indices: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    run: Launcher = launch,
) -> Tensor:
    """Return y[m] = bias + the sum over i of values[m, i] * weight[indices[m, i]]. run: launches the kernel."""
    table = row_major(weight, run)
    y = values.new_empty(len(values), table.shape[1])
    width, D = _width(table), table.shape[1]
    constants = {
        "K": indices.shape[1], "HAS_BIAS": bias is not None, "FLIGHT": 8 if width == WIDTHS[-1] else 4,
        "WIDTH": width, "EVEN": D % width == 0,
    }  # fmt: skip
    added = y if bias is None else bias.contiguous()
    args = values.contiguous(), indices.contiguous(), table, added, y, D, table.stride(0)
    run(_decode_kernel, (len(y), triton.cdiv(D, width)), args, constants, max(1, width // 512))
    return y


@triton.jit
def _dots_kernel(
    x, table, indices, rows, values, D, stride_x, stride, K,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Every program writes ENTRIES of one row of values [*, K]: dot products of x[m] with the table rows of its
    entries, where m is the number of the row or, unless rows is None, rows[entry]."""
    parts = tl.cdiv(K, ENTRIES)
    m = (tl.program_id(0) // parts).to(tl.int64)
    e = tl.program_id(0) % parts * ENTRIES + tl.arange(0, ENTRIES)
    place = m * K + tl.minimum(e, K - 1)
    n = tl.load(indices + place).to(tl.int64)
    row = m
    if rows is not None:
        row = tl.load(rows + place).to(tl.int64)[:, None]
    source = x + row * stride_x
    total = tl.zeros([ENTRIES, WIDTH], tl.float32)
    for first in range(0, D, WIDTH):
        d = first + tl.arange(0, WIDTH)
        at = table + n[:, None] * stride + d[None, :]
        if EVEN:
            v, w = tl.load(source + d[None, :]), tl.load(at)
        else:
            v = tl.load(source + d[None, :], mask=(d < D)[None, :], other=0.0)
            w = tl.load(at, mask=(d < D)[None, :], other=0.0)
        total += w.to(tl.float32) * v.to(tl.float32)
    found = tl.sum(total, 1)
    tl.store(values + m * K + e, found.to(values.dtype.element_ty), mask=e < K)


def dots(
    x: Tensor, weight: Tensor, indices: Tensor, rows: Tensor | None = None, run: Launcher = launch
) -> Tensor:
    """Return values[m, i] = x[m] . weight[indices[m, i]], or with `rows` [entries] values[i] = x[rows[i]] .
    weight[indices[i]]. run: launches the kernel."""
    x, table = along_rows(x), row_major(weight, run)
    values = x.new_empty(indices.shape)
    k, D = indices.shape[-1], table.shape[1]
    width = WIDTHS[-1] if x.is_cuda else 32
    constants = {"ENTRIES": ENTRIES, "WIDTH": width, "EVEN": D % width == 0}
    args = x, table, indices.contiguous(), rows, values, D, x.stride(0), table.stride(0), k
    programs = values.numel() // k * triton.cdiv(k, ENTRIES)
    run(_dots_kernel, (programs,), args, constants, 2)
    return values


def columns(indices: Tensor, N: int, rows: Tensor | None = None, M: int = 0) -> aten.Columns:
    """Return the entries of each column, for indices [M, k], distinct within a row, or indices [entries] with their
    `rows`, distinct pairs in any order."""
    indices = indices.contiguous()
    M = len(indices) if rows is None else M
    if triton.cdiv(M, 32) * N * 4 > MASKS:
        return aten.columns(indices, N, rows, M)
    ends = indices.new_empty(N, dtype=torch.int32)
    lists = TokenLists.of(None, indices, N, ends, aten.PIECE, rows, M)
    return aten.Columns(*lists, ends)


@triton.jit
def _add_pieces(sums, sides, first, count, d, D):
    """Return the sums of `count` pieces from `first` on, added in order."""
    total = tl.zeros([d.shape[0]], tl.float32)
    side = tl.zeros([], tl.float32)
    for i in range(0, count):
        p = (first + i).to(tl.int64)
        total += tl.load(sums + p * D + d, mask=d < D, other=0.0)
        side += tl.load(sides + p)
    return total, side


@triton.jit
def _pieces_kernel(
    entry, start, total, ends, rows, x, values, sums, sides, N, D, stride,
    K: tl.constexpr, PIECE: tl.constexpr, FLIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Program (p, part) sums piece p of the columns with several pieces. ends [N]: from `columns`."""
    p = tl.program_id(0)
    if p >= tl.load(ends + N - 1):
        return
    low = tl.zeros([], tl.int32)
    high = tl.full([], 0, tl.int32) + N
    while low < high:  # find the first column with pieces that end after p
        middle = (low + high) // 2
        behind = tl.load(ends + middle) > p
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, middle + 1)
    count = tl.load(total + low)
    piece = p - (tl.load(ends + low) - tl.cdiv(count, PIECE))
    first = tl.load(start + low) + piece * PIECE
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    found, side, _, _ = sum_entries(
        entry, first, tl.minimum(count - piece * PIECE, PIECE), rows, x, values, None, None, d, D, stride,
        K, FLIGHT, EVEN, PAIRS,
    )  # fmt: skip
    tl.store(sums + p.to(tl.int64) * D + d, found, mask=d < D)
    tl.store(sides + p, side, mask=tl.program_id(1) == 0)


@triton.jit(do_not_specialize=["first_column"])
def _outer_kernel(
    entry, start, total, ends, rows, x, values, sums, sides, bias, out, totals, first_column, D, stride,
    K: tl.constexpr, PIECE: tl.constexpr, FLIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Program (i, part) writes out[i, part] = bias + the sum over the entries of column n of value * x[row], and
    totals[n], the sum of the values, n = first_column + i. bias: [D] or None. rows: as in `sum_entries`."""
    i = tl.program_id(0).to(tl.int64)
    n = first_column + i
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    count = tl.load(total + n)
    if count > PIECE:
        pieces = tl.cdiv(count, PIECE)
        found, side = _add_pieces(sums, sides, tl.load(ends + n) - pieces, pieces, d, D)
    else:
        found, side, _, _ = sum_entries(
            entry, tl.load(start + n), count, rows, x, values, None, None, d, D, stride,
            K, FLIGHT, EVEN, PAIRS,
        )  # fmt: skip
    if bias is not None:
        found += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + i * D + d, found.to(out.dtype.element_ty), mask=d < D)
    tl.store(totals + n, side.to(totals.dtype.element_ty), mask=tl.program_id(1) == 0)


def outer(
    values: Tensor,
    x: Tensor,
    by: aten.Columns,
    column_major: bool,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    run: Launcher = launch,
) -> tuple[Tensor, Tensor]:
    """Return (bias [D] + sums [N, D] over each column's entries of value * x[row], sums [N] of the values), for values
    [M, k], or values [entries] with their `rows`. column_major: the layout of the first result. run: launches the
    kernels."""
    values, x = values.contiguous(), along_rows(x)
    N, D = len(by.start), x.shape[1]
    k = values.shape[1] if rows is None else 1
    piece = aten.PIECE
    # A column with several pieces has more than `piece` entries, so there are at most two pieces per piece + 1 entries.
    most = max(1, 2 * values.numel() // (piece + 1))
    sums, sides = (x.new_empty(s, dtype=torch.float32) for s in ((most, D), (most,)))
    out, totals = x.new_empty((D, N) if column_major else (N, D)), x.new_empty(N)
    bias = None if bias is None else bias.contiguous()
    constants = {"K": k, "PIECE": piece, **sum_options(x)}
    parts = triton.cdiv(D, constants["WIDTH"])
    lists = *by, rows, x, values, sums, sides
    run(_pieces_kernel, (most, parts), (*lists, N, D, x.stride(0)), constants, 1)
    step = buffered_rows(x, BUFFER) if column_major else N
    for first in range(0, N, step):
        buffer = x.new_empty(min(step, N - first), D) if column_major else out
        args = *lists, bias, buffer, totals, first, D, x.stride(0)
        run(_outer_kernel, (len(buffer), parts), args, constants, 1)
        if column_major:
            transpose(buffer, out, first, run)
    return out.t() if column_major else out, totals
