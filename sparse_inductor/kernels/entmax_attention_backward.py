"""Entmax attention backward by passes over blocks, from the saved threshold; deterministic.

With u = max((alpha - 1) z - tau, 0), beta = 1 / (alpha - 1), p = u^beta, g = u^(beta - 1) and
dp = dO v^T:

    dz    = g * (dp - delta),  delta = sum_j g dp / sum_j g
    dq    = scale * dz k,  dk = scale * dz^T q,  dv = p^T dO,  dbias = dz
    dalpha = sum_j dp * ((p - g / sum g) / (alpha - 1)^2 - (S - g sum S / sum g) / (alpha - 1)),
    S = p log p

delta is not the row sum of dO * O, as it is for softmax (g is p only where alpha -> 1), so the dq
pass sums g * (dp - guess) k and g k, and subtracts once the row is through. The guess, dO . O, keeps
the difference from cancelling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .entmax_attention_problem import (
    Left,
    Problem,
    Tile,
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
from .entmax_attention_tau import LN2, clip, log_entries, powers
from .launch import relaunched

__all__ = ["bias_gradient", "keys_blocks", "rows_blocks"]

POS_INF = tl.constexpr(float("inf"))


@triton.jit
def _narrow(x, like):
    """x in the dtype of `like`; u^(beta - 1) has no upper bound for alpha > 2, fp16 has."""
    if like.dtype == tl.float16:
        x = tl.clamp(x, -65504.0, 65504.0)
    return x.to(like.dtype)


@triton.jit
def _rows_pass(
    sums, qt, do, guess, d, beta, keys, values, i, row, side, ends, first, last,
    EDGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr,
    FINITE_FILL: tl.constexpr, ADDED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    WANT_ALPHA: tl.constexpr, LANES: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add to sums = (g dp k, g k, g dp, g, and for dalpha p dp, p dp log2 u, p log2 u) over key tiles."""
    k, stride_kl, stride_kd = keys
    v, stride_vl, stride_vd = values
    last_row, last_key, diagonal = ends
    gdpk, gk, gdp, gs, pdp, sdp, s = sums
    for n in tl.range(first, last, num_stages=STAGES):
        j = n * BN + tl.arange(0, BN)
        kt = load_tile(k, j, stride_kl, last_key, stride_kd, EDGE, D, BD)
        x, kept = row_scores(
            qt, kt, i, j, row, side, last_row, last_key, diagonal,
            EDGE, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN,
        )  # fmt: skip
        if WANT_ALPHA:
            u, ulog = log_entries(x, d[:, None], KIND)
        else:
            u = clip(x, d[:, None])
        _p, g = powers(u, beta[:, None], KIND)
        vt = load_tile(v, j, stride_vl, last_key, stride_vd, EDGE, DV, BDV)
        dp = product(do, tl.trans(vt), PRECISION, WIDEN) - guess[:, None]
        w = g * dp
        gdp += lane_sums(w, LANES)
        gs += lane_sums(g, LANES)
        if WANT_ALPHA:
            # p = g u, and S is log p = beta log u of that: what is the same in a row is for the end.
            pdp += lane_sums(w * u, LANES)
            sdp += lane_sums(w * ulog, LANES)
            s += lane_sums(g * ulog, LANES)
        if FINITE_FILL and not ADDED:
            w = tl.where(kept, w, 0.0)
            g = tl.where(kept, g, 0.0)
        gdpk = add_product(_narrow(w, kt), kt, gdpk, PRECISION, WIDEN)
        gk = add_product(_narrow(g, kt), kt, gk, PRECISION, WIDEN)
    return gdpk, gk, gdp, gs, pdp, sdp, s


