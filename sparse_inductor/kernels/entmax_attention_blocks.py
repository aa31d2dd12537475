"""Entmax attention forward by passes over blocks of keys: exact for every input.

A program owns a block of query rows and recomputes its scores in every pass over the keys: one for
the maxima and some for the threshold in the first kernel, one for the output in the second. Nothing
that grows with the number of keys is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .entmax_attention_problem import (
    Left,
    Problem,
    add_product,
    dropped_score,
    head_offsets,
    key_tiles,
    lane_sums,
    load_tile,
    product,
    row_constants,
    row_count,
    row_scores,
    tile_for,
    tile_rows,
)
from .entmax_attention_tau import (
    HARDWARE_OVER_1,
    class_bound,
    clip,
    clip_to_one,
    compensated,
    cubic_power,
    newton,
    powers,
    root,
    step,
)
from .launch import relaunched

__all__ = ["forward_blocks"]

NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))
SPREAD_NAN = tl.constexpr(tl.PropagateNan.ALL)
# What |h - 1| may be after the last step, by operand size in bytes; rounding of 16-bit operands is a
# hundred times that. The output is divided by the sum of p that results, and what a backward reads takes
# a Newton step more, which squares it.
EXACT = {2: 1e-5, 4: 2e-8}
# One in so many key tiles makes up the sample that a search may start from.
SAMPLE = tl.constexpr(8)
# Powers for which a search begins with cubics in their place; steps on those end where |h - 1| was under
# ROUGH, which leaves less than what a cubic is off by; for a power itself, one step from NEAR ends a search.
LEAST_POWER, MOST_POWER = tl.constexpr(1.5), tl.constexpr(3.5)
ROUGH, NEAR = tl.constexpr(0.1), tl.constexpr(0.02)
# Bisection alone closes an fp32 bracket in 30 turns, and every fourth is one at least.
TURNS = tl.constexpr(128)


@triton.jit
def _entries(x, d, q, WIDEN: tl.constexpr):
    """u = max(x - d, 0) of scores x [M, N] of queries q, d [M]."""
    if q.dtype == tl.float32:
        return clip(x, d[:, None])
    else:
        return clip_to_one(x, d[:, None], WIDEN)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=SPREAD_NAN)


@triton.jit
def _maxima(
    top, q, keys, i, row, side, ends, first, last,
    EDGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Maxima top [M, BN] of the columns j, j + BN, ... over key tiles first:last."""
    k, stride_kl, stride_kd = keys
    last_row, last_key, diagonal = ends
    for n in tl.range(first, last, num_stages=STAGES):
        j = n * BN + tl.arange(0, BN)
        kt = load_tile(k, j, stride_kl, last_key, stride_kd, EDGE, D, BD)
        x, _ = row_scores(
            q, kt, i, j, row, side, last_row, last_key, diagonal,
            EDGE, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN,
        )  # fmt: skip
        top = tl.maximum(top, x, propagate_nan=SPREAD_NAN)
    return top


