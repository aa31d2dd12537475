"""Entmax attention for large-support rows: supports of about 14 keys, too many for `candidates`, to about 130.

The kernel makes two passes over the scores of a block of rows. The first takes the maxima of 64 column classes over
all keys. They bound the threshold so tightly that hardly more scores than the support are above the bound (70 for a
support of 62 of 8192 keys; 870 for 410). The second pass appends those scores to lists, each written by one thread,
with predicates instead of branches, since nearly every warp has a hit. The threshold is then solved on
the lists, and the support is written to the block's entries.

Rows with larger supports fall back to the block passes: `gather_fallback` lists them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.launch import compiled_first, relaunched
from .candidates import (
    FAR,
    KEYS,
    block_lanes,
    block_place,
    full_scores,
    mixed_scores,
    open_block,
    pack,
    split_lanes,
    unpack,
)
from .problem import larger
from .tau import NEG_INF, POS_INF, SPREAD_NAN, bracket, powers, root, step

# Records per row and lane. A record is 16 bytes: the scores of two neighbouring columns and the first column. The first
# records of all lists are contiguous, followed by the second records, and so on: lists are short, and records that are
# read together share cache lines.
LIST = tl.constexpr(64)
# A list with more records is full, since a tile may append 8.
ROOM = tl.constexpr(56)
# The most classes, of 64, above the bound. With more (there are about 220 entries at 62) a row would fill its lists.
# Block passes are faster from about 130 entries on, but not for a few rows of a head.
FILLED = tl.constexpr(62.0)
# Two scores of -inf, read for a missing record.
NO_SCORES = tl.constexpr(-0x007FFFFF00800000)
# Records of each list that are loaded together.
CHUNK = tl.constexpr(8)
# The flag of a processed block is SOLVED plus the number of its fallback rows.
SOLVED = tl.constexpr(256)
EXACT = tl.constexpr(5e-7)
TURNS = tl.constexpr(64)


def list_words(rows: int) -> int:
    """Return the number of 64-bit words of a block's lists, a power of two."""
    return rows * 4 * LIST.value * 2


def _append_source(rows: int) -> tuple[str, str]:
    """Return PTX and constraints of the appends of one thread for one tile: 8 pairs of one row, without a branch.

    Outputs: low word of the list's end, whether the list was full. Inputs: the same, low word of the list's start,
    high word, bound, first column, 16 scores in column order. NaN is above every bound.
    """
    step = rows * 64
    room = ROOM.value * step
    lines = ["{", ".reg .pred p; .reg .b32 c, n; .reg .f32 y; .reg .b64 a;"]
    lines.append("mov.b32 $0, $2; mov.b32 $1, $3;")
    lines.append(f"sub.u32 n, $2, $4; setp.gt.u32 p, n, {room};")
    lines.append(f"@p mov.b32 $1, 1; @p add.u32 $0, $4, {room};")
    for e in range(8):
        one, two = f"${8 + 2 * e}", f"${9 + 2 * e}"
        lines.append(f"max.NaN.f32 y, {one}, {two}; setp.gtu.f32 p, y, $6;")
        lines.append(f"mov.b64 a, {{$0, $5}}; add.u32 c, $7, {8 * e};")
        lines.append(f"@p st.global.v2.f32 [a], {{{one}, {two}}}; @p st.global.b32 [a+8], c;")
        lines.append(f"@p add.u32 $0, $0, {step};")
    lines.append("}")
    return "\n".join(lines), ",".join(["=&r", "=&r", "r", "r", "r", "r", "f", "r"] + ["f"] * 16)


SOURCE, CONSTRAINTS = (tl.constexpr(x) for x in _append_source(128))


