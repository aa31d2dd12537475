"""Entmax attention of rows with few keys: everything from the rows' lists.

`entmax_attention_candidates` leaves each peaked row with the few scores that can be in its support,
`entmax_attention_broad` each broad row with its support. Here the thresholds of the former are solved,
the values gathered, and in the backward the lists are turned into lists of rows by key. Other rows
are left to the block passes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .arch import compute_capability
from .entmax_attention_broad import LIST, broad_kernel, gather_left, pack, unpack
from .entmax_attention_candidates import CAPACITY, KEYS, PEAKED, RECORD_BYTES, candidates_kernel
from .entmax_attention_problem import Left, Problem, row_constants
from .entmax_attention_spans import spans
from .entmax_attention_tau import class_bound, log_power, powers, step
from .launch import relaunched, sm_count

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
    "left_rows",
    "rows_backward",
]

NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))
SPREAD_NAN = tl.constexpr(tl.PropagateNan.ALL)
# Entries a row, shared by the rows of a block: a support varies by a quarter from row to row, the mean of
# 128 hardly. More are little gain: backward, block passes take 19 ns a row of 8192 keys, lists 0.17 an entry.
SLOTS = 80
# Fewer keys: the block passes' launches are the shorter ones.
MIN_KEYS = 1024
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


def left_rows(q: torch.Tensor, saved: tuple[torch.Tensor, ...]) -> Left | None:
    """The rows that the lists leave to the block passes; None: all, there are no lists."""
    return Left(saved[5], saved[6], block_rows(q)) if len(saved) > 2 else None


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=SPREAD_NAN)


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


@triton.jit
def _own_rows(counts, Lq, BM: tl.constexpr, R: tl.constexpr):
    """A program's R rows: (bh, the block they are in, i [R], their places in [B, H, Lq], counts)."""
    blocks = tl.cdiv(Lq, R)
    bh = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * R
    i = first + tl.arange(0, R)
    row = bh.to(tl.int64) * Lq + i
    return bh, first // BM, i, row, tl.load(counts + row, mask=i < Lq, other=-1)


