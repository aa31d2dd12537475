"""Entmax attention backward in passes over blocks, from the saved threshold; deterministic.

With u = max((alpha - 1) z - tau, 0), beta = 1 / (alpha - 1), p = u^beta, g = u^(beta - 1) and
dp = dO v^T:

    dz    = g * (dp - delta),  delta = sum_j g dp / sum_j g
    dq    = scale * dz k,  dk = scale * dz^T q,  dv = p^T dO,  dbias = dz
    dalpha = sum_j dp * ((p - g / sum g) / (alpha - 1)^2 - (S - g sum S / sum g) / (alpha - 1)),
    S = p log p

Unlike in softmax, delta is not the row sum of dO * O, because g is p only for alpha -> 1. The dq pass
therefore sums g * (dp - guess) k and g k, and subtracts (delta - guess) g k at the end of the row. The
guess dO . O avoids cancellation in the difference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched
from .problem import (
    FallbackRows,
    Problem,
    Row,
    Strided,
    Tiles,
    add_product,
    dropped_score,
    key_range,
    key_scores,
    lane_sums,
    load_tile,
    matrix,
    open_head,
    open_rows,
    own_rows,
    product,
    row_constants,
    store_tile,
    tile_for,
    tile_scores,
)
from .tau import LN2, POS_INF, clip, log_entries, powers


@triton.jit
def _narrow(x, like):
    """Convert x to the dtype of `like`, clamped to the range of fp16: u^(beta - 1) is unbounded for alpha > 2."""
    if like.dtype == tl.float16:
        x = tl.clamp(x, -65504.0, 65504.0)
    return x.to(like.dtype)


@relaunched
@triton.jit
def _rows_kernel(x, out, grad, reference, shift, fallback, dq, delta, dalpha, C: tl.constexpr):
    """A program computes BM rows of dq, delta and, unless it is None, dalpha."""
    bh, number, count = own_rows(x, fallback, C)
    if number * C.BM >= count:
        return
    block, tiles = open_rows(x, fallback, bh, number, count, C)
    whole, seen, every = tiles
    head, i, at = block.head, block.i, block.at
    last_row = head.Lq
    m = tl.load(reference + at, mask=i < last_row, other=0.0)
    d = tl.load(shift + at, mask=i < last_row, other=POS_INF)
    row = Row(block.factor, block.am1, m, block.fill - m)
    q = load_tile(head.q, i, last_row, True, C.D, C.BD)
    do_head = matrix(grad, (bh // x.H).to(tl.int64), (bh % x.H).to(tl.int64))
    do = load_tile(do_head, i, last_row, True, C.DV, C.BDV)
    o_head = matrix(out, (bh // x.H).to(tl.int64), (bh % x.H).to(tl.int64))
    o = load_tile(o_head, i, last_row, True, C.DV, C.BDV)
    guess = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    if C.CAUSAL and C.FINITE_FILL:
        seen = tl.where(tl.max((d < row.fill).to(tl.int32), 0) > 0, every, seen)
    # Sums of g dp k, g k, g dp, g, and for dalpha p dp, p dp log2 u, p log2 u.
    gdp = tl.zeros([C.BM, C.LANES], tl.float32)
    gs = gdp
    pdp = gdp
    sdp = gdp
    s = gdp
    gdpk = tl.zeros([C.BM, C.BD], tl.float32)
    gk = gdpk
    for EDGE in tl.static_range(2):
        first, last = key_range(Tiles(whole, seen, every), EDGE)
        for n in tl.range(first, last, num_stages=C.STAGES):
            j, k, scores, kept = key_scores(q, n, i, row, head, EDGE, C)
            if dalpha is not None:
                u, ulog = log_entries(scores, d[:, None], C.KIND)
            else:
                u = clip(scores, d[:, None])
            _p, g = powers(u, block.beta[:, None], C.KIND)
            v = load_tile(head.v, j, head.last_key, EDGE, C.DV, C.BDV)
            dp = product(do, tl.trans(v), C) - guess[:, None]
            w = g * dp
            gdp += lane_sums(w, C.LANES)
            gs += lane_sums(g, C.LANES)
            if dalpha is not None:
                # p = g u and S = p log p = p beta log u. Factors that are constant in a row are applied at the end.
                pdp += lane_sums(w * u, C.LANES)
                sdp += lane_sums(w * ulog, C.LANES)
                s += lane_sums(g * ulog, C.LANES)
            if C.FINITE_FILL and not C.ADDED:
                w = tl.where(kept, w, 0.0)
                g = tl.where(kept, g, 0.0)
            gdpk = add_product(_narrow(w, k), k, gdpk, C)
            gk = add_product(_narrow(g, k), k, gk, C)
    dead = d == POS_INF
    rest = tl.where(dead, 0.0, tl.sum(gdp, 1) / tl.sum(gs, 1))
    tl.store(delta + at, guess + rest, mask=i < last_row)
    dz_k = (gdpk - rest[:, None] * gk) * x.scale
    store_tile(dq, at, dz_k, i < last_row, C.D, C.BD)
    if dalpha is not None:
        da = tl.sum(pdp, 1) - rest - (tl.sum(sdp, 1) - rest * tl.sum(s, 1)) * LN2
        da = da / (block.am1 * block.am1)
        tl.store(dalpha + at, tl.where(dead, 0.0, da), mask=i < last_row)


class _Saved(NamedTuple):
    """Pointers for the rows of one head: reference and shift from the forward, delta from the pass over rows."""

    reference: Any
    shift: Any
    delta: Any


@triton.jit
def _row_numbers(base, i, limit, other, EDGE: tl.constexpr):
    """Load a number for each row i [M]; if EDGE, `other` from row `limit` on."""
    if EDGE:
        return tl.load(base + i, mask=i < limit, other=other)
    else:
        return tl.load(base + i)


@triton.jit
def _keys_pass(
    dk, dv, k, v, j, head, grad, saved, rows, count, first, last,
    EDGE: tl.constexpr, ONLY_LOW: tl.constexpr, LISTED: tl.constexpr, EVEN: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Add to dk / scale and dv over query tiles first:last.

    EDGE: a tile may cross the diagonal or the end of the keys. ONLY_LOW: all keys are after the
    diagonal; skip tiles in which no row has a threshold below `fill`. LISTED: first:last are tiles of
    the `count` rows listed in `rows`. EVEN: unless LISTED, no tile crosses the end of the rows.
    """
    last_row = head.Lq
    SOME: tl.constexpr = LISTED or not EVEN
    for n in tl.range(first, last, num_stages=1 if ONLY_LOW else C.STAGES):
        i = n * C.BM + tl.arange(0, C.BM)
        if LISTED:
            i = tl.load(rows + i, mask=i < count, other=last_row)
        factor, am1, beta = row_constants(head, i, C, SOME)
        m = _row_numbers(saved.reference, i, last_row, 0.0, SOME)
        d = _row_numbers(saved.shift, i, last_row, POS_INF, SOME)
        row = Row(factor, am1, m, dropped_score(am1, head.fill, C.FINITE_FILL) - m)
        wanted = 1
        if ONLY_LOW:
            wanted = tl.max((d < row.fill).to(tl.int32), 0)
        if wanted > 0:
            mean = _row_numbers(saved.delta, i, last_row, 0.0, SOME)
            q = load_tile(head.q, i, last_row, SOME, C.D, C.BD)
            do = load_tile(grad, i, last_row, SOME, C.DV, C.BDV)
            x, kept = tile_scores(q, k, i, j, row, head, EDGE, C)
            p, g = powers(clip(x, d[:, None]), beta[:, None], C.KIND)
            dv = add_product(tl.trans(p.to(do.dtype)), do, dv, C)
            dz = g * (product(do, tl.trans(v), C) - mean[:, None])
            if C.FINITE_FILL and not C.ADDED:
                dz = tl.where(kept, dz, 0.0)
            dk = add_product(tl.trans(_narrow(dz, q)), q, dk, C)
    return dk, dv