@triton.jit
def _append_pair(off, bound, lists, column, x, y, STEP: tl.constexpr):
    hit = (x > bound) | (y > bound) | (x != x) | (y != y)
    tl.store(lists + off // 8, pack(y.to(tl.int32, bitcast=True), x), mask=hit)
    tl.store(lists + off // 8 + 1, column.to(tl.int64), mask=hit)
    return off + tl.where(hit, STEP, 0)


@triton.jit
def _append(s, off, full, first, high, bound, lists, column, C: tl.constexpr):
    """Append the pairs of tile s [BM, 64] above bound, and return (end of each list in bytes, whether full)."""
    x, y = split_lanes(s, C.BM)
    if not C.INTERPRETED:
        off, full = tl.inline_asm_elementwise(
            SOURCE, CONSTRAINTS,
            [off, full, first, high, bound, column,
             x[0], y[0], x[1], y[1], x[2], y[2], x[3], y[3],
             x[4], y[4], x[5], y[5], x[6], y[6], x[7], y[7]],
            dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        STEP: tl.constexpr = C.BM * 64
        over = off - first > ROOM * STEP
        full = tl.where(over, 1, full)
        off = tl.where(over, first + ROOM * STEP, off)
        for n in tl.static_range(8):
            off = _append_pair(off, bound, lists, column + 8 * n, x[n], y[n], STEP)
    return off, full


@triton.jit
def _best(x, y):
    """Return the maximum [M] of the classes of each row, eight tensors [M, 4] in x and in y; NaN propagates."""
    best = larger(x[0], y[0])
    for n in tl.static_range(1, 8):
        best = larger(best, larger(x[n], y[n]))
    return tl.reduce(best, 1, larger)


@triton.jit
def _bound(x, y, best, factor, beta, KIND: tl.constexpr, STEPS: tl.constexpr):
    """Return (bound, number of classes above it) [M, 1]: `bound_step` for 64 classes, starting at best - 1 / factor."""
    power = tl.maximum(beta, 1.0) if KIND <= 0 else beta
    bound = best - 1.0 / factor
    none = tl.zeros_like(x[0])
    for _ in tl.static_range(STEPS):
        f = none
        g = none
        for n in tl.static_range(8):
            w0, g0 = powers(tl.maximum(x[n] - bound, 0.0) * factor, power, KIND)
            w1, g1 = powers(tl.maximum(y[n] - bound, 0.0) * factor, power, KIND)
            f += w0 + w1
            g += g0 + g1
        f = tl.sum(f, 1)[:, None]
        g = tl.sum(g, 1)[:, None]
        h = root(f, power, KIND)
        # The target is slightly over 1, so that rounding cannot move a bound past the root.
        ahead = (h - 1.00001) * f / (h * g * factor)
        bound = tl.where(ahead > 0.0, bound + ahead, bound)
    above = none
    for n in tl.static_range(8):
        above += (x[n] > bound).to(tl.float32) + (y[n] > bound).to(tl.float32)
    return bound, tl.sum(above, 1)[:, None]


@triton.jit
def _chunk(records, size, r):
    """Return (pointers to records r:r + CHUNK of every list, mask of existing records)."""
    slot = r + tl.arange(0, CHUNK)[None, None, :]
    return records[:, :, None] + slot * (records.shape[0] * 8), slot < size[:, :, None]


@triton.jit
def _list_chunk(records, size, r, m, factor, d):
    """Return u = max(x - d, 0) of both scores of records r:r + CHUNK of every list; 0 beyond the end."""
    at, live = _chunk(records, size, r)
    high, low = unpack(tl.load(at, mask=live, other=NO_SCORES))
    m, factor, d = m[:, None, None], factor[:, None, None], d[:, None, None]
    x = (low - m) * factor - d
    y = (high.to(tl.float32, bitcast=True) - m) * factor - d
    u = tl.maximum(x, 0.0, propagate_nan=SPREAD_NAN)
    v = tl.maximum(y, 0.0, propagate_nan=SPREAD_NAN)
    return u, v


@compiled_first
@relaunched
@triton.jit
def large_support_kernel(
    q_desc, k_desc, x, spans, largest, scratch, lists, flags, reference, shift, total,
    TRAINING: tl.constexpr, SLOTS: tl.constexpr, LATE: tl.constexpr, MINE: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Programs stride over the flagged blocks of BM rows and compute thresholds and supports of large-support rows.

    The entries of row i of a block, column << 32 | bits of u = max((alpha - 1) z - tau, 0), start at
    starts[i] of the block's BM * SLOTS slots. Rows are packed, so that long rows use the slots of short
    ones. A fallback row has counts[i] = -1; its reference and shift are its maximum and a lower bound of
    tau - reference. flags[block] = SOLVED + the number of fallback rows. scratch: BM * 4 * LIST
    records per program, not crossing a 4 GiB boundary. MINE: upper bound of a program's number of blocks.
    """
    BM: tl.constexpr = C.BM
    KIND: tl.constexpr = C.KIND
    SPANS: tl.constexpr = spans is not None
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    units = pid + tl.arange(0, MINE) * programs
    blocks = tl.cdiv(x.Lq, BM)
    heads = total // blocks
    mine_bh, mine_block = block_place(units, blocks, heads, LATE)
    flagged = tl.load(flags + mine_bh * blocks + mine_block, mask=units < total, other=0)
    if tl.max(flagged, 0) == 0:
        return
    rows, four, lane = block_lanes(BM)
    own = scratch + pid.to(tl.int64) * (BM * 4 * LIST * 2)
    index = rows[:, None] * 4 + four[None, :]
    records = own + index * 2
    if C.INTERPRETED:
        first = index * 16
        high = first
    else:
        address = records.to(tl.int64, bitcast=True)
        first = (address & 0xFFFFFFFF).to(tl.int32)
        high = (address >> 32).to(tl.int32)
    none = tl.zeros([BM, 4], tl.int32)
    for unit in range(pid, total, programs):
        bh, block = block_place(unit, blocks, heads, LATE)
        place = bh * blocks + block
        if tl.load(flags + place) != 0:
            run = open_block(bh, block, q_desc, k_desc, x, spans, largest, C)
            i, factor, beta = run.i, run.factor, run.beta
            full_tile, fulls, mixed = run.runs.full, run.runs.fulls, run.runs.mixed
            top = tl.full([BM, KEYS], NEG_INF, tl.float32)
            for n in tl.range(0, fulls, num_stages=C.STAGES):
                s = full_scores(run, full_tile + n, C)
                top = tl.maximum(top, s, propagate_nan=SPREAD_NAN)
            # If most of a block's tiles are full, the full tiles are enough for a bound.
            early = tl.where(fulls < 2 * mixed, mixed, 0)
            for n in tl.range(0, early, num_stages=1):
                s, _first = mixed_scores(run, n, NEG_INF, SPANS, C)
                top = tl.maximum(top, s, propagate_nan=SPREAD_NAN)
            # The bound must have the layout of the lists. Otherwise the scores of every tile would be converted.
            class_x, class_y = split_lanes(top, BM)
            best = _best(class_x, class_y)
            # These comparisons are false for NaN, so that a row with NaN falls back to the block passes.
            wanted = (best > NEG_INF) & (best < POS_INF) & (i < run.head.last_row)
            bound, filled = _bound(
                class_x, class_y, best[:, None], factor[:, None], beta[:, None], KIND, 4
            )
            wanted = wanted & (tl.sum(filled, 1) <= FILLED)
            if C.FINITE_FILL or C.HAS_BIAS:
                # An invisible key may be in the support.
                wanted = wanted & (tl.sum(bound, 1) > run.most)
            limit = tl.where(wanted[:, None], bound, FAR) + none.to(tl.float32)
            some = tl.max(wanted.to(tl.int32), 0)

            off = first
            full = none
            late = tl.where((some != 0) | (early < mixed), mixed, 0)
            for n in tl.range(0, late, num_stages=1):
                s, j = mixed_scores(run, n, NEG_INF, SPANS, C)
                top = tl.maximum(top, s, propagate_nan=SPREAD_NAN)
                off, full = _append(s, off, full, first, high, limit, own, lane + j, C)
            class_x, class_y = split_lanes(top, BM)
            best = _best(class_x, class_y)
            dead = i >= run.head.last_row
            if not C.FINITE_FILL and not C.HAS_BIAS:
                dead = dead | (best == NEG_INF)
            wanted = wanted & (best < POS_INF)
            m = tl.where(dead, 0.0, best)
            number = tl.maximum((fulls + mixed) * KEYS, 1).to(tl.float32)
            lo = tl.maximum(tl.sum((bound - m[:, None]) * factor[:, None], 1), -1.0)
            lo, low, hi, old = bracket(lo, number, beta)
            for n in tl.range(0, tl.where(some != 0, fulls, 0), num_stages=C.STAGES):
                t = full_tile + n
                s = full_scores(run, t, C)
                off, full = _append(s, off, full, first, high, limit, own, lane + t * KEYS, C)
            tl.debug_barrier()
            size = (off - first) // (BM * 64)
            full = tl.maximum(full, (size > ROOM).to(tl.int32))
            listed = wanted & (tl.max(full, 1) == 0)
            size = tl.where(listed[:, None], size, 0)
            longest = tl.max(tl.max(size, 1), 0)

            d = lo
            number = tl.maximum(2 * tl.sum(size, 1), 1).to(tl.float32)
            turn = 0
            searching = (longest > 0).to(tl.int32)
            while searching > 0:
                f = tl.zeros([BM, 4, CHUNK], tl.float32)
                g = tl.zeros([BM, 4, CHUNK], tl.float32)
                for r in range(0, longest, CHUNK):
                    u, v = _list_chunk(records, size, r, m, factor, d)
                    w0, g0 = powers(u, beta[:, None, None], KIND)
                    w1, g1 = powers(v, beta[:, None, None], KIND)
                    f += w0 + w1
                    g += g0 + g1
                d, rest, low, hi, old = step(
                    d, tl.sum(tl.sum(f, 2), 1), tl.sum(tl.sum(g, 2), 1), low, hi, old, number * beta,
                    turn, beta, KIND,
                )  # fmt: skip
                turn += 1
                searching = tl.max(((rest > EXACT) & listed).to(tl.int32), 0)
                if turn >= TURNS:
                    searching = 0

            kept = none
            for r in range(0, longest, CHUNK):
                u, v = _list_chunk(records, size, r, m, factor, d)
                kept += tl.sum((u != 0.0).to(tl.int32) + (v != 0.0).to(tl.int32), 2)
            support = tl.where(listed, tl.sum(kept, 1), 0)
            end = tl.cumsum(support, 0)
            space = tl.minimum(x.Lq - block * BM, BM) * SLOTS
            listed = listed & (end <= space)
            solved = listed | dead
            start = end - support
            pool = lists.entries + (bh.to(tl.int64) * x.Lq + block * BM) * SLOTS
            counted = lists.key_counts + (bh // x.G).to(tl.int64) * x.Lk
            at = start[:, None] + tl.cumsum(kept, 1) - kept
            for r in range(0, longest, CHUNK):
                u, v = _list_chunk(records, size, r, m, factor, d)
                at_record, live = _chunk(records, size, r)
                column = tl.load(at_record + 1, mask=live, other=0)
                column = column.to(tl.int32)  # the high word was not written
                keep_u = (u != 0.0) & listed[:, None, None]
                keep_v = (v != 0.0) & listed[:, None, None]
                one = keep_u.to(tl.int32)
                both = one + keep_v.to(tl.int32)
                where = at[:, :, None] + tl.cumsum(both, 2) - both
                tl.store(pool + where, pack(column, u), mask=keep_u)
                tl.store(pool + where + one, pack(column + 1, v), mask=keep_v)
                if TRAINING:
                    tl.atomic_add(counted + column, 1, mask=keep_u, sem="relaxed")
                    tl.atomic_add(counted + column + 1, 1, mask=keep_v, sem="relaxed")
                at += tl.sum(both, 2)
            inside = i < x.Lq
            tl.store(lists.starts + run.at, start, mask=inside)
            length = tl.where(solved, tl.where(dead, 0, support), -1)
            tl.store(lists.counts + run.at, length, mask=inside)
            tl.store(reference + run.at, m * factor, mask=inside)
            d = tl.where(listed, d, lo)
            tl.store(shift + run.at, tl.where(dead, POS_INF, d), mask=inside)
            left = tl.sum((inside & (solved == 0)).to(tl.int32), 0)
            tl.store(flags + place, left + SOLVED)
            tl.debug_barrier()


@relaunched
@triton.jit
def gather_fallback(flags, counts, fallback, earlier, Lq, BM: tl.constexpr, CHUNK: tl.constexpr):
    """Program (head, block) appends the block's fallback rows to those of the head's earlier blocks.

    fallback[bh] lists rows in ascending order; earlier[bh, t] is the number of fallback rows before block t.
    """
    blocks = tl.cdiv(Lq, BM)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    before = 0
    for t0 in range(0, block, CHUNK):
        t = t0 + tl.arange(0, CHUNK)
        before += tl.sum(tl.load(flags + bh * blocks + t, mask=t < block, other=0) % SOLVED, 0)
    mine = tl.load(flags + bh * blocks + block) % SOLVED
    tl.store(earlier + bh * (blocks + 1) + block, before)
    if block == blocks - 1:
        tl.store(earlier + bh * (blocks + 1) + blocks, before + mine)
    if mine > 0:
        i = block * BM + tl.arange(0, BM)
        out = (tl.load(counts + bh * Lq + i, mask=i < Lq, other=0) < 0).to(tl.int32)
        place = before + tl.cumsum(out, 0) - out
        tl.store(fallback + bh * Lq + place, i, mask=out != 0)
