"""Entmax attention forward in passes over blocks of keys: exact for every input.

Each program computes a block of query rows and recomputes its scores in every pass over the keys. The
first kernel takes one pass for the maxima and a few for the threshold, the second one pass for the
output. Memory does not grow with the number of keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched
from .problem import (
    FallbackRows,
    Problem,
    Row,
    Tiles,
    add_product,
    key_range,
    key_scores,
    lane_sums,
    load_tile,
    open_rows,
    own_rows,
    product,
    row_maxima,
    store_tile,
    tile_for,
)
from .tau import (
    HARDWARE_OVER_1,
    NEG_INF,
    POS_INF,
    SPREAD_NAN,
    bracket,
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

# Tolerance of |h - 1| after the last step, by operand size in bytes. The rounding of 16-bit operands is a
# hundred times larger. The output is divided by the resulting sum of p, and the threshold for the
# backward gets one more Newton step, which squares the error.
EXACT = {2: 1e-5, 4: 2e-8}
# The search may start from a sample of one in SAMPLE key tiles.
SAMPLE = tl.constexpr(8)
# Range of beta for which a search starts on cubic approximations of the power. Steps on a cubic end when |h - 1| was
# below ROUGH: the remaining error is then smaller than that of the cubic. One step on the power, from |f - 1| at most
# NEAR, ends the search.
LEAST_POWER, MOST_POWER = tl.constexpr(1.5), tl.constexpr(3.5)
ROUGH, NEAR = tl.constexpr(0.1), tl.constexpr(0.02)
# Bisection alone closes an fp32 bracket in 30 steps, and at least every fourth step is one.
TURNS = tl.constexpr(128)


@triton.jit
def _entries(x, d, q, C: tl.constexpr):
    """Return u = max(x - d, 0) for scores x [M, N] and d [M]; q is passed for its dtype."""
    if q.dtype == tl.float32:
        return clip(x, d[:, None])
    else:
        return clip_to_one(x, d[:, None], C.INTERPRETED)


@triton.jit
def _maxima(top, q, block, tiles, row, C: tl.constexpr):
    """Return the maxima top [M, BN] of the columns j, j + BN, ... over the tiles with a visible key."""
    for EDGE in tl.static_range(2):
        first, last = key_range(tiles, EDGE)
        for n in tl.range(first, last, num_stages=C.STAGES):
            _j, _k, x, _ = key_scores(q, n, block.i, row, block.head, EDGE, C)
            top = tl.maximum(top, x, propagate_nan=SPREAD_NAN)
    return top


@triton.jit
def _sums(d, q, block, tiles, row, C: tl.constexpr):
    """Return the sums of u^beta and u^(beta - 1) at d over the tiles with a visible key."""
    f = tl.zeros([C.BM], tl.float32)
    f_lost = f
    g = f
    g_lost = f
    for EDGE in tl.static_range(2):
        first, last = key_range(tiles, EDGE)
        for n in tl.range(first, last, num_stages=C.STAGES):
            _j, _k, x, _ = key_scores(q, n, block.i, row, block.head, EDGE, C)
            pw, pg = powers(_entries(x, d, q, C), block.beta[:, None], C.KIND)
            f, f_lost = compensated(f, f_lost, tl.sum(pw, 1))
            g, g_lost = compensated(g, g_lost, tl.sum(pg, 1))
    return f, g


@triton.jit
def _sampled(d, lo, hi, entries, q, block, whole, row, C: tl.constexpr):
    """Return a better start of the search than d: the result of two steps on a sample of the keys.

    The two steps take a quarter of a pass. They save one pass if a third of the keys are above d. In
    sparsemax, which has the loosest class bound, they save two passes if an eighth are. Other rows keep d.
    """
    part = whole // SAMPLE
    if part >= SAMPLE:
        ratio = whole.to(tl.float32) / part.to(tl.float32)
        zero = tl.zeros([C.BM], tl.float32)
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
            for n in tl.range(0, part, num_stages=C.STAGES):
                _j, _k, x, _ = key_scores(q, n * SAMPLE, block.i, row, block.head, False, C)
                u = _entries(x, guess, q, C)
                pw, pg = powers(u, block.beta[:, None], C.KIND)
                f += tl.sum(pw, 1)
                g += tl.sum(pg, 1)
                # A sum of comparisons would pack their bits into registers.
                c += tl.sum(tl.minimum(u * 1e30, 1.0), 1)
            if turn == 0:
                above = c * (8.0 if C.KIND == 1 else 3.0) / (part * C.BN).to(tl.float32)
            guess, _rest, low, high, old = step(
                guess, f * ratio, g * ratio, low, high, old, entries * block.beta, turn, block.beta, C.KIND
            )  # fmt: skip
            turn += 1
            searching = tl.where(tl.sum((above > 1.0).to(tl.int32), 0) * 2 > C.BM, 2 - turn, 0)
        if turn == 2:
            d = tl.where(above > 1.0, tl.minimum(tl.maximum(guess, lo), hi), d)
    return d


@triton.jit
def _moments(
    sums, d, q, block, row, first, last, EVERY: tl.constexpr, EDGE: tl.constexpr, C: tl.constexpr
):
    """Add the sums of u, u^2 and u^3 at d to sums = (n, s1, s2, s3), over every EVERY-th of the key tiles first:last.

    For a sample (EVERY > 1) also add the number of positive u to n; counting takes as long as two sums.
    """
    n, s1, s2, s3 = sums
    for t in tl.range(first, last, num_stages=C.STAGES):
        _j, _k, x, _ = key_scores(q, t * EVERY, block.i, row, block.head, EDGE, C)
        u = _entries(x, d, q, C)
        square = u * u
        s1 += tl.sum(u, 1)
        s2 += tl.sum(square, 1)
        s3 += tl.sum(square * u, 1)
        if EVERY > 1:
            # A sum of comparisons would pack their bits into registers.
            n += tl.sum(tl.minimum(u * 1e30, 1.0), 1)
    return n, s1, s2, s3


@triton.jit
def _rough_step(d, sums, ratio, cubic, lo, hi, old, bend, turn, beta, KIND: tl.constexpr):
    """Return (d, old) of `step` on the cubic instead of the power, from sums over a share 1 / ratio of the keys.

    lo and hi bracket the root of the power. They are not updated, since the sums are approximate: they are sums of the
    cubic, or over a sample.
    """
    n, s1, s2, s3 = sums
    c1, c2, c3 = cubic
    f = (c1 * s1 + c2 * s2 + c3 * s3) * ratio
    g = (c1 * n + 2.0 * c2 * s1 + 3.0 * c3 * s2) * ratio / beta
    # c1 may be negative. In a row with hardly any entry above d, the sums may then be negative, too.
    f, g = tl.maximum(f, 1e-30), tl.maximum(g, 1e-30)
    d, _rest, _lo, _hi, old = step(d, f, g, lo, hi, old, bend, turn, beta, KIND)
    return d, old


@triton.jit
def _rough(d, lo, hi, idle, bend, q, block, tiles, row, C: tl.constexpr):
    """Return (d, bend): a better start of the search than the lower bound d, and an estimate of h'' there.

    A general power takes two instructions of the special function units, which have an eighth of the
    throughput of other units: a pass with powers takes twice the time of a pass with cubics. Two steps on a sample
    of the keys leave an error of 10 % in h, and two or three passes from there 0.3 %. One step on the power itself
    squares that error.
    """
    beta = block.beta
    whole = tiles.whole
    part = whole // SAMPLE
    ratio = whole.to(tl.float32) / part.to(tl.float32)
    zero = tl.zeros([C.BM], tl.float32)
    cubic = cubic_power(beta, -d)
    none = (zero, zero, zero, zero)
    guess, count = d, zero
    old = (d, zero + POS_INF, zero)
    for turn in range(2):
        sums = _moments(none, guess, q, block, row, 0, part, SAMPLE, False, C)
        count = sums[0] * ratio
        guess, old = _rough_step(guess, sums, ratio, cubic, lo, hi, old, bend, turn, beta, C.KIND)
    old = (guess, zero + POS_INF, zero)
    turn = 0
    searching = 1
    while searching > 0:
        sums = (count, zero, zero, zero)
        sums = _moments(sums, guess, q, block, row, 0, whole, 1, False, C)
        sums = _moments(sums, guess, q, block, row, whole, tiles.seen, 1, True, C)
        d0, _h0, s0 = old
        guess, old = _rough_step(guess, sums, 1.0, cubic, lo, hi, old, bend, turn, beta, C.KIND)
        d1, h1, s1 = old
        # Twice the curvature between two steps. This may still be too small; the second term covers rows with many
        # entries near the threshold.
        seen = tl.maximum(2.0 * tl.abs((1.0 / s1 - 1.0 / s0) / (d1 - d0)), 0.5 / (s1 * s1))
        known = tl.where(seen < POS_INF, tl.minimum(seen, bend), bend)
        bend = tl.where(turn > 0, known, bend)
        turn += 1
        far = tl.where((tl.abs(h1 - 1.0) > ROUGH) & (idle == 0), 1, 0)
        searching = tl.where(turn < 2, 1, tl.where(turn < 4, tl.max(far, 0), 0))
    return guess, bend


@triton.jit
def _outputs(
    acc, more, d, q, block, tiles, row, KIND: tl.constexpr, REFINE: tl.constexpr, CAREFUL: tl.constexpr,
    SOLVE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return (acc + p @ v, more, sum of p, sum of u^(beta - 1) if REFINE) over the tiles with a visible key.

    CAREFUL: acc is a compensated sum over the tiles, and more its correction. SOLVE: u^(beta - 1) @ v is
    added to more.
    """
    head = block.head
    f = tl.zeros([C.BM, C.LANES], tl.float32)
    f_lost = f
    g = f
    for EDGE in tl.static_range(2):
        first, last = key_range(tiles, EDGE)
        for n in tl.range(first, last, num_stages=C.STAGES):
            j, _k, x, _ = key_scores(q, n, block.i, row, head, EDGE, C)
            p, pg = powers(_entries(x, d, q, C), block.beta[:, None], KIND)
            f, f_lost = compensated(f, f_lost, lane_sums(p, C.LANES))
            if REFINE:
                g += lane_sums(pg, C.LANES)
            v = load_tile(head.v, j, head.last_key, EDGE, C.DV, C.BDV)
            if CAREFUL:
                acc, more = compensated(acc, more, product(p.to(v.dtype), v, C))
            else:
                acc = add_product(p.to(v.dtype), v, acc, C)
            if SOLVE:
                more = add_product(pg.to(v.dtype), v, more, C)
    return acc, more, tl.sum(f, 1), tl.sum(g, 1)


