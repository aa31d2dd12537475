"""Entmax attention for small-support rows, first half: lists of the few scores that can be in a row's support.

The kernel makes one streaming pass over the scores of a block of rows. Before the pass, the maxima of 16
column classes over a part of the keys give each row a lower bound of its threshold, because maxima of
disjoint classes are distinct entries of the row. The pass then appends every group of four scores with one
above the bound to a list that only one thread writes, so that no atomics are needed and the order is fixed.
A bound from the final maxima filters these lists, and the remaining scores become the row's list.

Blocks with larger supports, with few visible keys, or whose lists overflow, are flagged for
`entmax_attention.large_support`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.launch import relaunched
from .problem import Head, entry_pointers, key_tiles, load_tile, open_head, product, row_constants
from .spans import LOW, Runs, mixed_tile, tiles_of
from .tau import bound_step

# Keys per tile: a lane of the accumulator holds 16 of a row's 64 columns, 4 groups of 4.
KEYS = tl.constexpr(64)
GROUP = tl.constexpr(4)
# A record is a group's four scores and the column of the first: 20 bytes, 8-byte aligned.
RECORD_BYTES = tl.constexpr(24)
RECORD_WORDS = tl.constexpr(6)
# Records per row and lane. A row of support 7 appends 24 in all lanes together, a few of them before its bound
# is tight; rows that pass the density test have fewer than 40 in each of four lanes.
CAPACITY = tl.constexpr(40)
# The most entries of a small-support row.
SMALL_SUPPORT = tl.constexpr(64)
# A block is dense if more than this number of a row's 16 classes, on average, have a maximum above the bound. Its
# supports are then about 14 or more, and appending with branches takes longer than the two passes of `large_support`.
DENSE_CLASSES = tl.constexpr(9.0)
# The same limit after EARLY tiles, when the mean is 5 for a support of 7 and 12 for a support of 50.
DENSE_EARLY = tl.constexpr(10.5)
# The least number of mixed tiles that are read before the pass.
MIXED = tl.constexpr(8)
ABSENT = tl.constexpr(-1e30)
FAR = tl.constexpr(1e30)


def _append_source(integer_test: bool) -> tuple[str, str]:
    """Return PTX and constraints of the appends of one thread for one tile: 4 groups of 4 scores of one row.

    Outputs: offset, 4 class maxima. Inputs: the same, then bound, the bits of the bound, base address, column,
    limit, 16 scores. For a bound >= 0, floats compare like their bits, and an integer maximum of three
    operands is one instruction.
    """
    size = GROUP.value
    groups = KEYS.value // 4 // size
    bound, bits, base, column, limit, first = (
        1 + groups + i for i in range(1 + groups, 7 + groups)
    )
    lines = ["{", ".reg .pred p; .reg .b32 l, c, x<4>; .reg .b64 a; .reg .f32 y;"]
    lines.append(f"mov.b32 $0, ${1 + groups};")
    for g in range(groups):
        lines.append(f"mov.b32 ${1 + g}, ${2 + groups + g};")
    for g in range(groups):
        for e in range(size):
            lines.append(f"mov.b32 x{e}, ${first + g * size + e};")
        kind = "s32" if integer_test else "NaN.f32"
        if integer_test:
            lines.append("max.s32 l, x0, x1;")
            lines += [f"max.s32 l, l, x{e};" for e in range(2, size)]
            lines.append(f"setp.gt.s32 p, l, ${bits};")
        else:
            lines.append(".reg .f32 z<4>;" if g == 0 else "")
            lines += [f"mov.b32 z{e}, x{e};" for e in range(size)]
            lines.append(f"max.{kind} y, z0, z1;")
            lines += [f"max.{kind} y, y, z{e};" for e in range(2, size)]
            lines.append(f"mov.b32 l, y; setp.gtu.f32 p, y, ${bound};")
        lines.append(f"@!p bra SKIP{g};")
        lines.append("mov.b32 y, l;")
        lines.append(f"max.f32 ${1 + g}, ${1 + g}, y;")
        lines.append(f"setp.le.s32 p, $0, ${limit};")
        lines.append(f"@!p bra FULL{g};")
        lines.append(f"cvt.u64.u32 a, $0; add.s64 a, a, ${base};")
        lines += [f"st.global.v2.b32 [a+{4 * e}], {{x{e}, x{e + 1}}};" for e in range(0, size, 2)]
        lines.append(f"add.u32 c, ${column}, {4 * size * g}; st.global.b32 [a+{4 * size}], c;")
        lines.append(f"FULL{g}: add.u32 $0, $0, {RECORD_BYTES.value};")
        lines.append(f"SKIP{g}:")
    lines.append("}")
    outs = ["=&r"] + ["=&f"] * groups
    ins = ["r"] + ["f"] * groups + ["f", "r", "l", "r", "r"] + ["f"] * (groups * size)
    return "\n".join(lines), ",".join(outs + ins)


INTEGER_SOURCE, CONSTRAINTS = (tl.constexpr(x) for x in _append_source(True))
FLOAT_SOURCE = tl.constexpr(_append_source(False)[0])


@triton.jit
def _split8(x, BM: tl.constexpr):
    """Return the eight columns of x [BM, 4, 8]."""
    even, odd = tl.split(tl.reshape(x, (BM, 4, 4, 2)))
    a, b = tl.split(tl.reshape(even, (BM, 4, 2, 2)))
    x0, x4 = tl.split(a)
    x2, x6 = tl.split(b)
    a, b = tl.split(tl.reshape(odd, (BM, 4, 2, 2)))
    x1, x5 = tl.split(a)
    x3, x7 = tl.split(b)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def split_lanes(s, BM: tl.constexpr):
    """Split tile s [BM, 64] into two tuples of eight [BM, 4]: columns 8 n + 2 l and 8 n + 2 l + 1 of lane l.

    This is the layout of the accumulator over its threads, so that no data moves.
    """
    x, y = tl.split(tl.permute(tl.reshape(s, (BM, 8, 4, 2)), (0, 2, 1, 3)))
    return _split8(x, BM), _split8(y, BM)


@triton.jit
def _append_group(off, top, bound, records, column, limit, a, b, c, d, NUMBER: tl.constexpr):
    """Append one group in plain Triton, and return (offset, class maximum)."""
    best = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    # NaN is above every bound.
    hit = (best > bound) | (a != a) | (b != b) | (c != c) | (d != d)
    write = hit & (off <= limit)
    at = records + off // 4
    tl.store(at, a, mask=write)
    tl.store(at + 1, b, mask=write)
    tl.store(at + 2, c, mask=write)
    tl.store(at + 3, d, mask=write)
    tl.store(at + 4, (column + 16 * NUMBER).to(tl.float32, bitcast=True), mask=write)
    off += tl.where(hit, RECORD_BYTES, 0)
    return off, tl.where(hit, tl.maximum(top, best), top)


@triton.jit
def _append(
    s, off, top, bound, records, column, limit,
    FLOAT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Append the groups of tile s [BM, 64] with a score above bound, and return (offset, class maxima)."""
    t0, t1, t2, t3 = top
    x, y = split_lanes(s, C.BM)
    x0, x1, x2, x3, x4, x5, x6, x7 = x
    y0, y1, y2, y3, y4, y5, y6, y7 = y
    if not C.INTERPRETED:
        SOURCE: tl.constexpr = FLOAT_SOURCE if FLOAT else INTEGER_SOURCE
        bits = off if FLOAT else bound.to(tl.int32, bitcast=True)
        base = records.to(tl.int64, bitcast=True)
        off, t0, t1, t2, t3 = tl.inline_asm_elementwise(
            SOURCE, CONSTRAINTS,
            [off, t0, t1, t2, t3, bound, bits, base, column, limit,
             x0, y0, x1, y1, x2, y2, x3, y3, x4, y4, x5, y5, x6, y6, x7, y7],
            dtype=(tl.int32, tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        off, t0 = _append_group(off, t0, bound, records, column, limit, x0, y0, x1, y1, 0)
        off, t1 = _append_group(off, t1, bound, records, column, limit, x2, y2, x3, y3, 1)
        off, t2 = _append_group(off, t2, bound, records, column, limit, x4, y4, x5, y5, 2)
        off, t3 = _append_group(off, t3, bound, records, column, limit, x6, y6, x7, y7, 3)
    return off, (t0, t1, t2, t3)


@triton.jit
def _class_maxima(s, top, BM: tl.constexpr):
    """Update the maxima of a row's 16 classes (lane, group) with tile s [BM, 64].

    The tile is split and not reduced: with a mask, the layout may spread a row over two warps, and Triton 3.6 reduces
    parts of rows wrongly then.
    """
    t0, t1, t2, t3 = top
    x, y = split_lanes(s, BM)
    t0 = tl.maximum(t0, tl.maximum(tl.maximum(x[0], y[0]), tl.maximum(x[1], y[1])))
    t1 = tl.maximum(t1, tl.maximum(tl.maximum(x[2], y[2]), tl.maximum(x[3], y[3])))
    t2 = tl.maximum(t2, tl.maximum(tl.maximum(x[4], y[4]), tl.maximum(x[5], y[5])))
    t3 = tl.maximum(t3, tl.maximum(tl.maximum(x[6], y[6]), tl.maximum(x[7], y[7])))
    return t0, t1, t2, t3


class Run(NamedTuple):
    """A block of rows and its visible keys: see `open_block`."""

    bh: Any
    block: Any
    head: Head
    i: Any
    at: Any
    factor: Any
    beta: Any
    runs: Runs
    k_desc: Any
    key_row: Any
    most: Any
    q: Any


@triton.jit
def _load_rows(desc, m, first, i, limit, EDGE: tl.constexpr, C: tl.constexpr):
    """Load rows i of a head's matrix, which start at row `first` of the descriptor's matrix."""
    if C.INTERPRETED:
        return load_tile(m, i, limit, EDGE, C.D, C.D)
    else:
        return desc.load([first, 0])


@triton.jit
def full_scores(run, n, C: tl.constexpr, EDGE: tl.constexpr = False):
    """Return the raw scores [BM, KEYS] of key tile n. All of its keys must be visible and have no bias."""
    j = n * KEYS + tl.arange(0, KEYS)
    head = run.head
    k = _load_rows(run.k_desc, head.k, run.key_row + n * KEYS, j, head.last_key, EDGE, C)
    return product(run.q, tl.trans(k), C)


@triton.jit
def mixed_scores(run, n, absent, SPANS: tl.constexpr, C: tl.constexpr):
    """Return (q . k + bias / scale [BM, KEYS], first key) of the n-th mixed tile; invisible keys score `absent`."""
    head, i = run.head, run.i
    tile = mixed_tile(n, run.runs, SPANS)
    j = tile * KEYS + tl.arange(0, KEYS)
    seen = (j < head.last_key)[None, :]
    inside = (i < head.Lq)[:, None] & seen
    if C.CAUSAL:
        seen = seen & (j[None, :] <= i[:, None] + head.diagonal)
    # Bias and mask are loaded before the product, so that they arrive while it waits for its keys.
    if C.HAS_BIAS:
        bias = tl.load(entry_pointers(head.bias, i, j), mask=inside, other=0.0)
    if C.HAS_MASK:
        kept = tl.load(entry_pointers(head.mask, i, j), mask=inside, other=0)
    s = full_scores(run, tile, C, True)
    if C.HAS_BIAS:
        s += bias.to(tl.float32) * (1.0 / head.scale)
    if C.HAS_MASK:
        seen = seen & (kept != 0)
    return tl.where(seen, s, absent), tile * KEYS


@triton.jit
def _reach(q, largest, head, C: tl.constexpr):
    """Return an upper bound [BM] of the raw scores of keys that are dropped or outside a row's span.

    largest: the largest absolute value in all keys of the head.
    """
    most = tl.full([C.BM], ABSENT, tl.float32)
    if C.FINITE_FILL:
        most = tl.maximum(most, head.fill / head.scale)
    if C.HAS_BIAS:
        reach = tl.sum(tl.abs(q.to(tl.float32)), 1) * tl.load(largest).to(tl.float32)
        most = tl.maximum(most, reach + LOW / head.scale, propagate_nan=tl.PropagateNan.ALL)
    return most


@triton.jit
def _stream(
    off, top, bound, run, records, lane, limit, factor, beta, seen, first, last,
    FLOAT: tl.constexpr, UPDATE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Run iterations first:last of the pass over the full key tiles.

    The pass starts after the `seen` tiles that gave the first bound, and processes those at its end, when the bound is
    tightest.
    """
    for n in tl.range(first, last, num_stages=C.STAGES):
        t = n + seen
        t = run.runs.full + tl.where(t >= last, t - last, t)
        s = full_scores(run, t, C)
        off, top = _append(s, off, top, bound, records, lane + t * KEYS, limit, FLOAT, C)
        if n % UPDATE == UPDATE - 1:
            bound = bound_step(top, bound, factor, beta, C.KIND, 1)
    return off, top, bound


@triton.jit
def _first_bound(top, factor, beta, row_ok, KIND: tl.constexpr):
    """Return lower bounds of the thresholds from the class maxima; FAR if a row does not exist."""
    t0, t1, t2, t3 = top
    best = tl.max(tl.maximum(tl.maximum(t0, t1), tl.maximum(t2, t3)), 1)[:, None]
    return tl.where(row_ok, bound_step(top, best - 1.0 / factor, factor, beta, KIND, 3), FAR)


@triton.jit
def _classes_above(top, bound, valid):
    """Return the mean number of a row's 16 classes with a maximum above the row's bound."""
    t0, t1, t2, t3 = top
    over = (t0 > bound).to(tl.float32) + (t1 > bound).to(tl.float32)
    over += (t2 > bound).to(tl.float32) + (t3 > bound).to(tl.float32)
    return tl.sum(tl.sum(over, 1), 0) / valid


@triton.jit
def block_lanes(BM: tl.constexpr):
    """Return (rows [BM] of a block, lanes [4] of a row, first column of each lane [BM, 4])."""
    rows = tl.arange(0, BM)
    four = tl.arange(0, 4)
    return rows, four, 2 * four[None, :] + tl.zeros([BM, 1], tl.int32)


@triton.jit
def block_place(unit, blocks, heads, LATE: tl.constexpr):
    """Return (head, block) of a unit of work. LATE: the last blocks, which have the longest rows, come first."""
    if LATE:
        return unit % heads, blocks - 1 - unit // heads
    else:
        return unit // blocks, unit % blocks


@triton.jit
def open_block(bh, block, q_desc, k_desc, x, spans, largest, C: tl.constexpr):
    """Return the `Run` of a block of BM rows of a head: rows i, their positions and constants [BM], visible key tiles,
    the upper bound of the scores of invisible keys, and queries [BM, D]."""
    b = (bh // x.H).to(tl.int64)
    h = (bh % x.H).to(tl.int64)
    first = block * C.BM
    i = first + tl.arange(0, C.BM)
    head = open_head(x, b, h)
    factor, _am1, beta = row_constants(head, i, C)
    tiles = key_tiles(first, tl.minimum(first + C.BM, x.Lq), head, C.CAUSAL, KEYS)
    if spans is None:
        runs = tiles_of(None, tiles)
    else:
        step_b, step_h, step_block = spans.strides
        runs = tiles_of(spans.table + b * step_b + h * step_h + block * step_block, tiles)
    bg = b * (x.H // x.G) + h // x.G
    q = _load_rows(q_desc, head.q, (bh * x.Lq + first).to(tl.int32), i, x.Lq, True, C)
    most = _reach(q, None if largest is None else largest + bg, head, C)
    at = bh.to(tl.int64) * x.Lq + i
    return Run(
        bh, block, head, i, at, factor, beta, runs, k_desc, (bg * x.Lk).to(tl.int32), most, q
    )  # fmt: skip


@relaunched
@triton.jit
def candidates_kernel(
    q_desc, k_desc, x, spans, largest, scratch, lists, flags, total, part, limited, narrow, beyond,
    SLOTS: tl.constexpr, LATE: tl.constexpr, UPDATE: tl.constexpr, EARLY: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Programs stride over blocks of BM rows and write the entries and counts of their rows.

    A row has counts[row] entries from SLOTS * row on, in a fixed order: column << 32 | bits of the raw score
    q . k, for all scores above a lower bound of the row's threshold. starts[row] is relative to the block's
    first entry. flags[block] = 1 if `large_support` has to process the block. scratch: BM * 4 * CAPACITY
    records per program, reused for each block. A share 1 / `part` of the key tiles, at most `limited`, is read
    before the pass; the maxima of EARLY full tiles (0: of all of these) may flag the block. A block with at
    most `narrow` visible tiles, one of them after the first `beyond`, is flagged at once.
    """
    BM: tl.constexpr = C.BM
    SPANS: tl.constexpr = spans is not None
    blocks = tl.cdiv(x.Lq, BM)
    heads = total // blocks
    rows, four, lane = block_lanes(BM)
    start = (rows[:, None] * 4 + four[None, :]) * (CAPACITY * RECORD_BYTES)
    limit = start + (CAPACITY - 1) * RECORD_BYTES
    own = scratch + tl.program_id(0).to(tl.int64) * (BM * 4 * CAPACITY * RECORD_WORDS)
    records = own + tl.zeros([BM, 4], tl.int32)
    for unit in range(tl.program_id(0), total, tl.num_programs(0)):
        bh, block = block_place(unit, blocks, heads, LATE)
        run = open_block(bh, block, q_desc, k_desc, x, spans, largest, C)
        i, full, fulls, mixed = run.i, run.runs.full, run.runs.fulls, run.runs.mixed
        last_row = run.head.last_row
        factor = run.factor[:, None] + tl.zeros([BM, 4], tl.float32)
        beta = run.beta[:, None] + tl.zeros([BM, 4], tl.float32)
        none = tl.full([BM, 4], ABSENT, tl.float32)
        top = (none, none, none, none)
        seen = tl.minimum(tl.maximum(fulls // part, EARLY), tl.minimum(fulls, limited))
        end = mixed_tile(mixed, run.runs, SPANS)
        looks = ((fulls + mixed > narrow) | (end <= beyond)).to(tl.int32)
        seen *= looks
        few = tl.minimum(EARLY, seen) if EARLY > 0 else seen
        for n in tl.range(0, few, num_stages=C.STAGES):
            top = _class_maxima(full_scores(run, full + n, C), top, BM)
        # Mixed tiles at edges are few, and all are read. With an irregular mask or a bias, only a sample is read.
        every = 1
        if SPANS:
            every = tl.maximum(mixed // tl.maximum(tl.minimum(mixed // part, limited), MIXED), 1)
        for n in tl.range(0, looks * (mixed // every), num_stages=1):
            s, _first = mixed_scores(run, n * every, ABSENT, SPANS, C)
            top = _class_maxima(s, top, BM)
        row_ok = (i < last_row)[:, None] & (lane >= 0)
        valid = tl.maximum(tl.minimum(last_row - block * BM, BM), 1).to(tl.float32)
        bound = _first_bound(top, factor, beta, row_ok, C.KIND)
        if EARLY > 0:
            dense = _classes_above(top, bound, valid) > DENSE_EARLY
            seen = tl.where(dense, few, seen)
            for n in tl.range(few, seen, num_stages=C.STAGES):
                top = _class_maxima(full_scores(run, full + n, C), top, BM)
            if seen > few:
                bound = _first_bound(top, factor, beta, row_ok, C.KIND)
            dense = dense | (_classes_above(top, bound, valid) > DENSE_CLASSES)
        else:
            dense = _classes_above(top, bound, valid) > DENSE_CLASSES
        dense = dense | (looks == 0)
        last = tl.where(dense, 0, fulls)

        off = start
        for n in tl.range(0, tl.where(dense, 0, mixed), num_stages=1):
            s, first = mixed_scores(run, n, ABSENT, SPANS, C)
            off, top = _append(s, off, top, bound, records, lane + first, limit, True, C)
            if SPANS and n % UPDATE == UPDATE - 1:
                bound = bound_step(top, bound, factor, beta, C.KIND, 1)
        low = tl.min(tl.min(bound, 1), 0) < 0.0
        signed = tl.where(low, last, 0)
        off, top, bound = _stream(
            off, top, bound, run, records, lane, limit, factor, beta, seen, 0, signed, True, UPDATE, C
        )  # fmt: skip
        off, top, bound = _stream(
            off, top, bound, run, records, lane, limit, factor, beta, seen, signed, last, False, UPDATE, C
        )  # fmt: skip
        bound = bound_step(top, bound, factor, beta, C.KIND, 2)

        # Filter each row's records with the final bound, in the order record, lane, element.
        tl.debug_barrier()
        over = off > limit + RECORD_BYTES
        slots = lists.entries + run.at[:, None] * SLOTS
        size = (tl.minimum(off, limit + RECORD_BYTES) - start) // RECORD_BYTES
        used = tl.zeros([BM, 1], tl.int32)
        for r in range(tl.max(tl.max(size, 1), 0)):
            live = (r < size) & row_ok
            at = records + start // 4 + r * RECORD_WORDS
            column = tl.load(at + 4, mask=live, other=0.0).to(tl.int32, bitcast=True)
            v0 = tl.load(at, mask=live, other=ABSENT)
            v1 = tl.load(at + 1, mask=live, other=ABSENT)
            v2 = tl.load(at + 2, mask=live, other=ABSENT)
            v3 = tl.load(at + 3, mask=live, other=ABSENT)
            # `(v <= bound) == 0` keeps NaN, unlike `v > bound`.
            k0 = (live & ((v0 <= bound) == 0)).to(tl.int32)
            k1 = (live & ((v1 <= bound) == 0)).to(tl.int32)
            k2 = (live & ((v2 <= bound) == 0)).to(tl.int32)
            k3 = (live & ((v3 <= bound) == 0)).to(tl.int32)
            mine = k0 + k1 + k2 + k3
            place = used + tl.cumsum(mine, 1) - mine
            _keep(slots, place, v0, column, k0)
            _keep(slots, place + k0, v1, column + 1, k1)
            _keep(slots, place + k0 + k1, v2, column + 8, k2)
            _keep(slots, place + k0 + k1 + k2, v3, column + 9, k3)
            used += tl.sum(mine, 1)[:, None]
        bad = (over | (used > SMALL_SUPPORT)) & row_ok
        if C.FINITE_FILL or C.HAS_BIAS:
            # An invisible key may be in the support.
            bad = bad | (((bound > run.most[:, None]) == 0) & row_ok)
        flag = tl.max(tl.max(bad.to(tl.int32), 1), 0) | dense.to(tl.int32)
        tl.store(flags + bh * blocks + block, flag)
        tl.store(lists.starts + run.at, rows * SLOTS, mask=i < x.Lq)
        found = tl.sum(tl.where(four[None, :] == 0, used, 0), 1)
        tl.store(lists.counts + run.at, found, mask=i < x.Lq)
        tl.debug_barrier()


@triton.jit
def _keep(slots, place, value, column, keep):
    tl.store(slots + place, pack(column, value), mask=(keep != 0) & (place < SMALL_SUPPORT))


@triton.jit
def unpack(entry):
    """Return (column or row number, float) of an entry."""
    low = (entry & 0xFFFFFFFF).to(tl.int32)
    return (entry >> 32).to(tl.int32), low.to(tl.float32, bitcast=True)


@triton.jit
def pack(number, value):
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (number.to(tl.int64) << 32) | bits
