"""Sums over the tokens for which each neuron is active: the gradients of the weights.

A counting sort lists the tokens of each neuron in ascending order, so that sums are always taken in the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched
from ..common.transpose import buffered_rows, transpose
from . import gather
from .gather import FLIGHT, fp32, in_pairs
from .packing import popcount

# Rows per word of the token masks.
WORD = 32
# Entries per program that are listed with their rows.
ENTRIES_PER_PROGRAM = 128
# Columns of a sum per program of one warp. The second is used if there are fewer than 1 024 columns and their number is
# not a multiple of 512.
WIDTHS = 512, 256
# Bytes of column-major sums that are buffered before they are transposed: they stay in L2 (50 MB on an H100).
BUFFER = 40 << 20


@triton.jit
def _entries(count, index, rows, num_entries, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Return (positions, rows, neurons, mask) of the entries of program p: those of row p, which are CAP if count is
    None, or with `rows` [num_entries] the entries from p * BLOCK on."""
    i = tl.arange(0, BLOCK)
    if rows is not None:
        at = tl.program_id(0) * BLOCK + i
        mask = at < num_entries
        m = tl.load(rows + at, mask=mask, other=0)
    else:
        m = tl.program_id(0) + tl.zeros([BLOCK], tl.int32)
        at = m.to(tl.int64) * CAP + i
        c = tl.full([], CAP, tl.int32)
        if count is not None:
            c = tl.load(count + tl.program_id(0))
            c = tl.where(c > CAP, 0, c)  # not packed
        mask = i < c
    n = tl.load(index + at, mask=mask, other=0).to(tl.int64)
    return at, m, n, mask