@triton.jit
def _head_pass(
    dk, dv, k, v, j, head, grad, saved, rows, count, spread, start, plain, end,
    LISTED: tl.constexpr, EVEN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add one head to dk / scale and dv. Query tiles start:plain have an edge, tiles plain:end have none."""
    if C.CAUSAL and C.FINITE_FILL:
        dk, dv = _keys_pass(
            dk, dv, k, v, j, head, grad, saved, rows, count, 0, tl.where(spread != 0, start, 0),
            True, True, LISTED, EVEN, C,
        )  # fmt: skip
    dk, dv = _keys_pass(
        dk, dv, k, v, j, head, grad, saved, rows, count, start, plain, True, False, LISTED, EVEN, C
    )  # fmt: skip
    return _keys_pass(
        dk, dv, k, v, j, head, grad, saved, rows, count, plain, end, False, False, LISTED, EVEN, C
    )  # fmt: skip


@relaunched
@triton.jit
def _keys_kernel(
    x, grad, reference, shift, delta, low, fallback, dk, dv, EVEN: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """A program computes dk and dv of BN keys, over the rows of all query heads that share the key head.

    low[b, h]: whether a row of the head has a threshold below `fill`, so that keys after the diagonal
    receive a gradient, too. FALLBACK_ROWS: include only fallback rows; dk and dv of a key head without
    such rows are not written.
    """
    Lq, Lk, G = x.Lq, x.Lk, x.G
    blocks = tl.cdiv(Lk, C.BN)
    bg = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    j = block * C.BN + tl.arange(0, C.BN)
    b = bg // (x.H // G)
    h0 = bg % (x.H // G) * G
    chosen = 0
    row_blocks = tl.cdiv(Lq, C.FALLBACK_ROWS) if C.FALLBACK_ROWS > 0 else 0
    if C.FALLBACK_ROWS > 0:
        for head_number in range(G):
            bh = bg * G + head_number
            chosen += tl.load(fallback.earlier + bh * (row_blocks + 1) + row_blocks)
    if C.FALLBACK_ROWS > 0 and chosen == 0:
        return
    head = open_head(x, b, h0)
    last_key, diagonal = head.last_key, head.diagonal
    k = load_tile(head.k, j, last_key, True, C.D, C.BD)
    v = load_tile(head.v, j, last_key, True, C.DV, C.BDV)
    acc_k = tl.zeros([C.BN, C.BD], tl.float32)
    acc_v = tl.zeros([C.BN, C.BDV], tl.float32)
    rows = tl.cdiv(Lq, C.BM)
    if block * C.BN >= last_key:
        rows = 0
    start = 0
    plain = 0  # first query tile with all of these keys before the diagonal
    if C.CAUSAL:
        start = tl.minimum(tl.maximum(block * C.BN - diagonal, 0) // C.BM, rows)
        plain = tl.maximum(block * C.BN + C.BN - 1 - diagonal, 0)
        plain = tl.maximum(tl.minimum(tl.cdiv(plain, C.BM), rows), start)
    if block * C.BN + C.BN > last_key:
        plain = rows
    for head_number in range(G):
        bh = (bg * G + head_number).to(tl.int64)
        h = (h0 + head_number).to(tl.int64)
        mine = open_head(x, b, h)
        first, middle, final = start, plain, rows
        here = 0
        listed = grad.start
        if C.FALLBACK_ROWS > 0:
            listed = fallback.rows + bh * Lq
            before = fallback.earlier + bh * (row_blocks + 1)
            first = tl.load(before + start * C.BM // C.FALLBACK_ROWS) // C.BM
            middle = tl.minimum(tl.cdiv(plain * C.BM, C.FALLBACK_ROWS), row_blocks)
            middle = tl.cdiv(tl.load(before + middle), C.BM)
            final = tl.minimum(tl.cdiv(rows * C.BM, C.FALLBACK_ROWS), row_blocks)
            final = tl.cdiv(tl.load(before + final), C.BM)
            first = tl.minimum(first, final)
            middle = tl.maximum(tl.minimum(middle, final), first)
            here = tl.load(before + row_blocks)
        do = matrix(grad, b.to(tl.int64), h)
        saved = _Saved(reference + bh * Lq, shift + bh * Lq, delta + bh * Lq)
        spread = 0
        if C.CAUSAL and C.FINITE_FILL:
            spread = tl.load(low + bh).to(tl.int32)
        if C.FALLBACK_ROWS > 0 and here < Lq:
            acc_k, acc_v = _head_pass(
                acc_k, acc_v, k, v, j, mine, do, saved, listed, here, spread, first, middle, final,
                True, EVEN, C,
            )  # fmt: skip
        else:
            acc_k, acc_v = _head_pass(
                acc_k, acc_v, k, v, j, mine, do, saved, listed, here, spread, start, plain, rows,
                False, EVEN, C,
            )  # fmt: skip
    at = bg.to(tl.int64) * Lk + j
    store_tile(dk, at, acc_k * x.scale, j < Lk, C.D, C.BD)
    store_tile(dv, at, acc_v, j < Lk, C.DV, C.BDV)


@relaunched
@triton.jit
def _bias_kernel(
    x, grad, reference, shift, delta, dbias, B,
    OVER_B: tl.constexpr, OVER_H: tl.constexpr, OVER_ROWS: tl.constexpr, OVER_KEYS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """A program computes a tile of dbias: sums of dz over the dimensions along which bias is broadcast."""
    Lq, Lk, H = x.Lq, x.Lk, x.H
    row_blocks = 1 if OVER_ROWS else tl.cdiv(Lq, C.BM)
    key_blocks = 1 if OVER_KEYS else tl.cdiv(Lk, C.BN)
    pid = tl.program_id(0)
    key_block = pid % key_blocks
    row_block = pid // key_blocks % row_blocks
    out = pid // key_blocks // row_blocks
    H_out = 1 if OVER_H else H
    b0 = out // H_out
    h0 = out % H_out
    acc = tl.zeros([C.BM, C.BN], tl.float32)
    for bi in range(B if OVER_B else 1):
        for hi in range(H if OVER_H else 1):
            b = (b0 + bi).to(tl.int64)
            h = (h0 + hi).to(tl.int64)
            head = open_head(x, b, h)
            do_head = matrix(grad, b, h)
            for ri in range(tl.cdiv(Lq, C.BM) if OVER_ROWS else 1):
                i = (row_block + ri) * C.BM + tl.arange(0, C.BM)
                at = (b * H + h) * Lq + i
                factor, am1, beta = row_constants(head, i, C)
                m = tl.load(reference + at, mask=i < Lq, other=0.0)
                d = tl.load(shift + at, mask=i < Lq, other=POS_INF)
                mean = tl.load(delta + at, mask=i < Lq, other=0.0)
                row = Row(factor, am1, m, dropped_score(am1, x.fill, C.FINITE_FILL) - m)
                q = load_tile(head.q, i, Lq, True, C.D, C.BD)
                do = load_tile(do_head, i, Lq, True, C.DV, C.BDV)
                for ki in range(tl.cdiv(Lk, C.BN) if OVER_KEYS else 1):
                    j, _k, scores, kept = key_scores(q, key_block + ki, i, row, head, True, C)
                    v = load_tile(head.v, j, head.last_key, True, C.DV, C.BDV)
                    _, g = powers(clip(scores, d[:, None]), beta[:, None], C.KIND)
                    dz = g * (product(do, tl.trans(v), C) - mean[:, None])
                    if not C.ADDED:
                        dz = tl.where(kept, dz, 0.0)
                    acc += dz
    i = row_block * C.BM + tl.arange(0, C.BM)
    j = key_block * C.BN + tl.arange(0, C.BN)
    rows = 1 if OVER_ROWS else Lq
    columns = 1 if OVER_KEYS else Lk
    if OVER_ROWS:
        acc = tl.sum(acc, 0)[None, :]
        i = tl.zeros([1], tl.int32)
    if OVER_KEYS:
        acc = tl.sum(acc, 1)[:, None]
        j = tl.zeros([1], tl.int32)
    at = (out.to(tl.int64) * rows + i)[:, None] * columns + j[None, :]
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(dbias + at, acc.to(dbias.dtype.element_ty), mask=inside)


def _low_heads(problem: Problem, reference: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return whether any row of a head has a threshold below `fill`, uint8 [B, H]."""
    if problem.alpha is None:
        am1 = reference.new_full((), problem.alpha_value - 1.0)  # fp32, to round like the kernels
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
    fallback: FallbackRows | None,
    dq: torch.Tensor,
    delta: torch.Tensor,
    dalpha: torch.Tensor | None,
) -> None:
    """Write dq, delta and, unless it is None, dalpha (fp32 [B, H, Lq]); with `fallback`, of those rows only."""
    tile = tile_for(problem, "rows")
    x = problem.operands()
    _rows_kernel[(problem.heads * triton.cdiv(x.Lq, tile.rows),)](
        x, Strided.of(out), Strided.of(grad), reference, shift, fallback, dq, delta, dalpha,
        C=problem.fixed(tile, fallback), **tile.options(),
    )  # fmt: skip


