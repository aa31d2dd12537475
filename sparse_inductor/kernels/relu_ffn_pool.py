"""Sharing weight rows between the tokens of a tile: a pool of neurons that many rows of a block of 128 have active.

Rows of one text use much the same neurons. Where a block of rows has neurons in common, those are multiplied as a dense
tile over just them, by tensor cores, each weight row read once a block; the other active neurons of a row, its strays,
stay in the packed form. A block without enough in common has an empty pool and costs a scan of its counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from .epilogue import encode, evaluate
from .relu_ffn_rows import n_listed

__all__ = ["ROWS", "Pool", "products", "split"]

# Rows a block: the height of a tile.
ROWS = 128
# Neurons a pool holds at most, so that the work of a block is bounded by a tenth of the dense one (at N = 5 632).
SIZE = 512
# A dense tile over the pool pays from about ten packed entries a row on (H200: 157 us of tensor cores for 512 neurons
# of 2 x 2 048 weights, against 0.12 us of reading for each packed entry).
ENTRIES = 10 * ROWS


class Pool:
    """size [blocks]: neurons of each block's pool; neuron [blocks, SIZE]; value [M, SIZE], 0 where not active."""

    def __init__(self, x: torch.Tensor, N: int) -> None:
        M = len(x)
        self.blocks = triton.cdiv(M, ROWS)
        self.counts = torch.zeros(self.blocks, N, dtype=torch.int32, device=x.device)
        self.slot = torch.empty(self.blocks, N, dtype=torch.int16, device=x.device)
        self.size = torch.empty(self.blocks, dtype=torch.int32, device=x.device)
        self.neuron = torch.empty(self.blocks, SIZE, dtype=torch.int32, device=x.device)
        self.value = x.new_empty(M, SIZE)


