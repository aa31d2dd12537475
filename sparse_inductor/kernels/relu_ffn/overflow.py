"""The backward of rows that are not sparse: tile products over a list of rows, as in `relu_ffn.dense`.

It works on copies of the listed rows, one after the other, so that every product of theirs can go through the bulk copy
engine, which reads the rows themselves where it can and all are listed. PAD rows after the last are zeros, for the
products that sum over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from ..common.epilogue import encode
from ..common.launch import relaunched
from ..common.pdl import pdl_options, wait_for_previous
from ..common.tile_order import rows_full, tile_at, tile_last
from ..common.tma import tma_descriptor
from .dots import slopes
from .tiles import (
    STAGES_HALF,
    add_parts,
    half_at,
    leave_part,
    narrow,
    precision,
    programs_of,
    put,
    rest_of,
    tile_of,
)

PAD = tl.constexpr(64)


@relaunched
@triton.jit
def _gather_kernel(
    x, dy, x_out, dy_out, rows, length, M, K, D, stride_x, stride_y,
    SOME: tl.constexpr, PDL: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x_out[i], dy_out[i] = x[rows[i]], dy[rows[i]], and zeros up to a multiple of PAD rows. SOME: unless all M rows
    are listed."""
    wait_for_previous(PDL)
    n_rows = tl.load(length)
    if SOME and n_rows == M:
        return
    for i in range(tl.program_id(0), tl.cdiv(n_rows, PAD) * PAD, tl.num_programs(0)):
        row = tl.load(rows + i, mask=i < n_rows, other=0).to(tl.int64)
        at = tl.full([], 0, tl.int64) + i
        for k0 in range(0, K, BLOCK):
            k = k0 + tl.arange(0, BLOCK)
            v = tl.load(x + row * stride_x + k, mask=tl.where(i < n_rows, k < K, False), other=0.0)
            tl.store(x_out + at * K + k, v, mask=k < K)
        for d0 in range(0, D, BLOCK):
            d = d0 + tl.arange(0, BLOCK)
            v = tl.load(dy + row * stride_y + d, mask=tl.where(i < n_rows, d < D, False), other=0.0)
            tl.store(dy_out + at * D + d, v, mask=d < D)


def readable(t: torch.Tensor) -> bool:
    """Whether rows of t need not be copied where all of them are listed."""
    return not t.is_cuda or tma_descriptor(t, PAD.value, PAD.value) is not None


def room_for_copies(x: torch.Tensor) -> torch.Tensor:
    """Room for `gather` to copy rows of x [M, K] to: PAD more of them."""
    return x.new_empty(len(x) + PAD.value, x.shape[1])


def gather(
    x: torch.Tensor,
    dy: torch.Tensor | None,
    x_out: torch.Tensor,
    dy_out: torch.Tensor | None,
    rows: torch.Tensor,
    length: torch.Tensor,
    *,
    all_too: bool = False,
) -> None:
    """Copy the listed rows of x [M, K] and dy [M, D] to x_out and dy_out, of `room_for_copies`; nothing where all are
    listed and both are `readable`, unless `all_too`."""
    if dy is None or dy_out is None:
        dy, dy_out = x[:, :0], x_out
    some = not all_too and readable(x) and readable(dy)
    _gather_kernel[(4 * programs_of(x),)](
        x, dy, x_out, dy_out, rows, length, *x.shape, dy.shape[1], x.stride(0), dy.stride(0),
        SOME=some, PAD=PAD.value, BLOCK=1024 if x.is_cuda else 32, **pdl_options(x),
    )  # fmt: skip


