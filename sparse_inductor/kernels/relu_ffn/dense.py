"""Kernels of the ReLU feed-forward block for rows that are not sparse: tile products over a list of rows.

How long the list is, only the device knows: every kernel is launched with a grid that fills the GPU, reads the length,
and returns at once where there is nothing to do. So rows may change sides from replay to replay of a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from ..common.arch import shared_memory
from ..common.epilogue import encode, evaluate
from ..common.launch import relaunched
from ..common.pdl import pdl_options, wait_for_previous
from ..common.tile_order import rows_full, tile_at, tile_last
from ..common.tma import tma_descriptor
from .packing import ARRIVED, listed_rows, n_listed
from .tiles import (
    STAGES_HALF,
    add_parts,
    half_at,
    is_last,
    leave_part,
    precision,
    programs_of,
    put,
    rest_of,
    sum_of_rows,
    tile_of,
)


@triton.jit
def _dot_listed(
    a, a_rows, stride_am, stride_ak, b, cols, stride_bn, stride_bk, K,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A[a_rows] @ B[cols]^T. EVEN: K is a multiple of BK. Rows that are not in it repeat another."""
    acc = tl.zeros([BM, BN], tl.float32)
    a_ptr = a + a_rows[:, None] * stride_am
    b_ptr = b + cols[None, :] * stride_bn
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a_at, b_at = a_ptr + k[None, :] * stride_ak, b_ptr + k[:, None] * stride_bk
        if EVEN:
            v, w = tl.load(a_at), tl.load(b_at)
        else:
            v = tl.load(a_at, mask=(k < K)[None, :], other=0.0)
            w = tl.load(b_at, mask=(k < K)[:, None], other=0.0)
        acc = tl.dot(v, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _hidden_tile(
    u, gates, m, n, threshold, F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr
):
    """gate = f(gate) * g(u) of a tile of gates at (m, n)."""
    g = gates.load([m, n]).to(tl.float32)
    h = evaluate(g, F_STEPS)
    if GATED:
        h = h * evaluate(u, G_STEPS)
    gates.store([m, n], tl.where(g <= threshold, 0.0, h).to(gates.dtype))


@relaunched
@triton.jit
def _hidden_kernel(
    x, up, gate, x_desc, up_desc, gate_desc, bias, state, rows,
    M, N, stride_xm, stride_xk, stride_un, stride_uk, THRESHOLD, K: tl.constexpr,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr, PDL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gate[row] = f(gate[row]) * g(x[row] up^T + bias), in place, for the listed rows. gate: [M, N], contiguous.

    TMA: where every row is listed, by TMA, BN columns a tile, else PART columns.
    """
    wait_for_previous(PDL)
    n_rows = n_listed(state)
    threshold = tl.full([], THRESHOLD, tl.float32)
    if TMA and n_rows == M:
        tiles_m = tl.cdiv(M, BM)
        tiles_n = tl.cdiv(N, BN)
        # Flattened, so that the next tile's operands are on their way while a tile ends.
        for t in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
            pm, pn = tile_at(t, tiles_m, tiles_n)
            u = tl.zeros([BM, BN], tl.float32)
            if GATED:
                for k in tl.range(0, K, BK):
                    u = tl.dot(x_desc.load([pm * BM, k]), up_desc.load([pn * BN, k]).T, u)
                if HAS_BIAS:
                    n = pn * BN + tl.arange(0, BN)
                    u += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            # By halves: what is read and written passes through shared memory, beside the operands' stages.
            left, right = tl.split(tl.permute(tl.reshape(u, (BM, 2, BN // 2)), (0, 2, 1)))
            n = pn * BN
            _hidden_tile(left, gate_desc, pm * BM, n, threshold, F_STEPS, G_STEPS, GATED)
            n += BN // 2
            _hidden_tile(right, gate_desc, pm * BM, n, threshold, F_STEPS, G_STEPS, GATED)
    else:
        tiles_m = tl.cdiv(n_rows, BM)
        tiles_n = tl.cdiv(N, PART)
        for t in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
            pm, pn = tile_at(t, tiles_m, tiles_n)
            i = pm * BM + tl.arange(0, BM)
            in_m = i < n_rows
            row = listed_rows(state, rows, i, M).to(tl.int64)
            n = pn * PART + tl.arange(0, PART)
            in_n = n < N
            col = tl.where(in_n, n, 0).to(tl.int64)
            if GATED:
                u = _dot_listed(
                    x, row, stride_xm, stride_xk, up, col, stride_un, stride_uk, K,
                    K % BK == 0, BM, PART, BK, PRECISION
                )  # fmt: skip
                if HAS_BIAS:
                    u += tl.load(bias + col, mask=in_n, other=0.0).to(tl.float32)[None, :]
            # After the product: pointers to a whole tile take more registers than its accumulator.
            at = gate + row[:, None] * N + col[None, :]
            mask = in_m[:, None] & in_n[None, :]
            g = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            h = evaluate(g, F_STEPS)
            if GATED:
                h = h * evaluate(u, G_STEPS)
            tl.store(at, tl.where(g <= threshold, 0.0, h).to(gate.dtype.element_ty), mask=mask)


def _listed_tile(t: torch.Tensor, found: list) -> tuple[list, bool, dict[str, int]]:
    """(descriptors or Nones, whether they are descriptors, tile) of a kernel of listed rows."""
    tile = tile_of(t)
    able = None not in found
    # Through pointers, which take registers too; and the fewer rows, the more tiles are needed to fill the GPU.
    tile["PART"] = min(tile["BN"], 64)
    if not able:
        tile["BN"] = tile["PART"]
        if t.is_cuda and t.dtype != torch.float32:
            # A few tiles of long sums, which wait for memory: six stages of 24 KiB are as much as three of BN columns.
            tile["num_stages"] = min(6, shared_memory(t.device) // (24 * 1024))
    return found if able else [None] * len(found), able, tile


def hidden(
    x: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: torch.Tensor,
    listed: tuple[torch.Tensor, torch.Tensor],
    f: Program,
    g: Program,
    threshold: float,
) -> None:
    """Make h of the listed rows in the place of their gate projection, a row of `gate` [M, N]."""
    table = x if up is None else up
    tile = tile_of(x)
    shapes = (x, "BM", "BK", 1), (table, "BN", "BK", 1), (gate, "BM", "BN", 2)
    made = [tma_descriptor(t, tile[i], tile[j] // part) for t, i, j, part in shapes]
    made, able, tile = _listed_tile(x, made)
    _hidden_kernel[(programs_of(x),)](
        x, table, gate, *made, bias, *listed,
        *gate.shape, *x.stride(), *table.stride(), threshold, x.shape[1],
        F_STEPS=encode(f), G_STEPS=encode(g), GATED=up is not None, HAS_BIAS=bias is not None,
        TMA=able, PRECISION=precision(x), **pdl_options(x), **tile,
    )  # fmt: skip


@relaunched
@triton.jit
def _activate_kernel(
    gate, up, numbers, THRESHOLD,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gate = f(gate) * g(up), in place, BLOCK numbers a program."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numbers
    g = tl.load(gate + i, mask=mask, other=0.0).to(tl.float32)
    h = evaluate(g, F_STEPS)
    if GATED:
        h = h * evaluate(tl.load(up + i, mask=mask, other=0.0).to(tl.float32), G_STEPS)
    tl.store(gate + i, tl.where(g <= THRESHOLD, 0.0, h).to(gate.dtype.element_ty), mask=mask)


def activate(
    gate: torch.Tensor, up: torch.Tensor | None, f: Program, g: Program, threshold: float
) -> torch.Tensor:
    """h in the place of the gate projection, both projections dense and contiguous."""
    block = 1024 if gate.is_cuda else 64
    _activate_kernel[(triton.cdiv(gate.numel(), block),)](
        gate, up, gate.numel(), threshold,
        F_STEPS=encode(f), G_STEPS=encode(g), GATED=up is not None, BLOCK=block,
    )  # fmt: skip
    return gate


@relaunched
@triton.jit
def _row_stats_kernel(hidden, stats, state, rows, M, N, stride_s, BLOCK: tl.constexpr):
    """The sum of |h| and the number of non-zeros of listed rows, from h [M, N]."""
    n_rows = n_listed(state)
    for i in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.max(listed_rows(state, rows, tl.full([1], i, tl.int32), M), 0).to(tl.int64)
        size = tl.zeros([BLOCK], tl.float32)
        nonzero = tl.zeros([BLOCK], tl.float32)
        for n0 in range(0, N, BLOCK):
            n = n0 + tl.arange(0, BLOCK)
            h = tl.load(hidden + row * N + n, mask=n < N, other=0.0).to(tl.float32)
            size += tl.abs(h)
            nonzero += (h != 0.0).to(tl.float32)
        tl.store(stats + 2 * stride_s + row, tl.sum(size, 0))
        tl.store(stats + 3 * stride_s + row, tl.sum(nonzero, 0))


def row_stats(
    hidden: torch.Tensor, stats: torch.Tensor, listed: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Fill stats[2:] [4, M] of listed rows from `hidden` [M, N], contiguous."""
    _row_stats_kernel[(8 * programs_of(hidden),)](
        hidden, stats, *listed, *hidden.shape, stats.stride(0),
        BLOCK=1024 if hidden.is_cuda else 32,
    )  # fmt: skip


# Programs that share a tile of `product` by its sum, where few rows are listed: the sum is over N, 5 632 in the
# figures, and a tile alone would take as long as a whole wave of them.
SPLITS = tl.constexpr(16)


@relaunched
@triton.jit
def _product_kernel(
    a, b, out, a_desc, b_desc, half_desc, out_desc, bias, state, rows, parts,
    M, N, stride_am, stride_ak, stride_bn, stride_bk, stride_om, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[row] = a[row] b^T + bias for the listed rows.

    TMA: where every row is listed, by TMA, BN columns a tile, and half a tile's rows past the
    last round of all programs, where several make parts [half, split, half a tile's size] of a sum and add them, in
    order; else PART columns. If such tiles are fewer than programs, several make parts, and the one that arrives last
    adds them.
    """
    wait_for_previous(PDL)
    n_rows = n_listed(state)
    tiles_m = tl.cdiv(n_rows, BM)
    if TMA and n_rows == M:
        tiles_n = tl.cdiv(N, BN)
        tiles = tiles_m * tiles_n
        full = rows_full(n_rows, BM)
        rest, halves, alone, splits = rest_of(tiles, tiles - full * tiles_n, tl.cdiv(K, BK))
        # Halves first, so that all parts are there long before they are added.
        HALF: tl.constexpr = BM // 2
        unit = tl.program_id(0)
        shares = unit < (halves - alone) * splits
        for shared in range(tl.where(unit < alone, 0, 1), tl.where(shares, 2, 1)):
            sharing = tl.where(shared > 0, splits, 1)
            half = unit // sharing + shared * alone
            m0, pn = half_at(half, tiles, rest, halves, full, tiles_n, BM)
            depth = tl.cdiv(tl.cdiv(K, sharing), BK) * BK
            k0 = unit % sharing * depth
            acc = tl.zeros([HALF, BN], tl.float32)
            for k in tl.range(k0, tl.minimum(k0 + depth, K), BK, num_stages=STAGES_HALF):
                acc = tl.dot(half_desc.load([m0, k]), b_desc.load([pn * BN, k]).T, acc)
            if shared > 0:
                leave_part(acc, parts, state + ARRIVED, unit, splits, n_rows - m0, HALF, BN)
            else:
                put(acc, out, bias, rows, m0, pn * BN, M, N, stride_om, False, HAS_BIAS)
        for t in tl.range(tl.program_id(0), tiles - rest, tl.num_programs(0), flatten=True):
            pm, pn = tile_last(t, full, tiles_n)
            acc = tl.zeros([BM, BN], tl.float32)
            for k in tl.range(0, K, BK):
                acc = tl.dot(a_desc.load([pm * BM, k]), b_desc.load([pn * BN, k]).T, acc)
            if HAS_BIAS:
                n = pn * BN + tl.arange(0, BN)
                acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            out_desc.store([pm * BM, pn * BN], acc.to(out_desc.dtype))
        if shares:
            half = alone + unit // splits
            m0, pn = half_at(half, tiles, rest, halves, full, tiles_n, BM)
            add_parts(
                out, bias, rows, parts, state + ARRIVED, unit, splits, m0, pn * BN, M, N, stride_om,
                False, HAS_BIAS, HALF, BN,
            )  # fmt: skip
    else:
        tiles_n = tl.cdiv(N, PART)
        tiles = tiles_m * tiles_n
        splits = tl.minimum(SPLITS, tl.maximum(1, tl.num_programs(0) // tl.maximum(tiles, 1)))
        depth = tl.cdiv(tl.cdiv(K, splits), BK) * BK
        for unit in range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
            k0 = (unit % splits) * depth
            pm, pn = tile_at(unit // splits, tiles_m, tiles_n)
            i = pm * BM + tl.arange(0, BM)
            in_m = i < n_rows
            row = listed_rows(state, rows, i, M).to(tl.int64)
            n = pn * PART + tl.arange(0, PART)
            in_n = n < N
            col = tl.where(in_n, n, 0).to(tl.int64)
            acc = _dot_listed(
                a + k0 * stride_ak, row, stride_am, stride_ak,
                b + k0 * stride_bk, col, stride_bn, stride_bk, tl.minimum(depth, K - k0),
                K % BK == 0, BM, PART, BK, PRECISION
            )  # fmt: skip
            last = splits > 0
            if splits > 1:
                last = is_last(acc, parts, state + ARRIVED, unit, splits, BM, PART)
                if last:
                    acc = sum_of_rows(parts, 0, unit, splits, BM, BM, PART)
            if last:
                if HAS_BIAS:
                    acc += tl.load(bias + col, mask=in_n, other=0.0).to(tl.float32)[None, :]
                to = out + row[:, None] * stride_om + col[None, :]
                tl.store(to, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    listed: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None = None,
) -> None:
    """out[row] = a[row] @ b^T + bias for the listed rows. b: [N, K], any strides."""
    tile = tile_of(a)
    shapes = (a, "BM", "BK", 1), (b, "BN", "BK", 1), (a, "BM", "BK", 2), (out, "BM", "BN", 1)
    found = [tma_descriptor(t, tile[i] // part, tile[j]) for t, i, j, part in shapes]
    made, able, tile = _listed_tile(a, found)
    programs = programs_of(a)
    parts = torch.empty(programs * tile["BM"] * tile["BN"], dtype=torch.float32, device=a.device)
    _product_kernel[(programs,)](
        a, b, out, *made, bias, *listed, parts,
        a.shape[0], b.shape[0], *a.stride(), *b.stride(), out.stride(0), b.shape[1],
        HAS_BIAS=bias is not None, TMA=able, PRECISION=precision(a), **pdl_options(a), **tile,
    )  # fmt: skip