@relaunched
@triton.jit
def _set_bits_kernel(
    count, index, rows, num_entries, bitmask, N, CAP: tl.constexpr, BLOCK: tl.constexpr
):
    """bitmask[m // 32, n] |= 1 << m % 32 for every active neuron n of row m. OR commutes: the result is
    deterministic. The first arguments are those of `_entries`."""
    _at, m, n, mask = _entries(count, index, rows, num_entries, CAP, BLOCK)
    bit = tl.full([BLOCK], 1, tl.int32) << (m % 32)
    tl.atomic_or(bitmask + (m // 32).to(tl.int64) * N + n, bit, mask=mask)


@relaunched
@triton.jit
def _count_kernel(bitmask, before, total, words, N, WORDS: tl.constexpr, BN: tl.constexpr):
    """before[w, n] = number of tokens of neuron n in the words before w; total[n] = number of all its tokens."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    carry = tl.zeros([BN], tl.int32)
    for w0 in range(0, words, WORDS):
        w = w0 + tl.arange(0, WORDS)
        at = w[:, None].to(tl.int64) * N + n[None, :]
        mask = (w < words)[:, None] & (n < N)[None, :]
        ones = popcount(tl.load(bitmask + at, mask=mask, other=0))
        ends = tl.cumsum(ones, 0)
        tl.store(before + at, carry[None, :] + ends - ones, mask=mask)
        carry += tl.sum(ones, 0)
    tl.store(total + n, carry, mask=n < N)


@relaunched
@triton.jit
def _place_kernel(
    count, index, rows, num_entries, bitmask, before, start, entry, N, CAP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """entry[start[n] + rank] = the position of the entry of row m and neuron n, where rank counts n's tokens before m.
    The first arguments are those of `_entries`."""
    place, m, n, mask = _entries(count, index, rows, num_entries, CAP, BLOCK)
    at = (m // 32).to(tl.int64) * N + n
    lower = (tl.full([BLOCK], 1, tl.int32) << (m % 32)) - 1
    rank = popcount(tl.load(bitmask + at, mask=mask, other=0) & lower)
    rank += tl.load(before + at, mask=mask, other=0)
    slot = tl.load(start + n, mask=mask, other=0) + rank
    tl.store(entry + slot, place.to(tl.int32), mask=mask)


@relaunched
@triton.jit
def _scan_kernel(total, start, ends, N, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """One program writes start[n] = sum of total[:n] and, unless ends is None, ends[n] = the number of pieces of PIECE
    tokens of the neurons 0 to n. Neurons with a single piece are not counted."""
    before, pieces_before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for n0 in range(0, N, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        t = tl.load(total + n, mask=n < N, other=0)
        tl.store(start + n, before + tl.cumsum(t, 0) - t, mask=n < N)
        before += tl.sum(t, 0)
        if ends is not None:
            pieces = tl.where(t > PIECE, tl.cdiv(t, PIECE), 0)
            tl.store(ends + n, pieces_before + tl.cumsum(pieces, 0), mask=n < N)
            pieces_before += tl.sum(pieces, 0)


class TokenLists(NamedTuple):
    """The tokens of each neuron n: entry[start[n] + j], j < total[n], is the position of the j-th token's entry in the
    packed form."""

    entry: torch.Tensor
    start: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(
        cls,
        count: torch.Tensor | None,
        index: torch.Tensor,
        N: int,
        ends: torch.Tensor | None = None,
        piece: int = 1,
        rows: torch.Tensor | None = None,
        M: int = 0,
    ) -> TokenLists:
        """Return the lists for packed rows: count [M], None if all are full; index [M, cap] into N neurons. With `rows`
        [entries], in any order, index is [entries], and M the number of rows.

        ends: receives the cumulative numbers of pieces of `piece` tokens, see `_scan_kernel`.
        """
        M, cap = index.shape if rows is None else (M, 1)
        words = triton.cdiv(M, WORD)
        bitmask = index.new_zeros(words, N, dtype=torch.int32)
        before = torch.empty_like(bitmask)
        lists = cls(*(bitmask.new_empty(n) for n in (index.numel(), N, N)))
        block = triton.next_power_of_2(cap) if rows is None else ENTRIES_PER_PROGRAM
        warps = 1 if block <= 128 else 4
        grid = (M if rows is None else triton.cdiv(index.numel(), block),)
        entries = count, index, rows, index.numel()
        _set_bits_kernel[grid](*entries, bitmask, N, CAP=cap, BLOCK=block, num_warps=warps)
        bn = 32
        _count_kernel[(triton.cdiv(N, bn),)](
            bitmask, before, lists.total, words, N,
            WORDS=min(256, triton.next_power_of_2(words)), BN=bn, num_warps=8,
        )  # fmt: skip
        _scan_kernel[(1,)](lists.total, lists.start, ends, N, PIECE=piece, BLOCK=4096, num_warps=8)
        _place_kernel[grid](
            *entries, bitmask, before, lists.start, lists.entry, N,
            CAP=cap, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return lists


@triton.jit
def _row_of(entry, rows, CAP: tl.constexpr):
    row = entry // CAP
    if rows is not None:
        row = tl.load(rows + entry)
    return row.to(tl.int64)


@triton.jit
def sum_entries(
    entry, first, count, rows, x, value_a, value_b, scale, d, D, stride,
    CAP: tl.constexpr, FLIGHT: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Return four sums over the `count` entries from `first` on: of value_a * x[row, d]; of value_a, multiplied by
    scale[row] unless scale is None; of value_b * x[row, d]; of value_b. row is rows[entry], or entry // CAP if rows is
    None. The last two are 0 if value_b is None."""
    r = tl.arange(0, FLIGHT)
    total_a, total_b = tl.zeros([d.shape[0]], tl.float32), tl.zeros([d.shape[0]], tl.float32)
    side_a, side_b = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    some = r < count * FLIGHT  # an empty list has no entry to load
    at = tl.load(entry + first + tl.minimum(r, count - 1), mask=some, other=0)
    row = _row_of(at, rows, CAP)
    for e in tl.range(0, count, FLIGHT, num_stages=1):
        # The next entries are loaded before the current rows arrive. Past the end, the last entry is loaded again.
        then = tl.load(entry + first + tl.minimum(e + FLIGHT + r, count - 1))
        source = x + row[:, None] * stride + d[None, :]
        t = tl.load(source) if EVEN else tl.load(source, mask=(d < D)[None, :], other=0.0)
        t = fp32(t, PAIRS)
        here = e + r < count
        v = tl.load(value_a + at, mask=here, other=0.0).to(tl.float32)
        total_a += tl.sum(t * v[:, None], 0)
        if scale is not None:
            v *= tl.load(scale + row)
        side_a += tl.sum(v, 0)
        if value_b is not None:
            v = tl.load(value_b + at, mask=here, other=0.0).to(tl.float32)
            total_b += tl.sum(t * v[:, None], 0)
            side_b += tl.sum(v, 0)
        at = then
        row = _row_of(at, rows, CAP)
    return total_a, side_a, total_b, side_b


def sum_options(x: torch.Tensor) -> dict[str, Any]:
    """Return the constants of a kernel that sums rows of x."""
    D = x.shape[1]
    wide, narrow = WIDTHS
    width = gather.width(D, narrow if D % wide and 2 * wide > D else wide, not x.is_cuda)
    return {"FLIGHT": FLIGHT, "WIDTH": width, "EVEN": D % width == 0, "PAIRS": in_pairs(x)}


@relaunched
@triton.jit
def _by_neuron_kernel(
    entry, start, total, x, value_a, value_b, out_a, out_b, bias_a, bias_b, scale,
    D, stride_x, stride_a, stride_b,
    CAP: tl.constexpr, FLIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Program (n, part) writes out_a[n, part] = the sum of value_a * x[token] over the neuron's tokens. out_b is the
    same for value_b; bias_a and bias_b are the sums of the values. All but out_a may be None. scale: see
    `sum_entries`."""
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    sum_a, side_a, sum_b, side_b = sum_entries(
        entry, tl.load(start + n), tl.load(total + n), None, x, value_a, value_b, scale, d, D, stride_x,
        CAP, FLIGHT, EVEN, PAIRS,
    )  # fmt: skip
    tl.store(out_a + n * stride_a + d, sum_a.to(out_a.dtype.element_ty), mask=d < D)
    if value_b is not None:
        tl.store(out_b + n * stride_b + d, sum_b.to(out_b.dtype.element_ty), mask=d < D)
    if tl.program_id(1) == 0:
        if bias_a is not None:
            tl.store(bias_a + n, side_a.to(bias_a.dtype.element_ty))
        if bias_b is not None:
            tl.store(bias_b + n, side_b.to(bias_b.dtype.element_ty))


def sums_by_neuron(
    lists: TokenLists, x, a, out_a, bias_a, cap, b=None, out_b=None, bias_b=None, scale=None
) -> None:  # fmt: skip
    """Write out[n] = the sum of value * x[token] over the tokens of neuron n, and bias[n] = the sum of the values (for
    `a`, of a * scale). The values are a and, unless it is None, b. out: [N, D], row-major or column-major."""
    N, D, options = len(lists.total), x.shape[1], sum_options(x)
    outs = [t for t in (out_a, out_b) if t is not None]
    step = N
    if any(t.stride(1) != 1 for t in outs):
        step = min(N, buffered_rows(x, BUFFER // len(outs)))
    buffers = [None if t.stride(1) == 1 else t.new_empty(step, D) for t in outs]
    for first in range(0, N, step):
        part = slice(first, min(first + step, N))
        n = part.stop - first
        into = [t[part] if rows is None else rows[:n] for t, rows in zip(outs, buffers)]
        start, total, of_a, of_b = (
            None if t is None else t[part] for t in (lists.start, lists.total, bias_a, bias_b)
        )
        second = into[1] if b is not None else None
        _by_neuron_kernel[(n, triton.cdiv(D, options["WIDTH"]))](
            lists.entry, start, total, x, a, b, into[0], second, of_a, of_b, scale,
            D, x.stride(0), into[0].stride(0), 0 if second is None else second.stride(0),
            CAP=cap, **options, num_warps=1,
        )  # fmt: skip
        for t, rows in zip(outs, buffers):
            if rows is not None:
                transpose(rows[:n], t.t(), first)
