"""Dot products of packed rows with the table rows of their active neurons. With the up projection they yield h; with
the down projection, in the backward pass, they yield the gradient of h. See `relu_ffn.gather`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from ..common.epilogue import dual, encode, evaluate
from ..common.launch import relaunched
from ..common.pdl import pdl_options, wait_for_previous
from . import gather
from .gather import FLIGHT, ROW_SEEN, STAGES, fp32, in_pairs, own_pieces, piece_at
from .packing import n_listed, pieces_of

# Columns of a row per warp.
DOT_COLUMNS = 1024
# Maximum bytes of the partial dot products of slices, before they are added.
SLICE_SUMS = 256 << 20
# Listed pieces per program if the table is cut into slices, for rows of maximum length. A slice then has many more
# programs than run at a time, so that few of them overlap with the next slice.
PIECES_SLICED = 8
# `gradients` distributes a row's entries over programs in stripes of STRIPE entries.
STRIPE = 32
PROGRAMS = 4
PROGRAMS_MANY = 2
# Columns of a row that are loaded at a time if a whole padded row would waste too many registers.
NARROW = 256


def _one_slice(table: torch.Tensor) -> tuple[int, int, int]:
    """As `_slices`, for one slice: a row's columns are held at once, as far as registers allow."""
    columns = gather.width(table.shape[1], 8192, not table.is_cuda)
    return 1, columns, max(1, columns // DOT_COLUMNS)


def _slices(table: torch.Tensor) -> tuple[int, int, int]:
    """Return (slices, columns held at once, warps) for a table: one slice if the table stays in L2."""
    if table.nbytes <= gather.RESIDENT:
        return _one_slice(table)
    columns = gather.columns_that_stay(table)
    return triton.cdiv(table.shape[1], columns), columns, max(1, columns // gather.SUM_COLUMNS)


def follows(x: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether `weighted_rows`, launched next, may process each row as soon as `dots` has computed it for tokens x and
    this table. This requires that all programs of `dots` start before the next kernel and compute whole dot
    products."""
    return pdl_options(x)["PDL"] and _slices(table)[0] == 1


@triton.jit
def _token(x, k, K, EVEN: tl.constexpr):
    v = tl.load(x + k) if EVEN else tl.load(x + k, mask=k < K, other=0.0)
    return v.to(tl.float32)


@triton.jit
def _dot_block(
    x, token, table, id, stride_t, K,
    WIDTH: tl.constexpr, EVEN: tl.constexpr, ONE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Return the [R] dot products of the token at `x` with table rows `id`, fp32.

    EVEN: K is a multiple of WIDTH. ONE: a row is one WIDTH, and `token` is all of the token.
    """
    k = tl.arange(0, WIDTH)
    rows = table + id[:, None] * stride_t
    if ONE:
        if EVEN:
            w = tl.load(rows + k[None, :])
        else:
            w = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)
        return tl.sum(fp32(w, PAIRS) * token[None, :], 1)
    total = tl.zeros([id.shape[0], WIDTH], tl.float32)
    for k0 in range(0, K, WIDTH):
        at = rows + (k0 + k)[None, :]
        w = tl.load(at) if EVEN else tl.load(at, mask=(k0 + k < K)[None, :], other=0.0)
        total += fp32(w, PAIRS) * _token(x, k0 + k, K, EVEN)[None, :]
    return tl.sum(total, 1)


@triton.jit
def _own_entries(c, p, programs, PIECE: tl.constexpr):
    """Return the number of the c entries in pieces p, p + programs, p + 2 * programs, ...; the last piece may be
    short."""
    pieces = tl.cdiv(c, PIECE)
    own = tl.cdiv(pieces - p, programs)
    last = (pieces - 1 - p) % programs == 0
    return own * PIECE - tl.where(last, pieces * PIECE - c, 0)


@triton.jit
def _hidden_of(
    g, u, valid, id, at, bias, ups,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Return h of the entries at `at`, of neurons `id`, from gates g and dot products u. KEEP: store u in `ups`."""
    if HAS_BIAS:
        u += tl.load(bias + id, mask=valid, other=0.0).to(tl.float32)
    if KEEP:
        tl.store(ups + at, u.to(ups.dtype.element_ty), mask=valid)
    return evaluate(g, F_STEPS) * evaluate(u, G_STEPS)


@relaunched
@triton.jit(do_not_specialize=["listers", "slice"])
def _dots_kernel(
    x, table, bias, count, index, gates, ups, out, state, pieces, ready,
    M, K, stride_x, stride_t, stride_g, listers, slice,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    KEEP: tl.constexpr, WHOLE: tl.constexpr, CAP: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    LISTS: tl.constexpr, SLICED: tl.constexpr, AGAIN: tl.constexpr,
    FLIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, ONE: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program computes h = f(gate) * g(x . up + bias) for pieces of PIECE active neurons of a row, reading K weights
    for each neuron.

    SLICED: compute x . up over one slice of WIDTH columns only (slice number `slice` + program_id(1)) and store it in
    `out` [slices, M, CAP]; AGAIN: add it to the values in `out`. WHOLE: `gates` is the projection [M, N] instead of the
    entries' gates. ready: a counter of the finished entries per row.
    """
    wait_for_previous(PDL)
    if SLICED:
        column = (slice + tl.program_id(1)) * WIDTH
        x += column
        table += column
        K -= column
        out += tl.program_id(1).to(tl.int64) * M * CAP
    some = n_listed(state) != M
    first, end, step = own_pieces(state, listers, M, LISTS)
    r = tl.arange(0, FLIGHT)
    for i in range(first, end, step):
        m, piece = piece_at(pieces, i, listers, PIECES, LISTS)
        start = piece * PIECE
        # All loads are issued together: positions past the row's end are loaded, but not used.
        c = tl.load(count + m)
        ahead = tl.load(index + m * CAP + start + r).to(tl.int32)
        mine = (c <= CAP) & some
        if LISTS:
            mine = mine & ((c > PIECE) == (tl.program_id(0) < listers))
        c = tl.where(mine, tl.minimum(c, start + PIECE), 0)
        if start < c:
            token = _token(x + m * stride_x, tl.arange(0, WIDTH), K, EVEN)
            last = c - 1
            # The next neurons are loaded before the current weights arrive. Past the end, a valid row is loaded again,
            # because masks cost more.
            after = tl.where(start + r < c, ahead, 0)
            for e in tl.range(start, c, FLIGHT, num_stages=STAGES):
                id = after.to(tl.int64)
                valid = e + r < c
                at = m * CAP + e + r
                after = tl.load(index + m * CAP + tl.minimum(e + FLIGHT + r, last)).to(tl.int32)
                u = _dot_block(
                    x + m * stride_x, token, table, id, stride_t, K, WIDTH, EVEN, ONE, PAIRS
                )
                if SLICED:
                    if AGAIN:
                        u += tl.load(out + at, mask=valid, other=0.0)
                    tl.store(out + at, u, mask=valid)
                else:
                    gates_at = m * stride_g + id if WHOLE else at
                    g = tl.load(gates + gates_at, mask=valid, other=0.0).to(tl.float32)
                    h = _hidden_of(g, u, valid, id, at, bias, ups, F_STEPS, G_STEPS, HAS_BIAS, KEEP)
                    h = tl.where(valid, h, 0.0)
                    tl.store(out + at, h.to(out.dtype.element_ty), mask=valid)
        if ready is not None:
            done = tl.maximum(c - start, 0)
            if tl.program_id(0) >= listers:
                done += ROW_SEEN
            tl.debug_barrier()
            tl.atomic_add(ready + m, done, sem="release")


@relaunched
@triton.jit
def _add_slices_kernel(
    parts, bias, count, index, gates, ups, out, state, M, stride_g,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    KEEP: tl.constexpr, WHOLE: tl.constexpr, CAP: tl.constexpr, SLICES: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program computes h of a packed row from the partial dot products `parts` [SLICES, M, CAP] of column slices."""
    wait_for_previous(PDL)
    m = tl.program_id(0).to(tl.int64)
    c = tl.load(count + m)
    if (c > CAP) | (n_listed(state) == M):
        return
    s = tl.arange(0, PADDED)[:, None]
    for e in range(0, c, BLOCK):
        at = m * CAP + e + tl.arange(0, BLOCK)
        valid = e + tl.arange(0, BLOCK) < c
        id = tl.load(index + at, mask=valid, other=0).to(tl.int64)
        g = tl.load(gates + (m * stride_g + id if WHOLE else at), mask=valid, other=0.0).to(
            tl.float32
        )
        some = (s < SLICES) & valid[None, :]
        u = tl.sum(tl.load(parts + s.to(tl.int64) * M * CAP + at[None, :], mask=some, other=0.0), 0)
        h = _hidden_of(g, u, valid, id, at, bias, ups, F_STEPS, G_STEPS, HAS_BIAS, KEEP)
        h = tl.where(valid, h, 0.0)
        tl.store(out + at, h.to(out.dtype.element_ty), mask=valid)


def dots(
    x: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor | None,
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ups: torch.Tensor | None,
    packing: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    f: Program,
    g: Program,
    whole: bool = False,
    ready: torch.Tensor | None = None,
) -> None:
    """Write h of the packed rows to `out` [M, CAP], and the up projection of the entries to `ups` unless that is None.

    packing: the result of `pack`. whole: `packed` has the projection [M, N] instead of the entries' gates. ready: [M]
    zeros for `weighted_rows`, which must be the next kernel (see `follows`).
    """
    count, index, gates = packed
    M, K = x.shape
    cap = index.shape[1]
    piece, most = pieces_of(M, cap, not x.is_cuda)
    listers = gather.listers_of(M, most)
    slices, wide, warps = _slices(table)
    sums, at_once = out, 1
    if slices > 1:
        listers = M * triton.cdiv(most, PIECES_SLICED) if most > 1 else 0
        at_once = max(1, min(slices, SLICE_SUMS // (4 * M * cap)))
        sums = x.new_empty(at_once, M, cap, dtype=torch.float32)
    block: dict[str, Any] = {
        "F_STEPS": encode(f), "G_STEPS": encode(g), "HAS_BIAS": bias is not None, "KEEP": ups is not None,
        "WHOLE": whole, "CAP": cap,
    }  # fmt: skip
    for first in range(0, slices, at_once):
        _dots_kernel[(listers + M, min(at_once, slices - first))](
            x, table, bias, count, index, gates, ups, sums, *packing, ready,
            M, K, x.stride(0), table.stride(0), gates.stride(0), listers, first,
            **block, PIECE=piece, PIECES=most, LISTS=listers > 0, SLICED=slices > 1, AGAIN=first > 0,
            FLIGHT=FLIGHT, WIDTH=wide, EVEN=K % wide == 0, ONE=wide * slices >= K,
            STAGES=STAGES, PAIRS=in_pairs(table), **pdl_options(x), **gather.limited(x), num_warps=warps,
        )  # fmt: skip
    if slices > 1:
        _add_slices_kernel[(M,)](
            sums, bias, count, index, gates, ups, out, packing[0], M, gates.stride(0),
            **block, SLICES=at_once, PADDED=triton.next_power_of_2(at_once), BLOCK=128 if x.is_cuda else 16,
            **pdl_options(x), num_warps=4,
        )  # fmt: skip


@triton.jit
def slopes(
    g, u, dh, da_extra, dh_extra, F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr
):
    """Return (d gate, d up, h) of active neurons from their projections and the gradient of h.

    da_extra, dh_extra: the gradients of |f(gate)| and |h| that statistics add.
    """
    a, a_slope = dual(g, F_STEPS)
    v, v_slope = dual(u, G_STEPS)
    h = a * v if GATED else a
    dh += dh_extra * ((h > 0.0).to(tl.float32) - (h < 0.0).to(tl.float32))
    da = dh * v if GATED else dh
    da += da_extra * ((a > 0.0).to(tl.float32) - (a < 0.0).to(tl.float32))
    d_gate = tl.where(a_slope == 0.0, 0.0, da * a_slope)
    d_up = tl.where(v_slope == 0.0, 0.0, dh * a * v_slope)
    return d_gate, d_up, h


@triton.jit
def _put_slopes(
    g, u, dh, da_extra, dh_extra, d_gate, d_up, hidden, at, valid,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Store `slopes` of the entries at `at` in d_gate, d_up and hidden."""
    dg, du, h = slopes(g, u, dh, da_extra, dh_extra, F_STEPS, G_STEPS, GATED)
    tl.store(d_gate + at, dg.to(d_gate.dtype.element_ty), mask=valid)
    if GATED:
        tl.store(d_up + at, du.to(d_up.dtype.element_ty), mask=valid)
    tl.store(hidden + at, h.to(hidden.dtype.element_ty), mask=valid)


@relaunched
@triton.jit
def _gradients_kernel(
    dy, table, count, index, gates, ups, d_gate, d_up, hidden, d_stats, weight,
    M, D, stride_y, stride_t, stride_s,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, STATS: tl.constexpr,
    CAP: tl.constexpr, PIECE: tl.constexpr, FLIGHT: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, ONE: tl.constexpr, STAGES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A program computes h and the gradients of both projections for some pieces of a row."""
    p = tl.num_programs(1) - 1 - tl.program_id(1)  # pieces that exist only in long rows start first
    start = p * PIECE
    r = tl.arange(0, FLIGHT)
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        m = (tl.full([], 0, tl.int32) + i).to(tl.int64)
        c = tl.load(count + m)
        if (c <= CAP) & (start < c):
            token = _token(dy + m * stride_y, tl.arange(0, WIDTH), D, EVEN)
            da_extra = tl.full([], 0.0, tl.float32)
            dh_extra = tl.full([], 0.0, tl.float32)
            if STATS:
                da_extra = tl.load(d_stats + m)
                dh_extra = tl.load(d_stats + 2 * stride_s + m)
            d_weighted = tl.full([], 0.0, tl.float32)
            if weight is not None:
                d_weighted = tl.load(d_stats + 4 * stride_s + m)
            after = tl.load(index + m * CAP + tl.minimum(start + r, c - 1)).to(tl.int32)
            own = _own_entries(c, p, tl.num_programs(1), PIECE)
            stripe = tl.num_programs(1) * PIECE
            for o in tl.range(0, own, FLIGHT, num_stages=STAGES):
                id = after.to(tl.int64)
                e = start + o // PIECE * stripe + o % PIECE
                valid = e + r < c
                at = m * CAP + e + r
                then = start + (o + FLIGHT) // PIECE * stripe + (o + FLIGHT) % PIECE
                after = tl.load(index + m * CAP + tl.minimum(then + r, c - 1)).to(tl.int32)
                g = tl.load(gates + at, mask=valid, other=0.0).to(tl.float32)
                u = tl.load(ups + at, mask=valid, other=0.0).to(tl.float32) if GATED else g
                dh = _dot_block(
                    dy + m * stride_y, token, table, id, stride_t, D, WIDTH, EVEN, ONE, PAIRS
                )
                if weight is not None:
                    dh += d_weighted * tl.load(weight + id).to(tl.float32)
                _put_slopes(
                    g, u, dh, da_extra, dh_extra, d_gate, d_up, hidden, at, valid, F_STEPS, G_STEPS, GATED
                )  # fmt: skip


def gradients(
    dy: torch.Tensor,
    table: torch.Tensor,
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ups: torch.Tensor | None,
    d_stats: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    f: Program,
    g: Program,
) -> None:
    """Write (d gate, d up, h) of the packed rows to `out`, each [M, CAP]. table: the down projection as [N, D].
    d_stats: the gradient of the statistics [4 or 5, M], fp32. weight: [N], of the fifth statistic."""
    count, index, gates = packed
    M, D = dy.shape
    cap = index.shape[1]
    _, wide, warps = _one_slice(table)
    piece, flight = 8 if not dy.is_cuda else STRIPE, FLIGHT
    programs, options = PROGRAMS if M <= 16384 else PROGRAMS_MANY, gather.limited(dy)
    if wide * 3 > D * 4:
        # More than a quarter of a row in registers would be padding, so columns are loaded in narrow steps: 145 us
        # instead of 186 at D = 2 304.
        wide, warps, piece, flight, programs, options = min(wide, NARROW), 1, 8, 8, 8, {}
    programs = min(triton.cdiv(cap, piece), programs)
    _gradients_kernel[(M, programs)](
        dy, table, count, index, gates, ups, *out, d_stats, weight,
        M, D, dy.stride(0), table.stride(0), 0 if d_stats is None else d_stats.stride(0),
        F_STEPS=encode(f), G_STEPS=encode(g), GATED=ups is not None, STATS=d_stats is not None,
        CAP=cap, PIECE=piece, FLIGHT=flight, WIDTH=wide, EVEN=D % wide == 0,
        ONE=wide >= D, STAGES=STAGES, PAIRS=in_pairs(table), **options, num_warps=warps,
    )  # fmt: skip