@triton.jit
def _select_kernel(
    counts, slot, size, neuron, state, M, N,
    SIZE: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program chooses a block's pool: the neurons active in at least t of its rows, t the least that SIZE allows.

    Where all M rows take the dense path, every pool is empty.
    """
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    c = tl.load(counts + b * N + n, mask=n < N, other=0)
    least = 3  # a neuron of one or two rows costs more in the tile than it costs packed
    while tl.sum((c >= least).to(tl.int32), 0) > SIZE:
        least += 1
    keep = (c >= least).to(tl.int32)
    enough = (tl.sum(c * keep, 0) >= ENTRIES) & (n_listed(state) != M)
    keep = tl.where(enough, keep, 0)
    at = tl.cumsum(keep, 0) - keep
    tl.store(slot + b * N + n, tl.where(keep != 0, at, -1).to(tl.int16), mask=n < N)
    tl.store(neuron + b * SIZE + at, n, mask=keep != 0)
    tl.store(size + b, tl.sum(keep, 0))


@triton.jit
def _split_kernel(
    count, index, value, slot, size, pool_value, N,
    CAP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program moves one row's entries that are in its block's pool to the pool; the strays close up, in order."""
    m = tl.program_id(0)
    b = (m // ROWS).to(tl.int64)
    if tl.load(size + b) == 0:
        return
    c = tl.load(count + m)
    i = tl.arange(0, BLOCK)
    row = m.to(tl.int64)
    tl.store(
        pool_value + row * SIZE + tl.arange(0, SIZE), tl.zeros([SIZE], pool_value.dtype.element_ty)
    )
    if c > CAP:
        return
    valid = i < c
    n = tl.load(index + row * CAP + i, mask=valid, other=0)
    v = tl.load(value + row * CAP + i, mask=valid, other=0.0)
    s = tl.load(slot + b * N + n.to(tl.int64), mask=valid, other=-1)
    stray = (valid & (s < 0)).to(tl.int32)
    at = tl.cumsum(stray, 0) - stray
    tl.debug_barrier()  # all is read, and the zeros are there, before anything is written over them
    tl.store(pool_value + row * SIZE + s.to(tl.int32), v, mask=valid & (s >= 0))
    tl.store(index + row * CAP + at, n, mask=stray != 0)
    tl.store(value + row * CAP + at, v, mask=stray != 0)
    tl.store(count + m, tl.sum(stray, 0))


def split(
    pool: Pool, state: torch.Tensor, count: torch.Tensor, index: torch.Tensor, value: torch.Tensor
) -> None:
    """Find the pools of packed rows, whose counts are there, and move their entries to them; the strays are left.

    state: of `pack`.
    """
    M, cap = index.shape
    N = pool.counts.shape[1]
    block = triton.next_power_of_2(cap)
    warps = 1 if block <= 128 else 4
    _select_kernel[(pool.blocks,)](
        pool.counts, pool.slot, pool.size, pool.neuron, state, M, N,
        SIZE=SIZE, ENTRIES=ENTRIES, BLOCK=triton.next_power_of_2(N), num_warps=8,
    )  # fmt: skip
    _split_kernel[(M,)](
        count, index, value, pool.slot, pool.size, pool.value, N,
        CAP=cap, ROWS=ROWS, SIZE=SIZE, BLOCK=block, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _up_kernel(
    x, up, bias, size, neuron, value, M, K, stride_x, stride_u,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """value = f(value) * g(x up^T + bias) for a tile of BM rows and BN neurons of their pool, in place."""
    b = tl.program_id(0)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    n_pool = tl.load(size + b)
    if tl.program_id(1) * BN >= n_pool:
        return
    m = b * BM + tl.arange(0, BM)
    row = tl.where(m < M, m, 0).to(tl.int64)
    n = tl.load(neuron + b.to(tl.int64) * SIZE + j, mask=j < n_pool, other=0).to(tl.int64)
    u = tl.zeros([BM, BN], tl.float32)
    if GATED:
        a_ptr = x + row[:, None] * stride_x
        b_ptr = up + n[None, :] * stride_u
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            v = tl.load(a_ptr + k[None, :], mask=(k < K)[None, :], other=0.0)
            w = tl.load(b_ptr + k[:, None], mask=(k < K)[:, None], other=0.0)
            u = tl.dot(v, w, u, input_precision=PRECISION)
        if HAS_BIAS:
            u += tl.load(bias + n).to(tl.float32)[None, :]
    at = value + row[:, None] * SIZE + j[None, :]
    mask = (m < M)[:, None] & (j < n_pool)[None, :]
    g = tl.load(at, mask=mask, other=0.0)
    h = evaluate(g.to(tl.float32), F_STEPS)
    if GATED:
        h = h * evaluate(u, G_STEPS)
    # An entry that is not there is 0, which f may not leave 0 (a shifted rectifier's cut is not at 0).
    tl.store(at, tl.where(g == 0.0, 0.0, h).to(value.dtype.element_ty), mask=mask)


@triton.jit
def _down_kernel(
    value, table, size, neuron, out, M, D, stride_t, stride_o,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[rows of a block, BN columns] = value @ table[the pool's neurons]."""
    b = tl.program_id(0)
    n_pool = tl.load(size + b)
    if n_pool == 0:
        return
    m = b * BM + tl.arange(0, BM)
    row = tl.where(m < M, m, 0).to(tl.int64)
    d = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, n_pool, BK):
        k = k0 + tl.arange(0, BK)
        n = tl.load(neuron + b.to(tl.int64) * SIZE + k, mask=k < n_pool, other=0).to(tl.int64)
        h = tl.load(value + row[:, None] * SIZE + k[None, :], mask=(k < n_pool)[None, :], other=0.0)
        w = tl.load(
            table + n[:, None] * stride_t + d[None, :],
            mask=(k < n_pool)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        acc = tl.dot(h, w, acc, input_precision=PRECISION)
    at = out + row[:, None] * stride_o + d[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (d < D)[None, :])


def products(
    x: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    pool: Pool,
    out: torch.Tensor,
    f: Program,
    g: Program,
    precision: str,
) -> None:
    """Write what the pools contribute to `out` [M, D], for the rows of blocks that have one. table: down as [N, D]."""
    M, K = x.shape
    D = out.shape[1]
    weight = x if up is None else up
    small = not x.is_cuda
    wide = x.dtype == torch.float32
    # Up: one warpgroup and 128 x 128, which leaves registers for the addresses of gathered rows and room for a second
    # program. Down: 256 wide, as the values are read again for every tile of columns.
    bn, bk, warps, stages = (32, 32, 4, 1) if small else (64, 32, 8, 2) if wide else (128, 64, 4, 3)
    _up_kernel[(pool.blocks, SIZE // bn)](
        x, weight, bias, pool.size, pool.neuron, pool.value, M, K, x.stride(0), weight.stride(0),
        F_STEPS=encode(f), G_STEPS=encode(g), GATED=up is not None, HAS_BIAS=bias is not None,
        SIZE=SIZE, BM=ROWS, BN=bn, BK=bk, PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if not small and not wide:
        bn, warps = 256, 8
    _down_kernel[(pool.blocks, triton.cdiv(D, bn))](
        pool.value, table, pool.size, pool.neuron, out, M, D, table.stride(0), out.stride(0),
        SIZE=SIZE, BM=ROWS, BN=bn, BK=bk, PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
