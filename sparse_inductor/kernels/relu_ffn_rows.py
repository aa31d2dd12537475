"""Kernels of the ReLU feed-forward block that work a row at a time, on its active neurons only, packed as
`relu_ffn_packing` says.

Every weight table read here is [N, *] with unit stride along a row: a neuron's weights are one run of memory. A table
that stays in L2 is read from there, which is why up and down are kernels of their own: each reads one table. A larger
one is taken by slices of its columns, each of which all rows pass over before the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from . import relu_ffn_ptx as ptx
from .early import EARLY_STARTS, early, let_next_start, wait_for_previous
from .epilogue import dual, encode, evaluate
from .launch import relaunched
from .relu_ffn_packing import LISTED, n_listed, pieces_of

__all__ = [
    "FLIGHT",
    "by_neuron",
    "dots",
    "follows",
    "gradients",
    "hidden_stats",
    "limited",
    "slopes",
    "weighted_rows",
    "width",
]

# Table rows in flight a program, and registers of a thread where weights have 16 bits: what the compiler takes unasked
# leaves room for too few programs (162 us of dot products for 123, at 8 192 tokens of 30 entries, K = 2 048).
FLIGHT = 4
REGISTERS = 96
# Columns of a sum that a program holds, and of them a warp; columns of a dot product that a warp holds.
WIDTH = 2048
SUM_COLUMNS = 512
DOT_COLUMNS = 1024
# Bytes of a table, or of a slice of its columns, that stay in L2 (50 MB on an H200) beside what passes through it.
RESIDENT = 36 << 20
# Columns of a slice at least: a warp's loads of 16 bytes.
NARROWEST = 256
# Slices from which on rows are summed by halves of them, and no row by pieces: a long row's program meets those of the
# next slices (782 us for 1 080 of sums, at 2 049 tokens of K = 8 192, N = 28 672).
MANY_SLICES = 4
# Bytes at most of the dot products of slices that wait to be added.
SLICE_SUMS = 256 << 20
# A kernel of these loops gains nothing from software pipelining: the loads of a block are all in flight already.
STAGES = 1


def width(n: int, most: int, interpreted: bool) -> int:
    """Columns, `most` at most, that a program holds of rows of n; 32 at least, so that there is a half of them."""
    return 32 if interpreted else min(most, max(32, triton.next_power_of_2(n)))


def _resident(D: int, interpreted: bool, tables: Sequence[torch.Tensor]) -> int:
    """Columns of rows of D, so many of which stay in L2 of all rows of the tables."""
    columns = width(D, WIDTH, interpreted)
    column = sum(len(t) * t.element_size() for t in tables)
    while columns > NARROWEST and columns * column > RESIDENT:
        columns //= 2
    return columns


def limited(t: torch.Tensor) -> dict[str, int]:
    """Options of a kernel that holds FLIGHT rows of such elements."""
    return {"maxnreg": REGISTERS} if t.is_cuda and t.element_size() == 2 else {}


def _pairs(table: torch.Tensor) -> bool:
    """Whether weights are made fp32 two at a time (`_fp32`)."""
    return table.is_cuda and table.dtype == torch.bfloat16 and torch.version.hip is None


def _whole(n: int, interpreted: bool) -> tuple[int, int]:
    """(columns, warps) for a dot product over rows of n: all of a row at once, as long as registers last."""
    columns = width(n, 8192, interpreted)
    return columns, max(1, columns // DOT_COLUMNS)


def _slices(table: torch.Tensor) -> tuple[int, int, int]:
    """(slices, columns of one, warps) of a table that is multiplied by: all columns at once where they stay in L2."""
    K, interpreted = table.shape[1], not table.is_cuda
    if table.nbytes <= RESIDENT:
        return 1, *_whole(K, interpreted)
    columns = _resident(K, interpreted, [table])
    return triton.cdiv(K, columns), columns, max(1, columns // SUM_COLUMNS)


def follows(x: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether `weighted_rows` may take rows as `dots` of tokens x and this table has done them, as its next kernel: all
    of that one's programs run when the first of this begins, and have all of a row's entries."""
    return early(x)["EARLY"] and _slices(table)[0] == 1


