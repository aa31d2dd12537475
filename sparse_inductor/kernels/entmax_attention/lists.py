"""Entmax attention of rows with small supports, computed from lists of their keys.

`entmax_attention.candidates` lists the few scores of a small-support row that can be in its support, and
`entmax_attention.large_support` lists the support of a large-support row. This module solves the thresholds
of small-support rows and gathers the values. In the backward it converts the lists into lists of rows by key.
Other rows fall back to the block passes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.arch import compute_capability
from ..common.launch import compiled_first, relaunched, sm_count
from .candidates import CAPACITY, KEYS, RECORD_BYTES, SMALL_SUPPORT, candidates_kernel, pack, unpack
from .large_support import gather_fallback, large_support_kernel, list_words
from .problem import (
    FallbackRows,
    Fixed,
    Problem,
    Strided,
    Tile,
    larger,
    load_tile,
    matrix,
    open_head,
    row_constants,
    store_tile,
)
from .spans import spans
from .tau import NEG_INF, POS_INF, SPREAD_NAN, bracket, class_bound, log_power, powers, step

# Entries per row, shared by the rows of a block: supports vary by a quarter between rows, but their mean over 128 rows
# hardly varies. More entries gain little: in the backward, block passes take 19 ns per row of 8192 keys, and lists
# 0.17 ns per entry.
SLOTS = 80
# With fewer keys the block passes are faster.
MIN_KEYS = 1024
# Up to NARROW_SPAN visible key tiles of a block, the two passes of `large_support` are faster than `candidates`. In
# long causal sequences only the first blocks are this narrow, too few to fill a GPU by themselves. With more than
# ALL_NARROW tiles in all, blocks that see only the first NARROW_SPAN tiles therefore stay with `candidates`.
NARROW_SPAN, ALL_NARROW = 24, 32
# The most rows of a key that one warp sorts, together with those of neighbouring keys (NARROW) or alone (SORTED), and
# that four warps sort (LONG). A key with more rows is searched for in the lists of all rows.
NARROW = tl.constexpr(128)
SORTED = tl.constexpr(512)
LONG = tl.constexpr(1024)
# Keys per program of `_many_rows_kernel`.
SPAN = 16
# Threads per SM, and the limit of registers per thread that allows them.
THREADS, REGISTERS = 512, 128
# Register limits of programs of one warp. These wait for memory, and fewer registers allow more programs (measured).
FINALIZE, BY_KEY = 64, 96
EXACT = tl.constexpr(5e-7)
TURNS = tl.constexpr(64)


class Lists(NamedTuple):
    """The lists of all rows. A row has counts[row] entries, from starts[row] of its block's entries on: column << 32 |
    bits of u = max((alpha - 1) z - tau, 0). counts is -1 for a fallback row, which has no list.

    fallback: the fallback rows of each head. earlier: the number of fallback rows before each block. key_counts: for
    each key the number of lists that contain it, if training.
    """

    entries: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    fallback: torch.Tensor
    earlier: torch.Tensor
    key_counts: torch.Tensor


def block_rows(q: torch.Tensor) -> int:
    """Return the number of rows per block. The rows of a block share a flag."""
    return 128 if q.device.type == "cuda" else 16


def applies(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
) -> bool:
    """Whether lists are used. If so, the saved tensors include them in every layer. On a GPU, this requires Hopper."""
    if q.device.type == "cuda":
        # The lists rely on the accumulator layout of 16-bit products with head dimensions 64 and 128.
        if compute_capability(q.device) != (9, 0) or q.element_size() != 2:
            return False
        if q.shape[3] not in (64, 128) or v.shape[3] > 128:
            return False
    elif q.shape[3] & (q.shape[3] - 1):
        return False
    B, H, Lq, _ = q.shape
    return (
        scale > 0
        and k.shape[2] >= MIN_KEYS
        # When the rows of a key are sorted, row numbers within a batch element share 32 bits with a slot.
        and H * Lq < 2**24
        and B * H * max(Lq, k.shape[2]) < 2**31
    )


def fallback_rows(q: torch.Tensor, lists: Lists | None) -> FallbackRows | None:
    """Return the rows that the block passes compute. None means all rows, if there are no lists."""
    return None if lists is None else FallbackRows(lists.fallback, lists.earlier, block_rows(q))


@triton.jit
def _solve(
    pool, first, n, row, factor, beta, key_counts, counts, reference, shift, inside,
    KIND: tl.constexpr, TRAINING: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Solve the thresholds of R rows with n candidates each, and replace their entries by column << 32 | bits of u.

    Returns the sizes of the supports.
    """
    slot = tl.arange(0, SMALL_SUPPORT)
    live = slot[None, :] < n[:, None]
    at = pool + first[:, None] + slot[None, :]
    column, score = unpack(tl.load(at, mask=live, other=0))
    score = tl.where(live, score, NEG_INF)
    best = tl.reduce(score, 1, larger)
    dead = best == NEG_INF
    best = tl.where(dead, 0.0, best)
    x = (score - best[:, None]) * factor[:, None]
    lo = class_bound(x, beta, KIND, 3)
    size = tl.maximum(n, 1).to(tl.float32)
    d, lo, hi, old = bracket(lo, size, beta)
    turn = 0
    searching = 1
    while searching > 0:
        w, g = powers(
            tl.maximum(x - d[:, None], 0.0, propagate_nan=SPREAD_NAN), beta[:, None], KIND
        )
        d, rest, lo, hi, old = step(
            d, tl.sum(w, 1), tl.sum(g, 1), lo, hi, old, size * beta, turn, beta, KIND
        )
        turn += 1
        searching = tl.max(((rest > EXACT) & (dead == 0)).to(tl.int32), 0)
        if turn >= TURNS:
            searching = 0
    u = tl.maximum(x - d[:, None], 0.0, propagate_nan=SPREAD_NAN)
    keep = (live & (u != 0.0)).to(tl.int32)
    place = tl.cumsum(keep, 1) - keep
    support = tl.sum(keep, 1)
    tl.debug_barrier()
    tl.store(pool + first[:, None] + place, pack(column, u), mask=keep != 0)
    tl.store(counts + row, support, mask=inside)
    tl.store(reference + row, best * factor, mask=inside)
    tl.store(shift + row, tl.where(dead, POS_INF, d), mask=inside)
    if TRAINING:
        tl.atomic_add(key_counts + column, 1, mask=keep != 0, sem="relaxed")
    tl.debug_barrier()
    return support