@relaunched
@triton.jit
def _rows_kernel(
    q, k, v, bias, mask, alpha, query_lengths, key_lengths,
    sqb, sqh, sql, sqd, skb, skh, skl, skd, svb, svh, svl, svd,
    sbb, sbh, sbl, sbk, smb, smh, sml, smk, sab, sah, sal,
    H, G, Lq, Lk, am1_value, scale, fill_value,
    out, grad, reference, shift, left, earlier, dq, delta, dalpha, sgb, sgh, sgl, sgd,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ALPHA: tl.constexpr,
    HAS_QLEN: tl.constexpr, HAS_KLEN: tl.constexpr, CAUSAL: tl.constexpr,
    FINITE_FILL: tl.constexpr, ADDED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    WANT_ALPHA: tl.constexpr, LANES: tl.constexpr, LEFT_ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns dq[b, h, i0:i0 + BM], delta of its rows and, if wanted, dalpha of each row."""
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
    at_row = bh.to(tl.int64) * Lq + i
    m = tl.load(reference + at_row, mask=i < Lq, other=0.0)
    d = tl.load(shift + at_row, mask=i < Lq, other=POS_INF)
    fill = dropped_score(am1, fill_value, FINITE_FILL) - m
    row = (factor, am1, m, fill)
    side = (bias + b * sbb + h * sbh, sbl, sbk, mask + b * smb + h * smh, sml, smk)
    keys = (k + k_at, skl, skd)
    values = (v + v_at, svl, svd)
    qt = load_tile(q + q_at, i, sql, Lq, sqd, True, D, BD)
    do = load_tile(grad + b * sgb + h * sgh, i, sgl, Lq, sgd, True, DV, BDV)
    o = load_tile(out + bh.to(tl.int64) * Lq * DV, i, DV, Lq, 1, True, DV, BDV)
    guess = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)

    whole, tiles, every = key_tiles(first_row, end_row, last_key, diagonal, CAUSAL, BN)
    if CAUSAL and FINITE_FILL:
        tiles = tl.where(tl.max((d < fill).to(tl.int32), 0) > 0, every, tiles)
    zero = tl.zeros([BM, LANES], tl.float32)
    wide = tl.zeros([BM, BD], tl.float32)
    sums = (wide, wide, zero, zero, zero, zero, zero)
    sums = _rows_pass(
        sums, qt, do, guess, d, beta, keys, values, i, row, side, ends, 0, whole,
        False, D, DV, BD, BDV, KIND, HAS_BIAS, HAS_MASK, CAUSAL, FINITE_FILL, ADDED, PRECISION,
        WIDEN, WANT_ALPHA, LANES, BN, STAGES,
    )  # fmt: skip
    gdpk, gk, gdp, gs, pdp, sdp, s = _rows_pass(
        sums, qt, do, guess, d, beta, keys, values, i, row, side, ends, whole, tiles,
        True, D, DV, BD, BDV, KIND, HAS_BIAS, HAS_MASK, CAUSAL, FINITE_FILL, ADDED, PRECISION,
        WIDEN, WANT_ALPHA, LANES, BN, STAGES,
    )  # fmt: skip
    dead = d == POS_INF
    rest = tl.where(dead, 0.0, tl.sum(gdp, 1) / tl.sum(gs, 1))
    tl.store(delta + at_row, guess + rest, mask=i < Lq)
    x = (gdpk - rest[:, None] * gk) * scale
    dd = tl.arange(0, BD)
    inside = (i < Lq)[:, None] & (dd < D)[None, :]
    tl.store(dq + at_row[:, None] * D + dd[None, :], x.to(dq.dtype.element_ty), mask=inside)
    if WANT_ALPHA:
        da = tl.sum(pdp, 1) - rest - (tl.sum(sdp, 1) - rest * tl.sum(s, 1)) * LN2
        da = da / (am1 * am1)
        tl.store(dalpha + at_row, tl.where(dead, 0.0, da), mask=i < Lq)


@triton.jit
def _row_numbers(base, i, limit, other, EDGE: tl.constexpr):
    """A number of each row i [M]; at an EDGE `other` from row `limit` on."""
    if EDGE:
        return tl.load(base + i, mask=i < limit, other=other)
    else:
        return tl.load(base + i)


@triton.jit
def _keys_pass(
    dk, dv, kt, vt, j, queries, grads, stats, row_source, side, ends, left, first, last,
    EDGE: tl.constexpr, ONLY_LOW: tl.constexpr, LISTED: tl.constexpr, EVEN: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ALPHA: tl.constexpr,
    CAUSAL: tl.constexpr, FINITE_FILL: tl.constexpr, ADDED: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add to dk / scale and dv over query tiles first:last.

    EDGE: a tile may cross the diagonal or the end of the keys. ONLY_LOW: skip tiles without a row
    whose threshold lies under `fill`, all keys of which are after the diagonal here. LISTED:
    first:last count tiles of the rows that `left` = (rows, how many) names. EVEN: no tile, other than of
    such, crosses the end of the rows.
    """
    q, stride_ql, stride_qd = queries
    grad, stride_gl, stride_gd = grads
    reference, shift, delta = stats
    alpha, stride_al, am1_value, scale, fill_value = row_source
    last_row, last_key, diagonal = ends
    SOME: tl.constexpr = LISTED or not EVEN
    for n in tl.range(first, last, num_stages=STAGES):
        i = n * BM + tl.arange(0, BM)
        if LISTED:
            i = tl.load(left[0] + i, mask=i < left[1], other=last_row)
        factor, am1, beta = row_constants(
            alpha, stride_al, i, last_row, am1_value, scale, HAS_ALPHA, SOME
        )
        m = _row_numbers(reference, i, last_row, 0.0, SOME)
        d = _row_numbers(shift, i, last_row, POS_INF, SOME)
        fill = dropped_score(am1, fill_value, FINITE_FILL) - m
        wanted = 1
        if ONLY_LOW:
            wanted = tl.max((d < fill).to(tl.int32), 0)
        if wanted > 0:
            mean = _row_numbers(delta, i, last_row, 0.0, SOME)
            qt = load_tile(q, i, stride_ql, last_row, stride_qd, SOME, D, BD)
            do = load_tile(grad, i, stride_gl, last_row, stride_gd, SOME, DV, BDV)
            x, kept = row_scores(
                qt, kt, i, j, (factor, am1, m, fill), side, last_row, last_key, diagonal,
                EDGE, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN,
            )  # fmt: skip
            p, g = powers(clip(x, d[:, None]), beta[:, None], KIND)
            dv = add_product(tl.trans(p.to(do.dtype)), do, dv, PRECISION, WIDEN)
            dz = g * (product(do, tl.trans(vt), PRECISION, WIDEN) - mean[:, None])
            if FINITE_FILL and not ADDED:
                dz = tl.where(kept, dz, 0.0)
            dk = add_product(tl.trans(_narrow(dz, qt)), qt, dk, PRECISION, WIDEN)
    return dk, dv


@triton.jit
def _head_pass(
    dk, dv, kt, vt, j, head_data, spread, start, plain, rows,
    LISTED: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_ALPHA: tl.constexpr, CAUSAL: tl.constexpr, FINITE_FILL: tl.constexpr, ADDED: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add one head to dk / scale and dv: query tiles start:plain have an edge, plain:rows none."""
    queries, grads, stats, source, side, ends, left = head_data
    if CAUSAL and FINITE_FILL:
        dk, dv = _keys_pass(
            dk, dv, kt, vt, j, queries, grads, stats, source, side, ends, left,
            0, tl.where(spread != 0, start, 0), True, True, LISTED, EVEN, D, DV, BD, BDV, KIND,
            HAS_BIAS, HAS_MASK, HAS_ALPHA, CAUSAL, FINITE_FILL, ADDED, PRECISION, WIDEN, BM, 1,
        )  # fmt: skip
    dk, dv = _keys_pass(
        dk, dv, kt, vt, j, queries, grads, stats, source, side, ends, left,
        start, plain, True, False, LISTED, EVEN, D, DV, BD, BDV, KIND,
        HAS_BIAS, HAS_MASK, HAS_ALPHA, CAUSAL, FINITE_FILL, ADDED, PRECISION, WIDEN, BM, STAGES,
    )  # fmt: skip
    return _keys_pass(
        dk, dv, kt, vt, j, queries, grads, stats, source, side, ends, left,
        plain, rows, False, False, LISTED, EVEN, D, DV, BD, BDV, KIND,
        HAS_BIAS, HAS_MASK, HAS_ALPHA, CAUSAL, FINITE_FILL, ADDED, PRECISION, WIDEN, BM, STAGES,
    )  # fmt: skip


@relaunched
@triton.jit
def _keys_kernel(
    q, k, v, bias, mask, alpha, query_lengths, key_lengths,
    sqb, sqh, sql, sqd, skb, skh, skl, skd, svb, svh, svl, svd,
    sbb, sbh, sbl, sbk, smb, smh, sml, smk, sab, sah, sal,
    H, G, Lq, Lk, am1_value, scale, fill_value,
    grad, reference, shift, delta, low, left, earlier, dk, dv, sgb, sgh, sgl, sgd,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ALPHA: tl.constexpr,
    HAS_QLEN: tl.constexpr, HAS_KLEN: tl.constexpr, CAUSAL: tl.constexpr,
    FINITE_FILL: tl.constexpr, ADDED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    LEFT_ROWS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns dk and dv[b, hkv, j0:j0 + BN], over the rows of all heads that read them.

    low[b, h] tells whether some row of the head has its threshold under `fill`, so that keys after
    the diagonal receive a gradient too. LEFT_ROWS: only the rows left[b, h], the first
    earlier[b, h, t] of which come before block t; dk and dv of a key head without any are not written.
    """
    blocks = tl.cdiv(Lk, BN)
    bg = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    j = block * BN + tl.arange(0, BN)
    groups = H // G
    b = bg // groups
    hkv = bg % groups
    chosen = 0
    row_blocks = tl.cdiv(Lq, LEFT_ROWS) if LEFT_ROWS > 0 else 0
    if LEFT_ROWS > 0:
        for head in range(G):
            bh = b.to(tl.int64) * H + hkv * G + head
            chosen += tl.load(earlier + bh * (row_blocks + 1) + row_blocks)
    if LEFT_ROWS > 0 and chosen == 0:
        return
    last_key = Lk
    if HAS_KLEN:
        last_key = tl.minimum(Lk, tl.load(key_lengths + b).to(tl.int32))
    diagonal = Lk - Lq
    ends = (Lq, last_key, diagonal)
    key_at = b.to(tl.int64) * skb + hkv.to(tl.int64) * skh
    value_at = b.to(tl.int64) * svb + hkv.to(tl.int64) * svh
    kt = load_tile(k + key_at, j, skl, last_key, skd, True, D, BD)
    vt = load_tile(v + value_at, j, svl, last_key, svd, True, DV, BDV)
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BDV], tl.float32)
    rows = tl.cdiv(Lq, BM)
    if block * BN >= last_key:
        rows = 0
    start = 0
    plain = 0  # first query tile wholly before the diagonal
    if CAUSAL:
        start = tl.minimum(tl.maximum(block * BN - diagonal, 0) // BM, rows)
        plain = tl.maximum(block * BN + BN - 1 - diagonal, 0)
        plain = tl.maximum(tl.minimum(tl.cdiv(plain, BM), rows), start)
    if block * BN + BN > last_key:
        plain = rows
    for head in range(G):
        h = (hkv * G + head).to(tl.int64)
        bh = b.to(tl.int64) * H + h
        first, middle, final = start, plain, rows
        here = 0
        if LEFT_ROWS > 0:
            before = earlier + bh * (row_blocks + 1)
            first = tl.load(before + start * BM // LEFT_ROWS) // BM
            middle = tl.minimum(tl.cdiv(plain * BM, LEFT_ROWS), row_blocks)
            middle = tl.cdiv(tl.load(before + middle), BM)
            final = tl.minimum(tl.cdiv(rows * BM, LEFT_ROWS), row_blocks)
            final = tl.cdiv(tl.load(before + final), BM)
            first = tl.minimum(first, final)
            middle = tl.maximum(tl.minimum(middle, final), first)
            here = tl.load(before + row_blocks)
        mine = (left + bh * Lq, here)
        queries = (q + b * sqb + h * sqh, sql, sqd)
        grads = (grad + b * sgb + h * sgh, sgl, sgd)
        stats = (reference + bh * Lq, shift + bh * Lq, delta + bh * Lq)
        source = (alpha + b * sab + h * sah, sal, am1_value, scale, fill_value)
        side = (bias + b * sbb + h * sbh, sbl, sbk, mask + b * smb + h * smh, sml, smk)
        spread = 0
        if CAUSAL and FINITE_FILL:
            spread = tl.load(low + bh).to(tl.int32)
        head_data = (queries, grads, stats, source, side, ends, mine)
        if LEFT_ROWS > 0 and here < Lq:
            acc_k, acc_v = _head_pass(
                acc_k, acc_v, kt, vt, j, head_data, spread, first, middle, final,
                True, EVEN, D, DV, BD, BDV, KIND, HAS_BIAS, HAS_MASK, HAS_ALPHA, CAUSAL,
                FINITE_FILL, ADDED, PRECISION, WIDEN, BM, STAGES,
            )  # fmt: skip
        else:
            acc_k, acc_v = _head_pass(
                acc_k, acc_v, kt, vt, j, head_data, spread, start, plain, rows,
                False, EVEN, D, DV, BD, BDV, KIND, HAS_BIAS, HAS_MASK, HAS_ALPHA, CAUSAL,
                FINITE_FILL, ADDED, PRECISION, WIDEN, BM, STAGES,
            )  # fmt: skip
    at = (bg.to(tl.int64) * Lk + j)[:, None]
    c = tl.arange(0, BD)
    inside = (j < Lk)[:, None] & (c < D)[None, :]
    acc_k = acc_k * scale
    tl.store(dk + at * D + c[None, :], acc_k.to(dk.dtype.element_ty), mask=inside)
    c = tl.arange(0, BDV)
    inside = (j < Lk)[:, None] & (c < DV)[None, :]
    tl.store(dv + at * DV + c[None, :], acc_v.to(dv.dtype.element_ty), mask=inside)


@relaunched
@triton.jit
def _bias_kernel(
    q, k, v, bias, mask, alpha, query_lengths, key_lengths,
    sqb, sqh, sql, sqd, skb, skh, skl, skd, svb, svh, svl, svd,
    sbb, sbh, sbl, sbk, smb, smh, sml, smk, sab, sah, sal,
    H, G, Lq, Lk, am1_value, scale, fill_value,
    grad, reference, shift, delta, dbias, sgb, sgh, sgl, sgd, B,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ALPHA: tl.constexpr,
    HAS_QLEN: tl.constexpr, HAS_KLEN: tl.constexpr, CAUSAL: tl.constexpr,
    FINITE_FILL: tl.constexpr, ADDED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    OVER_B: tl.constexpr, OVER_H: tl.constexpr, OVER_ROWS: tl.constexpr, OVER_KEYS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program owns a tile of dbias and sums dz over the dimensions that bias is broadcast over."""
    row_blocks = 1 if OVER_ROWS else tl.cdiv(Lq, BM)
    key_blocks = 1 if OVER_KEYS else tl.cdiv(Lk, BN)
    pid = tl.program_id(0)
    key_block = pid % key_blocks
    row_block = pid // key_blocks % row_blocks
    head = pid // key_blocks // row_blocks
    H_out = 1 if OVER_H else H
    b0 = head // H_out
    h0 = head % H_out
    diagonal = Lk - Lq
    acc = tl.zeros([BM, BN], tl.float32)
    for bi in range(B if OVER_B else 1):
        for hi in range(H if OVER_H else 1):
            b = (b0 + bi).to(tl.int64)
            h = (h0 + hi).to(tl.int64)
            bh = b * H + h
            last_key = Lk
            if HAS_KLEN:
                last_key = tl.minimum(Lk, tl.load(key_lengths + b).to(tl.int32))
            side = (bias + b * sbb + h * sbh, sbl, sbk, mask + b * smb + h * smh, sml, smk)
            for ri in range(tl.cdiv(Lq, BM) if OVER_ROWS else 1):
                i = (row_block + ri) * BM + tl.arange(0, BM)
                factor, am1, beta = row_constants(
                    alpha + b * sab + h * sah, sal, i, Lq, am1_value, scale, HAS_ALPHA
                )
                m = tl.load(reference + bh * Lq + i, mask=i < Lq, other=0.0)
                d = tl.load(shift + bh * Lq + i, mask=i < Lq, other=POS_INF)
                mean = tl.load(delta + bh * Lq + i, mask=i < Lq, other=0.0)
                row = (factor, am1, m, dropped_score(am1, fill_value, FINITE_FILL) - m)
                qt = load_tile(q + b * sqb + h * sqh, i, sql, Lq, sqd, True, D, BD)
                do = load_tile(grad + b * sgb + h * sgh, i, sgl, Lq, sgd, True, DV, BDV)
                for ki in range(tl.cdiv(Lk, BN) if OVER_KEYS else 1):
                    j = (key_block + ki) * BN + tl.arange(0, BN)
                    kt = load_tile(k + b * skb + (h // G) * skh, j, skl, last_key, skd, True, D, BD)
                    x, kept = row_scores(
                        qt, kt, i, j, row, side, Lq, last_key, diagonal,
                        True, HAS_BIAS, HAS_MASK, CAUSAL, PRECISION, WIDEN,
                    )  # fmt: skip
                    vt = load_tile(
                        v + b * svb + (h // G) * svh, j, svl, last_key, svd, True, DV, BDV
                    )
                    _, g = powers(clip(x, d[:, None]), beta[:, None], KIND)
                    dz = g * (product(do, tl.trans(vt), PRECISION, WIDEN) - mean[:, None])
                    if not ADDED:
                        dz = tl.where(kept, dz, 0.0)
                    acc += dz
    i = row_block * BM + tl.arange(0, BM)
    j = key_block * BN + tl.arange(0, BN)
    rows = 1 if OVER_ROWS else Lq
    columns = 1 if OVER_KEYS else Lk
    if OVER_ROWS:
        acc = tl.sum(acc, 0)[None, :]
        i = tl.zeros([1], tl.int32)
    if OVER_KEYS:
        acc = tl.sum(acc, 1)[:, None]
        j = tl.zeros([1], tl.int32)
    at = (head.to(tl.int64) * rows + i)[:, None] * columns + j[None, :]
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(dbias + at, acc.to(dbias.dtype.element_ty), mask=inside)


def _low_heads(problem: Problem, reference: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Whether a row of each head has its threshold under `fill`, uint8 [B, H]."""
    if problem.alpha is None:
        am1 = reference.new_full((), problem.alpha_value - 1.0)  # fp32, to round as the kernels do
    else:
        am1 = problem.alpha[..., 0] - 1.0
    low = (am1 * problem.fill).clamp_min(torch.finfo(torch.float32).min)
    return (shift < low - reference).any(-1).view(torch.uint8)


def rows_blocks(
    problem: Problem,
    grad: torch.Tensor,
    out: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
    left: Left | None,
    dq: torch.Tensor,
    delta: torch.Tensor,
    dalpha: torch.Tensor | None,
) -> None:
    """Fill dq, delta and, if given, dalpha (fp32 [B, H, Lq]); with `left` only its rows."""
    tile = tile_for(problem, "rows")
    rows = (shift, shift) if left is None else left[:2]
    _rows_kernel[(problem.heads * triton.cdiv(problem.q.shape[2], tile.rows),)](
        *problem.operands(), out, grad, reference, shift, *rows, dq, delta,
        delta if dalpha is None else dalpha, *grad.stride(),
        **problem.constants(), ADDED=problem.added_fill, WANT_ALPHA=dalpha is not None, LANES=problem.lanes,
        LEFT_ROWS=0 if left is None else left.block,
        BM=tile.rows, BN=tile.keys, STAGES=tile.stages, **tile.options(),
    )  # fmt: skip


def keys_blocks(
    problem: Problem,
    grad: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    left: Left | None,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Fill dk and dv; with `left` from its rows, and only key heads that have one."""
    low = delta
    if problem.causal and problem.finite_fill:
        low = _low_heads(problem, reference, shift)
    rows = (delta, delta) if left is None else left[:2]
    k = problem.k
    tile = tile_for(problem, "keys")
    _keys_kernel[(k.shape[0] * k.shape[1] * triton.cdiv(k.shape[2], tile.keys),)](
        *problem.operands(), grad, reference, shift, delta, low, *rows, dk, dv,
        *grad.stride(), **problem.constants(), ADDED=problem.added_fill,
        LEFT_ROWS=0 if left is None else left.block, EVEN=problem.q.shape[2] % tile.rows == 0,
        BM=tile.rows, BN=tile.keys, STAGES=tile.stages, **tile.options(),
    )  # fmt: skip


def bias_gradient(
    problem: Problem,
    like: torch.Tensor,
    grad: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
) -> torch.Tensor:
    """dbias in the shape and dtype of `like`, the bias before it was expanded."""
    B, H, Lq, Lk = (problem.q.shape[0], problem.q.shape[1], problem.q.shape[2], problem.k.shape[2])
    dbias = torch.empty(like.shape, device=like.device, dtype=like.dtype)
    over = [full != 1 and size == 1 for full, size in zip((B, H, Lq, Lk), like.shape)]
    tile: Tile = tile_for(problem, "bias")
    rows = 1 if over[2] else triton.cdiv(Lq, tile.rows)
    keys = 1 if over[3] else triton.cdiv(Lk, tile.keys)
    _bias_kernel[(like.shape[0] * like.shape[1] * rows * keys,)](
        *problem.operands(), grad, reference, shift, delta, dbias, *grad.stride(), B,
        **problem.constants(), ADDED=problem.added_fill,
        OVER_B=over[0], OVER_H=over[1], OVER_ROWS=over[2], OVER_KEYS=over[3],
        BM=tile.rows, BN=tile.keys, **tile.options(),
    )  # fmt: skip
    return dbias