@relaunched
@triton.jit
def _transpose_kernel(
    weight, out, D, N, stride_d, stride_n, stride_o,
    BD: tl.constexpr, BN: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """A program copies a tile of weight [D, N] to out [N, D].

    BESIDE: while the kernel in front of it ends, which does not write the weight and which one program waits for in
    the end: what waits for this one waits for both.
    """
    if BESIDE:
        tl.extra.cuda.gdc_launch_dependents()
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (d < D)[:, None] & (n < N)[None, :]
    t = tl.load(
        weight + d[:, None].to(tl.int64) * stride_d + n[None, :].to(tl.int64) * stride_n,
        mask=mask,
        other=0.0,
    )
    tl.store(
        out + n[:, None].to(tl.int64) * stride_o + d[None, :], tl.trans(t), mask=tl.trans(mask)
    )
    if BESIDE and tl.program_id(0) + tl.program_id(1) == 0:
        tl.extra.cuda.gdc_wait()


def by_neuron(weight: torch.Tensor, beside: bool = False) -> torch.Tensor:
    """A weight [D, N] as [N, D] with unit stride along a neuron's row: a view of it, or a copy (one pass over it).

    beside: while the kernel in front of it ends, which lets the next one start and does not write the weight.
    """
    if weight.stride(0) == 1:
        return weight.t()
    D, N = weight.shape
    out = weight.new_empty(N, D)
    # 64 x 64 at 16 bits: 128-byte runs on both sides.
    tile = 64 if weight.is_cuda else 32
    beside = beside and EARLY_STARTS
    options = {"launch_pdl": True} if beside else {}
    _transpose_kernel[(triton.cdiv(D, tile), triton.cdiv(N, tile))](
        weight, out, D, N, *weight.stride(), out.stride(0),
        BD=tile, BN=tile, BESIDE=beside, num_warps=4, **options,
    )  # fmt: skip
    return out


@triton.jit
def _fp32(w, PAIRS: tl.constexpr):
    """Weights as fp32. PAIRS: of bf16, one instruction each; the compiler takes two for each second one."""
    if PAIRS:
        both: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(
            both, "=r,=r,r", [w], dtype=tl.float32, is_pure=True, pack=2
        )
    return w.to(tl.float32)


@triton.jit
def _token(x, k, K, EVEN: tl.constexpr):
    v = tl.load(x + k) if EVEN else tl.load(x + k, mask=k < K, other=0.0)
    return v.to(tl.float32)


@triton.jit
def _dot_block(
    x, token, table, id, stride_t, K,
    WIDTH: tl.constexpr, EVEN: tl.constexpr, ONE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """[R] dot products of the token at `x` with table rows `id`, fp32.

    EVEN: K is a multiple of WIDTH. ONE: a row is one WIDTH, and `token` is all of the token.
    """
    k = tl.arange(0, WIDTH)
    rows = table + id[:, None] * stride_t
    if ONE:
        if EVEN:
            w = tl.load(rows + k[None, :])
        else:
            w = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)
        return tl.sum(_fp32(w, PAIRS) * token[None, :], 1)
    total = tl.zeros([id.shape[0]], tl.float32)
    for k0 in range(0, K, WIDTH):
        at = rows + (k0 + k)[None, :]
        w = tl.load(at) if EVEN else tl.load(at, mask=(k0 + k < K)[None, :], other=0.0)
        total += tl.sum(_fp32(w, PAIRS) * _token(x, k0 + k, K, EVEN)[None, :], 1)
    return total


@triton.jit
def _own_entries(c, p, programs, PIECE: tl.constexpr):
    """How many of c entries are in pieces p, p + programs, p + 2 programs and so on; the last piece may be short."""
    pieces = tl.cdiv(c, PIECE)
    own = tl.cdiv(pieces - p, programs)
    last = (pieces - 1 - p) % programs == 0
    return own * PIECE - tl.where(last, pieces * PIECE - c, 0)


@triton.jit
def _own_pieces(state, listers, M, LISTS: tl.constexpr):
    """(first, end, step): what is this program's. The first `listers` programs share the pieces that are listed, the
    others the rows of one piece. So the longest rows begin first: one that began last would be waited for.
    """
    p = tl.program_id(0)
    first, end, step = p - listers, tl.full([], 0, tl.int32) + M, tl.num_programs(0) - listers
    if LISTS and p < listers:
        first, end, step = p, tl.load(state + LISTED).to(tl.int32), listers
    return first, end, step


@triton.jit
def _piece(pieces, i, listers, PIECES: tl.constexpr, LISTS: tl.constexpr):
    """(row, piece of it)."""
    m = tl.full([], 0, tl.int32) + i
    piece = m * 0
    if LISTS and tl.program_id(0) < listers:
        item = tl.load(pieces + i)
        m, piece = item // PIECES, item % PIECES
    return m.to(tl.int64), piece


@triton.jit
def _row_of_rest(alone, i, M):
    """Row i of those in groups left alone; in the last group, the last of M rows again."""
    m = tl.load(alone + i // GROUP) * GROUP + i % GROUP
    return tl.minimum(m, M - 1).to(tl.int64)


# A row's word of `ready`: how many of its entries are done, and this once the program that has the row has seen it.
ROW_SEEN = tl.constexpr(1 << 20)


@triton.jit
def _wait_for_entries(ready, m, n, seen):
    """Wait until n entries of row m are done, of which `seen` says what is known; what is then.

    Nobody waits for ever: all programs that have entries to do were running when the first that waits began.
    """
    while seen < ROW_SEEN + n:
        seen = tl.atomic_add(ready + m, 0, sem="acquire")
    return seen


@triton.jit
def _hidden(
    g, u, valid, id, at, bias, ups,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """h of active neurons `id` from their gates and dot products; KEEP: u is stored at `ups`."""
    if HAS_BIAS:
        u += tl.load(bias + id, mask=valid, other=0.0).to(tl.float32)
    if KEEP:
        tl.store(ups + at, u.to(ups.dtype.element_ty), mask=valid)
    return tl.where(valid, evaluate(g, F_STEPS) * evaluate(u, G_STEPS), 0.0)


@relaunched
@triton.jit(do_not_specialize=["listers", "slice"])
def _dots_kernel(
    x, table, bias, count, index, gates, ups, out, state, pieces, octets, alone, ready,
    M, K, stride_x, stride_t, stride_g, listers, slice,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    KEEP: tl.constexpr, WHOLE: tl.constexpr, CAP: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    LISTS: tl.constexpr, SLICED: tl.constexpr, AGAIN: tl.constexpr, REST: tl.constexpr,
    FLIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, ONE: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program computes h = f(gate) * g(x . up + bias) of pieces of PIECE active neurons of a row: reads K numbers
    for each.

    SLICED: it makes x . up of a slice of WIDTH columns alone, `slice` or one after it, into `out` [slices, M, CAP];
    AGAIN: adds them to what is there.
    WHOLE: `gates` is the projection [M, N], not the entries'. ready: where a row's entries are told to be done.
    REST: the rows of the groups that `relu_ffn_resident` has left alone, each in one piece.
    """
    wait_for_previous(EARLY)
    if SLICED:
        column = (slice + tl.program_id(1)) * WIDTH
        x += column
        table += column
        K -= column
        out += tl.program_id(1).to(tl.int64) * M * CAP
    some = n_listed(state) != M
    first, end, step = _own_pieces(state, listers, M, LISTS)
    if REST:
        end = tl.load(octets + 1) * GROUP
    r = tl.arange(0, FLIGHT)
    for i in range(first, end, step):
        m, piece = _piece(pieces, i, listers, PIECES, LISTS)
        if REST:
            m = _row_of_rest(alone, i, M)
        start = piece * PIECE
        # What is asked of L2 is asked at once: neurons that are not there are looked at, not used.
        c = tl.load(count + m)
        ahead = tl.load(index + m * CAP + start + r).to(tl.int32)
        mine = (c <= CAP) & some
        if LISTS:
            mine = mine & ((c > PIECE) == (tl.program_id(0) < listers))
        c = tl.where(mine, tl.minimum(c, start + PIECE), 0)
        if start < c:
            token = _token(x + m * stride_x, tl.arange(0, WIDTH), K, EVEN)
            last = c - 1
            # The next neurons are known before the weights of these arrive. Past the end, some row again: masks cost
            # more.
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
                    h = _hidden(g, u, valid, id, at, bias, ups, F_STEPS, G_STEPS, HAS_BIAS, KEEP)
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
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program computes h of a packed row from the dot products `parts` [SLICES, M, CAP] of slices of columns."""
    wait_for_previous(EARLY)
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
        h = _hidden(g, u, valid, id, at, bias, ups, F_STEPS, G_STEPS, HAS_BIAS, KEEP)
        tl.store(out + at, h.to(out.dtype.element_ty), mask=valid)


@relaunched
@triton.jit
def _sum_stats_kernel(count, hidden, stats, stride_s, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of |h| and the number of non-zeros of one packed row."""
    m = tl.program_id(0).to(tl.int64)
    c = tl.load(count + m)
    if c > CAP:
        return
    i = tl.arange(0, BLOCK)
    h = tl.load(hidden + m * CAP + i, mask=i < c, other=0.0).to(tl.float32)
    tl.store(stats + 2 * stride_s + m, tl.sum(tl.abs(h), 0))
    tl.store(stats + 3 * stride_s + m, tl.sum((h != 0.0).to(tl.float32), 0))


# A weighted sum of more entries is made in halves.
LONG = 48
# Rows to a program that takes listed pieces, where many run; and such programs, one a row at most, where few do.
SHARE = 8
LISTERS = 2048
# Pieces of the longest row to a program that takes listed pieces of slices: those of one slice are many more than run
# at once, so that few run with the next one's.
PIECES_SLICED = 8
# Programs of a kernel that may have nothing to do: 10 us where it has not, and enough to share the rows out evenly.
IDLE = 8192
# The same of one that runs on the few multiprocessors that another kernel leaves; and rows a program.
IDLE_SUMS = 4096
ROWS_IDLE = 8
GROUP = tl.constexpr(ptx.GROUP)
# `gradients` stripes a row's entries over programs, so many at a time.
STRIPE = 32
PROGRAMS = 4
PROGRAMS_MANY = 2


def _listers(M: int, most: int) -> int:
    """Programs for the pieces that are listed, of rows of `most` at most."""
    return max(triton.cdiv(M, SHARE), min(M, LISTERS)) if most > 1 else 0


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
    rest: tuple[torch.Tensor, torch.Tensor] | None = None,
    whole: bool = False,
    ready: torch.Tensor | None = None,
) -> None:
    """h of the packed rows into `out` [M, CAP]; fills `ups`, the up projection itself, where given. packing: of `pack`.

    rest: of `relu_ffn_resident.Lists`, where it has done the others. whole: `packed` has the projection [M, N] in place
    of the entries' gates. ready: [M] zeros, for `weighted_rows`, which is to be the next kernel (`follows`).
    """
    count, index, gates = packed
    M, K = x.shape
    cap = index.shape[1]
    piece, most = pieces_of(M, cap, not x.is_cuda)
    listers, programs = _listers(M, most), M
    octets, alone = (None, None) if rest is None else rest
    slices, wide, warps = _slices(table)
    sums, at_once = out, 1
    if rest is not None:
        piece, most, listers, programs = triton.next_power_of_2(cap), 1, 0, min(M, IDLE)
        slices, (wide, warps) = 1, _whole(K, not x.is_cuda)
    elif slices > 1:
        listers = M * triton.cdiv(most, PIECES_SLICED) if most > 1 else 0
        at_once = max(1, min(slices, SLICE_SUMS // (4 * M * cap)))
        sums = x.new_empty(at_once, M, cap, dtype=torch.float32)
    block: dict[str, Any] = {
        "F_STEPS": encode(f), "G_STEPS": encode(g), "HAS_BIAS": bias is not None, "KEEP": ups is not None,
        "WHOLE": whole, "CAP": cap,
    }  # fmt: skip
    for first in range(0, slices, at_once):
        _dots_kernel[(listers + programs, min(at_once, slices - first))](
            x, table, bias, count, index, gates, ups, sums, *packing, octets, alone, ready,
            M, K, x.stride(0), table.stride(0), gates.stride(0), listers, first,
            **block, PIECE=piece, PIECES=most, LISTS=listers > 0, SLICED=slices > 1, AGAIN=first > 0,
            REST=rest is not None, FLIGHT=FLIGHT, WIDTH=wide, EVEN=K % wide == 0, ONE=wide * slices >= K,
            STAGES=STAGES, PAIRS=_pairs(table), **early(x), **limited(x), num_warps=warps,
        )  # fmt: skip
    if slices > 1:
        _add_slices_kernel[(M,)](
            sums, bias, count, index, gates, ups, out, packing[0], M, gates.stride(0),
            **block, SLICES=at_once, PADDED=triton.next_power_of_2(at_once), BLOCK=128 if x.is_cuda else 16,
            **early(x), num_warps=4,
        )  # fmt: skip


def hidden_stats(count: torch.Tensor, hidden: torch.Tensor, stats: torch.Tensor) -> None:
    """Fill the last two of stats [4, M] for the packed rows of h [M, CAP]."""
    M, cap = hidden.shape
    block = triton.next_power_of_2(cap)
    _sum_stats_kernel[(M,)](
        count, hidden, stats, stats.stride(0), CAP=cap, BLOCK=block, num_warps=1
    )


@triton.jit
def _row_head(
    m, count, index, pool_size, CAP: tl.constexpr, POOL_ROWS: tl.constexpr, FLIGHT: tl.constexpr
):
    """(count, first places of the index, neurons of the block's pool) of row m: what is asked of L2 is asked at once,
    places that the row does not have, too."""
    c = tl.load(count + m)
    ahead = tl.load(index + m * CAP + tl.arange(0, FLIGHT))
    n_pool = c * 0
    if POOL_ROWS > 0:
        n_pool = tl.load(pool_size + m // POOL_ROWS)
    return c, ahead, n_pool


@triton.jit
def _sum_block(table, id, stride, d, in_d, v, EVEN: tl.constexpr, PAIRS: tl.constexpr):
    """v times rows `id` of the table, summed over them."""
    at = table + id[:, None] * stride + d[None, :]
    w = tl.load(at) if EVEN else tl.load(at, mask=in_d[None, :], other=0.0)
    return tl.sum(_fp32(w, PAIRS) * v[:, None], 0)


@triton.jit
def _weighted_row(
    m, c, d, ahead, n_pool, index, value_a, table_a, value_b, table_b, bias, out,
    D, stride_a, stride_b, stride_o,
    STEPS: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr, CAP: tl.constexpr,
    POOL_ROWS: tl.constexpr, FLIGHT: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Columns d of row m, which has c entries; ahead: what the first FLIGHT places of its index hold."""
    in_d = d < D
    r = tl.arange(0, FLIGHT)
    total = tl.zeros([d.shape[0]], tl.float32)
    if POOL_ROWS > 0:
        pooled = tl.where(n_pool > 0, in_d, False)
        total += tl.load(out + m * stride_o + d, mask=pooled, other=0.0).to(tl.float32)
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
    i, c, ahead, n_pool, none, d, count, index, value_a, table_a, value_b, table_b, bias, out,
    D, stride_a, stride_b, stride_o,
    STEPS: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr, CAP: tl.constexpr, LONG: tl.constexpr,
    LISTS: tl.constexpr, POOL_ROWS: tl.constexpr, FLIGHT: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Columns d to d + WIDTH of row i with this head, unless it is heavy, or becomes so, or is listed."""
    m = (tl.full([], 0, tl.int32) + i).to(tl.int64)
    if c <= CAP:
        if none:
            tl.store(count + m, CAP + 1)
        elif not LISTS or c <= LONG:
            _weighted_row(
                m, c, d + tl.arange(0, WIDTH), ahead, n_pool,
                index, value_a, table_a, value_b, table_b, bias, out,
                D, stride_a, stride_b, stride_o,
                STEPS, TWO, HAS_BIAS, CAP, POOL_ROWS, FLIGHT, EVEN, STAGES, PAIRS,
            )  # fmt: skip


@triton.jit
def _unsummed(
    i, end, count, index, pool_size, summed,
    CAP: tl.constexpr, SUMMED: tl.constexpr, POOL_ROWS: tl.constexpr, FLIGHT: tl.constexpr,
):  # fmt: skip
    """The head of row i, or of the last where there is none; a row that is summed already has too many entries."""
    m = tl.minimum(tl.full([], 0, tl.int32) + i, end - 1).to(tl.int64)
    c, ahead, n_pool = _row_head(m, count, index, pool_size, CAP, POOL_ROWS, FLIGHT)
    if SUMMED > 0:
        c = tl.where(tl.load(summed + m // SUMMED) == 0, c, CAP + 1)
    return c, ahead, n_pool


@relaunched
@triton.jit(do_not_specialize=["listers", "programs"])
def _weighted_rows_kernel(
    count, index, value_a, table_a, value_b, table_b, bias, out, pool_size, state, pieces, summed, all_summed, ready,
    M, D, stride_a, stride_b, stride_o, listers, programs,
    STEPS: tl.constexpr, TWO: tl.constexpr, ASK: tl.constexpr, HAS_BIAS: tl.constexpr, CAP: tl.constexpr,
    SUMMED: tl.constexpr, LONG: tl.constexpr, PIECES: tl.constexpr, LISTS: tl.constexpr,
    POOL_ROWS: tl.constexpr, FLIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program writes out[m, d0:d0 + WIDTH] = bias + sum over the row's entries of value * table row.

    POOL_ROWS: where the row's block has a pool, its part is in `out` already. ASK: where the state says that all rows
    are dense, the row becomes heavy. LISTS: a row of more than LONG entries is done where its first two pieces are
    listed, half of the columns each, and twice as many table rows in flight: else it would be waited for.
    summed: of each SUMMED rows, unless that is 0, whether it is done already. ready: a row is waited for, not all of
    them, whose dot products the kernel in front of this one makes.
    """
    seen = tl.zeros([], tl.int32)
    if ready is None:
        wait_for_previous(EARLY)
    else:
        let_next_start(EARLY)
        seen = _wait_for_entries(ready, tl.maximum(tl.program_id(0) - listers, 0), 0, seen)
    HALF: tl.constexpr = WIDTH // 2
    first, end, step = _own_pieces(state, listers, M, LISTS)
    d = tl.program_id(1) * WIDTH
    none = False
    if ASK:
        none = n_listed(state) == M
    nothing = False
    if SUMMED > 0:
        nothing = tl.load(all_summed) == tl.cdiv(M, SUMMED)
    if LISTS and tl.program_id(0) < listers:
        for i in range(first, tl.where(none or nothing, first, end), step):
            m, part = _piece(pieces, i, listers, PIECES, LISTS)
            c, ahead, n_pool = _row_head(m, count, index, pool_size, CAP, POOL_ROWS, 2 * FLIGHT)
            here = (c <= CAP) & (c > LONG) & (part < 2)
            if SUMMED > 0:
                here &= tl.load(summed + m // SUMMED) == 0
            if here:
                if ready is not None:
                    _wait_for_entries(ready, m, c, 0 * seen)
                _weighted_row(
                    m, c, d + part * HALF + tl.arange(0, HALF), ahead, n_pool,
                    index, value_a, table_a, value_b, table_b, bias, out,
                    D, stride_a, stride_b, stride_o,
                    STEPS, TWO, HAS_BIAS, CAP, POOL_ROWS, 2 * FLIGHT, EVEN, STAGES, PAIRS,
                )  # fmt: skip
    else:
        c, ahead, n_pool = _unsummed(
            first, end, count, index, pool_size, summed, CAP, SUMMED, POOL_ROWS, FLIGHT
        )
        if ready is not None:  # noqa: SIM102
            if (c <= CAP) & ((not LISTS) | (c <= LONG)):
                # Where all rows are dense, none of their entries is ever done.
                _wait_for_entries(ready, first, tl.where(none, 0, c), seen)
        if nothing:
            return
        if SUMMED > 0:
            # Few programs, as there may be nothing to do. The next head is here before the weights of a row are.
            for i in range(first, end, programs):
                c_next, ahead_next, n_next = _unsummed(
                    i + programs,
                    end,
                    count,
                    index,
                    pool_size,
                    summed,
                    CAP,
                    SUMMED,
                    POOL_ROWS,
                    FLIGHT,
                )
                _one_row(
                    i, c, ahead, n_pool, none, d, count, index, value_a, table_a, value_b, table_b, bias, out,
                    D, stride_a, stride_b, stride_o,
                    STEPS, TWO, HAS_BIAS, CAP, LONG, LISTS, POOL_ROWS, FLIGHT, WIDTH, EVEN, STAGES, PAIRS,
                )  # fmt: skip
                c, ahead, n_pool = c_next, ahead_next, n_next
        else:
            _one_row(
                first, c, ahead, n_pool, none, d, count, index, value_a, table_a, value_b, table_b, bias, out,
                D, stride_a, stride_b, stride_o,
                STEPS, TWO, HAS_BIAS, CAP, LONG, LISTS, POOL_ROWS, FLIGHT, WIDTH, EVEN, STAGES, PAIRS,
            )  # fmt: skip
    if EARLY and ready is not None:  # noqa: SIM102
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
    pool_size: torch.Tensor | None = None,
    pool_rows: int = 0,
    packing: tuple[torch.Tensor, torch.Tensor] | None = None,
    summed: tuple[torch.Tensor, torch.Tensor] | None = None,
    summed_rows: int = 0,
    ready: torch.Tensor | None = None,
) -> None:
    """out[m] = bias + sum_i steps(value[m, i]) * table[index[m, i]] (+ the same of a second value and table).

    Rows that are heavy are left as they are, and become so where `packing`, of `pack`, says it of all. pool_size: of
    each block of `pool_rows` rows; where it is not 0, `out` is added to. summed: of each `summed_rows` rows; where it
    is not 0, there is nothing to do; and how many are not. ready: of `dots`, which was launched just before.
    """
    M, D = out.shape
    value_b, table_b = second if second is not None else (value, table)
    tables = [table] if second is None else [table, table_b]
    wide, flight = _resident(D, not out.is_cuda, tables), FLIGHT
    many = triton.cdiv(D, wide) >= MANY_SLICES
    if many:
        wide = max(NARROWEST, wide // 2)
        flight = 2 * FLIGHT if wide < SUM_COLUMNS else FLIGHT  # as many bytes a warp
    warps = max(1, wide // SUM_COLUMNS)
    piece, most = pieces_of(M, index.shape[1], not out.is_cuda)
    state, pieces = (None, None) if packing is None else packing
    listers = 0 if packing is None or many else _listers(M, most)
    flags, all_flags = (None, None) if summed is None else summed
    programs = M
    if summed is not None:
        programs = min(M, max(IDLE_SUMS, M // ROWS_IDLE))
        listers = min(listers, programs // 2)
    _weighted_rows_kernel[(listers + programs, triton.cdiv(D, wide))](
        count, index, value, table, value_b, table_b, bias, out, pool_size, state, pieces, flags, all_flags, ready,
        M, D, table.stride(0), table_b.stride(0), out.stride(0), listers, programs,
        STEPS=encode(steps), TWO=second is not None, ASK=packing is not None, HAS_BIAS=bias is not None,
        CAP=index.shape[1], SUMMED=summed_rows, LONG=max(piece, LONG if out.is_cuda else 16), PIECES=most,
        LISTS=listers > 0, POOL_ROWS=pool_rows, FLIGHT=flight, WIDTH=wide, EVEN=D % wide == 0,
        STAGES=STAGES, PAIRS=_pairs(table), **early(out), **limited(out), num_warps=warps,
    )  # fmt: skip


@triton.jit
def slopes(
    g, u, dh, da_extra, dh_extra, F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr
):
    """(d gate, d up, h) of active neurons from their projections and the gradient of h.

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


@relaunched
@triton.jit
def _gradients_kernel(
    dy, table, count, index, gates, ups, d_gate, d_up, hidden, d_stats, octets, alone,
    M, D, stride_y, stride_t, stride_s,
    F_STEPS: tl.constexpr, G_STEPS: tl.constexpr, GATED: tl.constexpr, STATS: tl.constexpr,
    REST: tl.constexpr, CAP: tl.constexpr, PIECE: tl.constexpr, FLIGHT: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, ONE: tl.constexpr, STAGES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A program computes the gradients of both projections, and h, of some pieces of its rows.

    REST: as in `_dots_kernel`.
    """
    rows = M
    if REST:
        rows = tl.load(octets + 1) * GROUP
    p = tl.num_programs(1) - 1 - tl.program_id(1)  # what only long rows have begins first
    start = p * PIECE
    r = tl.arange(0, FLIGHT)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        m = (tl.full([], 0, tl.int32) + i).to(tl.int64)
        if REST:
            m = _row_of_rest(alone, i, M)
        c = tl.load(count + m)
        if (c <= CAP) & (start < c):
            token = _token(dy + m * stride_y, tl.arange(0, WIDTH), D, EVEN)
            da_extra = tl.full([], 0.0, tl.float32)
            dh_extra = tl.full([], 0.0, tl.float32)
            if STATS:
                da_extra = tl.load(d_stats + m)
                dh_extra = tl.load(d_stats + 2 * stride_s + m)
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
                dg, du, h = slopes(g, u, dh, da_extra, dh_extra, F_STEPS, G_STEPS, GATED)
                tl.store(d_gate + at, dg.to(d_gate.dtype.element_ty), mask=valid)
                if GATED:
                    tl.store(d_up + at, du.to(d_up.dtype.element_ty), mask=valid)
                tl.store(hidden + at, h.to(hidden.dtype.element_ty), mask=valid)


def gradients(
    dy: torch.Tensor,
    table: torch.Tensor,
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ups: torch.Tensor | None,
    d_stats: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    f: Program,
    g: Program,
    rest: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """(d gate, d up, h) of the packed rows into `out`, each [M, CAP]; `table` is the down projection as [N, D].

    rest: as in `dots`.
    """
    count, index, gates = packed
    M, D = dy.shape
    cap = index.shape[1]
    wide, warps = _whole(D, not dy.is_cuda)
    piece = 8 if not dy.is_cuda else STRIPE
    programs = min(triton.cdiv(cap, piece), PROGRAMS if M <= 16384 else PROGRAMS_MANY)
    octets, alone = (None, None) if rest is None else rest
    row_programs = M
    if rest is not None:
        row_programs = min(M, IDLE // programs)
    _gradients_kernel[(row_programs, programs)](
        dy, table, count, index, gates, ups, *out, d_stats, octets, alone,
        M, D, dy.stride(0), table.stride(0), 0 if d_stats is None else d_stats.stride(0),
        F_STEPS=encode(f), G_STEPS=encode(g), GATED=ups is not None, STATS=d_stats is not None,
        REST=rest is not None, CAP=cap, PIECE=piece, FLIGHT=FLIGHT, WIDTH=wide, EVEN=D % wide == 0,
        ONE=wide >= D, STAGES=STAGES, PAIRS=_pairs(table), **limited(dy), num_warps=warps,
    )  # fmt: skip
