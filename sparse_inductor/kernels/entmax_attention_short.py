"""Entmax attention forward of short rows: the scores of a block of rows stay in registers, in one launch.

The passes of `entmax_attention_blocks` make the scores again for each step of the search for the threshold, which
for a few hundred keys takes longer than to wait for what they read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .entmax_attention_problem import (
    Problem,
    Tile,
    dropped_score,
    head_offsets,
    load_tile,
    product,
    row_constants,
    row_scores,
)
from .entmax_attention_tau import clip_to_one, newton, powers, step
from .launch import relaunched

__all__ = ["applies", "forward_short"]

NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))
SPREAD_NAN = tl.constexpr(tl.PropagateNan.ALL)
# What |h - 1| may be after the last step, and how many there are at most: see `entmax_attention_blocks`.
EXACT_SUM = tl.constexpr(1e-5)
TURNS = tl.constexpr(128)


# Keys of a row: 64 rows' scores are 64 registers a thread, and three programs share an SM.
MOST_KEYS = 128


def _tile(problem: Problem) -> Tile:
    """All keys at once."""
    cuda = problem.q.device.type == "cuda"
    keys = max(16, triton.next_power_of_2(problem.k.shape[2]))
    return Tile(64 if cuda else 16, keys, 4, 1)


def applies(problem: Problem) -> bool:
    """Whether the scores of a block of rows fit: few keys and 16-bit operands."""
    most = MOST_KEYS if problem.q.device.type == "cuda" else 32
    widths = max(problem.width, problem.value_width)
    return problem.q.element_size() == 2 and problem.k.shape[2] <= most and widths <= 128


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=SPREAD_NAN)


@relaunched
@triton.jit
def _short_kernel(
    q, k, v, bias, mask, alpha, query_lengths, key_lengths,
    sqb, sqh, sql, sqd, skb, skh, skl, skd, svb, svh, svl, svd,
    sbb, sbh, sbl, sbk, smb, smh, sml, smk, sab, sah, sal,
    H, G, Lq, Lk, am1_value, scale, fill_value,
    out, reference, shift,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ALPHA: tl.constexpr,
    HAS_QLEN: tl.constexpr, HAS_KLEN: tl.constexpr, CAUSAL: tl.constexpr,
    FINITE_FILL: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    REFINE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program owns out, reference and shift of BM rows; BN is no less than the number of keys.

    REFINE: shift takes one more Newton step, for a backward.
    """
    blocks = tl.cdiv(Lq, BM)
    bh = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    j = tl.arange(0, BN)
    b, h, q_at, k_at, v_at = head_offsets(bh, H, G, sqb, sqh, skb, skh, svb, svh)
    last_key = Lk
    if HAS_KLEN:
        last_key = tl.minimum(Lk, tl.load(key_lengths + b).to(tl.int32))
    last_row = Lq
    if HAS_QLEN:
        last_row = tl.minimum(Lq, tl.load(query_lengths + b).to(tl.int32))
    factor, am1, beta = row_constants(
        alpha + b * sab + h * sah, sal, i, Lq, am1_value, scale, HAS_ALPHA
    )
    side = (bias + b * sbb + h * sbh, sbl, sbk, mask + b * smb + h * smh, sml, smk)
    zero = tl.zeros([BM], tl.float32)
    row = (factor, am1, zero, dropped_score(am1, fill_value, FINITE_FILL))
    qt = load_tile(q + q_at, i, sql, Lq, sqd, True, D, BD)
    kt = load_tile(k + k_at, j, skl, last_key, skd, True, D, BD)
    x, _ = row_scores(
        qt, kt, i, j, row, side, Lq, last_key, Lk - Lq,
        True, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN,
    )  # fmt: skip
    m = tl.reduce(x, 1, _larger)
    dead = (m == NEG_INF) | (i >= last_row)
    m = tl.where(dead, 0.0, m)
    idle = dead | (tl.abs(m) == POS_INF) | (m != m)
    x = x - m[:, None]
    # A row of n equal scores has its root at -n^(-1/beta), any other row before that.
    entries = tl.maximum(last_key, 1).to(tl.float32)
    hi = -tl.exp2(-tl.log2(entries) / beta) + 1e-6
    lo = zero - 1.0
    d = tl.minimum(lo, hi)
    old = (d, zero + POS_INF, zero)
    turn = 0
    searching = 1
    while searching > 0:
        w, g = powers(clip_to_one(x, d[:, None], WIDEN), beta[:, None], KIND)
        d, rest, lo, hi, old = step(
            d, tl.sum(w, 1), tl.sum(g, 1), lo, hi, old, entries * beta, turn, beta, KIND
        )
        turn += 1
        searching = tl.max(((rest > EXACT_SUM) & (idle == 0)).to(tl.int32), 0)
        if turn >= TURNS:
            searching = 0
    p, g = powers(clip_to_one(x, d[:, None], WIDEN), beta[:, None], KIND)
    f = tl.sum(p, 1)
    vt = load_tile(v + v_at, j, svl, last_key, svd, True, DV, BDV)
    acc = product(p.to(vt.dtype), vt, PRECISION, WIDEN)
    # What fp32 leaves of sum p == 1 goes to all entries alike.
    acc = tl.where(dead[:, None], 0.0, acc / f[:, None])
    at_row = bh.to(tl.int64) * Lq + i
    c = tl.arange(0, BDV)
    inside = (i < Lq)[:, None] & (c < DV)[None, :]
    tl.store(out + at_row[:, None] * DV + c[None, :], acc.to(out.dtype.element_ty), mask=inside)
    tl.store(reference + at_row, m, mask=i < Lq)
    if REFINE:
        d = newton(d, f, tl.sum(g, 1), beta, KIND)
    tl.store(shift + at_row, tl.where(dead, POS_INF, d), mask=i < Lq)


def forward_short(
    problem: Problem,
    out: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
    training: bool,
) -> None:
    """Fill out [B, H, Lq, Dv], reference and shift fp32 [B, H, Lq]; tau = reference + shift."""
    tile = _tile(problem)
    _short_kernel[(problem.heads * triton.cdiv(problem.q.shape[2], tile.rows),)](
        *problem.operands(), out, reference, shift, **problem.constants(),
        REFINE=training, BM=tile.rows, BN=tile.keys, **tile.options(),
    )  # fmt: skip
