"""Statistics of the activations of a feed-forward block, from the entries of packed rows and from the listed rows.

stats [4 or 5, M], fp32: the sum of |a| and the number of non-zeros of a = f(gate), the same two of h, and the sum of
h * weight. counts [N], int32: the number of tokens for which h of a neuron is not 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from ..common.epilogue import encode, evaluate
from ..common.launch import relaunched
from .listed import Listed, programs_of, tile_rows
from .packing import n_listed

# Programs per block of columns that share the listed rows for `counts`.
SHARES = 16

# (stats, the weight [N] of the fifth statistic or None, counts or None)
Wanted = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@relaunched
@triton.jit
def _packed_kernel(
    count, index, gates, hidden, weight, stats, counts, state, M, stride_s,
    F_STEPS: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program computes all statistics of one packed row. hidden: h of the entries; None if h is f(gate)."""
    m = tl.program_id(0).to(tl.int64)
    c = tl.load(count + m)
    if (c > CAP) | (n_listed(state) == M):
        return
    size_a = tl.zeros([BLOCK], tl.float32)
    some_a, size_h, some_h, weighted = size_a, size_a, size_a, size_a
    for e in range(0, c, BLOCK):
        at = m * CAP + e + tl.arange(0, BLOCK)
        valid = e + tl.arange(0, BLOCK) < c
        a = evaluate(tl.load(gates + at, mask=valid, other=0.0).to(tl.float32), F_STEPS)
        a = tl.where(valid, a, 0.0)
        h = a
        if hidden is not None:
            h = tl.load(hidden + at, mask=valid, other=0.0).to(tl.float32)
        size_a += tl.abs(a)
        some_a += (a != 0.0).to(tl.float32)
        size_h += tl.abs(h)
        some_h += (h != 0.0).to(tl.float32)
        n = tl.load(index + at, mask=valid, other=0).to(tl.int64)
        if weight is not None:
            weighted += h * tl.load(weight + n, mask=valid, other=0.0).to(tl.float32)
        if counts is not None:
            tl.atomic_add(counts + n, 1, mask=valid & (h != 0.0), sem="relaxed")
    tl.store(stats + m, tl.sum(size_a, 0))
    tl.store(stats + stride_s + m, tl.sum(some_a, 0))
    tl.store(stats + 2 * stride_s + m, tl.sum(size_h, 0))
    tl.store(stats + 3 * stride_s + m, tl.sum(some_h, 0))
    if weight is not None:
        tl.store(stats + 4 * stride_s + m, tl.sum(weighted, 0))


def of_packed(
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    hidden: torch.Tensor | None,
    wanted: Wanted,
    state: torch.Tensor,
    f: Program,
) -> None:
    """Write the statistics of the packed rows: count [M], index and gates [M, CAP]. hidden: h of the entries [M, CAP];
    None if h is f(gate). state: from `packing.pack`."""
    (count, index, gates), (stats, weight, counts) = packed, wanted
    _packed_kernel[(len(count),)](
        count, index, gates, hidden, weight, stats, counts, state, len(count), stats.stride(0),
        F_STEPS=encode(f), CAP=index.shape[1], BLOCK=128 if gates.is_cuda else 16, num_warps=1,
    )  # fmt: skip


@relaunched
@triton.jit
def _listed_kernel(
    values, weight, stats, rows, length, M, N, stride_s, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write stats[:2], and unless weight is None the weighted sum stats[2], of the listed rows of STEPS(values) [M,
    N]."""
    n_rows = tl.load(length)
    for i in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.max(tile_rows(rows, n_rows, M, tl.full([1], i, tl.int32)), 0)
        size = tl.zeros([BLOCK], tl.float32)
        some, weighted = size, size
        for n0 in range(0, N, BLOCK):
            n = n0 + tl.arange(0, BLOCK)
            v = tl.load(values + row * N + n, mask=n < N, other=0.0).to(tl.float32)
            v = tl.where(n < N, evaluate(v, STEPS), 0.0)
            size += tl.abs(v)
            some += (v != 0.0).to(tl.float32)
            if weight is not None:
                weighted += v * tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(stats + row, tl.sum(size, 0))
        tl.store(stats + stride_s + row, tl.sum(some, 0))
        if weight is not None:
            tl.store(stats + 2 * stride_s + row, tl.sum(weighted, 0))


@relaunched
@triton.jit
def _listed_counts_kernel(hidden, counts, rows, length, M, N, BLOCK: tl.constexpr):
    """counts[n] += the number of listed rows of hidden [M, N] with hidden[row, n] != 0. Each program handles a
    share of the rows."""
    n_rows = tl.load(length)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for i in range(tl.program_id(1), n_rows, tl.num_programs(1)):
        row = tl.max(tile_rows(rows, n_rows, M, tl.full([1], i, tl.int32)), 0)
        h = tl.load(hidden + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        total += (h != 0.0).to(tl.int32)
    tl.atomic_add(counts + n, total, mask=(n < N) & (total > 0), sem="relaxed")


def of_listed(
    values: torch.Tensor, wanted: Wanted, listed: Listed, *, hidden: bool, steps: Program = ()
) -> None:
    """Write the statistics of the listed rows from values [M, N], contiguous: of a = steps(values), or if `hidden` of h
    = values."""
    stats, weight, counts = wanted
    if hidden:
        stats = stats[2:]
    else:
        weight = counts = None
    M, N = values.shape
    _listed_kernel[(8 * programs_of(values),)](
        values, weight, stats, listed.rows, listed.length, M, N, stats.stride(0),
        STEPS=encode(steps), BLOCK=1024 if values.is_cuda else 32,
    )  # fmt: skip
    if counts is not None:
        block = 512 if values.is_cuda else 32
        _listed_counts_kernel[(triton.cdiv(N, block), SHARES)](
            values, counts, listed.rows, listed.length, M, N, BLOCK=block
        )
