"""Entmax attention forward for few queries, as in decoding with a cache: split over the keys.

The first kernel reads the keys once, in many programs: the queries of all heads that share a key head form one tile,
and their few scores are written to memory. In the second kernel each program computes one row: it solves the threshold
on the row's scores and gathers the values of the support.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched
from .blocks import EXACT, TURNS
from .problem import (
    Head,
    Matrix,
    Problem,
    Row,
    Tile,
    dropped_score,
    key_scores,
    larger,
    matrix,
    open_head,
    row_constants,
    row_maxima,
)
from .tau import NEG_INF, POS_INF, bracket, class_bound, clip, clip_to_one, newton, powers, step

# The most rows of a tile, queries of a head (with more, the other kernels fill the GPU), and scores (8 bytes each).
MOST_ROWS, MOST_QUERIES, MOST_SCORES = 64, 16, 2**25
# Keys per tile; scores per step of the second kernel; entries whose values it gathers at a time.
KEYS, CHUNK, GATHER = 128, 4096, 64


def applies(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether there are few enough queries for these kernels. Depends on sizes only."""
    B, H, Lq, _ = q.shape
    few = Lq <= MOST_QUERIES and H // k.shape[1] * Lq <= MOST_ROWS
    return few and B * H * Lq * k.shape[2] <= MOST_SCORES


def _tile(problem: Problem) -> Tile:
    rows = problem.q.shape[1] // problem.k.shape[1] * problem.q.shape[2]
    rows = max(16, triton.next_power_of_2(rows))
    # A tile of 128 keys with D 256 in fp32 exceeds a program's shared memory.
    wide = problem.width * problem.q.element_size() > 256
    keys = 16 if problem.interpreted else KEYS // 2 if wide else KEYS
    return Tile(rows, keys, 4, 1)


@triton.jit
def _heads_of_rows(t, b, h):
    """Same as `matrix`, with a head h for each row [M]."""
    return Matrix(t.start + (b * t.batch + h * t.head)[:, None], t.row, t.column)