def keys_blocks(
    problem: Problem,
    grad: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    fallback: FallbackRows | None,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Write dk and dv; with `fallback`, from those rows only, and only for key heads that have any."""
    low = None
    if problem.causal and problem.finite_fill:
        low = _low_heads(problem, reference, shift)
    tile = tile_for(problem, "keys")
    x, k = problem.operands(), problem.k
    _keys_kernel[(k.shape[0] * k.shape[1] * triton.cdiv(x.Lk, tile.keys),)](
        x, Strided.of(grad), reference, shift, delta, low, fallback, dk, dv,
        EVEN=x.Lq % tile.rows == 0, C=problem.fixed(tile, fallback), **tile.options(),
    )  # fmt: skip


def bias_gradient(
    problem: Problem,
    like: torch.Tensor,
    grad: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
) -> torch.Tensor:
    """Return dbias in the shape and dtype of `like`, the bias before it was expanded."""
    x = problem.operands()
    B = problem.q.shape[0]
    dbias = torch.empty(like.shape, device=like.device, dtype=like.dtype)
    over = [full != 1 and size == 1 for full, size in zip((B, x.H, x.Lq, x.Lk), like.shape)]
    tile = tile_for(problem, "bias")
    rows = 1 if over[2] else triton.cdiv(x.Lq, tile.rows)
    keys = 1 if over[3] else triton.cdiv(x.Lk, tile.keys)
    _bias_kernel[(like.shape[0] * like.shape[1] * rows * keys,)](
        x, Strided.of(grad), reference, shift, delta, dbias, B,
        OVER_B=over[0], OVER_H=over[1], OVER_ROWS=over[2], OVER_KEYS=over[3],
        C=problem.fixed(tile), **tile.options(),
    )  # fmt: skip
    return dbias