class _Rows(NamedTuple):
    """A program's R rows: head, block, row numbers, positions in [B, H, Lq], the block's entries, and the start and
    count of each row in these; counts are -1 for rows without a list."""

    bh: Any
    block: Any
    i: Any
    at: Any
    pool: Any
    start: Any
    count: Any


@triton.jit
def _own_rows(x, lists, SLOTS: tl.constexpr, BM: tl.constexpr, R: tl.constexpr):
    blocks = tl.cdiv(x.Lq, R)
    bh = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * R
    i = first + tl.arange(0, R)
    at = bh.to(tl.int64) * x.Lq + i
    count = tl.load(lists.counts + at, mask=i < x.Lq, other=-1)
    start = tl.load(lists.starts + at, mask=count >= 0, other=0)
    block = first // BM
    pool = lists.entries + (bh.to(tl.int64) * x.Lq + block * BM) * SLOTS
    return _Rows(bh, block, i, at, pool, start, count)


@triton.jit
def _gathered(m, which, live, D: tl.constexpr, BD: tl.constexpr):
    """Load rows `which` [R, CHUNK] of a matrix [., D] as fp32 [R, CHUNK, BD], 0 unless `live`."""
    d = tl.arange(0, BD)
    at = m.start + which.to(tl.int64)[:, :, None] * m.row + d[None, None, :] * m.column
    inside = live[:, :, None] & (d < D)[None, None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@relaunched
@triton.jit
def _finalize_kernel(
    x, lists, flags, out, reference, shift,
    TRAINING: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """A program computes out of R rows, and the thresholds and supports of small-support rows.

    It reads and writes 8 bytes per candidate, gathers DV values per entry of the support, and counts
    each key's rows (integer atomics: the result does not depend on the order).
    """
    bh, block, i, at, pool, start, n = _own_rows(x, lists, SLOTS, C.BM, R)
    if tl.max(n, 0) < 0:
        return
    head = open_head(x, bh // x.H, bh % x.H)
    factor, _am1, beta = row_constants(head, i, C)
    inside = n >= 0
    support = tl.maximum(n, 0)
    if tl.load(flags + bh * tl.cdiv(x.Lq, C.BM) + block) == 0:
        counted = lists.key_counts + (bh // x.G).to(tl.int64) * x.Lk
        support = _solve(
            pool, start, support, at, factor, beta, counted, lists.counts, reference, shift, inside,
            C.KIND, TRAINING, R,
        )  # fmt: skip
    acc = tl.zeros([R, C.BDV], tl.float32)
    f = tl.zeros([R, CHUNK], tl.float32)
    for c in range(0, tl.max(support, 0), CHUNK):
        s = c + tl.arange(0, CHUNK)
        filled = s[None, :] < support[:, None]
        chosen, un = unpack(tl.load(pool + start[:, None] + s[None, :], mask=filled, other=0))
        p, _g = powers(un, beta[:, None], C.KIND)
        p = tl.where(filled, p, 0.0)
        f += p
        acc += tl.sum(_gathered(head.v, chosen, filled, C.DV, C.BDV) * p[:, :, None], 1)
    total = tl.sum(f, 1)
    # sum p is 1 only up to rounding: normalise.
    acc = tl.where((support == 0)[:, None], 0.0, acc / total[:, None])
    store_tile(out, at, acc, inside, C.DV, C.BDV)


class Filed(NamedTuple):
    """The entries of the lists, sorted by key: row << 32 | bits of u, with row = h * Lq + i.

    ends: int32, the end of each key's segment in by_key, relative to the first entry of its key head; while entries are
    being written, the position of the next one. partial: the number of fallback rows of each key head.
    """

    by_key: torch.Tensor
    ends: torch.Tensor
    partial: torch.Tensor


@relaunched
@triton.jit
def _places_kernel(x, lists, filed, BM: tl.constexpr, CHUNK: tl.constexpr):
    """A program computes the start of each key's segment in a key head, and the number of fallback rows of the head."""
    bg = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(x.Lq, BM)
    left = 0
    for g in range(x.G):
        left += tl.load(lists.earlier + (bg * x.G + g) * (blocks + 1) + blocks)
    tl.store(filed.partial + bg, left)
    before = 0
    for c in range(0, x.Lk, CHUNK):
        j = c + tl.arange(0, CHUNK)
        n = tl.load(lists.key_counts + bg * x.Lk + j, mask=j < x.Lk, other=0)
        tl.store(filed.ends + bg * x.Lk + j, before + tl.cumsum(n, 0) - n, mask=j < x.Lk)
        before += tl.sum(n, 0)


@relaunched
@triton.jit
def _rows_kernel(
    x, lists, filed, grad, dq, delta, dalpha,
    SLOTS: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A program computes dq, delta and dalpha of R rows, and writes their entries to the lists of their keys.

    An entry is written at its key's cursor, which is incremented atomically. The order does not matter, since the
    kernels for keys sort the entries. Gathers D + DV values per entry.
    """
    bh, _block, i, at, pool, start, n = _own_rows(x, lists, SLOTS, C.BM, R)
    if tl.max(n, 0) < 0:
        return
    listed = n >= 0
    n = tl.maximum(n, 0)
    head = open_head(x, bh // x.H, bh % x.H)
    _factor, am1, beta = row_constants(head, i, C)
    do_head = matrix(grad, (bh // x.H).to(tl.int64), (bh % x.H).to(tl.int64))
    do = load_tile(do_head, i, x.Lq, True, C.DV, C.BDV).to(tl.float32)
    bg = (bh // x.G).to(tl.int64)
    cursors = filed.ends + bg * x.Lk
    by_key = filed.by_key + bg * x.G * x.Lq * SLOTS
    number = (bh % x.H * x.Lq + i).to(tl.int32)
    gdpk = tl.zeros([R, C.BD], tl.float32)
    gk = tl.zeros([R, C.BD], tl.float32)
    gdp = tl.zeros([R], tl.float32)
    gs = tl.zeros([R], tl.float32)
    pdp = tl.zeros([R], tl.float32)
    sdp = tl.zeros([R], tl.float32)
    ss = tl.zeros([R], tl.float32)
    guess = tl.zeros([R], tl.float32)
    for c in range(0, tl.max(n, 0), CHUNK):
        s = c + tl.arange(0, CHUNK)
        live = s[None, :] < n[:, None]
        entry = tl.load(pool + start[:, None] + s[None, :], mask=live, other=0)
        column, u = unpack(entry)
        p, g = powers(u, beta[:, None], C.KIND)
        values = _gathered(head.v, column, live, C.DV, C.BDV)
        vectors = _gathered(head.k, column, live, C.D, C.BD)
        p = tl.where(live, p, 0.0)
        g = tl.where(live, g, 0.0)
        dp = tl.sum(values * do[:, None, :], 2)
        if c == 0:
            # An estimate of delta, the mean of the first chunk, avoids cancellation in the difference.
            guess = tl.where(n == 0, 0.0, tl.sum(g * dp, 1) / tl.sum(g, 1))
        dp -= guess[:, None]
        w = g * dp
        gdp += tl.sum(w, 1)
        gs += tl.sum(g, 1)
        if dalpha is not None:
            plogp = p * log_power(u, beta[:, None], C.KIND)
            pdp += tl.sum(p * dp, 1)
            sdp += tl.sum(plogp * dp, 1)
            ss += tl.sum(plogp, 1)
        gdpk += tl.sum(vectors * w[:, :, None], 1)
        gk += tl.sum(vectors * g[:, :, None], 1)
        place = tl.atomic_add(cursors + column, 1, mask=live, sem="relaxed")
        moved = pack(tl.broadcast_to(number[:, None], [R, CHUNK]), u)
        tl.store(by_key + place, moved, mask=live)
    rest = tl.where(n == 0, 0.0, gdp / gs)
    tl.store(delta + at, guess + rest, mask=listed)
    store_tile(dq, at, (gdpk - rest[:, None] * gk) * x.scale, listed, C.D, C.BD)
    if dalpha is not None:
        da = (pdp - rest) / (am1 * am1) - (sdp - rest * ss) / am1
        tl.store(dalpha + at, tl.where(n == 0, 0.0, da), mask=listed)


def _network(pack: int, bits: int) -> str:
    """Return PTX of a bitonic sort: each group of 2 ** bits lanes of a warp sorts `pack` integers per lane, ascending.

    Every round starts with mirrored partners, so that all comparisons have the same direction. Operands: `pack`
    integers out, `pack` integers in. Element lane * pack + register of the result has that rank.
    """
    # The low bits of an element's number are its register, the others its lane.
    low = pack.bit_length() - 1
    x = [f"x{r}" for r in range(pack)]
    lines = [f"{{ .reg .pred p<5>; .reg .b32 l, t, x<{pack}>, y<{pack}>;", "mov.u32 l, %laneid;"]
    for bit in range(bits):
        lines.append(f"and.b32 t, l, {1 << bit}; setp.eq.u32 p{bit}, t, 0;")
    lines += [f"mov.b32 {x[r]}, ${pack + r};" for r in range(pack)]

    def exchange(first: int, second: int) -> None:
        lines.append(f"min.s32 t, {x[first]}, {x[second]};")
        lines.append(f"max.s32 {x[second]}, {x[first]}, {x[second]}; mov.b32 {x[first]}, t;")

    def across(lanes: int, registers: int) -> None:
        lines.extend(
            f"shfl.sync.bfly.b32 y{r}, {x[r ^ registers]}, {lanes}, 31, -1;" for r in range(pack)
        )
        bit = lanes.bit_length() - 1
        for r in range(pack):
            lines.append(f"@p{bit} min.s32 {x[r]}, {x[r]}, y{r};")
            lines.append(f"@!p{bit} max.s32 {x[r]}, {x[r]}, y{r};")

    for size in range(1, low + bits + 1):  # sorted runs of 2 ** size
        for bit in range(size - 1, -1, -1):
            partner = (2 << bit) - 1 if bit == size - 1 else 1 << bit
            lanes, registers = partner >> low, partner & (pack - 1)
            if lanes:
                across(lanes, registers)
            else:
                for r in range(pack):
                    if r < r ^ registers:
                        exchange(r, r ^ registers)
    lines += [f"mov.b32 ${r}, {x[r]};" for r in range(pack)]
    lines.append("}")
    return "\n".join(lines)


def _own(pack: int) -> str:
    """Return PTX that computes the numbers lane * pack + register of a thread's elements."""
    lines = "".join(f"mad.lo.u32 ${r}, l, {pack}, {r};" for r in range(pack))
    return f"{{ .reg .b32 l; mov.u32 l, %laneid; {lines} }}"


def _operands(pack: int) -> str:
    """Return the operand constraints of both PTX programs. All inputs are read before any output is written."""
    return ",".join(["=r"] * pack + ["r"] * pack)


# PTX programs by the number of elements per thread, for four segments or one segment per warp.
FOUR1, FOUR2, FOUR4, FOUR8, FOUR16 = (tl.constexpr(_network(1 << x, 3)) for x in range(5))
ONE1, ONE2, ONE4, ONE8, ONE16 = (tl.constexpr(_network(1 << x, 5)) for x in range(5))
OWN1, OWN2, OWN4, OWN8, OWN16 = (tl.constexpr(_own(1 << x)) for x in range(5))
OPERANDS1, OPERANDS2, OPERANDS4, OPERANDS8, OPERANDS16 = (
    tl.constexpr(_operands(1 << x)) for x in range(5)
)
LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _in_registers(
    x, by1: tl.constexpr, by2: tl.constexpr, by4: tl.constexpr, by8: tl.constexpr,
    by16: tl.constexpr, pack: tl.constexpr,
):  # fmt: skip
    """Run one of five PTX programs on x, chosen by `pack`, the number of elements per thread."""
    source: tl.constexpr = (
        by1 if pack == 1 else by2 if pack == 2 else by4 if pack == 4 else by8 if pack == 8 else by16
    )
    operands: tl.constexpr = (
        OPERANDS1 if pack == 1 else OPERANDS2 if pack == 2 else OPERANDS4 if pack == 4
        else OPERANDS8 if pack == 8 else OPERANDS16
    )  # fmt: skip
    return tl.inline_asm_elementwise(
        source, operands, [x], dtype=tl.int32, is_pure=False, pack=pack
    )


@triton.jit
def _network_sort(order, segments: tl.constexpr, pack: tl.constexpr):
    if segments == 4:
        return _in_registers(order, FOUR1, FOUR2, FOUR4, FOUR8, FOUR16, pack)
    else:
        return _in_registers(order, ONE1, ONE2, ONE4, ONE8, ONE16, pack)


@triton.jit
def _own_elements(like, pack: tl.constexpr):
    return _in_registers(like, OWN1, OWN2, OWN4, OWN8, OWN16, pack)


@triton.jit
def _sort(by_key, start, n, R: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """Sort R segments of n <= WIDTH entries by row number, in place.

    The sort keys are row number * WIDTH + position, which fit 31 bits. They are sorted in a warp's
    registers, with a sixth of the instructions of `tl.sort`. e is the position of a thread's element in
    all tensors of this shape. These have the same layout, since each is only loaded and stored entry by
    entry.
    """
    segments: tl.constexpr = 1 if R == 1 else 4
    e = tl.arange(0, segments * WIDTH)
    given = e % WIDTH
    if not C.INTERPRETED:
        e = _own_elements(e, segments * WIDTH // 32)
    r = tl.arange(0, R)
    first = tl.zeros_like(e)
    size = tl.zeros_like(e)
    for one in tl.static_range(R):
        mine = e // WIDTH == one
        first = tl.where(mine, tl.sum(tl.where(r == one, start, 0), 0), first)
        size = tl.where(mine, tl.sum(tl.where(r == one, n, 0), 0), size)
    s = e % WIDTH
    at = by_key + first
    # With one segment any thread may load any entry, so that neighbouring threads load neighbouring entries.
    given = given if segments == 1 else s
    number = (tl.load(at + given, mask=given < size, other=0) >> 32).to(tl.int32)
    order = tl.where(given < size, number * WIDTH + given, LAST)
    if not C.INTERPRETED:
        order = _network_sort(order, segments, segments * WIDTH // 32)
    else:
        order = tl.reshape(tl.sort(tl.reshape(order, [segments, WIDTH]), 1), [segments * WIDTH])
    there = order != LAST
    entry = tl.load(at + order % WIDTH, mask=there, other=0)
    tl.debug_barrier()
    tl.store(at + s, entry, mask=there)
    tl.debug_barrier()


@triton.jit
def _sort_wide(by_key, start, n, WIDTH: tl.constexpr):
    """Same as `_sort` for one segment, with row numbers of any size and more entries; start and n are [1]."""
    s = tl.arange(0, WIDTH)
    live = s[None, :] < n[:, None]
    at = by_key + start[:, None] + s[None, :]
    entry = tl.sort(tl.load(at, mask=live, other=0x7FFFFFFFFFFFFFFF), 1)
    tl.debug_barrier()
    tl.store(at, entry, mask=live)
    tl.debug_barrier()


@triton.jit
def _key_terms(dk, dv, x, grad, delta, b, number, u, live, vk, C: tl.constexpr):
    """Add the terms of rows `number` [R, CHUNK] (h * Lq + i) with entries u to dk / scale and dv [R, .]."""
    h = (number // x.Lq).to(tl.int64)
    i = (number % x.Lq).to(tl.int64)
    am1 = tl.zeros_like(u) + x.am1
    if C.HAS_ALPHA:
        at = x.alpha.start + b * x.alpha.batch + h * x.alpha.head + i * x.alpha.row
        am1 = tl.load(at, mask=live, other=1.5).to(tl.float32) - 1.0
    p, g = powers(u, 1.0 / am1, C.KIND)
    mean = tl.load(delta + b * x.H * x.Lq + number, mask=live, other=0.0)
    rows = _gathered_rows(x.q, b, h, i, live, C.D, C.BD)
    do = _gathered_rows(grad, b, h, i, live, C.DV, C.BDV)
    dz = g * (tl.sum(do * vk[:, None, :], 2) - mean)
    dk += tl.sum(rows * tl.where(live, dz, 0.0)[:, :, None], 1)
    dv += tl.sum(do * tl.where(live, p, 0.0)[:, :, None], 1)
    return dk, dv


@triton.jit
def _gathered_rows(t, b, h, i, live, D: tl.constexpr, BD: tl.constexpr):
    """Load rows i [R, CHUNK] of heads h [R, CHUNK] as fp32 [R, CHUNK, BD], 0 unless `live`."""
    d = tl.arange(0, BD)
    at = (t.start + b * t.batch + h * t.head + i * t.row)[:, :, None] + d[None, None, :] * t.column
    inside = live[:, :, None] & (d < D)[None, None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write_keys(dk, dv, acc_k, acc_v, key, want, partial, scale, C: tl.constexpr):
    """Write dk and dv of keys `key`. If partial, add the results that the block passes have written."""
    there = tl.where(partial, want, False)
    acc_k = acc_k * scale + _contiguous(dk, key, there, C.D, C.BD)
    store_tile(dk, key, acc_k, want, C.D, C.BD)
    acc_v = acc_v + _contiguous(dv, key, there, C.DV, C.BDV)
    store_tile(dv, key, acc_v, want, C.DV, C.BDV)


@triton.jit
def _contiguous(base, at, there, D: tl.constexpr, BD: tl.constexpr):
    """Load rows `at` of a contiguous matrix [., D] as fp32, 0 unless `there`."""
    d = tl.arange(0, BD)
    where = base + at[:, None] * D + d[None, :]
    return tl.load(where, mask=there[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)


class _Keys(NamedTuple):
    """A program's share of the keys of a head: the head, the first key, and the head's entries, counts and ends."""

    bg: Any
    first: Any
    by_key: Any
    counts: Any
    ends: Any
    under: Any
    """Whether the block passes have written results for this head."""


@triton.jit
def _own_keys(x, lists, filed, KEYS_EACH: tl.constexpr, SLOTS: tl.constexpr):
    blocks = tl.cdiv(x.Lk, KEYS_EACH)
    bg = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * KEYS_EACH
    by_key = filed.by_key + bg.to(tl.int64) * x.G * x.Lq * SLOTS
    at = bg.to(tl.int64) * x.Lk
    return _Keys(bg, first, by_key, lists.key_counts + at, filed.ends + at, filed.partial + bg)


@triton.jit
def _values(x, bg, j, C: tl.constexpr):
    """Load the values of keys j as fp32 [R, BDV]."""
    heads = x.H // x.G
    v = matrix(x.v, (bg // heads).to(tl.int64), (bg % heads).to(tl.int64))
    return load_tile(v, j, x.Lk, True, C.DV, C.BDV).to(tl.float32)


@triton.jit
def _add_rows(x, grad, delta, keys, j, start, n, want, dk, dv, R: tl.constexpr, CHUNK: tl.constexpr,
              C: tl.constexpr):  # fmt: skip
    """Compute dk and dv of keys j [R] from n rows each, whose entries begin at start."""
    b = (keys.bg // (x.H // x.G)).to(tl.int64)
    vk = _values(x, keys.bg, j, C)
    acc_k = tl.zeros([R, C.BD], tl.float32)
    acc_v = tl.zeros([R, C.BDV], tl.float32)
    for c in range(0, tl.max(n, 0), CHUNK):
        s = c + tl.arange(0, CHUNK)
        live = s[None, :] < n[:, None]
        number, u = unpack(tl.load(keys.by_key + start[:, None] + s[None, :], mask=live, other=0))
        acc_k, acc_v = _key_terms(acc_k, acc_v, x, grad, delta, b, number, u, live, vk, C)
    under = tl.load(keys.under) != 0
    _write_keys(dk, dv, acc_k, acc_v, keys.bg.to(tl.int64) * x.Lk + j, want, under, x.scale, C)


@relaunched
@triton.jit
def _keys_kernel(
    x, lists, filed, grad, delta, dk, dv,
    SLOTS: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A program computes dk and dv of R keys with at most NARROW rows each, added in row order.

    Gathers D + DV values per entry. If one of the keys has more rows, all R keys are skipped.
    """
    keys = _own_keys(x, lists, filed, R, SLOTS)
    j = keys.first + tl.arange(0, R)
    n = tl.load(keys.counts + j, mask=j < x.Lk, other=0)
    most = tl.max(n, 0)
    if most > NARROW:
        return
    start = tl.load(keys.ends + j, mask=j < x.Lk, other=0) - n
    if most > 64:
        _sort(keys.by_key, start, n, R, 128, C)
    elif most > 32:
        _sort(keys.by_key, start, n, R, 64, C)
    elif most > 16:
        _sort(keys.by_key, start, n, R, 32, C)
    elif most > 8:
        _sort(keys.by_key, start, n, R, 16, C)
    elif most > 1:
        _sort(keys.by_key, start, n, R, 8, C)
    _add_rows(x, grad, delta, keys, j, start, n, j < x.Lk, dk, dv, R, CHUNK, C)


@relaunched
@triton.jit
def _many_rows_kernel(
    x, lists, filed, grad, delta, dk, dv,
    SLOTS: tl.constexpr, SMALL: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
    SPAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A program computes those of SPAN keys that `_keys_kernel` skips and that have up to SORTED rows, one by one.

    SMALL: row numbers times SORTED fit 31 bits.
    """
    keys = _own_keys(x, lists, filed, SPAN, SLOTS)
    span = keys.first + tl.arange(0, SPAN)
    if tl.max(tl.load(keys.counts + span, mask=span < x.Lk, other=0), 0) <= NARROW:
        return
    for group in range(keys.first, tl.minimum(keys.first + SPAN, x.Lk), R):
        j = group + tl.arange(0, R)
        if tl.max(tl.load(keys.counts + j, mask=j < x.Lk, other=0), 0) > NARROW:
            for r in range(R):
                one = group + r + tl.arange(0, 1)
                n = tl.load(keys.counts + one, mask=one < x.Lk, other=0)
                start = tl.load(keys.ends + one, mask=one < x.Lk, other=0) - n
                want = (one < x.Lk) & (n <= SORTED)
                n = tl.where(want, n, 0)
                many = tl.max(n, 0)
                if many > 128:
                    if SMALL:
                        if many > 256:
                            _sort(keys.by_key, start, n, 1, 512, C)
                        else:
                            _sort(keys.by_key, start, n, 1, 256, C)
                    else:
                        _sort_wide(keys.by_key, start, n, 512)
                elif many > 64:
                    _sort(keys.by_key, start, n, 1, 128, C)
                elif many > 1:
                    _sort(keys.by_key, start, n, 1, 64, C)
                _add_rows(x, grad, delta, keys, one, start, n, want, dk, dv, 1, CHUNK, C)


@compiled_first
@relaunched
@triton.jit
def _long_keys_kernel(
    x, lists, filed, grad, delta, dk, dv,
    SLOTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, SLOT: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """A program computes those of SPAN keys that have more than SORTED rows.

    Up to LONG rows are sorted. More rows are found by reading the lists of all rows of the key's heads,
    ROWS at a time, which takes 8 bytes per entry. A key that most rows attend to needs no list of rows.
    """
    keys = _own_keys(x, lists, filed, SPAN, SLOTS)
    b = (keys.bg // (x.H // x.G)).to(tl.int64)
    span = keys.first + tl.arange(0, SPAN)
    n = tl.load(keys.counts + span, mask=span < x.Lk, other=0)
    long = tl.where(n > SORTED, span, x.Lk)
    j = tl.min(long, 0)
    slot = tl.arange(0, SLOT)
    while j < x.Lk:
        one = j + tl.arange(0, 1)
        vk = _values(x, keys.bg, one, C)
        acc_k = tl.zeros([1, C.BD], tl.float32)
        acc_v = tl.zeros([1, C.BDV], tl.float32)
        rows = tl.sum(tl.where(span == j, n, 0), 0)
        if rows <= LONG:
            size = rows + tl.zeros([1], tl.int32)
            start = tl.load(keys.ends + one) - size
            _sort_wide(keys.by_key, start, size, LONG)
            for c in range(0, rows, ROWS):
                s = c + tl.arange(0, ROWS)
                live = (s < rows)[None, :]
                at = keys.by_key + start[:, None] + s[None, :]
                number, u = unpack(tl.load(at, mask=live, other=0))
                acc_k, acc_v = _key_terms(acc_k, acc_v, x, grad, delta, b, number, u, live, vk, C)
        for g in range(tl.where(rows <= LONG, 0, x.G)):
            bh = keys.bg * x.G + g
            for i0 in range(0, x.Lq, ROWS):
                i = i0 + tl.arange(0, ROWS)
                row = bh.to(tl.int64) * x.Lq + i
                m = tl.load(lists.counts + row, mask=i < x.Lq, other=0)
                begin = tl.load(lists.starts + row, mask=i < x.Lq, other=0)
                pool = lists.entries + ((row - i % C.BM) * SLOTS + begin)[:, None]
                weight = tl.zeros([ROWS], tl.float32)
                found = weight != 0.0
                for c in range(0, tl.max(m, 0), SLOT):
                    live = (c + slot)[None, :] < m[:, None]
                    column, u = unpack(tl.load(pool + (c + slot)[None, :], mask=live, other=0))
                    match = live & (column == j)
                    weight += tl.sum(tl.where(match, u, 0.0), 1)
                    found = found | (tl.max(match.to(tl.int32), 1) != 0)
                number = (bh % x.H * x.Lq + i).to(tl.int32)
                if tl.max(found.to(tl.int32), 0) != 0:
                    acc_k, acc_v = _key_terms(
                        acc_k, acc_v, x, grad, delta, b, number[None, :], weight[None, :],
                        found[None, :], vk, C,
                    )  # fmt: skip
        under = tl.load(keys.under) != 0
        key = keys.bg.to(tl.int64) * x.Lk + one
        _write_keys(dk, dv, acc_k, acc_v, key, one < x.Lk, under, x.scale, C)
        j = tl.min(tl.where(long > j, long, x.Lk), 0)


def _schedule(tiles: int) -> tuple[int, int, int, int]:
    """Return arguments of `candidates_kernel` for a number of key tiles: (part, limited, UPDATE, EARLY).

    A hit takes as long as a quarter of a tile. With few tiles, better bounds are worth reading more tiles ahead.
    """
    return (1, 32, 8, 0) if tiles <= 64 else (4, 64, 16, 8)


def _per(problem: Problem) -> int:
    """Return the rows or keys per program of one warp, which holds several vectors of each in registers."""
    return 4 if max(problem.width, problem.value_width) <= 64 else 2


def _fixed(problem: Problem) -> Fixed:
    return problem.fixed(
        Tile(block_rows(problem.q), KEYS.value, 4, 1 if problem.interpreted else 3)
    )


def _registers(problem: Problem, most: int) -> dict[str, int]:
    """Return the option that limits a kernel's registers per thread; the interpreter has none."""
    return {} if problem.interpreted else {"maxnreg": most}


def forward_lists(
    problem: Problem,
    out: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
    lists: Lists,
    training: bool,
) -> None:
    """Write the lists; out, reference and shift of the rows with a list; and, for fallback rows, the reference and
    shift from which the block passes start."""
    q, k = problem.q, problem.k
    cuda = not problem.interpreted
    if cuda or q.stride(3) != 1 or k.stride(3) != 1:
        q, k = q.contiguous(), k.contiguous()
    x = problem.operands()._replace(q=Strided.of(q), k=Strided.of(k))
    rows = block_rows(q)
    blocks = triton.cdiv(x.Lq, rows)
    total = problem.heads * blocks

    def programs(warps: int) -> int:
        if not cuda:
            return 2
        return min(total, THREADS // (32 * warps) * sm_count(q.device))

    narrow, wide = programs(4), programs(8)
    area = list_words(rows)
    scratch = torch.empty(
        max(
            narrow * rows * 4 * CAPACITY.value * RECORD_BYTES.value // 8,
            (wide + 1) * area,
        ),
        device=q.device,
        dtype=torch.int64,
    )
    aligned = scratch[-scratch.data_ptr() // 8 % area :]
    flags = lists.counts.new_empty(problem.heads, blocks)
    if training:
        lists.key_counts.zero_()
    D = problem.width
    descriptors = [
        TensorDescriptor.from_tensor(t.view(-1, D), [n, D]) if cuda else None
        for t, n in ((q, rows), (k, KEYS.value))
    ]
    masked = problem.bias is not None or problem.mask is not None
    table = spans(problem, rows, KEYS.value) if masked else None
    # For the upper bound of the scores of keys that a bias makes invisible.
    largest = None if problem.bias is None else torch.linalg.vector_norm(k, math.inf, (2, 3))
    head = (*descriptors, x, table, largest)
    options = {
        "SLOTS": SLOTS,
        "LATE": problem.causal or (table is not None and table.strides[2] != 0),
        "C": _fixed(problem),
        **_registers(problem, REGISTERS),
    }
    tiles = triton.cdiv(x.Lk, KEYS.value)
    part, most, update, early = _schedule(tiles)
    beyond = 0 if tiles <= ALL_NARROW else NARROW_SPAN
    candidates_kernel[(narrow,)](
        *head, scratch.view(torch.float32), lists, flags, total, part, most, NARROW_SPAN, beyond,
        UPDATE=update, EARLY=early, num_warps=4, **options,
    )  # fmt: skip
    large_support_kernel[(wide,)](
        *head, aligned, lists, flags, reference, shift, total,
        TRAINING=training, MINE=triton.next_power_of_2(triton.cdiv(total, wide)), num_warps=8,
        **options,
    )  # fmt: skip
    gather_fallback[(total,)](
        flags, lists.counts, lists.fallback, lists.earlier, x.Lq, BM=rows, CHUNK=256, num_warps=4
    )
    per = _per(problem)
    _finalize_kernel[(problem.heads * triton.cdiv(x.Lq, per),)](
        x, lists, flags, out, reference, shift, TRAINING=training, SLOTS=SLOTS, R=per, CHUNK=8,
        C=_fixed(problem), num_warps=1, **_registers(problem, FINALIZE),
    )  # fmt: skip


def rows_backward(
    problem: Problem,
    grad: torch.Tensor,
    lists: Lists,
    dq: torch.Tensor,
    delta: torch.Tensor,
    dalpha: torch.Tensor | None,
) -> Filed:
    """Write dq, delta and dalpha of the rows with lists, and return their entries by key."""
    x, rows, per = problem.operands(), block_rows(problem.q), _per(problem)
    filed = Filed(
        torch.empty_like(lists.entries),
        torch.empty_like(lists.key_counts),
        lists.key_counts.new_empty(problem.k.shape[:2]),
    )
    _places_kernel[(filed.partial.numel(),)](x, lists, filed, BM=rows, CHUNK=4096, num_warps=8)
    _rows_kernel[(problem.heads * triton.cdiv(x.Lq, per),)](
        x, lists, filed, Strided.of(grad), dq, delta, dalpha, SLOTS=SLOTS, R=per, CHUNK=8,
        C=_fixed(problem), num_warps=1, **_registers(problem, REGISTERS),
    )  # fmt: skip
    return filed


def add_keys_from_lists(
    problem: Problem,
    grad: torch.Tensor,
    lists: Lists,
    filed: Filed,
    delta: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Write dk and dv from the lists. In key heads with fallback rows, add to the results of the block passes."""
    x, heads = problem.operands(), filed.partial.numel()
    given = (x, lists, filed, Strided.of(grad), delta, dk, dv)
    constants = {"SLOTS": SLOTS, "C": _fixed(problem)}
    # `_keys_kernel` holds two tensors of R x CHUNK x width in registers: 64 registers per lane each at width 64, and 32
    # above, where the sums take more.
    per = _per(problem)
    _keys_kernel[(heads * triton.cdiv(x.Lk, per),)](
        *given, **constants, R=per, CHUNK=2 * per, num_warps=1,
        **_registers(problem, BY_KEY if per == 4 else REGISTERS),
    )  # fmt: skip
    _many_rows_kernel[(heads * triton.cdiv(x.Lk, SPAN),)](
        *given, **constants, SMALL=x.H * x.Lq * SORTED.value < 2**31, R=per, CHUNK=2 * per**2, SPAN=SPAN,
        num_warps=1, **_registers(problem, REGISTERS),
    )  # fmt: skip
    _long_keys_kernel[(heads * triton.cdiv(x.Lk, 64),)](
        *given, **constants, SPAN=64, ROWS=32, SLOT=64, num_warps=4
    )