@relaunched
@triton.jit
def _threshold_kernel(
    x, reference, shift, bends, fallback,
    EXACT_SUM: tl.constexpr, BOUNDED: tl.constexpr, DEFER: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A program computes reference and shift of BM rows; tau = reference + shift.

    shift is +inf for a row without support (past query_lengths, or all scores -inf). BOUNDED: reference
    and shift hold the maximum and a lower bound of the shift, which saves a pass. DEFER: if a search
    starts on cubics, `_output_kernel` finishes it; bends receives h'' of those rows and 0 for others. Every pass
    reads the head's keys from L2, since the programs of a head run at the same time.
    """
    bh, number, count = own_rows(x, fallback, C)
    if number * C.BM >= count:
        return
    block, all_tiles = open_rows(x, fallback, bh, number, count, C)
    whole, seen, every = all_tiles
    head, i, beta, fill = block.head, block.i, block.beta, block.fill
    q = load_tile(head.q, i, head.Lq, True, C.D, C.BD)
    zero = tl.zeros([C.BM], tl.float32)
    unfinished = 1
    while unfinished > 0:
        tiles = Tiles(whole, seen, every)
        entries = tl.maximum(seen * C.BN, 1).to(tl.float32)
        if BOUNDED:
            m = tl.load(reference + block.at, mask=i < head.Lq, other=0.0)
            lo = tl.load(shift + block.at, mask=i < head.Lq, other=-1.0)
            dead = i >= head.last_row
            # A row with NaN or inf has no threshold to search for.
            idle = dead | (tl.abs(m) == POS_INF) | (m != m)
        else:
            top = tl.full([C.BM, C.BN], NEG_INF, tl.float32)
            top = _maxima(top, q, block, tiles, Row(block.factor, block.am1, zero, fill), C)
            m, dead, idle = row_maxima(top, i, head)
            lo = class_bound(top - m[:, None], beta, C.KIND, 4)
        row = Row(block.factor, block.am1, m, fill - m)
        d, lo, hi, old = bracket(lo, entries, beta)
        bend = entries * beta
        rough = 0
        if C.KIND <= 0:
            fits = (tl.min(beta, 0) >= LEAST_POWER) & (tl.max(beta, 0) <= MOST_POWER)
            rough = tl.where(fits & (whole >= SAMPLE * SAMPLE), 1, 0)
            if rough != 0:
                d, bend = _rough(d, lo, hi, idle, bend, q, block, tiles, row, C)
            else:
                d = _sampled(d, lo, hi, entries, q, block, whole, row, C)
        elif C.KIND != 2:
            d = _sampled(d, lo, hi, entries, q, block, whole, row, C)
        turn = 0
        searching = 1
        if DEFER:
            searching = 1 - rough
            bend_or_none = tl.where(rough > 0, tl.maximum(bend, 1e-30), 0.0)
            tl.store(bends + block.at, bend_or_none, mask=i < head.Lq)
        while searching > 0:
            f, g = _sums(d, q, block, tiles, row, C)
            d, rest, lo, hi, old = step(d, f, g, lo, hi, old, bend, turn, beta, C.KIND)
            far = (rest > EXACT_SUM) & (idle == 0)
            if C.KIND <= 0:
                # The bend of a cubic is valid only where the cubic is accurate.
                first = tl.where(turn == 0, rough, 0) > 0
                far = tl.where(first, far | ((tl.abs(f - 1.0) > NEAR) & (idle == 0)), far)
            turn += 1
            searching = tl.max(far.to(tl.int32), 0)
            if turn >= TURNS:
                searching = 0
        tl.store(reference + block.at, m, mask=i < head.Lq)
        tl.store(shift + block.at, tl.where(dead, POS_INF, d), mask=i < head.Lq)
        unfinished = 0
        if C.CAUSAL and C.FINITE_FILL:
            # The score of a key after the diagonal is `fill`: include these keys if it exceeds the threshold.
            low = (dead | (d < fill - m)) & (i < head.last_row)
            unfinished = tl.where(seen < every, tl.max(low.to(tl.int32), 0), 0)
            seen = every


@relaunched
@triton.jit
def _output_kernel(
    x, out, reference, shift, bends, fallback,
    REFINE: tl.constexpr, CAREFUL: tl.constexpr, EXACT_SUM: tl.constexpr, DEFERRED: tl.constexpr,
    SOLVE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A program computes BM rows of out from their thresholds.

    REFINE: shift gets one more Newton step, from the sums of this pass, for a backward. DEFERRED: skip
    blocks with an unfinished search (bends > 0); with SOLVE skip all others, and finish the search. The last
    steps of a search move a threshold by 0.001 of the row's range, so that a first-order correction of p suffices.
    """
    bh, number, count = own_rows(x, fallback, C)
    if number * C.BM >= count:
        return
    block, tiles = open_rows(x, fallback, bh, number, count, C)
    whole, seen, every = tiles
    head, i, beta, at = block.head, block.i, block.beta, block.at
    q = load_tile(head.q, i, head.Lq, True, C.D, C.BD)
    m = tl.load(reference + at, mask=i < head.Lq, other=0.0)
    d = tl.load(shift + at, mask=i < head.Lq, other=POS_INF)
    dead = d == POS_INF
    if DEFERRED:
        bend = tl.load(bends + at, mask=i < head.Lq, other=0.0)
        if (tl.max(bend, 0) > 0.0) != SOLVE:
            return
    row = Row(block.factor, block.am1, m, block.fill - m)
    if C.CAUSAL and C.FINITE_FILL:
        seen = tl.where(tl.max((d < row.fill).to(tl.int32), 0) > 0, every, seen)
    tiles = Tiles(whole, seen, every)
    wide = tl.zeros([C.BM, C.BDV], tl.float32)
    none = tl.zeros([C.BM, C.LANES], tl.float32)
    acc = wide
    f = tl.zeros([C.BM], tl.float32)
    if SOLVE:
        # Only rows with beta > 1 are deferred.
        OVER: tl.constexpr = HARDWARE_OVER_1 if C.KIND == -1 else C.KIND
        more = wide
        g = f
        change = f
        turn = 0
        searching = 1
        while searching > 0:
            d = tl.where(dead, d, tl.maximum(d + change, -1.0))
            acc, more, f, g = _outputs(
                wide, wide, d, q, block, tiles, row, OVER, True, False, True, C
            )
            norm = root(f, beta, OVER)
            # A Newton step. h is convex for the powers of deferred rows, so that no bracket is needed.
            change = (norm - 1.0) * f / (norm * g)
            far = (0.5 * bend * change * change > EXACT_SUM) | (tl.abs(f - 1.0) > NEAR)
            turn += 1
            # In a row with NaN, `change` is NaN.
            far = far & (dead == 0) & (change == change)
            searching = tl.where(turn < TURNS, tl.max(far.to(tl.int32), 0), 0)
        acc -= (beta * change)[:, None] * more
        f -= beta * change * g
        better = d + change
        tl.store(shift + at, tl.where(dead | (change != change), d, better), mask=i < head.Lq)
    else:
        acc, _more, f, g = _outputs(
            wide, wide if CAREFUL else none, d, q, block, tiles, row, C.KIND, REFINE, CAREFUL, False, C
        )  # fmt: skip
        if REFINE:
            better = newton(d, f, g, beta, C.KIND)
            tl.store(shift + at, tl.where(dead, d, better), mask=i < head.Lq)
    # sum p is 1 only up to rounding: normalise.
    acc = tl.where(dead[:, None], 0.0, acc / f[:, None])
    store_tile(out, at, acc, i < head.Lq, C.DV, C.BDV)


def forward_blocks(
    problem: Problem,
    out: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
    fallback: FallbackRows | None,
    training: bool,
) -> None:
    """Write out [B, H, Lq, Dv], reference and shift fp32 [B, H, Lq]; tau = reference + shift.

    With `fallback`, only those rows are computed. Their reference and shift already hold the maximum and a lower bound
    of the shift, unless a fill or a bias may raise keys that the lists did not contain.
    """
    x = problem.operands()
    tile = tile_for(problem, "threshold")
    C = problem.fixed(tile, fallback)
    size = problem.q.element_size()
    # A causal row needs its threshold to decide whether a finite fill exceeds it.
    defer = (
        problem.kind <= 0
        and size == 2
        and not (problem.causal and problem.finite_fill)
        and max(problem.width, problem.value_width) <= 128  # two sums of the output's size
        and problem.k.shape[2] >= tile.keys * SAMPLE.value**2
    )
    bends = torch.empty_like(shift) if defer else shift
    _threshold_kernel[(problem.heads * triton.cdiv(x.Lq, tile.rows),)](
        x, reference, shift, bends, fallback, EXACT_SUM=EXACT[size], DEFER=defer,
        BOUNDED=fallback is not None and not problem.finite_fill and problem.bias is None,
        C=C, **tile.options(),
    )  # fmt: skip
    for solve in (False, True)[: 1 + defer]:
        tile = tile_for(problem, "solve" if solve else "output")
        C = problem.fixed(tile, fallback, 1 if solve else None)
        _output_kernel[(problem.heads * triton.cdiv(x.Lq, tile.rows),)](
            x, out, reference, shift, bends, fallback, REFINE=training, CAREFUL=size == 4,
            EXACT_SUM=EXACT[size], DEFERRED=defer, SOLVE=solve,
            C=C, **tile.options(),
        )  # fmt: skip
