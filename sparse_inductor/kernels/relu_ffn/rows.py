"""Sums of the table rows of packed rows' active neurons, and the tables. See `relu_ffn.gather`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from ..common.epilogue import encode, evaluate
from ..common.launch import relaunched
from ..common.pdl import USE_PDL, let_next_start, pdl_options, wait_for_previous
from . import gather
from .gather import (
    FLIGHT,
    ROW_SEEN,
    STAGES,
    SUM_COLUMNS,
    columns_that_stay,
    fp32,
    in_pairs,
    limited,
    listers_of,
    own_pieces,
    piece_at,
)
from .packing import n_listed, pieces_of

# Slices from which on rows are summed by halves of them, and no row by pieces: a long row's program meets those of the
# next slices (782 us for 1 080 of sums, at 2 049 tokens of K = 8 192, N = 28 672).
MANY_SLICES = 4
# A weighted sum of more entries is made in halves.
LONG = 48


@relaunched
@triton.jit
def _transpose_kernel(
    weight, out, D, N, stride_d, stride_n, stride_o,
    BD: tl.constexpr, BN: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Copy weight [D, N] to out [N, D], a tile a program.

    BESIDE: while the kernel in front of it ends, which does not write the weight and which one program waits for in
    the end: what waits for this one waits for both.
    """
    if BESIDE:
        tl.extra.cuda.gdc_launch_dependents()
    tiles_d = tl.cdiv(D, BD)
    d = tl.program_id(0) % tiles_d * BD + tl.arange(0, BD)
    n = tl.program_id(0) // tiles_d * BN + tl.arange(0, BN)
    mask = (d < D)[:, None] & (n < N)[None, :]
    w = tl.load(
        weight + d[:, None].to(tl.int64) * stride_d + n[None, :].to(tl.int64) * stride_n,
        mask=mask,
        other=0.0,
    )
    to = out + n[:, None].to(tl.int64) * stride_o + d[None, :]
    tl.store(to, tl.trans(w), mask=tl.trans(mask))
    if BESIDE and tl.program_id(0) == 0:
        tl.extra.cuda.gdc_wait()


def by_neuron(
    weight: torch.Tensor, beside: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A weight [D, N] as [N, D] with unit stride along a neuron's row: a view of it, or a copy (one pass over it); with
    `out` a copy there.

    beside: while the kernel in front of it ends, which lets the next one start and does not write the weight.
    """
    if weight.stride(0) == 1 and out is None:
        return weight.t()
    D, N = weight.shape
    out = weight.new_empty(N, D) if out is None else out
    # 64 x 64 at 16 bits: 128-byte runs on both sides.
    tile = 64 if weight.is_cuda else 32
    beside = beside and USE_PDL
    _transpose_kernel[(triton.cdiv(D, tile) * triton.cdiv(N, tile),)](
        weight, out, D, N, *weight.stride(), out.stride(0),
        BD=tile, BN=tile, BESIDE=beside, num_warps=4, **({"launch_pdl": True} if beside else {}),
    )  # fmt: skip
    return out


@triton.jit
def _wait_for_entries(ready, m, n, seen):
    """Wait until n entries of row m are done, of which `seen` says what is known; what is then.

    Nobody waits for ever: all programs that have entries to do were running when the first that waits began.
    """
    while seen < n + ROW_SEEN:
        seen = tl.atomic_add(ready + m, 0, sem="acquire")
    return seen


@triton.jit
def _row_head(m, count, index, CAP: tl.constexpr, FLIGHT: tl.constexpr):
    """(count, first places of the index) of row m: what is asked of L2 is asked at once, places that the row does not
    have, too."""
    return tl.load(count + m), tl.load(index + m * CAP + tl.arange(0, FLIGHT))


@triton.jit
def _sum_block(table, id, stride, d, in_d, v, EVEN: tl.constexpr, PAIRS: tl.constexpr):
    """v times rows `id` of the table, summed over them."""
    at = table + id[:, None] * stride + d[None, :]
    w = tl.load(at) if EVEN else tl.load(at, mask=in_d[None, :], other=0.0)
    return tl.sum(fp32(w, PAIRS) * v[:, None], 0)


@triton.jit
def _weighted_row(
    m, c, d, ahead, index, value_a, table_a, value_b, table_b, onto, bias, out,
    D, stride_a, stride_b, stride_o,
    STEPS: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr, CAP: tl.constexpr,
    FLIGHT: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Columns d of row m, which has c entries; ahead: what the first FLIGHT places of its index hold."""
    in_d = d < D
    r = tl.arange(0, FLIGHT)
    total = tl.zeros([d.shape[0]], tl.float32)
    if onto is not None:
        total = tl.load(onto + m * D + d, mask=in_d, other=0.0)
    # Past the end, some row again: a mask costs more.
    after = tl.where(r < c, ahead, 0).to(tl.int32)
    for e in tl.range(0, c, FLIGHT, num_stages=STAGES):
        valid = e + r < c
        id = after.to(tl.int64)
        after = tl.load(index + m * CAP + tl.minimum(e + FLIGHT + r, c - 1)).to(tl.int32)
        v = tl.load(value_a + m * CAP + e + r, mask=valid, other=0.0).to(tl.float32)
        v = tl.where(valid, evaluate(v, STEPS), 0.0)
        total += _sum_block(table_a, id, stride_a, d, in_d, v, EVEN, PAIRS)
        if TWO:
            v = tl.load(value_b + m * CAP + e + r, mask=valid, other=0.0).to(tl.float32)
            total += _sum_block(table_b, id, stride_b, d, in_d, v, EVEN, PAIRS)
    if HAS_BIAS:
        total += tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)
    tl.store(out + m * stride_o + d, total.to(out.dtype.element_ty), mask=in_d)