@triton.jit
def _sums(
    sums, d, beta, q, keys, i, row, side, ends, first, last,
    EDGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """sums = (f, lost, g, lost): add u^beta and u^(beta - 1) at d over key tiles first:last."""
    k, stride_kl, stride_kd = keys
    last_row, last_key, diagonal = ends
    f, f_lost, g, g_lost = sums
    for n in tl.range(first, last, num_stages=STAGES):
        j = n * BN + tl.arange(0, BN)
        kt = load_tile(k, j, stride_kl, last_key, stride_kd, EDGE, D, BD)
        x, _ = row_scores(
            q, kt, i, j, row, side, last_row, last_key, diagonal,
            EDGE, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN,
        )  # fmt: skip
        pw, pg = powers(_entries(x, d, q, WIDEN), beta[:, None], KIND)
        f, f_lost = compensated(f, f_lost, tl.sum(pw, 1))
        g, g_lost = compensated(g, g_lost, tl.sum(pg, 1))
    return f, f_lost, g, g_lost


@triton.jit
def _sampled(
    d, lo, hi, beta, entries, q, keys, i, row, side, ends, whole,
    D: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Where the search may better start than at d: what two steps find for a sample of the keys.

    Worth a quarter of a pass, and saves one, where a third of the keys are above d, or two, where an eighth
    are in sparsemax, whose bound by classes is the loosest; other rows keep d.
    """
    part = whole // SAMPLE
    if part >= SAMPLE:
        k, stride_kl, stride_kd = keys
        last_row, last_key, diagonal = ends
        ratio = whole.to(tl.float32) / part.to(tl.float32)
        zero = tl.zeros([BM], tl.float32)
        guess = d
        low = lo
        high = hi
        old = (d, zero + POS_INF, zero)
        above = zero
        turn = 0
        searching = 1
        while searching > 0:
            f = zero
            g = zero
            c = zero
            for n in tl.range(0, part, num_stages=STAGES):
                j = n * (SAMPLE * BN) + tl.arange(0, BN)
                kt = load_tile(k, j, stride_kl, last_key, stride_kd, False, D, BD)
                x, _ = row_scores(
                    q, kt, i, j, row, side, last_row, last_key, diagonal,
                    False, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN,
                )  # fmt: skip
                u = _entries(x, guess, q, WIDEN)
                pw, pg = powers(u, beta[:, None], KIND)
                f += tl.sum(pw, 1)
                g += tl.sum(pg, 1)
                # Of comparisons the bits would be packed into registers.
                c += tl.sum(tl.minimum(u * 1e30, 1.0), 1)
            if turn == 0:
                above = c * (8.0 if KIND == 1 else 3.0) / (part * BN).to(tl.float32)
            guess, _rest, low, high, old = step(
                guess, f * ratio, g * ratio, low, high, old, entries * beta, turn, beta, KIND
            )
            turn += 1
            searching = tl.where(tl.sum((above > 1.0).to(tl.int32), 0) * 2 > BM, 2 - turn, 0)
        if turn == 2:
            d = tl.where(above > 1.0, tl.minimum(tl.maximum(guess, lo), hi), d)
    return d


@triton.jit
def _moments(
    sums, d, q, keys, i, row, side, ends, first, last,
    EVERY: tl.constexpr, EDGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """sums = (n, s1, s2, s3): add sums of u, u^2 and u^3 at d over every EVERY-th of key tiles first:last.

    Of a sample (EVERY > 1) also, to n, how many are positive: counting takes as much as two of the sums.
    """
    k, stride_kl, stride_kd = keys
    last_row, last_key, diagonal = ends
    n, s1, s2, s3 = sums
    for t in tl.range(first, last, num_stages=STAGES):
        j = t * (EVERY * BN) + tl.arange(0, BN)
        kt = load_tile(k, j, stride_kl, last_key, stride_kd, EDGE, D, BD)
        x, _ = row_scores(
            q, kt, i, j, row, side, last_row, last_key, diagonal,
            EDGE, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN,
        )  # fmt: skip
        u = _entries(x, d, q, WIDEN)
        square = u * u
        s1 += tl.sum(u, 1)
        s2 += tl.sum(square, 1)
        s3 += tl.sum(square * u, 1)
        if EVERY > 1:
            # Of comparisons the bits would be packed into registers.
            n += tl.sum(tl.minimum(u * 1e30, 1.0), 1)
    return n, s1, s2, s3


@triton.jit
def _rough_step(d, sums, ratio, cubic, lo, hi, old, bend, turn, beta, KIND: tl.constexpr):
    """(d, old) of `step` for the cubic in place of the power, from sums over a part 1 / ratio of the keys.

    lo and hi bracket the power's root: what is seen here bounds the cubic's, or the sample's.
    """
    n, s1, s2, s3 = sums
    c1, c2, c3 = cubic
    f = (c1 * s1 + c2 * s2 + c3 * s3) * ratio
    g = (c1 * n + 2.0 * c2 * s1 + 3.0 * c3 * s2) * ratio / beta
    # c1 may be negative: a row with hardly an entry above d has no root to its sum.
    f, g = tl.maximum(f, 1e-30), tl.maximum(g, 1e-30)
    d, _rest, _lo, _hi, old = step(d, f, g, lo, hi, old, bend, turn, beta, KIND)
    return d, old


@triton.jit
def _rough(
    d, lo, hi, idle, beta, bend, q, keys, i, row, side, ends, whole, tiles,
    D: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Where the search better starts than at d, a lower bound, and h'' there: (d, bend).

    A general power is two instructions of the special function units, which do an eighth of what others
    do: a pass with it takes twice the time of one with a cubic. From a sample of the keys two steps end
    10 % off (in h), from there two or three passes 0.3 %, which one step with the power itself squares.
    """
    part = whole // SAMPLE
    ratio = whole.to(tl.float32) / part.to(tl.float32)
    zero = tl.zeros([BM], tl.float32)
    cubic = cubic_power(beta, -d)
    none = (zero, zero, zero, zero)
    guess, count = d, zero
    old = (d, zero + POS_INF, zero)
    for turn in range(2):
        sums = _moments(
            none, guess, q, keys, i, row, side, ends, 0, part,
            SAMPLE, False, D, BD, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN, BN, STAGES,
        )  # fmt: skip
        count = sums[0] * ratio
        guess, old = _rough_step(guess, sums, ratio, cubic, lo, hi, old, bend, turn, beta, KIND)
    old = (guess, zero + POS_INF, zero)
    turn = 0
    searching = 1
    while searching > 0:
        sums = (count, zero, zero, zero)
        sums = _moments(
            sums, guess, q, keys, i, row, side, ends, 0, whole,
            1, False, D, BD, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN, BN, STAGES,
        )  # fmt: skip
        sums = _moments(
            sums, guess, q, keys, i, row, side, ends, whole, tiles,
            1, True, D, BD, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN, BN, STAGES,
        )  # fmt: skip
        d0, _h0, s0 = old
        guess, old = _rough_step(guess, sums, 1.0, cubic, lo, hi, old, bend, turn, beta, KIND)
        d1, h1, s1 = old
        # Twice what is seen between two steps, which may be a little; but the more of a row is curved,
        # the more of its entries are near the threshold, as they are in all rows but those of ties.
        seen = tl.maximum(2.0 * tl.abs((1.0 / s1 - 1.0 / s0) / (d1 - d0)), 0.5 / (s1 * s1))
        known = tl.where(seen < POS_INF, tl.minimum(seen, bend), bend)
        bend = tl.where(turn > 0, known, bend)
        turn += 1
        far = tl.where((tl.abs(h1 - 1.0) > ROUGH) & (idle == 0), 1, 0)
        searching = tl.where(turn < 2, 1, tl.where(turn < 4, tl.max(far, 0), 0))
    return guess, bend


@triton.jit
def _outputs(
    sums, d, beta, q, keys, values, i, row, side, ends, first, last,
    EDGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    REFINE: tl.constexpr, CAREFUL: tl.constexpr, SOLVE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """sums = (acc, more, f, lost, g): add p @ v, p and, if wanted, u^(beta - 1) over tiles first:last.

    CAREFUL: acc too is a compensated sum of the tiles', and more what it lost. SOLVE: more takes
    u^(beta - 1) @ v.
    """
    acc, more, f, f_lost, g = sums
    k, stride_kl, stride_kd = keys
    v, stride_vl, stride_vd = values
    last_row, last_key, diagonal = ends
    for n in tl.range(first, last, num_stages=STAGES):
        j = n * BN + tl.arange(0, BN)
        kt = load_tile(k, j, stride_kl, last_key, stride_kd, EDGE, D, BD)
        x, _ = row_scores(
            q, kt, i, j, row, side, last_row, last_key, diagonal,
            EDGE, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN,
        )  # fmt: skip
        p, pg = powers(_entries(x, d, q, WIDEN), beta[:, None], KIND)
        f, f_lost = compensated(f, f_lost, lane_sums(p, LANES))
        if REFINE:
            g += lane_sums(pg, LANES)
        vt = load_tile(v, j, stride_vl, last_key, stride_vd, EDGE, DV, BDV)
        if CAREFUL:
            acc, more = compensated(acc, more, product(p.to(vt.dtype), vt, PRECISION, WIDEN))
        else:
            acc = add_product(p.to(vt.dtype), vt, acc, PRECISION, WIDEN)
        if SOLVE:
            more = add_product(pg.to(vt.dtype), vt, more, PRECISION, WIDEN)
    return acc, more, f, f_lost, g


@relaunched
@triton.jit
def _threshold_kernel(
    q, k, v, bias, mask, alpha, query_lengths, key_lengths,
    sqb, sqh, sql, sqd, skb, skh, skl, skd, svb, svh, svl, svd,
    sbb, sbh, sbl, sbk, smb, smh, sml, smk, sab, sah, sal,
    H, G, Lq, Lk, am1_value, scale, fill_value,
    reference, shift, bends, left, earlier,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ALPHA: tl.constexpr,
    HAS_QLEN: tl.constexpr, HAS_KLEN: tl.constexpr, CAUSAL: tl.constexpr,
    FINITE_FILL: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    LEFT_ROWS: tl.constexpr, EXACT_SUM: tl.constexpr, BOUNDED: tl.constexpr, DEFER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program finds reference and shift of rows i0:i0 + BM; tau = reference + shift.

    shift is +inf for a row without support (past query_lengths, or all scores -inf). BOUNDED: they
    hold the maximum and a lower bound of the shift, which saves a pass. DEFER: where a search begins with
    cubics it ends there, bends being h'' of those rows, and 0 of others. Every pass reads the head's keys:
    from L2, since the programs of a head run together.
    """
    blocks = tl.cdiv(Lq, BM)
    bh = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    count = row_count(earlier, bh, Lq, LEFT_ROWS)
    if block * BM >= count:
        return
    i, first_row, end_row = tile_rows(left, bh, block, count, Lq, CAUSAL, LEFT_ROWS, BM)
    b, h, q_at, k_at, _v_at = head_offsets(bh, H, G, sqb, sqh, skb, skh, svb, svh)
    last_key = Lk
    if HAS_KLEN:
        last_key = tl.minimum(Lk, tl.load(key_lengths + b).to(tl.int32))
    diagonal = Lk - Lq
    ends = (Lq, last_key, diagonal)
    factor, am1, beta = row_constants(
        alpha + b * sab + h * sah, sal, i, Lq, am1_value, scale, HAS_ALPHA
    )
    fill = dropped_score(am1, fill_value, FINITE_FILL)
    side = (bias + b * sbb + h * sbh, sbl, sbk, mask + b * smb + h * smh, sml, smk)
    keys = (k + k_at, skl, skd)
    qt = load_tile(q + q_at, i, sql, Lq, sqd, True, D, BD)
    at_row = bh.to(tl.int64) * Lq + i
    last_row = Lq
    if HAS_QLEN:
        last_row = tl.minimum(Lq, tl.load(query_lengths + b).to(tl.int32))
    whole, tiles, every = key_tiles(first_row, end_row, last_key, diagonal, CAUSAL, BN)
    zero = tl.zeros([BM], tl.float32)
    unfinished = 1
    while unfinished > 0:
        # A row of n equal scores has its root at -n^(-1/beta), any other row before that.
        entries = tl.maximum(tiles * BN, 1).to(tl.float32)
        hi = -tl.exp2(-tl.log2(entries) / beta) + 1e-6
        if BOUNDED:
            m = tl.load(reference + at_row, mask=i < Lq, other=0.0)
            lo = tl.load(shift + at_row, mask=i < Lq, other=-1.0)
            dead = i >= last_row
        else:
            top = tl.full([BM, BN], NEG_INF, tl.float32)
            row = (factor, am1, zero, fill)
            top = _maxima(
                top, qt, keys, i, row, side, ends, 0, whole,
                False, D, BD, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN, BN, STAGES,
            )  # fmt: skip
            top = _maxima(
                top, qt, keys, i, row, side, ends, whole, tiles,
                True, D, BD, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN, BN, STAGES,
            )  # fmt: skip
            m = tl.reduce(top, 1, _larger)
            dead = (m == NEG_INF) | (i >= last_row)
            m = tl.where(dead, 0.0, m)
            lo = class_bound(top - m[:, None], zero - 1.0, beta, KIND, 6)
            lo = tl.maximum(lo - 1e-6, -1.0)
        # A row with NaN or inf has no sum to search for.
        idle = dead | (tl.abs(m) == POS_INF) | (m != m)
        row = (factor, am1, m, fill - m)
        d = tl.minimum(lo, hi)
        bend = entries * beta
        rough = 0
        if KIND <= 0:
            fits = (tl.min(beta, 0) >= LEAST_POWER) & (tl.max(beta, 0) <= MOST_POWER)
            rough = tl.where(fits & (whole >= SAMPLE * SAMPLE), 1, 0)
            if rough != 0:
                d, bend = _rough(
                    d, lo, hi, idle, beta, bend, qt, keys, i, row, side, ends, whole, tiles,
                    D, BD, KIND, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN, BM, BN, STAGES,
                )  # fmt: skip
            else:
                d = _sampled(
                    d, lo, hi, beta, entries, qt, keys, i, row, side, ends, whole,
                    D, BD, KIND, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN, BM, BN, STAGES,
                )  # fmt: skip
        elif KIND != 2:
            d = _sampled(
                d, lo, hi, beta, entries, qt, keys, i, row, side, ends, whole,
                D, BD, KIND, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN, BM, BN, STAGES,
            )  # fmt: skip
        old = (d, zero + POS_INF, zero)
        turn = 0
        searching = 1
        if DEFER:
            searching = 1 - rough
            tl.store(bends + at_row, tl.where(rough > 0, tl.maximum(bend, 1e-30), 0.0), mask=i < Lq)
        while searching > 0:
            sums = _sums(
                (zero, zero, zero, zero), d, beta, qt, keys, i, row, side, ends, 0, whole,
                False, D, BD, KIND, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN, BN, STAGES,
            )  # fmt: skip
            f, _f_lost, g, _g_lost = _sums(
                sums, d, beta, qt, keys, i, row, side, ends, whole, tiles,
                True, D, BD, KIND, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN, BN, STAGES,
            )  # fmt: skip
            d, rest, lo, hi, old = step(d, f, g, lo, hi, old, bend, turn, beta, KIND)
            far = (rest > EXACT_SUM) & (idle == 0)
            if KIND <= 0:
                # The bend of a cubic holds where the cubic does.
                first = tl.where(turn == 0, rough, 0) > 0
                far = tl.where(first, far | ((tl.abs(f - 1.0) > NEAR) & (idle == 0)), far)
            turn += 1
            searching = tl.max(far.to(tl.int32), 0)
            if turn >= TURNS:
                searching = 0
        tl.store(reference + at_row, m, mask=i < Lq)
        tl.store(shift + at_row, tl.where(dead, POS_INF, d), mask=i < Lq)
        unfinished = 0
        if CAUSAL and FINITE_FILL:
            # A key after the diagonal holds `fill`: left out so far, unless it has a say.
            low = (dead | (d < fill - m)) & (i < last_row)
            unfinished = tl.where(tiles < every, tl.max(low.to(tl.int32), 0), 0)
            tiles = every


@relaunched
@triton.jit
def _output_kernel(
    q, k, v, bias, mask, alpha, query_lengths, key_lengths,
    sqb, sqh, sql, sqd, skb, skh, skl, skd, svb, svh, svl, svd,
    sbb, sbh, sbl, sbk, smb, smh, sml, smk, sab, sah, sal,
    H, G, Lq, Lk, am1_value, scale, fill_value,
    out, reference, shift, bends, left, earlier,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ALPHA: tl.constexpr,
    HAS_QLEN: tl.constexpr, HAS_KLEN: tl.constexpr, CAUSAL: tl.constexpr,
    FINITE_FILL: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    LEFT_ROWS: tl.constexpr, REFINE: tl.constexpr, CAREFUL: tl.constexpr, LANES: tl.constexpr,
    EXACT_SUM: tl.constexpr, DEFERRED: tl.constexpr, SOLVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns out[b, h, i0:i0 + BM], from the rows' thresholds.

    REFINE: shift, for a backward, takes the Newton step that the sums seen here are worth. DEFERRED: not
    where rows' bends say that their thresholds are not there yet; with SOLVE only there. These steps move
    thresholds by 0.001 of what the row spans, and p by so little that its derivative tells the change.
    """
    blocks = tl.cdiv(Lq, BM)
    bh = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    count = row_count(earlier, bh, Lq, LEFT_ROWS)
    if block * BM >= count:
        return
    i, first_row, end_row = tile_rows(left, bh, block, count, Lq, CAUSAL, LEFT_ROWS, BM)
    b, h, q_at, k_at, v_at = head_offsets(bh, H, G, sqb, sqh, skb, skh, svb, svh)
    last_key = Lk
    if HAS_KLEN:
        last_key = tl.minimum(Lk, tl.load(key_lengths + b).to(tl.int32))
    diagonal = Lk - Lq
    ends = (Lq, last_key, diagonal)
    factor, am1, beta = row_constants(
        alpha + b * sab + h * sah, sal, i, Lq, am1_value, scale, HAS_ALPHA
    )
    fill = dropped_score(am1, fill_value, FINITE_FILL)
    side = (bias + b * sbb + h * sbh, sbl, sbk, mask + b * smb + h * smh, sml, smk)
    keys = (k + k_at, skl, skd)
    qt = load_tile(q + q_at, i, sql, Lq, sqd, True, D, BD)
    at_row = bh.to(tl.int64) * Lq + i
    values = (v + v_at, svl, svd)
    m = tl.load(reference + at_row, mask=i < Lq, other=0.0)
    d = tl.load(shift + at_row, mask=i < Lq, other=POS_INF)
    dead = d == POS_INF
    if DEFERRED:
        bend = tl.load(bends + at_row, mask=i < Lq, other=0.0)
        if (tl.max(bend, 0) > 0.0) != SOLVE:
            return
    row = (factor, am1, m, fill - m)
    whole, tiles, every = key_tiles(first_row, end_row, last_key, diagonal, CAUSAL, BN)
    if CAUSAL and FINITE_FILL:
        tiles = tl.where(tl.max((d < fill - m).to(tl.int32), 0) > 0, every, tiles)
    wide = tl.zeros([BM, BDV], tl.float32)
    none = tl.zeros([BM, LANES], tl.float32)
    acc = wide
    f = tl.zeros([BM], tl.float32)
    if SOLVE:
        # All of these powers are over 1.
        OVER: tl.constexpr = HARDWARE_OVER_1 if KIND == -1 else KIND
        more = wide
        g = f
        change = f
        turn = 0
        searching = 1
        while searching > 0:
            d = tl.where(dead, d, tl.maximum(d + change, -1.0))
            sums = _outputs(
                (wide, wide, none, none, none), d, beta, qt, keys, values, i, row, side, ends, 0, whole,
                False, D, BD, DV, BDV, OVER, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN, BN, STAGES,
                True, False, True, LANES,
            )  # fmt: skip
            acc, more, f_lanes, _f_lost, g_lanes = _outputs(
                sums, d, beta, qt, keys, values, i, row, side, ends, whole, tiles,
                True, D, BD, DV, BDV, OVER, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN, BN, STAGES,
                True, False, True, LANES,
            )  # fmt: skip
            f, g = tl.sum(f_lanes, 1), tl.sum(g_lanes, 1)
            norm = root(f, beta, OVER)
            # Newton's: h is convex for the powers that are deferred, so that no step leaves its rows.
            change = (norm - 1.0) * f / (norm * g)
            far = (0.5 * bend * change * change > EXACT_SUM) | (tl.abs(f - 1.0) > NEAR)
            turn += 1
            # There is none in a row with NaN.
            far = far & (dead == 0) & (change == change)
            searching = tl.where(turn < TURNS, tl.max(far.to(tl.int32), 0), 0)
        acc -= (beta * change)[:, None] * more
        f -= beta * change * g
        tl.store(shift + at_row, tl.where(dead | (change != change), d, d + change), mask=i < Lq)
    else:
        sums = _outputs(
            (wide, wide if CAREFUL else none, none, none, none), d, beta, qt, keys, values, i, row, side,
            ends, 0, whole, False, D, BD, DV, BDV, KIND, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN,
            BN, STAGES, REFINE, CAREFUL, False, LANES,
        )  # fmt: skip
        acc, _lost, f_lanes, _f_lost, g_lanes = _outputs(
            sums, d, beta, qt, keys, values, i, row, side,
            ends, whole, tiles, True, D, BD, DV, BDV, KIND, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION,
            WIDEN, BN, STAGES, REFINE, CAREFUL, False, LANES,
        )  # fmt: skip
        f = tl.sum(f_lanes, 1)
        if REFINE:
            better = newton(d, f, tl.sum(g_lanes, 1), beta, KIND)
            tl.store(shift + at_row, tl.where(dead, d, better), mask=i < Lq)
    # What fp32 leaves of sum p == 1 goes to all entries alike.
    acc = tl.where(dead[:, None], 0.0, acc / f[:, None])
    c = tl.arange(0, BDV)
    inside = (i < Lq)[:, None] & (c < DV)[None, :]
    tl.store(out + at_row[:, None] * DV + c[None, :], acc.to(out.dtype.element_ty), mask=inside)


def forward_blocks(
    problem: Problem,
    out: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
    left: Left | None,
    training: bool,
) -> None:
    """Fill out [B, H, Lq, Dv], reference and shift fp32 [B, H, Lq]; tau = reference + shift.

    With `left` only its rows, whose reference and shift hold their maximum and a lower bound of the
    shift (not where a fill or a bias may bring in keys that the lists did not look at).
    """
    operands, constants = problem.operands(), problem.constants()
    blocks = {"LEFT_ROWS": 0 if left is None else left.block}
    rows = (shift, shift) if left is None else left[:2]
    tile = tile_for(problem, "threshold")
    size = problem.q.element_size()
    # A causal row needs its threshold to know whether a finite fill has a say.
    defer = (
        constants["KIND"] <= 0
        and size == 2
        and not (problem.causal and problem.finite_fill)
        and max(problem.width, problem.value_width) <= 128  # two sums of the output's size
        and problem.k.shape[2] >= tile.keys * SAMPLE.value**2
    )
    bends = torch.empty_like(shift) if defer else shift
    _threshold_kernel[(problem.heads * triton.cdiv(problem.q.shape[2], tile.rows),)](
        *operands, reference, shift, bends, *rows, **constants, **blocks,
        EXACT_SUM=EXACT[size], DEFER=defer,
        BOUNDED=left is not None and not problem.finite_fill and problem.bias is None,
        BM=tile.rows, BN=tile.keys, STAGES=tile.stages, **tile.options(),
    )  # fmt: skip
    for solve in (False, True)[: 1 + defer]:
        tile = tile_for(problem, "solve" if solve else "output")
        _output_kernel[(problem.heads * triton.cdiv(problem.q.shape[2], tile.rows),)](
            *operands, out, reference, shift, bends, *rows, **constants, **blocks,
            REFINE=training, CAREFUL=size == 4, LANES=1 if solve else problem.lanes, EXACT_SUM=EXACT[size],
            DEFERRED=defer, SOLVE=solve,
            BM=tile.rows, BN=tile.keys, STAGES=tile.stages, **tile.options(),
        )  # fmt: skip
