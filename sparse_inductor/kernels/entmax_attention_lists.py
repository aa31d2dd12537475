"""Entmax attention for peaked rows, second half: everything from the rows' candidate lists.

`entmax_attention_candidates` leaves each row with the few scores that can be in its support. Here
the threshold is solved on them, the values gathered, and in the backward the lists are turned into
lists of rows by key. Blocks of rows that were flagged are left to the block passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .entmax_attention_candidates import CAPACITY, KEYS, RECORD_BYTES, candidates_kernel
from .entmax_attention_problem import Problem, row_constants
from .entmax_attention_tau import class_bound, powers, step

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # a Triton without host descriptors: pointers
    TensorDescriptor = None

__all__ = [
    "SLOTS",
    "add_keys_from_lists",
    "applies",
    "block_rows",
    "forward_lists",
    "rows_backward",
]

NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))
SPREAD_NAN = tl.constexpr(tl.PropagateNan.ALL)
LN2 = tl.constexpr(0.6931471805599453)
# Entries a row: 2.5 times the support at which block passes take over. Half would send one row in a
# few thousand, and the 127 beside it, to them.
SLOTS = 64
# Fewer keys: the block passes' launches are the shorter ones.
MIN_KEYS = 1024
# Rows of a key that one warp sorts, with those of its neighbours, and that four warps sort. A key with
# more is searched for in the rows' lists.
SORTED = tl.constexpr(128)
LONG = tl.constexpr(1024)
# Programs of 128 threads a multiprocessor, and the registers a thread that lets them be.
RESIDENT, REGISTERS = 4, 128
EXACT = tl.constexpr(5e-7)
TURNS = tl.constexpr(64)


def block_rows(q: torch.Tensor) -> int:
    """Rows that share a flag."""
    return 128 if q.device.type == "cuda" else 16


def applies(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
) -> bool:
    """Whether candidate lists are tried: plain or causal scores, and Hopper on a GPU."""
    if q.device.type == "cuda":
        # 16-bit products of width 64 and 128 leave the accumulator in the layout that the lists
        # are built on.
        if torch.cuda.get_device_capability(q.device) != (9, 0) or q.element_size() != 2:
            return False
        if q.shape[3] not in (64, 128) or v.shape[3] > 128:
            return False
    elif q.shape[3] & (q.shape[3] - 1):
        return False
    B, H, Lq, _ = q.shape
    return (
        bias is None
        and mask is None
        and scale > 0
        and k.shape[2] >= MIN_KEYS
        # Row numbers within a batch element share 32 bits with a slot when a key's rows are sorted.
        and H * Lq < 2**24
        and B * H * max(Lq, k.shape[2]) < 2**31
    )


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=SPREAD_NAN)


@triton.jit
def _unpack(entry):
    """(column or row number, float) of an entry."""
    low = (entry & 0xFFFFFFFF).to(tl.int32)
    return (entry >> 32).to(tl.int32), low.to(tl.float32, bitcast=True)


@triton.jit
def _pack(number, value):
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (number.to(tl.int64) << 32) | bits


@triton.jit
def _finalize_kernel(
    v, alpha, sab, sah, sal, svb, svh, svl, svd,
    H, G, Lq, Lk, am1_value, scale,
    entries, counts, flags, key_counts, out, reference, shift,
    DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr, HAS_ALPHA: tl.constexpr,
    TRAINING: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, R: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """A program owns R rows: their threshold, out, and entries as column << 32 | bits of u.

    Reads and writes 8 bytes a candidate and gathers DV values for each of the support; counts each
    key's rows (integer atomics: the order does not matter).
    """
    blocks = tl.cdiv(Lq, R)
    bh = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * R + tl.arange(0, R)
    if tl.load(flags + bh * tl.cdiv(Lq, BM) + (tl.program_id(0) % blocks * R) // BM) != 0:
        return
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    factor, _am1, beta = row_constants(
        alpha + b * sab + h * sah, sal, i, Lq, am1_value, scale, HAS_ALPHA
    )
    row = bh.to(tl.int64) * Lq + i
    n = tl.load(counts + row, mask=i < Lq, other=0)
    key = (b * (H // G) + h // G) * Lk
    slot = tl.arange(0, SLOTS)
    live = slot[None, :] < n[:, None]
    at = entries + row[:, None] * SLOTS + slot[None, :]
    column, score = _unpack(tl.load(at, mask=live, other=0))
    score = tl.where(live, score, NEG_INF)
    best = tl.reduce(score, 1, _larger)
    dead = best == NEG_INF
    best = tl.where(dead, 0.0, best)
    x = (score - best[:, None]) * factor[:, None]
    zero = tl.zeros([R], tl.float32)
    lo = class_bound(x, zero - 1.0, beta, KIND, 3)
    lo = tl.maximum(lo - 1e-6, -1.0)
    size = tl.maximum(n, 1).to(tl.float32)
    hi = -tl.exp2(-tl.log2(size) / beta) + 1e-6
    d = tl.minimum(lo, hi)
    old = (d, zero + POS_INF, zero)
    turn = 0
    searching = 1
    while searching > 0:
        w, g = powers(
            tl.maximum(x - d[:, None], 0.0, propagate_nan=SPREAD_NAN), beta[:, None], KIND
        )
        d, rest, lo, hi, old = step(
            d, tl.sum(w, 1), tl.sum(g, 1), lo, hi, old, size, turn, beta, KIND
        )
        turn += 1
        searching = tl.max(((rest > EXACT) & (dead == 0)).to(tl.int32), 0)
        if turn >= TURNS:
            searching = 0
    u = tl.maximum(x - d[:, None], 0.0, propagate_nan=SPREAD_NAN)
    keep = (live & (u != 0.0)).to(tl.int32)
    place = tl.cumsum(keep, 1) - keep
    support = tl.sum(keep, 1)
    w, g = powers(u, beta[:, None], KIND)
    f = tl.sum(w, 1)
    tl.debug_barrier()
    to = entries + row[:, None] * SLOTS + place
    tl.store(to, _pack(column, u), mask=keep != 0)
    tl.store(counts + row, support, mask=i < Lq)
    tl.store(reference + row, best * factor, mask=i < Lq)
    tl.store(shift + row, tl.where(dead, POS_INF, d), mask=i < Lq)
    if TRAINING:
        tl.atomic_add(key_counts + key + column, 1, mask=keep != 0, sem="relaxed")
    tl.debug_barrier()
    dd = tl.arange(0, BDV)
    v_head = v + b * svb + (h // G) * svh
    acc = tl.zeros([R, BDV], tl.float32)
    for c in range(0, tl.max(support, 0), CHUNK):
        s = c + tl.arange(0, CHUNK)
        filled = s[None, :] < support[:, None]
        chosen, un = _unpack(
            tl.load(entries + row[:, None] * SLOTS + s[None, :], mask=filled, other=0)
        )
        p, _g = powers(un, beta[:, None], KIND)
        source = v_head + chosen.to(tl.int64)[:, :, None] * svl + dd[None, None, :] * svd
        some = filled[:, :, None] & (dd < DV)[None, None, :]
        values = tl.load(source, mask=some, other=0.0).to(tl.float32)
        acc += tl.sum(values * tl.where(filled, p, 0.0)[:, :, None], 1)
    acc = tl.where(dead[:, None], 0.0, acc / f[:, None])
    inside = (i < Lq)[:, None] & (dd < DV)[None, :]
    tl.store(out + row[:, None] * DV + dd[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rows_kernel(
    k, v, alpha, sab, sah, sal, skb, skh, skl, skd, svb, svh, svl, svd,
    H, G, Lq, Lk, am1_value, scale,
    entries, counts, flags, cursors, by_key, grad, sgb, sgh, sgl, sgd, dq, delta, dalpha,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr, WANT_ALPHA: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr,
    R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program owns dq, delta and dalpha of R rows, and files their entries under their keys.

    by_key takes row << 32 | bits of u at the place that the key's cursor names: in any order, the
    keys' kernel sorts. Gathers D + DV values for each entry.
    """
    blocks = tl.cdiv(Lq, R)
    bh = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * R + tl.arange(0, R)
    if tl.load(flags + bh * tl.cdiv(Lq, BM) + (tl.program_id(0) % blocks * R) // BM) != 0:
        return
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    _factor, am1, beta = row_constants(
        alpha + b * sab + h * sah, sal, i, Lq, am1_value, scale, HAS_ALPHA
    )
    row = bh.to(tl.int64) * Lq + i
    n = tl.load(counts + row, mask=i < Lq, other=0)
    dd = tl.arange(0, BD)
    de = tl.arange(0, BDV)
    inside = (i < Lq)[:, None] & (de < DV)[None, :]
    at = grad + b * sgb + h * sgh + i.to(tl.int64)[:, None] * sgl + de[None, :] * sgd
    do = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    k_head = k + b * skb + (h // G) * skh
    v_head = v + b * svb + (h // G) * svh
    key = (b * (H // G) + h // G) * Lk
    number = (h * Lq + i).to(tl.int32)
    gdpk = tl.zeros([R, BD], tl.float32)
    gk = tl.zeros([R, BD], tl.float32)
    gdp = tl.zeros([R], tl.float32)
    gs = tl.zeros([R], tl.float32)
    pdp = tl.zeros([R], tl.float32)
    sdp = tl.zeros([R], tl.float32)
    ss = tl.zeros([R], tl.float32)
    guess = tl.zeros([R], tl.float32)
    for c in range(0, tl.max(n, 0), CHUNK):
        s = c + tl.arange(0, CHUNK)
        live = s[None, :] < n[:, None]
        entry = tl.load(entries + row[:, None] * SLOTS + s[None, :], mask=live, other=0)
        column, u = _unpack(entry)
        p, g = powers(u, beta[:, None], KIND)
        which = column.to(tl.int64)[:, :, None]
        values = tl.load(
            v_head + which * svl + de[None, None, :] * svd,
            mask=live[:, :, None] & (de < DV)[None, None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        vectors = tl.load(
            k_head + which * skl + dd[None, None, :] * skd,
            mask=live[:, :, None] & (dd < D)[None, None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        p = tl.where(live, p, 0.0)
        g = tl.where(live, g, 0.0)
        dp = tl.sum(values * do[:, None, :], 2)
        if c == 0:
            # Any guess of delta keeps the difference from cancelling: the first chunk's mean.
            guess = tl.where(n == 0, 0.0, tl.sum(g * dp, 1) / tl.sum(g, 1))
        dp -= guess[:, None]
        w = g * dp
        gdp += tl.sum(w, 1)
        gs += tl.sum(g, 1)
        if WANT_ALPHA:
            plogp = tl.where(p == 0.0, 0.0, p * (tl.log2(u) * LN2) * beta[:, None])
            pdp += tl.sum(p * dp, 1)
            sdp += tl.sum(plogp * dp, 1)
            ss += tl.sum(plogp, 1)
        gdpk += tl.sum(vectors * w[:, :, None], 1)
        gk += tl.sum(vectors * g[:, :, None], 1)
        place = tl.atomic_add(cursors + key + column, 1, mask=live, sem="relaxed")
        filed = _pack(tl.broadcast_to(number[:, None], [R, CHUNK]), u)
        tl.store(by_key + place, filed, mask=live)
    rest = tl.where(n == 0, 0.0, gdp / gs)
    tl.store(delta + row, guess + rest, mask=i < Lq)
    x = (gdpk - rest[:, None] * gk) * scale
    inside = (i < Lq)[:, None] & (dd < D)[None, :]
    tl.store(dq + row[:, None] * D + dd[None, :], x.to(dq.dtype.element_ty), mask=inside)
    if WANT_ALPHA:
        da = (pdp - rest) / (am1 * am1) - (sdp - rest * ss) / am1
        tl.store(dalpha + row, tl.where(n == 0, 0.0, da), mask=i < Lq)


@triton.jit
def _sort(by_key, start, n, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Sort each of R segments of at most WIDTH entries by row number, in place.

    With BITS, row numbers have 31 - BITS bits: half the network's work is saved by sorting them with
    the place of their entry, in 32 bits.
    """
    s = tl.arange(0, WIDTH)
    live = s[None, :] < n[:, None]
    at = by_key + start[:, None] + s[None, :]
    if BITS > 0:
        number = (tl.load(at, mask=live, other=0) >> 32).to(tl.int32)
        order = tl.sort(tl.where(live, (number << BITS) + s[None, :], 0x7FFFFFFF), 1)
        chosen = by_key + start[:, None] + (order & (WIDTH - 1))
        entry = tl.load(chosen, mask=live, other=0)
    else:
        entry = tl.sort(tl.load(at, mask=live, other=0x7FFFFFFFFFFFFFFF), 1)
    tl.debug_barrier()
    tl.store(at, entry, mask=live)
    tl.debug_barrier()


@triton.jit
def _key_terms(
    q, grad, delta, alpha, sqb, sqh, sql, sqd, sgb, sgh, sgl, sgd, sab, sah, sal,
    b, number, u, live, H, Lq, am1_value, scale, vk, dk, dv,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
):  # fmt: skip
    """Add the rows `number` [R, C] (h * Lq + i) with weights u to dk / scale and dv [R, .]."""
    h = (number // Lq).to(tl.int64)
    i = (number % Lq).to(tl.int64)
    am1 = tl.zeros_like(u) + am1_value
    if HAS_ALPHA:
        am1 = (
            tl.load(alpha + b * sab + h * sah + i * sal, mask=live, other=1.5).to(tl.float32) - 1.0
        )
    p, g = powers(u, 1.0 / am1, KIND)
    mean = tl.load(delta + b * H * Lq + number, mask=live, other=0.0)
    dd = tl.arange(0, BD)
    de = tl.arange(0, BDV)
    rows = tl.load(
        (q + b * sqb + h * sqh + i * sql)[:, :, None] + dd[None, None, :] * sqd,
        mask=live[:, :, None] & (dd < D)[None, None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    do = tl.load(
        (grad + b * sgb + h * sgh + i * sgl)[:, :, None] + de[None, None, :] * sgd,
        mask=live[:, :, None] & (de < DV)[None, None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    dz = g * (tl.sum(do * vk[:, None, :], 2) - mean)
    dk += tl.sum(rows * tl.where(live, dz, 0.0)[:, :, None], 1)
    dv += tl.sum(do * tl.where(live, p, 0.0)[:, :, None], 1)
    return dk, dv


@triton.jit
def _write_keys(
    dk, dv, acc_k, acc_v, key, want, partial, scale,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """dk and dv of keys `key`; on top of what the block passes left there, where partial."""
    dd = tl.arange(0, BD)
    inside = want[:, None] & (dd < D)[None, :]
    at = dk + key[:, None] * D + dd[None, :]
    acc_k = acc_k * scale + tl.load(at, mask=tl.where(partial, inside, False), other=0.0).to(
        tl.float32
    )
    tl.store(at, acc_k.to(dk.dtype.element_ty), mask=inside)
    de = tl.arange(0, BDV)
    inside = want[:, None] & (de < DV)[None, :]
    at = dv + key[:, None] * DV + de[None, :]
    acc_v = acc_v + tl.load(at, mask=tl.where(partial, inside, False), other=0.0).to(tl.float32)
    tl.store(at, acc_v.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def _keys_kernel(
    q, v, alpha, sqb, sqh, sql, sqd, svb, svh, svl, svd, sab, sah, sal,
    H, G, Lq, Lk, am1_value, scale,
    by_key, ends, key_counts, partial, grad, sgb, sgh, sgl, sgd, delta, dk, dv,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program owns dk and dv of R keys with at most SORTED rows each, added in the rows' order.

    Gathers D + DV values for each entry.
    """
    blocks = tl.cdiv(Lk, R)
    bg = tl.program_id(0) // blocks
    j = tl.program_id(0) % blocks * R + tl.arange(0, R)
    b = (bg // (H // G)).to(tl.int64)
    key = bg.to(tl.int64) * Lk + j
    n = tl.load(key_counts + key, mask=j < Lk, other=0)
    start = tl.load(ends + key, mask=j < Lk, other=0) - n
    want = (j < Lk) & (n <= SORTED)
    n = tl.where(want, n, 0)
    most = tl.max(n, 0)
    if most > 64:
        _sort(by_key, start, n, 128, 7)
    elif most > 32:
        _sort(by_key, start, n, 64, 7)
    elif most > 16:
        _sort(by_key, start, n, 32, 7)
    elif most > 8:
        _sort(by_key, start, n, 16, 7)
    elif most > 1:
        _sort(by_key, start, n, 8, 7)
    de = tl.arange(0, BDV)
    at = v + b * svb + (bg % (H // G)).to(tl.int64) * svh + j.to(tl.int64)[:, None] * svl
    vk = tl.load(at + de[None, :] * svd, mask=(j < Lk)[:, None] & (de < DV)[None, :], other=0.0).to(
        tl.float32
    )
    acc_k = tl.zeros([R, BD], tl.float32)
    acc_v = tl.zeros([R, BDV], tl.float32)
    for c in range(0, most, CHUNK):
        s = c + tl.arange(0, CHUNK)
        live = s[None, :] < n[:, None]
        number, u = _unpack(tl.load(by_key + start[:, None] + s[None, :], mask=live, other=0))
        acc_k, acc_v = _key_terms(
            q, grad, delta, alpha, sqb, sqh, sql, sqd, sgb, sgh, sgl, sgd, sab, sah, sal,
            b, number, u, live, H, Lq, am1_value, scale, vk, acc_k, acc_v,
            D, BD, DV, BDV, KIND, HAS_ALPHA,
        )  # fmt: skip
    _write_keys(dk, dv, acc_k, acc_v, key, want, tl.load(partial + bg) != 0, scale, D, BD, DV, BDV)


@triton.jit
def _long_keys_kernel(
    q, v, alpha, sqb, sqh, sql, sqd, svb, svh, svl, svd, sab, sah, sal,
    H, G, Lq, Lk, am1_value, scale,
    by_key, ends, entries, counts, flags, key_counts, partial, grad, sgb, sgh, sgl, sgd, delta,
    dk, dv,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """dk and dv of keys with more than SORTED rows, among SPAN keys a program.

    Up to LONG rows are sorted. Beyond, they are found by reading the lists of all rows of the key's
    heads, ROWS at a time: 8 bytes a slot that is filled. A key that most rows attend to has no use
    for a list of rows.
    """
    blocks = tl.cdiv(Lk, SPAN)
    bg = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * SPAN
    b = (bg // (H // G)).to(tl.int64)
    span = first + tl.arange(0, SPAN)
    n = tl.load(key_counts + bg.to(tl.int64) * Lk + span, mask=span < Lk, other=0)
    long = tl.where(n > SORTED, span, Lk)
    j = tl.min(long, 0)
    de = tl.arange(0, BDV)
    slot = tl.arange(0, SLOTS)
    while j < Lk:
        one = j + tl.arange(0, 1)
        at = v + b * svb + (bg % (H // G)).to(tl.int64) * svh + one.to(tl.int64)[:, None] * svl
        vk = tl.load(at + de[None, :] * svd, mask=(de < DV)[None, :], other=0.0).to(tl.float32)
        acc_k = tl.zeros([1, BD], tl.float32)
        acc_v = tl.zeros([1, BDV], tl.float32)
        rows = tl.sum(tl.where(span == j, n, 0), 0)
        if rows <= LONG:
            size = rows + tl.zeros([1], tl.int32)
            start = tl.load(ends + bg.to(tl.int64) * Lk + one) - size
            _sort(by_key, start, size, LONG, 0)
            for c in range(0, rows, ROWS):
                s = c + tl.arange(0, ROWS)
                live = (s < rows)[None, :]
                number, u = _unpack(
                    tl.load(by_key + start[:, None] + s[None, :], mask=live, other=0)
                )
                acc_k, acc_v = _key_terms(
                    q, grad, delta, alpha, sqb, sqh, sql, sqd, sgb, sgh, sgl, sgd, sab, sah, sal,
                    b, number, u, live, H, Lq, am1_value, scale, vk, acc_k, acc_v,
                    D, BD, DV, BDV, KIND, HAS_ALPHA,
                )  # fmt: skip
        for g in range(tl.where(rows <= LONG, 0, G)):
            h = (bg % (H // G)) * G + g
            head = b * H + h
            for i0 in range(0, Lq, ROWS):
                i = i0 + tl.arange(0, ROWS)
                skip = tl.load(flags + head * tl.cdiv(Lq, BM) + i // BM, mask=i < Lq, other=1)
                row = head * Lq + i
                m = tl.load(counts + row, mask=(i < Lq) & (skip == 0), other=0)
                live = slot[None, :] < m[:, None]
                entry = tl.load(entries + row[:, None] * SLOTS + slot[None, :], mask=live, other=0)
                column, u = _unpack(entry)
                match = live & (column == j)
                weight = tl.sum(tl.where(match, u, 0.0), 1)
                found = tl.max(match.to(tl.int32), 1) != 0
                number = (h * Lq + i).to(tl.int32)
                if tl.max(found.to(tl.int32), 0) != 0:
                    acc_k, acc_v = _key_terms(
                        q, grad, delta, alpha, sqb, sqh, sql, sqd, sgb, sgh, sgl, sgd,
                        sab, sah, sal, b, number[None, :], weight[None, :], found[None, :],
                        H, Lq, am1_value, scale, vk, acc_k, acc_v,
                        D, BD, DV, BDV, KIND, HAS_ALPHA,
                    )  # fmt: skip
        key = bg.to(tl.int64) * Lk + one
        _write_keys(
            dk, dv, acc_k, acc_v, key, one < Lk, tl.load(partial + bg) != 0, scale, D, BD, DV, BDV
        )
        j = tl.min(tl.where(long > j, long, Lk), 0)


def _schedule(tiles: int) -> tuple[int, int]:
    """(key tiles looked at ahead of the pass, tiles between two updates of the bounds)."""
    return max(1, min(tiles // 2, 32)), 8 if tiles <= 64 else 16


def forward_lists(
    problem: Problem,
    out: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
    entries: torch.Tensor,
    counts: torch.Tensor,
    flags: torch.Tensor,
    key_counts: torch.Tensor | None,
) -> None:
    """Fill out, reference and shift of all rows but those in flagged blocks.

    entries int64 [B, H, Lq, SLOTS]: column << 32 | bits of u = max((alpha - 1) z - tau, 0), the
    first counts [B, H, Lq] of each row. flags int32 [B, H, ceil(Lq / block_rows)]: 1 = left to the
    block passes. key_counts int32 [B, Hkv, Lk], for a backward: how many rows hold each key.
    """
    q, k, v = problem.q, problem.k, problem.v
    cuda = q.device.type == "cuda"
    B, H, Lq, D = q.shape
    Lk = k.shape[2]
    G = H // k.shape[1]
    rows = block_rows(q)
    tma = cuda and TensorDescriptor is not None
    if tma:
        q, k = q.contiguous(), k.contiguous()
    elif q.stride(3) != 1 or k.stride(3) != 1:
        q, k = q.contiguous(), k.contiguous()
    total = B * H * triton.cdiv(Lq, rows)
    if cuda:
        programs = RESIDENT * torch.cuda.get_device_properties(q.device).multi_processor_count
    else:
        programs = 2
    programs = min(total, programs)
    words = rows * 4 * CAPACITY.value * RECORD_BYTES.value // 4
    scratch = torch.empty(programs * words, device=q.device, dtype=torch.float32)
    tiles = triton.cdiv(Lk, KEYS.value)
    constants = problem.constants()
    strides = (0, 0, 0) if problem.alpha is None else problem.alpha.stride()[:3]
    unused = q
    descriptors: tuple[object, object] = (unused, unused)
    if tma:
        descriptors = (
            TensorDescriptor.from_tensor(q.view(-1, D), [rows, D]),
            TensorDescriptor.from_tensor(k.view(-1, D), [KEYS.value, D]),
        )
    alpha = unused if problem.alpha is None else problem.alpha
    lengths = [unused if t is None else t for t in (problem.query_lengths, problem.key_lengths)]
    options = {"maxnreg": REGISTERS} if cuda else {}
    before, update = _schedule(tiles)
    candidates_kernel[(programs,)](
        *descriptors, q, k, alpha, *lengths, *q.stride()[:3], *k.stride()[:3], *strides,
        H, G, Lq, Lk, float(problem.alpha_value - 1), float(problem.scale), float(problem.fill),
        scratch, entries, counts, flags, total, before,
        D=D, KIND=constants["KIND"], HAS_ALPHA=problem.alpha is not None,
        HAS_QLEN=problem.query_lengths is not None, HAS_KLEN=problem.key_lengths is not None,
        CAUSAL=problem.causal, FINITE_FILL=problem.finite_fill,
        PRECISION=constants["PRECISION"], WIDEN=constants["WIDEN"], ASM=cuda, TMA=tma,
        SLOTS=SLOTS, UPDATE=update, BM=rows, STAGES=3 if cuda else 1,
        num_warps=4, **options,
    )  # fmt: skip
    per = 4
    _finalize_kernel[(B * H * triton.cdiv(Lq, per),)](
        v, alpha, *strides, *v.stride(), H, G, Lq, Lk,
        float(problem.alpha_value - 1), float(problem.scale),
        entries, counts, flags, counts if key_counts is None else key_counts, out, reference, shift,
        DV=constants["DV"], BDV=constants["BDV"], KIND=constants["KIND"],
        HAS_ALPHA=problem.alpha is not None, TRAINING=key_counts is not None, SLOTS=SLOTS, BM=rows,
        R=per, CHUNK=8, num_warps=1,
    )  # fmt: skip


def rows_backward(
    problem: Problem,
    grad: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    dq: torch.Tensor,
    delta: torch.Tensor,
    dalpha: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dq, delta and dalpha of the rows with lists, and their entries by key.

    Returns (by_key, ends): int64 row << 32 | bits of u, row = h * Lq + i, and where each key's
    segment ends.
    """
    q, k, v = problem.q, problem.k, problem.v
    B, H, Lq, _d = q.shape
    entries, counts, flags, key_counts = saved
    ends = torch.cumsum(key_counts.view(-1), 0, dtype=torch.int64)
    cursors = ends - key_counts.view(-1)
    by_key = torch.empty(entries.numel(), device=q.device, dtype=torch.int64)
    constants = problem.constants()
    strides = (0, 0, 0) if problem.alpha is None else problem.alpha.stride()[:3]
    per = 4
    _rows_kernel[(B * H * triton.cdiv(Lq, per),)](
        k, v, q if problem.alpha is None else problem.alpha, *strides, *k.stride(), *v.stride(),
        H, H // k.shape[1], Lq, k.shape[2], float(problem.alpha_value - 1), float(problem.scale),
        entries, counts, flags, cursors, by_key, grad, *grad.stride(), dq, delta,
        delta if dalpha is None else dalpha,
        **{name: constants[name] for name in ("D", "BD", "DV", "BDV", "KIND", "HAS_ALPHA")},
        WANT_ALPHA=dalpha is not None, SLOTS=SLOTS, BM=block_rows(q), R=per, CHUNK=8, num_warps=1,
    )  # fmt: skip
    return by_key, ends


def add_keys_from_lists(
    problem: Problem,
    grad: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    by_key: torch.Tensor,
    ends: torch.Tensor,
    delta: torch.Tensor,
    partial: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """dk and dv from the lists; added to what they hold where partial [B, Hkv] says so."""
    q, k, v = problem.q, problem.k, problem.v
    B, H, Lq, _ = q.shape
    Lk = k.shape[2]
    entries, counts, flags, key_counts = saved
    constants = problem.constants()
    strides = (0, 0, 0) if problem.alpha is None else problem.alpha.stride()[:3]
    head = (
        q, v, q if problem.alpha is None else problem.alpha,
        *q.stride(), *v.stride(), *strides, H, H // k.shape[1], Lq, Lk,
        float(problem.alpha_value - 1), float(problem.scale),
    )  # fmt: skip
    names = ("D", "BD", "DV", "BDV", "KIND", "HAS_ALPHA")
    constants = {name: constants[name] for name in names}
    # Two tensors of R x CHUNK x width in registers: 64 each a lane at width 64.
    per = 4 if max(problem.width, problem.value_width) <= 64 else 2
    _keys_kernel[(B * k.shape[1] * triton.cdiv(Lk, per),)](
        *head, by_key, ends, key_counts, partial, grad, *grad.stride(), delta, dk, dv,
        **constants, R=per, CHUNK=8, num_warps=1,
    )  # fmt: skip
    _long_keys_kernel[(B * k.shape[1] * triton.cdiv(Lk, 64),)](
        *head, by_key, ends, entries, counts, flags, key_counts, partial, grad, *grad.stride(), delta, dk, dv,
        **constants, SLOTS=SLOTS, BM=block_rows(q), SPAN=64, ROWS=32, num_warps=4,
    )  # fmt: skip