@triton.jit
def _one_row(
    i, c, ahead, none, d, count, index, value_a, table_a, value_b, table_b, onto, bias, out,
    D, stride_a, stride_b, stride_o,
    STEPS: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr, CAP: tl.constexpr, LONG: tl.constexpr,
    LISTS: tl.constexpr, FLIGHT: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Columns d to d + WIDTH of row i with this head, unless it overflows, or is made to, or is listed."""
    m = (tl.full([], 0, tl.int32) + i).to(tl.int64)
    if c <= CAP:
        if none:
            tl.store(count + m, CAP + 1)
        elif not LISTS or c <= LONG:
            _weighted_row(
                m, c, d + tl.arange(0, WIDTH), ahead,
                index, value_a, table_a, value_b, table_b, onto, bias, out,
                D, stride_a, stride_b, stride_o,
                STEPS, TWO, HAS_BIAS, CAP, FLIGHT, EVEN, STAGES, PAIRS,
            )  # fmt: skip


@relaunched
@triton.jit(do_not_specialize=["listers"])
def _weighted_rows_kernel(
    count, index, value_a, table_a, value_b, table_b, onto, bias, out, state, pieces, ready,
    M, D, stride_a, stride_b, stride_o, listers,
    STEPS: tl.constexpr, TWO: tl.constexpr, ASK: tl.constexpr, HAS_BIAS: tl.constexpr, CAP: tl.constexpr,
    LONG: tl.constexpr, PIECES: tl.constexpr, LISTS: tl.constexpr,
    FLIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program writes out[m, d0:d0 + WIDTH] = bias + sum over the row's entries of value * table row.

    ASK: where the state says that all rows
    are dense, the row overflows. LISTS: a row of more than LONG entries is done where its first two pieces are
    listed, half of the columns each, and twice as many table rows in flight: else it would be waited for.
    ready: a row is waited for, not all of
    them, whose dot products the kernel in front of this one makes.
    """
    seen = tl.zeros([], tl.int32)
    if ready is None:
        wait_for_previous(PDL)
    else:
        let_next_start(PDL)
        seen = _wait_for_entries(ready, tl.maximum(tl.program_id(0) - listers, 0), 0, seen)
    HALF: tl.constexpr = WIDTH // 2
    first, end, step = own_pieces(state, listers, M, LISTS)
    d = tl.program_id(1) * WIDTH
    none = False
    if ASK:
        none = n_listed(state) == M
    if LISTS and tl.program_id(0) < listers:
        for i in range(first, tl.where(none, first, end), step):
            m, part = piece_at(pieces, i, listers, PIECES, LISTS)
            c, ahead = _row_head(m, count, index, CAP, 2 * FLIGHT)
            here = (c <= CAP) & (c > LONG) & (part < 2)
            if here:
                if ready is not None:
                    _wait_for_entries(ready, m, c, 0 * seen)
                _weighted_row(
                    m, c, d + part * HALF + tl.arange(0, HALF), ahead,
                    index, value_a, table_a, value_b, table_b, onto, bias, out,
                    D, stride_a, stride_b, stride_o,
                    STEPS, TWO, HAS_BIAS, CAP, 2 * FLIGHT, EVEN, STAGES, PAIRS,
                )  # fmt: skip
    else:
        m = (tl.full([], 0, tl.int32) + first).to(tl.int64)
        c, ahead = _row_head(m, count, index, CAP, FLIGHT)
        if ready is not None:  # noqa: SIM102
            if (c <= CAP) & ((not LISTS) | (c <= LONG)):
                # Where all rows are dense, none of their entries is ever done.
                _wait_for_entries(ready, first, tl.where(none, 0, c), seen)
        _one_row(
            first, c, ahead, none, d, count, index, value_a, table_a, value_b, table_b, onto, bias, out,
            D, stride_a, stride_b, stride_o,
            STEPS, TWO, HAS_BIAS, CAP, LONG, LISTS, FLIGHT, WIDTH, EVEN, STAGES, PAIRS,
        )  # fmt: skip
    if PDL and ready is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.extra.cuda.gdc_wait()  # what waits for this kernel waits for the one in front of it


def weighted_rows(
    count: torch.Tensor,
    index: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    *,
    steps: Program = (),
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    packing: tuple[torch.Tensor, torch.Tensor] | None = None,
    onto: torch.Tensor | None = None,
    ready: torch.Tensor | None = None,
) -> None:
    """out[m] = bias + sum_i steps(value[m, i]) * table[index[m, i]] (+ the same of a second value and table, and `onto`
    [M, D], fp32 and contiguous).

    Rows that overflow are left as they are, and do so where `packing`, of `pack`, says it of all. ready: of
    `dots`, which was launched just before.
    """
    M, D = out.shape
    value_b, table_b = second if second is not None else (value, table)
    tables = [table] if second is None else [table, table_b]
    wide, flight = columns_that_stay(D, not out.is_cuda, tables), FLIGHT
    many = triton.cdiv(D, wide) >= MANY_SLICES
    if many:
        wide = max(gather.NARROWEST, wide // 2)
        flight = 2 * FLIGHT if wide < SUM_COLUMNS else FLIGHT  # as many bytes a warp
    warps = max(1, wide // SUM_COLUMNS)
    piece, most = pieces_of(M, index.shape[1], not out.is_cuda)
    state, pieces = (None, None) if packing is None else packing
    listers = 0 if packing is None or many else listers_of(M, most)
    _weighted_rows_kernel[(listers + M, triton.cdiv(D, wide))](
        count, index, value, table, value_b, table_b, onto, bias, out, state, pieces, ready,
        M, D, table.stride(0), table_b.stride(0), out.stride(0), listers,
        STEPS=encode(steps), TWO=second is not None, ASK=packing is not None, HAS_BIAS=bias is not None,
        CAP=index.shape[1], LONG=max(piece, LONG if out.is_cuda else 16), PIECES=most,
        LISTS=listers > 0, FLIGHT=flight, WIDTH=wide, EVEN=D % wide == 0,
        STAGES=STAGES, PAIRS=in_pairs(table), **pdl_options(out), **limited(out), num_warps=warps,
    )  # fmt: skip
