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

from . import relu_ffn_pool_hopper as hopper
from .boxes import boxes
from .early import early, wait_for_previous
from .epilogue import encode, evaluate
from .launch import relaunched
from .relu_ffn_packing import decide_after_pools, dense_row, n_listed

__all__ = ["ENTRIES", "ROWS", "SIZE", "Pool", "counts", "products", "split", "words"]

# Rows a block: the height of a tile.
ROWS = 128
# Neurons a pool holds at most, so that the work of a block is bounded by a tenth of the dense one (at N = 5 632).
SIZE = 512
# A dense tile over the pool pays from about ten packed entries a row on (H200: 157 us of tensor cores for 512 neurons
# of 2 x 2 048 weights, against 0.12 us of reading for each packed entry).
ENTRIES = 10 * ROWS


class Pool:
    """size [blocks]: neurons of each block's pool; neuron [blocks, SIZE]; value [M, SIZE], 0 where not active."""

    def __init__(self, x: torch.Tensor) -> None:
        """x [M, K]: for how many rows, and their dtype."""
        M = len(x)
        self.blocks = triton.cdiv(M, ROWS)
        self.size = torch.empty(self.blocks, dtype=torch.int32, device=x.device)
        self.neuron = torch.empty(self.blocks, SIZE, dtype=torch.int32, device=x.device)
        self.value = x.new_empty(M, SIZE)


