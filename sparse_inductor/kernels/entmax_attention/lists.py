"""Entmax attention of rows with few keys: everything from the rows' lists.

`entmax_attention.candidates` leaves each peaked row with the few scores that can be in its support,
`entmax_attention.broad` each broad row with its support. Here the thresholds of the former are solved,
the values gathered, and in the backward the lists are turned into lists of rows by key. Other rows
are left to the block passes.
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
from .broad import broad_kernel, gather_left, list_words
from .candidates import CAPACITY, KEYS, PEAKED, RECORD_BYTES, candidates_kernel, pack, unpack
from .problem import (
    Fixed,
    Left,
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

# Entries a row, shared by the rows of a block: a support varies by a quarter from row to row, the mean of
# 128 hardly. More are little gain: backward, block passes take 19 ns a row of 8192 keys, lists 0.17 an entry.
SLOTS = 80
# Fewer keys: the block passes' launches are the shorter ones.
MIN_KEYS = 1024
# Key tiles that a block sees: with no more, two passes over all cost less than a look at a part and a pass. Of long
# sequences' causal blocks only the first are so narrow: too few to fill a GPU alone.
NARROW_SPAN, ALL_NARROW = 24, 32
# Rows of a key that one warp sorts, up to NARROW with those of its neighbours, and that four warps
# sort. A key with more is searched for in the rows' lists.
NARROW = tl.constexpr(128)
SORTED = tl.constexpr(512)
LONG = tl.constexpr(1024)
# Keys that a program of one warp goes through for those with more than NARROW rows.
SPAN = 16
# Threads an SM, and the registers a thread that lets them be.
THREADS, REGISTERS = 512, 128
# Programs of one warp wait for memory: fewer registers, more of them (measured, with those of dq at 128).
FINALIZE, BY_KEY = 64, 96
EXACT = tl.constexpr(5e-7)
TURNS = tl.constexpr(64)


class Lists(NamedTuple):
    """The rows' lists. Of the entries of a block of rows those of a row are the counts[row] from starts[row] on: column
    << 32 | bits of u = max((alpha - 1) z - tau, 0); counts -1 for a row without a list.

    left: those rows of each head; earlier: how many come before each block; key_counts: how many rows hold each key,
    if training.
    """

    entries: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    left: torch.Tensor
    earlier: torch.Tensor
    key_counts: torch.Tensor


def block_rows(q: torch.Tensor) -> int:
    """Rows that share a flag."""
    return 128 if q.device.type == "cuda" else 16


def applies(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
) -> bool:
    """Whether there is room for candidate lists in what is saved, in every layer: Hopper on a GPU."""
    if q.device.type == "cuda":
        # 16-bit products of width 64 and 128 leave the accumulator in the layout that the lists
        # are built on.
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
        # Row numbers within a batch element share 32 bits with a slot when a key's rows are sorted.
        and H * Lq < 2**24
        and B * H * max(Lq, k.shape[2]) < 2**31
    )


def left_rows(q: torch.Tensor, lists: Lists | None) -> Left | None:
    """The rows that the lists leave to the block passes; None: all, there are no lists."""
    return None if lists is None else Left(lists.left, lists.earlier, block_rows(q))


@triton.jit
def _solve(
    pool, first, n, row, factor, beta, key_counts, counts, reference, shift, inside,
    KIND: tl.constexpr, TRAINING: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Thresholds of R rows from n candidates each: their entries become column << 32 | bits of u.

    Returns the sizes of the supports.
    """
    slot = tl.arange(0, PEAKED)
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
    """A program's R rows: their head and block, which they are, their places in [B, H, Lq], the block's entries, and
    which of these are each row's; counts are -1 where a row has no list."""

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
    """Rows `which` [R, CHUNK] of a matrix [., D] in fp32 [R, CHUNK, BD], 0 where they are not live."""
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
    """A program owns out of R rows; of peaked ones also the threshold and the support.

    Reads and writes 8 bytes a candidate and gathers DV values for each of the support; counts each
    key's rows (integer atomics: the order does not matter).
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
    # What fp32 leaves of sum p == 1 goes to all entries alike.
    acc = tl.where((support == 0)[:, None], 0.0, acc / total[:, None])
    store_tile(out, at, acc, inside, C.DV, C.BDV)


class Filed(NamedTuple):
    """The entries of lists by key: row << 32 | bits of u, row = h * Lq + i.

    ends: int32, where each key's segment of by_key ends, counted from Lq * SLOTS for each head of queries before; until
    they are filed, where its next entry goes. partial: how many rows of each key head have no list.
    """

    by_key: torch.Tensor
    ends: torch.Tensor
    partial: torch.Tensor


@relaunched
@triton.jit
def _places_kernel(x, lists, filed, BM: tl.constexpr, CHUNK: tl.constexpr):
    """A program owns a key head: where each key's entries begin, and how many rows of it are left."""
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
    """A program owns dq, delta and dalpha of R rows, and files their entries under their keys.

    An entry goes to the place that the key's cursor names, which moves on: in any order, the keys' kernel sorts.
    Gathers D + DV values for each entry.
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
            # Any guess of delta keeps the difference from cancelling: the first chunk's mean.
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
    """PTX: every 2 ** bits lanes of a warp sort pack integers each, ascending.

    Bitonic, each round beginning with mirrored partners, so that every comparison is in one direction.
    Out and in: pack integers. Element lane * pack + register of the result is the next larger one.
    """
    # The low bits of an element's number say which register, the others which lane.
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
    """PTX: the numbers lane * pack + register, for whatever a thread holds."""
    lines = "".join(f"mad.lo.u32 ${r}, l, {pack}, {r};" for r in range(pack))
    return f"{{ .reg .b32 l; mov.u32 l, %laneid; {lines} }}"


def _operands(pack: int) -> str:
    """Constraints of both: all operands are read before any is written."""
    return ",".join(["=r"] * pack + ["r"] * pack)


# By the elements in a thread's registers: four segments, or one, to a warp.
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
    """The one of five programs that takes `pack` elements a thread, on all of x."""
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

    Row numbers times WIDTH fit 31 bits: they are sorted together with where their entry is. In a
    warp's registers, which takes a sixth of the instructions of `tl.sort`. That e says where its element
    is holds for all tensors of this shape here: they have one layout, as none has more than loads and
    stores of single entries to choose it by.
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
    # Any thread may bring any entry of the one segment: neighbours next to each other.
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
    """As `_sort` of one segment, for row numbers of any size and more entries; start and n are [1]."""
    s = tl.arange(0, WIDTH)
    live = s[None, :] < n[:, None]
    at = by_key + start[:, None] + s[None, :]
    entry = tl.sort(tl.load(at, mask=live, other=0x7FFFFFFFFFFFFFFF), 1)
    tl.debug_barrier()
    tl.store(at, entry, mask=live)
    tl.debug_barrier()


@triton.jit
def _key_terms(dk, dv, x, grad, delta, b, number, u, live, vk, C: tl.constexpr):
    """Add the rows `number` [R, CHUNK] (h * Lq + i) with weights u to dk / scale and dv [R, .]."""
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
    """Rows i [R, CHUNK] of heads h [R, CHUNK] in fp32 [R, CHUNK, BD], 0 where they are not live."""
    d = tl.arange(0, BD)
    at = (t.start + b * t.batch + h * t.head + i * t.row)[:, :, None] + d[None, None, :] * t.column
    inside = live[:, :, None] & (d < D)[None, None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write_keys(dk, dv, acc_k, acc_v, key, want, partial, scale, C: tl.constexpr):
    """dk and dv of keys `key`; on top of what the block passes left there, where partial."""
    there = tl.where(partial, want, False)
    acc_k = acc_k * scale + _contiguous(dk, key, there, C.D, C.BD)
    store_tile(dk, key, acc_k, want, C.D, C.BD)
    acc_v = acc_v + _contiguous(dv, key, there, C.DV, C.BDV)
    store_tile(dv, key, acc_v, want, C.DV, C.BDV)


@triton.jit
def _contiguous(base, at, there, D: tl.constexpr, BD: tl.constexpr):
    """Rows `at` of a contiguous matrix [., D] in fp32, 0 where they are not there."""
    d = tl.arange(0, BD)
    where = base + at[:, None] * D + d[None, :]
    return tl.load(where, mask=there[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)


class _Keys(NamedTuple):
    """A program's part of the keys of a head: the head, the first key, and the head's entries, numbers and ends."""

    bg: Any
    first: Any
    by_key: Any
    counts: Any
    ends: Any
    under: Any
    """Whether the block passes have left something for this head."""


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
    """Values of keys j in fp32 [R, BDV]."""
    heads = x.H // x.G
    v = matrix(x.v, (bg // heads).to(tl.int64), (bg % heads).to(tl.int64))
    return load_tile(v, j, x.Lk, True, C.DV, C.BDV).to(tl.float32)


@triton.jit
def _add_rows(x, grad, delta, keys, j, start, n, want, dk, dv, R: tl.constexpr, CHUNK: tl.constexpr,
              C: tl.constexpr):  # fmt: skip
    """dk and dv of keys j [R] from n rows each, which by_key names from start on."""
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
    """A program owns dk and dv of R keys with at most NARROW rows each, added in the rows' order.

    Gathers D + DV values for each entry. If one key has more, none of them is done here.
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
def _broad_keys_kernel(
    x, lists, filed, grad, delta, dk, dv,
    SLOTS: tl.constexpr, SMALL: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
    SPAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`_keys_kernel` for the keys that it leaves among SPAN a program: one by one, up to SORTED rows.

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
    """dk and dv of keys with more than SORTED rows, among SPAN keys a program.

    Up to LONG rows are sorted. Beyond, they are found by reading the lists of all rows of the key's
    heads, ROWS at a time: 8 bytes a slot that is filled. A key that most rows attend to has no use
    for a list of rows.
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
    """Of the candidates' pass: (part of the key tiles looked at ahead, at most, UPDATE, EARLY).

    A hit costs as much as a quarter of a tile: with few tiles bounds are worth more of them.
    """
    return (1, 32, 8, 0) if tiles <= 64 else (4, 64, 16, 8)


def _per(problem: Problem) -> int:
    """Rows or keys of a program of one warp, which has several vectors for each in its registers."""
    return 4 if max(problem.width, problem.value_width) <= 64 else 2


def _fixed(problem: Problem) -> Fixed:
    return problem.fixed(
        Tile(block_rows(problem.q), KEYS.value, 4, 1 if problem.interpreted else 3)
    )


def forward_lists(
    problem: Problem,
    out: torch.Tensor,
    reference: torch.Tensor,
    shift: torch.Tensor,
    lists: Lists,
    training: bool,
) -> None:
    """Fill the lists and the rows of out, reference and shift that have one; of the others, what their block passes
    start from."""
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
    # Of keys that a bias takes out of reach.
    largest = None if problem.bias is None else torch.linalg.vector_norm(k, math.inf, (2, 3))
    head = (*descriptors, x, table, largest)
    options = {
        "SLOTS": SLOTS,
        "LATE": problem.causal or (table is not None and table.strides[2] != 0),
        "C": _fixed(problem),
        **({"maxnreg": REGISTERS} if cuda else {}),
    }
    tiles = triton.cdiv(x.Lk, KEYS.value)
    part, most, update, early = _schedule(tiles)
    beyond = 0 if tiles <= ALL_NARROW else NARROW_SPAN
    candidates_kernel[(narrow,)](
        *head, scratch.view(torch.float32), lists, flags, total, part, most, NARROW_SPAN, beyond,
        UPDATE=update, EARLY=early, num_warps=4, **options,
    )  # fmt: skip
    broad_kernel[(wide,)](
        *head, aligned, lists, flags, reference, shift, total,
        TRAINING=training, MINE=triton.next_power_of_2(triton.cdiv(total, wide)), num_warps=8,
        **options,
    )  # fmt: skip
    gather_left[(total,)](
        flags, lists.counts, lists.left, lists.earlier, x.Lq, BM=rows, CHUNK=256, num_warps=4
    )
    per = _per(problem)
    _finalize_kernel[(problem.heads * triton.cdiv(x.Lq, per),)](
        x, lists, flags, out, reference, shift, TRAINING=training, SLOTS=SLOTS, R=per, CHUNK=8,
        C=_fixed(problem), num_warps=1, **({"maxnreg": FINALIZE} if cuda else {}),
    )  # fmt: skip


def rows_backward(
    problem: Problem,
    grad: torch.Tensor,
    lists: Lists,
    dq: torch.Tensor,
    delta: torch.Tensor,
    dalpha: torch.Tensor | None,
) -> Filed:
    """dq, delta and dalpha of the rows with lists, and their entries by key."""
    x, rows, per = problem.operands(), block_rows(problem.q), _per(problem)
    filed = Filed(
        torch.empty_like(lists.entries),
        torch.empty_like(lists.key_counts),
        lists.key_counts.new_empty(problem.k.shape[:2]),
    )
    _places_kernel[(filed.partial.numel(),)](x, lists, filed, BM=rows, CHUNK=4096, num_warps=8)
    _rows_kernel[(problem.heads * triton.cdiv(x.Lq, per),)](
        x, lists, filed, Strided.of(grad), dq, delta, dalpha, SLOTS=SLOTS, R=per, CHUNK=8,
        C=_fixed(problem), num_warps=1,
        **({} if problem.interpreted else {"maxnreg": REGISTERS}),
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
    """dk and dv from the lists; on top of what they hold in key heads with rows that were left."""
    x, heads = problem.operands(), filed.partial.numel()
    given = (x, lists, filed, Strided.of(grad), delta, dk, dv)
    constants = {"SLOTS": SLOTS, "C": _fixed(problem)}
    # Two tensors of R x CHUNK x width in registers: 64 a lane each at width 64, 32 above, where sums take more.
    per = _per(problem)

    def registers(most: int) -> dict[str, int]:
        return {} if problem.interpreted else {"maxnreg": most}

    _keys_kernel[(heads * triton.cdiv(x.Lk, per),)](
        *given,
        **constants,
        R=per,
        CHUNK=2 * per,
        num_warps=1,
        **registers(BY_KEY if per == 4 else REGISTERS),
    )
    _broad_keys_kernel[(heads * triton.cdiv(x.Lk, SPAN),)](
        *given, **constants, SMALL=x.H * x.Lq * SORTED.value < 2**31, R=per, CHUNK=2 * per**2, SPAN=SPAN,
        num_warps=1, **registers(REGISTERS),
    )  # fmt: skip
    _long_keys_kernel[(heads * triton.cdiv(x.Lk, 64),)](
        *given, **constants, SPAN=64, ROWS=32, SLOT=64, num_warps=4
    )