@relaunched
@triton.jit
def _finalize_kernel(
    v, alpha, sab, sah, sal, svb, svh, svl, svd,
    H, G, Lq, Lk, am1_value, scale,
    entries, starts, counts, flags, key_counts, out, reference, shift,
    DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr, HAS_ALPHA: tl.constexpr,
    TRAINING: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, R: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """A program owns out of R rows; of peaked ones also the threshold and the support.

    Reads and writes 8 bytes a candidate and gathers DV values for each of the support; counts each
    key's rows (integer atomics: the order does not matter).
    """
    bh, block, i, row, n = _own_rows(counts, Lq, BM, R)
    if tl.max(n, 0) < 0:
        return
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    factor, _am1, beta = row_constants(
        alpha + b * sab + h * sah, sal, i, Lq, am1_value, scale, HAS_ALPHA
    )
    inside = n >= 0
    first = tl.load(starts + row, mask=inside, other=0)
    pool = entries + (bh.to(tl.int64) * Lq + block * BM) * SLOTS
    support = tl.maximum(n, 0)
    if tl.load(flags + bh * tl.cdiv(Lq, BM) + block) == 0:
        counted = key_counts + (b * (H // G) + h // G) * Lk
        support = _solve(
            pool, first, support, row, factor, beta, counted, counts, reference, shift, inside,
            KIND, TRAINING, R,
        )  # fmt: skip
    dd = tl.arange(0, BDV)
    v_head = v + b * svb + (h // G) * svh
    acc = tl.zeros([R, BDV], tl.float32)
    f = tl.zeros([R, CHUNK], tl.float32)
    for c in range(0, tl.max(support, 0), CHUNK):
        s = c + tl.arange(0, CHUNK)
        filled = s[None, :] < support[:, None]
        chosen, un = unpack(tl.load(pool + first[:, None] + s[None, :], mask=filled, other=0))
        p, _g = powers(un, beta[:, None], KIND)
        p = tl.where(filled, p, 0.0)
        f += p
        source = v_head + chosen.to(tl.int64)[:, :, None] * svl + dd[None, None, :] * svd
        some = filled[:, :, None] & (dd < DV)[None, None, :]
        values = tl.load(source, mask=some, other=0.0).to(tl.float32)
        acc += tl.sum(values * p[:, :, None], 1)
    total = tl.sum(f, 1)
    # What fp32 leaves of sum p == 1 goes to all entries alike.
    acc = tl.where((support == 0)[:, None], 0.0, acc / total[:, None])
    some = inside[:, None] & (dd < DV)[None, :]
    tl.store(out + row[:, None] * DV + dd[None, :], acc.to(out.dtype.element_ty), mask=some)


@relaunched
@triton.jit
def _places_kernel(
    key_counts, earlier, cursors, partial, H, G, Lq, Lk, BM: tl.constexpr, CHUNK: tl.constexpr
):
    """A program owns a key head: where each key's entries begin, and how many rows of it are left."""
    bg = tl.program_id(0).to(tl.int64)
    head = bg // (H // G) * H + bg % (H // G) * G
    blocks = tl.cdiv(Lq, BM)
    left = 0
    for g in range(G):
        left += tl.load(earlier + (head + g) * (blocks + 1) + blocks)
    tl.store(partial + bg, left)
    before = 0
    for c in range(0, Lk, CHUNK):
        j = c + tl.arange(0, CHUNK)
        n = tl.load(key_counts + bg * Lk + j, mask=j < Lk, other=0)
        tl.store(cursors + bg * Lk + j, before + tl.cumsum(n, 0) - n, mask=j < Lk)
        before += tl.sum(n, 0)


@relaunched
@triton.jit
def _rows_kernel(
    k, v, alpha, sab, sah, sal, skb, skh, skl, skd, svb, svh, svl, svd,
    H, G, Lq, Lk, am1_value, scale,
    entries, starts, counts, cursors, by_key, grad, sgb, sgh, sgl, sgd, dq, delta, dalpha,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr, WANT_ALPHA: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr,
    R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program owns dq, delta and dalpha of R rows, and files their entries under their keys.

    by_key takes row << 32 | bits of u at the place that the key's cursor names, which moves on: in any
    order, the keys' kernel sorts. Gathers D + DV values for each entry.
    """
    bh, block, i, row, n = _own_rows(counts, Lq, BM, R)
    if tl.max(n, 0) < 0:
        return
    listed = n >= 0
    n = tl.maximum(n, 0)
    start = tl.load(starts + row, mask=listed, other=0)
    pool = entries + (bh.to(tl.int64) * Lq + block * BM) * SLOTS
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    _factor, am1, beta = row_constants(
        alpha + b * sab + h * sah, sal, i, Lq, am1_value, scale, HAS_ALPHA
    )
    dd = tl.arange(0, BD)
    de = tl.arange(0, BDV)
    inside = listed[:, None] & (de < DV)[None, :]
    at = grad + b * sgb + h * sgh + i.to(tl.int64)[:, None] * sgl + de[None, :] * sgd
    do = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    k_head = k + b * skb + (h // G) * skh
    v_head = v + b * svb + (h // G) * svh
    bg = b * (H // G) + h // G
    key = bg * Lk
    by_key += bg * G * Lq * SLOTS
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
        entry = tl.load(pool + start[:, None] + s[None, :], mask=live, other=0)
        column, u = unpack(entry)
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
            plogp = p * log_power(u, beta[:, None], KIND)
            pdp += tl.sum(p * dp, 1)
            sdp += tl.sum(plogp * dp, 1)
            ss += tl.sum(plogp, 1)
        gdpk += tl.sum(vectors * w[:, :, None], 1)
        gk += tl.sum(vectors * g[:, :, None], 1)
        place = tl.atomic_add(cursors + key + column, 1, mask=live, sem="relaxed")
        filed = pack(tl.broadcast_to(number[:, None], [R, CHUNK]), u)
        tl.store(by_key + place, filed, mask=live)
    rest = tl.where(n == 0, 0.0, gdp / gs)
    tl.store(delta + row, guess + rest, mask=listed)
    x = (gdpk - rest[:, None] * gk) * scale
    inside = listed[:, None] & (dd < D)[None, :]
    tl.store(dq + row[:, None] * D + dd[None, :], x.to(dq.dtype.element_ty), mask=inside)
    if WANT_ALPHA:
        da = (pdp - rest) / (am1 * am1) - (sdp - rest * ss) / am1
        tl.store(dalpha + row, tl.where(n == 0, 0.0, da), mask=listed)


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
def _sort(by_key, start, n, R: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr):
    """Sort R segments of n <= WIDTH entries by row number, in place.

    Row numbers times WIDTH fit 31 bits: they are sorted together with where their entry is. In a
    warp's registers, which takes a sixth of the instructions of `tl.sort`. That e says where its element
    is holds for all tensors of this shape here: they have one layout, as none has more than loads and
    stores of single entries to choose it by.
    """
    segments: tl.constexpr = 1 if R == 1 else 4
    e = tl.arange(0, segments * WIDTH)
    given = e % WIDTH
    if ASM:
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
    if ASM:
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
def _add_rows(
    q, v, grad, delta, alpha, sqb, sqh, sql, sqd, svb, svh, svl, svd, sab, sah, sal,
    sgb, sgh, sgl, sgd, H, G, Lq, Lk, am1_value, scale, by_key, bg, j, start, n, want, partial, dk, dv,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """dk and dv of keys j [R] of key head bg from n rows each, which by_key names from start on."""
    b = (bg // (H // G)).to(tl.int64)
    de = tl.arange(0, BDV)
    at = v + b * svb + (bg % (H // G)).to(tl.int64) * svh + j.to(tl.int64)[:, None] * svl
    vk = tl.load(at + de[None, :] * svd, mask=(j < Lk)[:, None] & (de < DV)[None, :], other=0.0).to(
        tl.float32
    )
    acc_k = tl.zeros([R, BD], tl.float32)
    acc_v = tl.zeros([R, BDV], tl.float32)
    for c in range(0, tl.max(n, 0), CHUNK):
        s = c + tl.arange(0, CHUNK)
        live = s[None, :] < n[:, None]
        number, u = unpack(tl.load(by_key + start[:, None] + s[None, :], mask=live, other=0))
        acc_k, acc_v = _key_terms(
            q, grad, delta, alpha, sqb, sqh, sql, sqd, sgb, sgh, sgl, sgd, sab, sah, sal,
            b, number, u, live, H, Lq, am1_value, scale, vk, acc_k, acc_v,
            D, BD, DV, BDV, KIND, HAS_ALPHA,
        )  # fmt: skip
    key = bg.to(tl.int64) * Lk + j
    _write_keys(dk, dv, acc_k, acc_v, key, want, partial, scale, D, BD, DV, BDV)


@relaunched
@triton.jit
def _keys_kernel(
    q, v, alpha, sqb, sqh, sql, sqd, svb, svh, svl, svd, sab, sah, sal,
    H, G, Lq, Lk, am1_value, scale,
    by_key, ends, key_counts, partial, grad, sgb, sgh, sgl, sgd, delta, dk, dv,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr, SLOTS: tl.constexpr, ASM: tl.constexpr, R: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """A program owns dk and dv of R keys with at most NARROW rows each, added in the rows' order.

    Gathers D + DV values for each entry. If one key has more, none of them is done here.
    """
    blocks = tl.cdiv(Lk, R)
    bg = tl.program_id(0) // blocks
    j = tl.program_id(0) % blocks * R + tl.arange(0, R)
    key = bg.to(tl.int64) * Lk + j
    n = tl.load(key_counts + key, mask=j < Lk, other=0)
    most = tl.max(n, 0)
    if most > NARROW:
        return
    by_key += bg.to(tl.int64) * G * Lq * SLOTS
    start = tl.load(ends + key, mask=j < Lk, other=0) - n
    if most > 64:
        _sort(by_key, start, n, R, 128, ASM)
    elif most > 32:
        _sort(by_key, start, n, R, 64, ASM)
    elif most > 16:
        _sort(by_key, start, n, R, 32, ASM)
    elif most > 8:
        _sort(by_key, start, n, R, 16, ASM)
    elif most > 1:
        _sort(by_key, start, n, R, 8, ASM)
    _add_rows(
        q, v, grad, delta, alpha, sqb, sqh, sql, sqd, svb, svh, svl, svd, sab, sah, sal,
        sgb, sgh, sgl, sgd, H, G, Lq, Lk, am1_value, scale, by_key, bg, j, start, n, j < Lk,
        tl.load(partial + bg) != 0, dk, dv, D, BD, DV, BDV, KIND, HAS_ALPHA, R, CHUNK,
    )  # fmt: skip


@relaunched
@triton.jit
def _broad_keys_kernel(
    q, v, alpha, sqb, sqh, sql, sqd, svb, svh, svl, svd, sab, sah, sal,
    H, G, Lq, Lk, am1_value, scale,
    by_key, ends, key_counts, partial, grad, sgb, sgh, sgl, sgd, delta, dk, dv,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr, SLOTS: tl.constexpr, ASM: tl.constexpr, SMALL: tl.constexpr,
    R: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """`_keys_kernel` for the keys that it leaves among SPAN a program: one by one, up to SORTED rows.

    SMALL: row numbers times SORTED fit 31 bits.
    """
    blocks = tl.cdiv(Lk, SPAN)
    bg = tl.program_id(0) // blocks
    by_key += bg.to(tl.int64) * G * Lq * SLOTS
    first = tl.program_id(0) % blocks * SPAN
    key = bg.to(tl.int64) * Lk
    span = first + tl.arange(0, SPAN)
    if tl.max(tl.load(key_counts + key + span, mask=span < Lk, other=0), 0) <= NARROW:
        return
    under = tl.load(partial + bg) != 0
    for group in range(first, tl.minimum(first + SPAN, Lk), R):
        j = group + tl.arange(0, R)
        if tl.max(tl.load(key_counts + key + j, mask=j < Lk, other=0), 0) > NARROW:
            for r in range(R):
                one = group + r + tl.arange(0, 1)
                n = tl.load(key_counts + key + one, mask=one < Lk, other=0)
                start = tl.load(ends + key + one, mask=one < Lk, other=0) - n
                want = (one < Lk) & (n <= SORTED)
                n = tl.where(want, n, 0)
                many = tl.max(n, 0)
                if many > 128:
                    if SMALL:
                        if many > 256:
                            _sort(by_key, start, n, 1, 512, ASM)
                        else:
                            _sort(by_key, start, n, 1, 256, ASM)
                    else:
                        _sort_wide(by_key, start, n, 512)
                elif many > 64:
                    _sort(by_key, start, n, 1, 128, ASM)
                elif many > 1:
                    _sort(by_key, start, n, 1, 64, ASM)
                _add_rows(
                    q, v, grad, delta, alpha, sqb, sqh, sql, sqd, svb, svh, svl, svd, sab, sah, sal,
                    sgb, sgh, sgl, sgd, H, G, Lq, Lk, am1_value, scale, by_key, bg, one, start, n, want,
                    under, dk, dv, D, BD, DV, BDV, KIND, HAS_ALPHA, 1, CHUNK,
                )  # fmt: skip


@relaunched
@triton.jit
def _long_keys_kernel(
    q, v, alpha, sqb, sqh, sql, sqd, svb, svh, svl, svd, sab, sah, sal,
    H, G, Lq, Lk, am1_value, scale,
    by_key, ends, entries, starts, counts, key_counts, partial, grad, sgb, sgh, sgl, sgd, delta,
    dk, dv,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """dk and dv of keys with more than SORTED rows, among SPAN keys a program.

    Up to LONG rows are sorted. Beyond, they are found by reading the lists of all rows of the key's
    heads, ROWS at a time: 8 bytes a slot that is filled. A key that most rows attend to has no use
    for a list of rows.
    """
    blocks = tl.cdiv(Lk, SPAN)
    bg = tl.program_id(0) // blocks
    by_key += bg.to(tl.int64) * G * Lq * SLOTS
    first = tl.program_id(0) % blocks * SPAN
    b = (bg // (H // G)).to(tl.int64)
    span = first + tl.arange(0, SPAN)
    n = tl.load(key_counts + bg.to(tl.int64) * Lk + span, mask=span < Lk, other=0)
    long = tl.where(n > SORTED, span, Lk)
    j = tl.min(long, 0)
    de = tl.arange(0, BDV)
    slot = tl.arange(0, SLOT)
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
            _sort_wide(by_key, start, size, LONG)
            for c in range(0, rows, ROWS):
                s = c + tl.arange(0, ROWS)
                live = (s < rows)[None, :]
                number, u = unpack(
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
                row = head * Lq + i
                m = tl.load(counts + row, mask=i < Lq, other=0)
                begin = tl.load(starts + row, mask=i < Lq, other=0)
                pool = entries + ((row - i % BM) * SLOTS + begin)[:, None]
                weight = tl.zeros([ROWS], tl.float32)
                found = weight != 0.0
                for c in range(0, tl.max(m, 0), SLOT):
                    live = (c + slot)[None, :] < m[:, None]
                    column, u = unpack(tl.load(pool + (c + slot)[None, :], mask=live, other=0))
                    match = live & (column == j)
                    weight += tl.sum(tl.where(match, u, 0.0), 1)
                    found = found | (tl.max(match.to(tl.int32), 1) != 0)
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


def _schedule(tiles: int) -> tuple[int, int, int, int]:
    """Of the candidates' pass: (part of the key tiles looked at ahead, at most, UPDATE, EARLY).

    A hit costs as much as a quarter of a tile: with few tiles bounds are worth more of them.
    """
    return (1, 32, 8, 0) if tiles <= 64 else (4, 64, 16, 8)


def forward_lists(
    problem: Problem,
    out: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    training: bool,
) -> None:
    """Fill saved and the rows of out that have lists; of the others, what their block passes start from.

    saved, as `entmax_attention.saved_like` has it: reference and shift; entries, whose first counts[row]
    from starts[row] of the row's block on are column << 32 | bits of u = max((alpha - 1) z - tau, 0);
    counts -1 for a row without; those rows of each head in left, and how many come before each block
    in earlier; key_counts, if training: how many rows hold each key.
    """
    reference, shift, entries, starts, counts, left, earlier, key_counts = saved
    q, k, v = problem.q, problem.k, problem.v
    cuda = q.device.type == "cuda"

    def optional(t: torch.Tensor | None, n: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        return (q, (0,) * n) if t is None else (t, t.stride()[:n])

    B, H, Lq, D = q.shape
    Lk = k.shape[2]
    G = H // k.shape[1]
    rows = block_rows(q)
    tma = cuda and TensorDescriptor is not None
    if tma or q.stride(3) != 1 or k.stride(3) != 1:
        q, k = q.contiguous(), k.contiguous()
    blocks = triton.cdiv(Lq, rows)
    total = B * H * blocks

    def programs(warps: int) -> int:
        if not cuda:
            return 2
        return min(total, THREADS // (32 * warps) * sm_count(q.device))

    narrow, wide = programs(4), programs(8)
    scratch = torch.empty(
        max(
            narrow * rows * 4 * CAPACITY.value * RECORD_BYTES.value // 8,
            wide * rows * 4 * LIST.value * 2 + 128,
        ),
        device=q.device,
        dtype=torch.int64,
    )
    aligned = scratch[-scratch.data_ptr() % 1024 // 8 :]
    flags = counts.new_empty(B * H, blocks)
    if training:
        key_counts.zero_()
    constants = problem.constants()
    unused = q
    descriptors: tuple[object, object] = (unused, unused)
    if tma:
        descriptors = (
            TensorDescriptor.from_tensor(q.view(-1, D), [rows, D]),
            TensorDescriptor.from_tensor(k.view(-1, D), [KEYS.value, D]),
        )
    masked = problem.bias is not None or problem.mask is not None
    table, steps = spans(problem, rows, KEYS.value) if masked else (unused, (0, 0, 0))
    # Of keys that a bias takes out of reach.
    largest = unused if problem.bias is None else torch.linalg.vector_norm(k, math.inf, (2, 3))
    alpha, strides = optional(problem.alpha, 3)
    sides = [optional(t, 4) for t in (problem.bias, problem.mask)]
    lengths = [unused if t is None else t for t in (problem.query_lengths, problem.key_lengths)]
    head = (
        *descriptors, q, k, *(t for t, _ in sides), alpha, *lengths, table, largest,
        *q.stride()[:3], *k.stride()[:3], *sides[0][1], *sides[1][1], *strides, *steps,
        H, G, Lq, Lk, float(problem.alpha_value - 1), float(problem.scale), float(problem.fill),
    )  # fmt: skip
    options = {
        "D": D, "KIND": constants["KIND"], "HAS_BIAS": problem.bias is not None,
        "HAS_MASK": problem.mask is not None, "HAS_ALPHA": problem.alpha is not None,
        "HAS_QLEN": problem.query_lengths is not None, "HAS_KLEN": problem.key_lengths is not None,
        "CAUSAL": problem.causal, "FINITE_FILL": problem.finite_fill,
        "PRECISION": constants["PRECISION"], "WIDEN": constants["WIDEN"], "ASM": cuda, "TMA": tma,
        "SLOTS": SLOTS, "BM": rows, "STAGES": 3 if cuda else 1,
        **({"maxnreg": REGISTERS} if cuda else {}),
    }  # fmt: skip
    part, most, update, early = _schedule(triton.cdiv(Lk, KEYS.value))
    candidates_kernel[(narrow,)](
        *head, scratch.view(torch.float32), entries, starts, counts, flags, total, part, most,
        UPDATE=update, EARLY=early, num_warps=4, **options,
    )  # fmt: skip
    broad_kernel[(wide,)](
        *head, aligned, entries, starts, counts, flags, key_counts, reference, shift, total,
        TRAINING=training, MINE=triton.next_power_of_2(triton.cdiv(total, wide)), num_warps=8,
        **options,
    )  # fmt: skip
    gather_left[(total,)](flags, counts, left, earlier, Lq, BM=rows, CHUNK=256, num_warps=4)
    per = 4
    _finalize_kernel[(B * H * triton.cdiv(Lq, per),)](
        v, alpha, *strides, *v.stride(), H, G, Lq, Lk,
        float(problem.alpha_value - 1), float(problem.scale),
        entries, starts, counts, flags, key_counts, out, reference, shift,
        DV=constants["DV"], BDV=constants["BDV"], KIND=constants["KIND"],
        HAS_ALPHA=problem.alpha is not None, TRAINING=training, SLOTS=SLOTS, BM=rows,
        R=per, CHUNK=8, num_warps=1, **({"maxnreg": FINALIZE} if cuda else {}),
    )  # fmt: skip


def rows_backward(
    problem: Problem,
    grad: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    dq: torch.Tensor,
    delta: torch.Tensor,
    dalpha: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, delta and dalpha of the rows with lists, and their entries by key.

    Returns (by_key, ends, partial): int64 row << 32 | bits of u, row = h * Lq + i; where each key's
    segment ends, int32, counted from Lq * SLOTS for each head of queries before; how many rows of
    each key head have no list.
    """
    q, k, v = problem.q, problem.k, problem.v
    B, H, Lq, _d = q.shape
    _reference, _shift, entries, starts, counts, _left, earlier, key_counts = saved
    G, Lk = H // k.shape[1], k.shape[2]
    cursors, partial = torch.empty_like(key_counts), key_counts.new_empty(k.shape[:2])
    _places_kernel[(B * k.shape[1],)](
        key_counts, earlier, cursors, partial, H, G, Lq, Lk, BM=block_rows(q), CHUNK=4096, num_warps=8
    )  # fmt: skip
    by_key = torch.empty_like(entries)
    constants = problem.constants()
    strides = (0, 0, 0) if problem.alpha is None else problem.alpha.stride()[:3]
    per = 4
    _rows_kernel[(B * H * triton.cdiv(Lq, per),)](
        k, v, q if problem.alpha is None else problem.alpha, *strides, *k.stride(), *v.stride(),
        H, G, Lq, Lk, float(problem.alpha_value - 1), float(problem.scale),
        entries, starts, counts, cursors, by_key, grad, *grad.stride(), dq, delta,
        delta if dalpha is None else dalpha,
        **{name: constants[name] for name in ("D", "BD", "DV", "BDV", "KIND", "HAS_ALPHA")},
        WANT_ALPHA=dalpha is not None, SLOTS=SLOTS, BM=block_rows(q), R=per, CHUNK=8, num_warps=1,
        **({"maxnreg": REGISTERS} if q.device.type == "cuda" else {}),
    )  # fmt: skip
    # Each cursor has come to the end of its key's entries.
    return by_key, cursors, partial


def add_keys_from_lists(
    problem: Problem,
    grad: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    by_key: torch.Tensor,
    ends: torch.Tensor,
    partial: torch.Tensor,
    delta: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """dk and dv from the lists; on top of what they hold in key heads with rows that were left."""
    q, k, v = problem.q, problem.k, problem.v
    B, H, Lq, _ = q.shape
    Lk = k.shape[2]
    _reference, _shift, entries, starts, counts, _left, _earlier, key_counts = saved
    constants = problem.constants()
    strides = (0, 0, 0) if problem.alpha is None else problem.alpha.stride()[:3]
    head = (
        q, v, q if problem.alpha is None else problem.alpha,
        *q.stride(), *v.stride(), *strides, H, H // k.shape[1], Lq, Lk,
        float(problem.alpha_value - 1), float(problem.scale),
    )  # fmt: skip
    names = ("D", "BD", "DV", "BDV", "KIND", "HAS_ALPHA")
    constants = {name: constants[name] for name in names} | {"SLOTS": SLOTS}
    asm = q.device.type == "cuda"
    # Two tensors of R x CHUNK x width in registers: 64 each a lane at width 64.
    per = 4 if max(problem.width, problem.value_width) <= 64 else 2
    tail = (partial, grad, *grad.stride(), delta, dk, dv)
    _keys_kernel[(B * k.shape[1] * triton.cdiv(Lk, per),)](
        *head, by_key, ends, key_counts, *tail, **constants, ASM=asm, R=per, CHUNK=8, num_warps=1,
        **({"maxnreg": BY_KEY} if asm else {}),
    )  # fmt: skip
    _broad_keys_kernel[(B * k.shape[1] * triton.cdiv(Lk, SPAN),)](
        *head, by_key, ends, key_counts, *tail, **constants, ASM=asm,
        SMALL=H * Lq * SORTED.value < 2**31, R=per, CHUNK=8 * per, SPAN=SPAN, num_warps=1,
        **({"maxnreg": REGISTERS} if asm else {}),
    )  # fmt: skip
    _long_keys_kernel[(B * k.shape[1] * triton.cdiv(Lk, 64),)](
        *head, by_key, ends, entries, starts, counts, key_counts, *tail, **constants,
        BM=block_rows(q), SPAN=64, ROWS=32, SLOT=64, num_warps=4,
    )  # fmt: skip
