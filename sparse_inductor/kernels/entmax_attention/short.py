"""Entmax attention forward for short rows: one launch, with the scores of a block of rows in registers.

The passes of `entmax_attention.blocks` recompute the scores in each step of the threshold search. For a few hundred
keys this dominates the time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched
from .blocks import EXACT, TURNS
from .problem import (
    Problem,
    Row,
    Tile,
    dropped_score,
    key_scores,
    larger,
    load_tile,
    open_head,
    product,
    row_constants,
    row_maxima,
    store_tile,
)
from .tau import POS_INF, bracket, class_bound, clip_to_one, newton, powers, step

# The most keys: the scores of 64 rows take 128 registers per thread. 512 keys do not fit, and alternatives gain too
# little over the block passes for a second kernel. Measured with 32 x 12 heads, D 64: recomputing half of the scores in
# each step takes 0.23 to 0.25 ms, the block passes 0.21 (H200); a Gluon kernel with a head's keys and values kept by
# eight warps 0.17 to 0.18, the block passes 0.22 (H100); scores rounded to fp16, two per step, 0.25, the block passes
# 0.28 (H200, from the host's call).
MOST_KEYS = 256
# Keys per class. The maxima of the classes give the first bound of the search.
CLASS = tl.constexpr(4)


def _tile(problem: Problem) -> Tile:
    """Return a tile with all keys of a row."""
    keys = max(16, triton.next_power_of_2(problem.k.shape[2]))
    if problem.interpreted:
        return Tile(16, keys, 4, 1)
    wide = max(problem.width, problem.value_width) > 64
    rows, warps = (128, 8) if wide and keys == MOST_KEYS else (64, 4)
    return Tile(rows, keys, warps, 1, in_place=True)


def applies(problem: Problem) -> bool:
    """Whether the scores of a block of rows fit: few keys and 16-bit operands."""
    most = 32 if problem.interpreted else MOST_KEYS
    widths = max(problem.width, problem.value_width)
    return problem.q.element_size() == 2 and problem.k.shape[2] <= most and widths <= 128


@relaunched
@triton.jit
def _short_kernel(
    x, out, reference, shift, EXACT_SUM: tl.constexpr, REFINE: tl.constexpr, C: tl.constexpr
):
    """A program computes out, reference and shift of BM rows; BN is at least the number of keys.

    REFINE: shift gets one more Newton step, for a backward.
    """
    blocks = tl.cdiv(x.Lq, C.BM)
    bh = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * C.BM + tl.arange(0, C.BM)
    head = open_head(x, bh // x.H, bh % x.H)
    factor, am1, beta = row_constants(head, i, C)
    zero = tl.zeros([C.BM], tl.float32)
    row = Row(factor, am1, zero, dropped_score(am1, x.fill, C.FINITE_FILL))
    q = load_tile(head.q, i, x.Lq, True, C.D, C.BD)
    j, _k, z, _ = key_scores(q, 0, i, row, head, True, C)
    # In the accumulator's layout one thread holds the columns of a class. In the layout of a wide load neighbouring
    # lanes may hold classes that are not adjacent, and Triton 3.6 reduces such a layout wrongly.
    CLASSES: tl.constexpr = C.BN // CLASS
    NEXT: tl.constexpr = 8 if CLASSES > 8 else CLASSES
    top = tl.reduce(tl.reshape(z, (C.BM, CLASSES // NEXT, CLASS, NEXT)), 2, larger)
    top = tl.reshape(top, (C.BM, CLASSES))
    m, dead, idle = row_maxima(top, i, head)
    bound = class_bound(top - m[:, None], beta, C.KIND, 2)
    z = z - m[:, None]
    entries = tl.maximum(head.last_key, 1).to(tl.float32)
    d, lo, hi, old = bracket(bound, entries, beta)
    turn = 0
    searching = 1
    while searching > 0:
        w, g = powers(clip_to_one(z, d[:, None], C.INTERPRETED), beta[:, None], C.KIND)
        d, rest, lo, hi, old = step(
            d, tl.sum(w, 1), tl.sum(g, 1), lo, hi, old, entries * beta, turn, beta, C.KIND
        )
        turn += 1
        searching = tl.max(((rest > EXACT_SUM) & (idle == 0)).to(tl.int32), 0)
        if turn >= TURNS:
            searching = 0
    p, g = powers(clip_to_one(z, d[:, None], C.INTERPRETED), beta[:, None], C.KIND)
    f = tl.sum(p, 1)
    v = load_tile(head.v, j, head.last_key, True, C.DV, C.BDV)
    # sum p is 1 only up to rounding: normalise.
    acc = product(p.to(v.dtype), v, C)
    acc = tl.where(dead[:, None], 0.0, acc / f[:, None])
    at = bh.to(tl.int64) * x.Lq + i
    store_tile(out, at, acc, i < x.Lq, C.DV, C.BDV)
    tl.store(reference + at, m, mask=i < x.Lq)
    if REFINE:
        d = newton(d, f, tl.sum(g, 1), beta, C.KIND)
    tl.store(shift + at, tl.where(dead, POS_INF, d), mask=i < x.Lq)


def forward_short(
    problem: Problem,
    out: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
    training: bool,
) -> None:
    """Write out [B, H, Lq, Dv], reference and shift fp32 [B, H, Lq]; tau = reference + shift."""
    tile = _tile(problem)
    _short_kernel[(problem.heads * triton.cdiv(problem.q.shape[2], tile.rows),)](
        problem.operands(), out, reference, shift, EXACT_SUM=EXACT[2], REFINE=training,
        C=problem.fixed(tile), **tile.options(),
    )  # fmt: skip