@relaunched
@triton.jit
def _scores_kernel(x, scores, maxima, C: tl.constexpr):
    """A program computes the scores (alpha - 1) z [B, H, Lq, Lk] of BN keys and all queries of their key head.

    maxima [B, H, Lq, tiles]: each row's largest score of the tile.
    """
    tiles = tl.cdiv(x.Lk, C.BN)
    bg = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    heads = x.H // x.G
    b = (bg // heads).to(tl.int64)
    r = tl.arange(0, C.BM)
    h = (bg % heads * x.G + r // x.Lq).to(tl.int64)
    i = tl.where(r < x.G * x.Lq, r % x.Lq, x.Lq)
    first = open_head(x, b, bg % heads * x.G)
    head = Head(
        first.q, first.k, first.v,
        _heads_of_rows(x.bias, b, h) if C.HAS_BIAS else first.bias,
        _heads_of_rows(x.mask, b, h) if C.HAS_MASK else first.mask,
        first.alpha, first.Lq, first.last_row, first.last_key, first.diagonal,
        first.am1, first.scale, first.fill,
    )  # fmt: skip
    am1 = tl.zeros([C.BM], tl.float32) + x.am1
    if C.HAS_ALPHA:
        at = x.alpha.start + b * x.alpha.batch + h * x.alpha.head + i.to(tl.int64) * x.alpha.row
        am1 = tl.load(at, mask=i < x.Lq, other=1.5).to(tl.float32) - 1.0
    zero = tl.zeros([C.BM], tl.float32)
    row = Row(am1 * x.scale, am1, zero, dropped_score(am1, x.fill, C.FINITE_FILL))
    d = tl.arange(0, C.BD)
    q = tl.load(
        _heads_of_rows(x.q, b, h).start + i.to(tl.int64)[:, None] * x.q.row + d[None, :] * x.q.column,
        mask=(i < x.Lq)[:, None] & (d < C.D)[None, :], other=0.0,
    )  # fmt: skip
    j, _k, z, _ = key_scores(q, tile, i, row, head, True, C)
    at = (b * x.H + h) * x.Lq + i
    inside = (i < x.Lq)[:, None] & (j < x.Lk)[None, :]
    tl.store(scores + at[:, None] * x.Lk + j[None, :], z, mask=inside)
    tl.store(maxima + at * tiles + tile, tl.reduce(z, 1, larger), mask=i < x.Lq)


@triton.jit
def _above(scores, j, last_key, m, d, SIZE: tl.constexpr, C: tl.constexpr):
    """Return u = max(x - d, 0) [1, n] for keys j [1, n] of a row, 0 beyond the last key."""
    z = tl.load(scores + j, mask=j < last_key, other=NEG_INF) - m[:, None]
    if SIZE == 4:
        return clip(z, d[:, None])
    else:
        return clip_to_one(z, d[:, None], C.INTERPRETED)


@relaunched
@triton.jit
def _row_kernel(
    x, scores, maxima, columns, out, reference, shift,
    EXACT_SUM: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr,
    GATHER: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A program computes out, reference and shift of a row; columns [B, H, Lq, Lk] is scratch for its support."""
    bh = tl.program_id(0) // x.Lq
    i = tl.program_id(0) % x.Lq + tl.zeros([1], tl.int32)
    at = tl.program_id(0).to(tl.int64)
    head = open_head(x, bh // x.H, bh % x.H)
    _factor, _am1, beta = row_constants(head, i, C)
    last_key = head.last_key
    scores += at * x.Lk
    columns += at * x.Lk
    tiles = tl.cdiv(x.Lk, C.BN)
    t = tl.arange(0, TILES)[None, :]
    top = tl.load(maxima + at * tiles + t, mask=t < tiles, other=NEG_INF)
    m, dead, idle = row_maxima(top, i, head)
    # Maxima of disjoint tiles are distinct entries of the row.
    lo = class_bound(top - m[:, None], beta, C.KIND, 4)
    entries = tl.maximum(last_key, 1).to(tl.float32)
    d, lo, hi, old = bracket(lo, entries, beta)
    turn = 0
    searching = tl.max((idle == 0).to(tl.int32), 0)
    n = tl.arange(0, CHUNK)[None, :]
    while searching > 0:
        f = tl.zeros([1, CHUNK], tl.float32)
        g = tl.zeros([1, CHUNK], tl.float32)
        for c in range(0, last_key, CHUNK):
            w0, g0 = powers(_above(scores, c + n, last_key, m, d, SIZE, C), beta[:, None], C.KIND)
            f += w0
            g += g0
        d, rest, lo, hi, old = step(
            d, tl.sum(f, 1), tl.sum(g, 1), lo, hi, old, entries * beta, turn, beta, C.KIND
        )
        turn += 1
        searching = tl.max((rest > EXACT_SUM).to(tl.int32), 0)
        if turn >= TURNS:
            searching = 0
    f = tl.zeros([1, CHUNK], tl.float32)
    g = tl.zeros([1, CHUNK], tl.float32)
    support = tl.program_id(0) * 0
    for c in range(0, last_key, CHUNK):
        u = _above(scores, c + n, last_key, m, d, SIZE, C)
        w0, g0 = powers(u, beta[:, None], C.KIND)
        f += w0
        g += g0
        kept = (u != 0.0).to(tl.int32)
        place = support + tl.cumsum(kept, 1) - kept
        tl.store(columns + place, c + n, mask=kept != 0)
        support += tl.sum(tl.sum(kept, 1), 0)
    tl.debug_barrier()
    # One more Newton step from the sums at d squares the error.
    d = newton(d, tl.sum(f, 1), tl.sum(g, 1), beta, C.KIND)
    e = tl.arange(0, C.BDV)[None, :]
    v = matrix(x.v, (bh // x.H).to(tl.int64), (bh % x.H // x.G).to(tl.int64))
    acc = tl.zeros([GATHER, C.BDV], tl.float32)
    total = tl.zeros([1, GATHER], tl.float32)
    for c in range(0, support, GATHER):
        s = c + tl.arange(0, GATHER)
        j = tl.load(columns + s, mask=s < support, other=x.Lk)
        p, _g = powers(_above(scores, j[None, :], last_key, m, d, SIZE, C), beta[:, None], C.KIND)
        where = v.start + j.to(tl.int64)[:, None] * v.row + e * v.column
        values = tl.load(where, mask=(s < support)[:, None] & (e < C.DV), other=0.0)
        total += p
        acc += tl.trans(p) * values.to(tl.float32)
    # sum p is 1 only up to rounding: normalise.
    mean = tl.where(dead[:, None], 0.0, tl.sum(acc, 0)[None, :] / tl.sum(total, 1)[:, None])
    tl.store(out + at * C.DV + e, mean.to(out.dtype.element_ty), mask=e < C.DV)
    one = tl.zeros([1], tl.int32)
    tl.store(reference + at + one, m)
    tl.store(shift + at + one, tl.where(dead, POS_INF, d))


def forward_few(
    problem: Problem,
    out: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
) -> None:
    """Write out [B, H, Lq, Dv], reference and shift fp32 [B, H, Lq]; tau = reference + shift."""
    x, tile = problem.operands(), _tile(problem)
    # The rows of a tile belong to several heads.
    C = problem.fixed(tile)._replace(BIAS_ROWS=tl.constexpr(True), MASK_ROWS=tl.constexpr(True))
    tiles = triton.cdiv(x.Lk, tile.keys)
    scores = shift.new_empty((*shift.shape, x.Lk))
    maxima = shift.new_empty((*shift.shape, tiles))
    columns = torch.empty_like(scores, dtype=torch.int32)
    key_heads = problem.k.shape[0] * problem.k.shape[1]
    _scores_kernel[(key_heads * tiles,)](x, scores, maxima, C=C, **tile.options())
    size = problem.q.element_size()
    small = problem.interpreted
    _row_kernel[(shift.numel(),)](
        x, scores, maxima, columns, out, reference, shift, EXACT_SUM=EXACT[size], SIZE=size,
        TILES=max(16, triton.next_power_of_2(tiles)), CHUNK=32 if small else CHUNK,
        GATHER=16 if small else GATHER, C=C, num_warps=8,
    )  # fmt: skip