@relaunched
@triton.jit
def _select_kernel(
    counts, slot, size, neuron, state, M, N, ROW,
    SIZE: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program chooses a block's pool: the neurons active in at least t of its rows, t the least that SIZE allows.

    Where all M rows take the dense path, every pool is empty; whether they do is settled by what the pools leave.
    """
    wait_for_previous(EARLY)
    b = tl.program_id(0).to(tl.int64)
    if n_listed(state) == M:
        tl.store(size + b, 0)
        return
    n = tl.arange(0, BLOCK)
    c = tl.load(counts + b * N + n, mask=n < N, other=0)
    least = 3  # a neuron of one or two rows costs more in the tile than it costs packed
    while tl.sum((c >= least).to(tl.int32), 0) > SIZE:
        least += 1
    keep = (c >= least).to(tl.int32)
    keep = tl.where(tl.sum(c * keep, 0) >= ENTRIES, keep, 0)
    at = tl.cumsum(keep, 0) - keep
    tl.store(slot + b * N + n, tl.where(keep != 0, at, -1).to(tl.int16), mask=n < N)
    tl.store(neuron + b * SIZE + at, n, mask=keep != 0)
    n_pool = tl.sum(keep, 0)
    tl.store(size + b, n_pool)
    strays = tl.sum(c * (1 - keep), 0)
    decide_after_pools(state, strays + tl.where(n_pool > 0, ENTRIES, 0), ROW, M)


@triton.jit
def _n_pooled(size, b, state, M):
    """Neurons of the pool of block b that are to be worked on."""
    return tl.where(n_listed(state) == M, 0, tl.load(size + b))


@relaunched
@triton.jit
def _split_kernel(
    count, index, value, slot, size, pool_value, state, M, N,
    CAP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program moves R rows' entries that are in their block's pool to the pool; the strays close up, in order."""
    wait_for_previous(EARLY)
    first = tl.program_id(0) * R
    b = (first // ROWS).to(tl.int64)
    n_pool = _n_pooled(size, b, state, M)
    if n_pool == 0:
        return
    m = first + tl.arange(0, R)
    c = tl.load(count + m, mask=m < M, other=CAP + 1)
    row = m.to(tl.int64)[:, None]
    # Up to whole tiles of `_down_kernel`.
    s = tl.arange(0, SIZE)[None, :]
    zero = tl.zeros([R, SIZE], pool_value.dtype.element_ty)
    tl.store(
        pool_value + row * SIZE + s, zero, mask=(m < M)[:, None] & (s < tl.cdiv(n_pool, 64) * 64)
    )
    tl.debug_barrier()  # the zeros are there before anything is written over them
    c = tl.where(c > CAP, -1, c)
    kept = tl.zeros([R], tl.int32)
    for i0 in range(0, tl.max(c, 0), BLOCK):
        i = i0 + tl.arange(0, BLOCK)[None, :]
        valid = i < c[:, None]
        n = tl.load(index + row * CAP + i, mask=valid, other=0)
        v = tl.load(value + row * CAP + i, mask=valid, other=0.0)
        place = tl.load(slot + b * N + n.to(tl.int64), mask=valid, other=-1).to(tl.int32)
        stray = (valid & (place < 0)).to(tl.int32)
        at = kept[:, None] + tl.cumsum(stray, 1) - stray
        tl.debug_barrier()  # all is read before a stray is written there
        tl.store(pool_value + row * SIZE + place, v, mask=valid & (place >= 0))
        tl.store(index + row * CAP + at, n, mask=stray != 0)
        tl.store(value + row * CAP + at, v, mask=stray != 0)
        kept += tl.sum(stray, 1)
    tl.store(count + m, kept, mask=c >= 0)


def words(M: int, N: int) -> int:
    """Words of int64 that `counts` of M rows take."""
    return triton.cdiv(triton.cdiv(M, ROWS) * N, 2)


def counts(room: torch.Tensor, N: int) -> torch.Tensor:
    """How many rows of a block have a neuron active, [blocks, N] int32, in room of `words`."""
    c = room.view(torch.int32)
    return c[: len(c) // N * N].view(-1, N)


def split(
    pool: Pool,
    counts: torch.Tensor,
    state: torch.Tensor,
    count: torch.Tensor,
    index: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Find the pools of packed rows by their `counts`, and move their entries to them; the strays are left.

    state: of `pack`.
    """
    M, cap = index.shape
    N = counts.shape[1]
    slot = torch.empty(pool.blocks, N, dtype=torch.int16, device=index.device)
    block = min(64, triton.next_power_of_2(cap))  # a few more than most rows have
    rows_each = 4  # a row and a warp
    _select_kernel[(pool.blocks,)](
        counts, slot, pool.size, pool.neuron, state, M, N, dense_row(M, N),
        SIZE=SIZE, ENTRIES=ENTRIES, BLOCK=triton.next_power_of_2(N), **early(value), num_warps=8,
    )  # fmt: skip
    _split_kernel[(triton.cdiv(M, rows_each),)](
        count, index, value, slot, pool.size, pool.value, state, M, N,
        CAP=cap, ROWS=ROWS, SIZE=SIZE, R=rows_each, BLOCK=block, **early(value), num_warps=rows_each,
    )  # fmt: skip


@relaunched
@triton.jit
def _up_kernel(
    x, up, value, x_box, bias, size, neuron, state, M, K, stride_x, stride_u,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BOXES: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """value = f(value) * g(x up^T + bias) for a tile of BM rows and BN neurons of their pool, in place.

    EVEN: K is a multiple of BK.
    """
    wait_for_previous(EARLY)
    b = tl.program_id(1)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    n_pool = _n_pooled(size, b, state, M)
    if tl.program_id(0) * BN >= n_pool:
        return
    m = b * BM + tl.arange(0, BM)
    row = tl.where(m < M, m, 0).to(tl.int64)
    # Past the end, the last again: a mask costs more.
    n = tl.load(neuron + b.to(tl.int64) * SIZE + tl.minimum(j, n_pool - 1)).to(tl.int64)
    u = tl.zeros([BM, BN], tl.float32)
    if GATED:
        k = tl.arange(0, BK)
        a_ptr = x + row[:, None] * stride_x + k[None, :]
        b_ptr = up + n[None, :] * stride_u + k[:, None]
        for k0 in range(0, K, BK):
            if BOXES:
                v = x_box.load([b * BM, k0])
            elif EVEN:
                v = tl.load(a_ptr + k0)
            else:
                v = tl.load(a_ptr + k0, mask=(k0 + k < K)[None, :], other=0.0)
            if EVEN:
                w = tl.load(b_ptr + k0)
            else:
                w = tl.load(b_ptr + k0, mask=(k0 + k < K)[:, None], other=0.0)
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


@relaunched
@triton.jit
def _down_kernel(
    value, table, out, value_box, out_box, size, neuron, state, M, D, stride_t, stride_o,
    BOXES: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[rows of a block, BN columns] = value @ table[the pool's neurons]. EVEN: D is a multiple of BN."""
    wait_for_previous(EARLY)
    b = tl.program_id(1)
    n_pool = _n_pooled(size, b, state, M)
    if n_pool == 0:
        return
    m = b * BM + tl.arange(0, BM)
    row = tl.where(m < M, m, 0).to(tl.int64)
    d = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    listed = neuron + b.to(tl.int64) * SIZE
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, n_pool, BK):
        # The values past the end are 0.
        n = tl.load(listed + tl.minimum(k0 + k, n_pool - 1)).to(tl.int64)
        h = (
            value_box.load([b * BM, k0])
            if BOXES
            else tl.load(value + row[:, None] * SIZE + (k0 + k)[None, :])
        )
        at = table + n[:, None] * stride_t + d[None, :]
        w = tl.load(at) if EVEN else tl.load(at, mask=(d < D)[None, :], other=0.0)
        acc = tl.dot(h, w, acc, input_precision=PRECISION)
    if BOXES:
        out_box.store([b * BM, tl.program_id(0) * BN], acc.to(out.dtype.element_ty))
    else:
        at = out + row[:, None] * stride_o + d[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (d < D)[None, :])


# Tiles of 16-bit products, ROWS high: (columns, depth, warps, stages). The operand of gathered rows passes through the
# threads, so that registers for its addresses are left beside the accumulator.
UP_TILE = (128, 64, 4, 3)
DOWN_TILE = (128, 64, 4, 3)


def products(
    x: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    pool: Pool,
    state: torch.Tensor,
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
    bn, bk, warps, stages = (32, 32, 4, 1) if small else (64, 32, 8, 2) if wide else UP_TILE
    x_box = boxes(x, ROWS, bk)
    _up_kernel[(triton.cdiv(SIZE, bn), pool.blocks)](
        x, weight, pool.value, x_box, bias, pool.size, pool.neuron, state, M, K, x.stride(0), weight.stride(0),
        F_STEPS=encode(f), G_STEPS=encode(g), GATED=up is not None, HAS_BIAS=bias is not None,
        BOXES=x_box is not None, EVEN=K % bk == 0, SIZE=SIZE, BM=ROWS, BN=bn, BK=bk, PRECISION=precision,
        **early(x), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if hopper.applies(pool.value, table, out):
        hopper.down(pool.value, table, out, pool.size, pool.neuron, state)
        return
    if not small and not wide:
        bn, bk, warps, stages = DOWN_TILE
    value_box, out_box = boxes(pool.value, ROWS, bk), boxes(out, ROWS, bn)
    able = value_box is not None and out_box is not None
    _down_kernel[(triton.cdiv(D, bn), pool.blocks)](
        pool.value, table, out, value_box if able else None, out_box if able else None,
        pool.size, pool.neuron, state, M, D, table.stride(0), out.stride(0),
        BOXES=able, EVEN=D % bn == 0, SIZE=SIZE, BM=ROWS, BN=bn, BK=bk, PRECISION=precision,
        **early(x), num_warps=warps, num_stages=stages,
    )  # fmt: skip