@triton.jit
def _copied_tile(
    acc, a, m0, b, n0, M, N, K, first, end, stride_a, stride_b,
    TMA: tl.constexpr, BY_ROW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """acc + A[m0:, first:end] @ B[n0:, first:end]^T, or with BY_ROW @ B[first:end, n0:]."""
    if TMA:
        for k in tl.range(first, end, BK, num_stages=STAGES):
            if BY_ROW:
                acc = tl.dot(a.load([m0, k]), b.load([k, n0]), acc)
            else:
                acc = tl.dot(a.load([m0, k]), b.load([n0, k]).T, acc)
    else:
        m = (m0 + tl.arange(0, BM)).to(tl.int64)
        n = (n0 + tl.arange(0, BN)).to(tl.int64)
        for k0 in range(first, end, BK):
            k = (k0 + tl.arange(0, BK)).to(tl.int64)
            in_k = k < K
            v = tl.load(
                a + m[:, None] * stride_a + k[None, :],
                mask=(m < M)[:, None] & in_k[None, :],
                other=0.0,
            )
            if BY_ROW:
                at = b + k[:, None] * stride_b + n[None, :]
            else:
                at = b + n[None, :] * stride_b + k[:, None]
            w = tl.load(at, mask=(n < N)[None, :] & in_k[:, None], other=0.0)
            acc = tl.dot(v, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _copied_tiles(
    a, b, c, d, a_half, c_half, bias, out, rows, parts, arrived,
    n_rows, N, K, stride_a, stride_b, stride_d, stride_o,
    TMA: tl.constexpr, BY_ROW: tl.constexpr, TWO: tl.constexpr, SCATTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tiles of a program of `_copied_product_kernel`."""
    tiles_n = tl.cdiv(N, BN)
    tiles = tl.cdiv(n_rows, BM) * tiles_n
    full = rows_full(n_rows, BM)
    rest, halves, alone, splits = 0, 0, 0, 1
    if SPLIT:
        steps = tl.cdiv(K, BK) * (2 if TWO else 1)
        rest, halves, alone, splits = rest_of(tiles, tiles - full * tiles_n, steps)
    # Halves first, so that all parts are there long before they are added.
    HALF: tl.constexpr = BM // 2
    unit = tl.program_id(0)
    shares = unit < (halves - alone) * splits
    if SPLIT:
        for shared in range(tl.where(unit < alone, 0, 1), tl.where(shares, 2, 1)):
            sharing = tl.where(shared > 0, splits, 1)
            half = unit // sharing + shared * alone
            m0, pn = half_at(half, tiles, rest, halves, full, tiles_n, BM)
            n0 = pn * BN
            # Both sums, one behind the other.
            one = tl.cdiv(K, BK) * BK
            depth = tl.cdiv(tl.cdiv(one * (2 if TWO else 1), BK), sharing) * BK
            first = unit % sharing * depth
            end = first + depth
            acc = tl.zeros([HALF, BN], tl.float32)
            acc = _copied_tile(
                acc, a_half, m0, b, n0, n_rows, N, K, tl.minimum(first, one), tl.minimum(end, one), stride_a,
                stride_b, TMA, BY_ROW, HALF, BN, BK, PRECISION, STAGES_HALF,
            )  # fmt: skip
            if TWO:
                first, end = tl.maximum(first - one, 0), tl.minimum(tl.maximum(end - one, 0), one)
                acc = _copied_tile(
                    acc, c_half, m0, d, n0, n_rows, N, K, first, end, stride_a, stride_d,
                    TMA, BY_ROW, HALF, BN, BK, PRECISION, STAGES_HALF,
                )  # fmt: skip
            if shared > 0:
                leave_part(acc, parts, arrived, unit, splits, n_rows - m0, HALF, BN)
            else:
                put(acc, out, bias, rows, m0, n0, n_rows, N, stride_o, SCATTER, HAS_BIAS)
    for t in range(tl.program_id(0), tiles - rest, tl.num_programs(0)):
        pm, pn = tile_last(t, full, tiles_n)
        m0, n0 = pm * BM, pn * BN
        acc = tl.zeros([BM, BN], tl.float32)
        acc = _copied_tile(
            acc, a, m0, b, n0, n_rows, N, K, 0, K, stride_a, stride_b, TMA, BY_ROW, BM, BN, BK, PRECISION
        )  # fmt: skip
        if TWO:
            acc = _copied_tile(
                acc, c, m0, d, n0, n_rows, N, K, 0, K, stride_a, stride_d, TMA, BY_ROW, BM, BN, BK, PRECISION
            )  # fmt: skip
        put(acc, out, bias, rows, m0, n0, n_rows, N, stride_o, SCATTER, HAS_BIAS)
    if SPLIT:
        half = alone + unit // splits
        if shares:
            m0, pn = half_at(half, tiles, rest, halves, full, tiles_n, BM)
            add_parts(
                out, bias, rows, parts, arrived, unit, splits, m0, pn * BN, n_rows, N, stride_o,
                SCATTER, HAS_BIAS, HALF, BN,
            )  # fmt: skip


@relaunched
@triton.jit
def _copied_product_kernel(
    a, all_a, b, c, d, a_half, all_half, c_half, bias, out, rows, length, parts, arrived,
    M, N, K, stride_a, stride_all, stride_b, stride_d, stride_o,
    PDL: tl.constexpr,
    TMA: tl.constexpr, BY_ROW: tl.constexpr, TWO: tl.constexpr, SCATTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[i] = a[i] b^T (+ c[i] d^T) + bias for i < length; with SCATTER into out[rows[i]]; with BY_ROW a[i] b.

    Where all M rows are listed, of all_a instead of a, unless that is None. parts, arrived: unless they are None, tiles
    past the last round of all programs are made by halves, as in `relu_ffn.dense`.
    """
    wait_for_previous(PDL)
    n_rows = tl.load(length)
    SPLIT: tl.constexpr = parts is not None
    if all_a is not None and n_rows == M:
        _copied_tiles(
            all_a, b, c, d, all_half, c_half, bias, out, rows, parts, arrived,
            n_rows, N, K, stride_all, stride_b, stride_d, stride_o,
            TMA, BY_ROW, TWO, SCATTER, HAS_BIAS, SPLIT, BM, BN, BK, PRECISION
        )  # fmt: skip
    else:
        _copied_tiles(
            a, b, c, d, a_half, c_half, bias, out, rows, parts, arrived,
            n_rows, N, K, stride_a, stride_b, stride_d, stride_o,
            TMA, BY_ROW, TWO, SCATTER, HAS_BIAS, SPLIT, BM, BN, BK, PRECISION
        )  # fmt: skip


def copied_product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    length: torch.Tensor,
    *,
    by_row: bool = False,
    scatter: bool = False,
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    arrived: torch.Tensor | None = None,
) -> None:
    """out[i] (with `scatter` out[rows[i]]) = a[i] @ b^T (+ second[0][i] @ second[1]^T) + bias, i < length.

    a: as `gather` gives it, from rows of `source`. b: [N, K], or with `by_row` [K, N] and not transposed; unit stride
    along rows, as a. arrived: zeros, one for a program, that are counted in.
    """
    tile = tile_of(a)
    M = len(out) if source is None else len(source)
    if source is not None and not readable(source):
        source = None
    K, N = a.shape[1], b.shape[1] if by_row else b.shape[0]
    c, d = second or (a, b)
    a_tile = tile["BM"], tile["BK"]
    b_tile = (tile["BK"], tile["BN"]) if by_row else (tile["BN"], tile["BK"])
    given: list = [
        tma_descriptor(t, *tile_of) for t, tile_of in zip((a, b, c, d), (a_tile, b_tile) * 2)
    ]
    halves: list = [None] * 3
    programs, parts = programs_of(a), None
    if None in given:
        able, given, tile = False, [a, b, c, d], narrow(tile)
        given.insert(1, source)
    else:
        able = True
        given.insert(1, None if source is None else tma_descriptor(source, *a_tile))
        if arrived is not None:
            half_tile = tile["BM"] // 2, tile["BK"]
            halves = [None if t is None else tma_descriptor(t, *half_tile) for t in (a, source, c)]
            size = tile["BM"] * tile["BN"] // 2
            parts = a.new_empty(programs * size, dtype=torch.float32)
    _copied_product_kernel[(programs,)](
        *given, *halves, bias, out, rows, length, parts, None if parts is None else arrived,
        M, N, K, a.stride(0), 0 if source is None else source.stride(0), b.stride(0), d.stride(0), out.stride(0),
        TMA=able, BY_ROW=by_row, TWO=second is not None, SCATTER=scatter,
        HAS_BIAS=bias is not None, PRECISION=precision(a), **pdl_options(a), **tile,
    )  # fmt: skip


@relaunched
@triton.jit
def _slopes_kernel(
    gate, up, dh, d_stats, rows, length,
    N, stride_s, THRESHOLD, PDL: tl.constexpr,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, STATS: tl.constexpr,
    PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(gate, up, dh) -> (d gate, d up, h), in place, [M, N]; entry i of the list is row i. Zeros in PAD rows more."""
    wait_for_previous(PDL)
    n_rows = tl.load(length)
    blocks = tl.cdiv(N, BLOCK)
    for t in range(tl.program_id(0), tl.cdiv(n_rows, PAD) * PAD * blocks, tl.num_programs(0)):
        i = (t // blocks).to(tl.int64)
        n = (t % blocks) * BLOCK + tl.arange(0, BLOCK)
        at = i * N + n
        mask = n < N
        g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=mask, other=0.0).to(tl.float32) if GATED else g
        gradient = tl.load(dh + at, mask=mask, other=0.0).to(tl.float32)
        da_extra = tl.full([], 0.0, tl.float32)
        dh_extra = tl.full([], 0.0, tl.float32)
        if STATS:
            row = tl.load(rows + i, mask=i < n_rows, other=0).to(tl.int64)
            da_extra = tl.load(d_stats + row)
            dh_extra = tl.load(d_stats + 2 * stride_s + row)
        dg, du, h = slopes(g, u, gradient, da_extra, dh_extra, F_STEPS, G_STEPS, GATED)
        off = (g <= THRESHOLD) | (i >= n_rows)
        tl.store(gate + at, tl.where(off, 0.0, dg).to(gate.dtype.element_ty), mask=mask)
        if GATED:
            tl.store(up + at, tl.where(off, 0.0, du).to(up.dtype.element_ty), mask=mask)
        tl.store(dh + at, tl.where(off, 0.0, h).to(dh.dtype.element_ty), mask=mask)


def slopes_in_place(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    dh: torch.Tensor,
    d_stats: torch.Tensor | None,
    rows: torch.Tensor,
    length: torch.Tensor,
    f: Program,
    g: Program,
    threshold: float,
) -> None:
    """(gate, up, dh) [M, N] of listed rows to (d gate, d up, h), in place."""
    _slopes_kernel[(8 * programs_of(gate),)](
        gate, up, dh, d_stats, rows, length,
        gate.shape[1], 0 if d_stats is None else d_stats.stride(0), threshold,
        F_STEPS=encode(f), G_STEPS=encode(g), GATED=up is not None, STATS=d_stats is not None,
        PAD=PAD.value, BLOCK=1024 if gate.is_cuda else 32, **pdl_options(gate),
    )  # fmt: skip


@triton.jit
def _summed_tiles(
    a, x, out, bias_out, before, n_rows, N, K, stride_a, stride_x, stride_on, stride_ok,
    TMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tiles of one sum of a program of `_add_products_kernel`, which begin behind so many of others."""
    tiles_n = tl.cdiv(K, BN)
    tiles_m = tl.cdiv(N, BM)
    programs = tl.num_programs(0)
    first = (tl.program_id(0) + programs - before % programs) % programs
    for t in range(first, tiles_m * tiles_n, programs):
        pm, pn = tile_at(t, tiles_m, tiles_n)
        n = pm * BM + tl.arange(0, BM)
        k = pn * BN + tl.arange(0, BN)
        acc = tl.zeros([BM, BN], tl.float32)
        total = tl.zeros([BM], tl.float32)
        for i0 in range(0, n_rows, BK):
            if TMA:
                w = a.load([i0, pm * BM])
                v = x.load([i0, pn * BN])
            else:
                i = (i0 + tl.arange(0, BK)).to(tl.int64)
                in_i = (i < n_rows)[:, None]
                w = tl.load(
                    a + i[:, None] * stride_a + n[None, :], mask=in_i & (n < N)[None, :], other=0.0
                )
                v = tl.load(
                    x + i[:, None] * stride_x + k[None, :], mask=in_i & (k < K)[None, :], other=0.0
                )
            acc = tl.dot(w.T, v, acc, input_precision=PRECISION)
            if HAS_BIAS:
                total += tl.sum(w.to(tl.float32), 0)
        at = out + n[:, None].to(tl.int64) * stride_on + k[None, :].to(tl.int64) * stride_ok
        mask = (n < N)[:, None] & (k < K)[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
        if HAS_BIAS and pn == 0:
            total += tl.load(bias_out + n, mask=n < N, other=0.0).to(tl.float32)
            tl.store(bias_out + n, total.to(bias_out.dtype.element_ty), mask=n < N)


@triton.jit
def _summed(
    a, x, all_x, out, bias_out, before, n_rows, M, N, K, stride_a, stride_x, stride_all, stride_on, stride_ok,
    TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sum of `_add_products_kernel`; how many tiles are behind it."""
    HAS_BIAS: tl.constexpr = bias_out is not None
    if all_x is not None and n_rows == M:
        _summed_tiles(
            a, all_x, out, bias_out, before, n_rows, N, K, stride_a, stride_all, stride_on, stride_ok,
            TMA, HAS_BIAS, BM, BN, BK, PRECISION
        )  # fmt: skip
    else:
        _summed_tiles(
            a, x, out, bias_out, before, n_rows, N, K, stride_a, stride_x, stride_on, stride_ok,
            TMA, HAS_BIAS, BM, BN, BK, PRECISION
        )  # fmt: skip
    return before + tl.cdiv(N, BM) * tl.cdiv(K, BN)


@relaunched
@triton.jit
def _add_products_kernel(
    a0, x0, all0, out0, bias0, a1, x1, all1, out1, bias1, a2, x2, all2, out2, bias2, length,
    M, N, K0, K1, K2, stride_a0, stride_x0, stride_all0, stride_on0, stride_ok0,
    stride_a1, stride_x1, stride_all1, stride_on1, stride_ok1,
    stride_a2, stride_x2, stride_all2, stride_on2, stride_ok2,
    PDL: tl.constexpr,
    TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each of up to three sums, out[n, k] += sum over i < length of a[i, n] * x[i, k], or where all M rows are listed
    of all_x, unless that is None; bias_out[n] += sum of a[i, n]. Programs go on from one sum's tiles to the next's."""
    wait_for_previous(PDL)
    n_rows = tl.load(length)
    if n_rows == 0:
        return
    tiles = tl.full([], 0, tl.int32)
    tiles = _summed(
        a0, x0, all0, out0, bias0, tiles, n_rows, M, N, K0, stride_a0, stride_x0, stride_all0, stride_on0, stride_ok0,
        TMA, BM, BN, BK, PRECISION
    )  # fmt: skip
    if out1 is not None:
        tiles = _summed(
            a1, x1, all1, out1, bias1, tiles, n_rows, M, N, K1,
            stride_a1, stride_x1, stride_all1, stride_on1, stride_ok1,
            TMA, BM, BN, BK, PRECISION
        )  # fmt: skip
    if out2 is not None:
        _summed(
            a2, x2, all2, out2, bias2, tiles, n_rows, M, N, K2,
            stride_a2, stride_x2, stride_all2, stride_on2, stride_ok2,
            TMA, BM, BN, BK, PRECISION
        )  # fmt: skip


class Sum(NamedTuple):
    """out [N, K], of any strides, += a^T x over the listed rows, which are the first ones of a [M, N] and x [M, K],
    copies of those of `source`; bias [N], unless that is None, += the sum of a over them."""

    a: torch.Tensor
    x: torch.Tensor
    source: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None


def add_products(sums: Sequence[Sum], length: torch.Tensor) -> None:
    """One to three sums over the same rows, `length` [1] of them."""
    tile = tile_of(sums[0].a)
    described = [
        [tma_descriptor(s.a, tile["BK"], tile["BM"]), tma_descriptor(s.x, tile["BK"], tile["BN"])]
        for s in sums
    ]
    able = all(None not in pair for pair in described)
    if not able:
        tile = narrow(tile)
    operands: list[Any] = []
    strides: list[int] = []
    widths: list[int] = []
    for s, pair in zip(sums, described):
        whole: Any = None
        if readable(s.source):
            whole = tma_descriptor(s.source, tile["BK"], tile["BN"]) if able else s.source
        operands += [*(pair if able else (s.a, s.x)), whole, s.out, s.bias]
        strides += [s.a.stride(0), s.x.stride(0), s.source.stride(0), *s.out.stride()]
        widths.append(s.x.shape[1])
    missing = 3 - len(sums)
    _add_products_kernel[(programs_of(length),)](
        *operands, *[None] * (5 * missing), length, len(sums[0].source), sums[0].a.shape[1],
        *widths, *[1] * missing, *strides, *[1] * (5 * missing),
        TMA=able, PRECISION=precision(sums[0].a), **pdl_options(length), **tile,
    )  # fmt: skip
