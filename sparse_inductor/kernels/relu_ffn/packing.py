"""Packing: the active neurons of every row of the gate projection, and which rows overflow.

The packed form of M rows: `count` [M] int32, `index` and values [M, CAP], the active neurons of a row in an order that
depends on nothing but which they are. A row with count > CAP *overflows*: nothing of it is packed, and
`relu_ffn.dense` computes it. The row kernels (`relu_ffn.dots`, `relu_ffn.rows`) take another row's entries a piece at
a time.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from sparse_inductor.epilogue.steps import Program

from ..common.arch import capability
from ..common.epilogue import encode, evaluate
from ..common.launch import relaunched

# Gates of a row that a program of `pack` looks at at once, and its warps; first it looks at PACK_HEAD of them.
PACK_BLOCK = 2048
PACK_WARPS = 2
PACK_HEAD = 512
# What `pack` counts: counters, each in a 32-byte sector of its own, as adds to one address take turns; then how many
# counters are full; then the number of rows of the dense path. Row m counts in counter m % COUNTERS.
COUNTERS = tl.constexpr(32)
LINE = tl.constexpr(4)  # int64 words a sector
FULL = tl.constexpr(128)
DENSE = tl.constexpr(129)
LISTED = tl.constexpr(130)  # entries of the list of pieces
BLOCKS = tl.constexpr(
    131
)  # blocks that `relu_ffn.bitmask_packing` has packed, and what their rows cost
ARRIVED = tl.constexpr(132)  # from here on, a counter for each tile that several programs make
ARRIVALS = 512  # at least half as many as a GPU has SMs
# A counter's fields: rows counted, overflow rows among them, entries of the others. `ROWS_MOST` rows keep them apart.
ONE_ROW = tl.constexpr(1 << 46)
ONE_OVERFLOW = tl.constexpr(1 << 29)
# The fields of BLOCKS.
ONE_BLOCK = tl.constexpr(1 << 40)
ROWS_MOST = 1 << 21
# Rows from which on the longest of them do not count any more.
MANY = 16384
# Entries of packed rows that cost as much as a row of the dense path, for each neuron: the tensor cores multiply by all
# N up and down weights in the time in which L2 yields those of N / 105 neurons, of N / 80 where rows are many (H200, at
# 8 192 and 32 768 tokens of K = 2 048).
DENSE_ROW = 1 / 105
DENSE_ROW_MANY = 1 / 80
# Entries a piece. Rows are uneven: where few rows run, the longest piece is the time it takes (49 us of dot products
# against 53 at 2 048 tokens, but 164 against 145 at 8 192).
PIECE = 64
PIECE_FEW = 32
# Up to so many rows a piece is a short one.
FEW_ROWS = 4096


def dense_row(M: int, N: int) -> float:
    """Entries that cost as much as a row of the dense path, of M rows."""
    return max(N * (DENSE_ROW_MANY if M > MANY else DENSE_ROW), 1.0)


def pieces_of(M: int, cap: int, interpreted: bool) -> tuple[int, int]:
    """(entries a piece of M rows, pieces of a row at most)."""
    piece = 8 if interpreted else PIECE_FEW if M <= FEW_ROWS else PIECE
    return piece, triton.cdiv(cap, piece)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger_pair(a, b, PAIRS: tl.constexpr):
    larger: tl.constexpr = "max.NaN." + PAIRS + "x2 $0, $1, $2;"
    return tl.inline_asm_elementwise(larger, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _list_groups(
    gates, n, N, threshold, threshold_pair, PAIRS: tl.constexpr, G: tl.constexpr, C: tl.constexpr
):
    """Which of G groups of eight gates, from n on, have one that is not <= threshold (NaN is not): [G // C, C] as
    int32, each one's place among them, and how many there are.

    PAIRS: "bf16" or "f16", for a program of one warp that looks at two gates an instruction; both halves of
    threshold_pair are the zero threshold, rounded down. A vote of the warp then gives the places among 32 groups.
    """
    first = n + tl.arange(0, G) * 8
    if PAIRS == "":
        at = first[:, None] + tl.arange(0, 8)[None, :]
        g = tl.load(gates + at, mask=at < N, other=float("-inf")).to(tl.float32)
        some = (~(tl.reduce(g, 1, _larger) <= threshold)).to(tl.int32)
        place = tl.cumsum(some, 0) - some
        count = tl.sum(some, 0)
        some = tl.reshape(some, (G // C, C))
        place = tl.reshape(place, (G // C, C))
    else:
        words = (gates + first).to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, 4)[None, :]
        w = tl.load(words, mask=(first < N)[:, None], other=0)
        a, b = tl.split(tl.reshape(w, (G // C, C, 2, 2)))
        a, b = tl.split(_larger_pair(a, b, PAIRS))
        top = _larger_pair(a, b, PAIRS)
        here = tl.reshape(first < N, (G // C, C)).to(tl.int32)
        vote: tl.constexpr = (
            "{ .reg .pred p, q; .reg .b32 all, low; setp.gtu."
            + PAIRS
            + "x2 p|q, $3, $4; or.pred p, p, q;"
            " setp.ne.and.b32 p, $5, 0, p; selp.b32 $0, 1, 0, p; vote.sync.ballot.b32 all, p, 0xffffffff;"
            " popc.b32 $2, all; mov.u32 low, %lanemask_lt; and.b32 low, low, all; popc.b32 $1, low; }"
        )
        some, place, of_vote = tl.inline_asm_elementwise(
            vote, "=&r,=&r,=&r,r,r,r", [top, threshold_pair, here],
            dtype=(tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        place += tl.cumsum(of_vote, 0) - of_vote
        count = tl.max(tl.sum(of_vote, 0), 0)
    return some, place, count


@triton.jit
def _note_row(state, m, c, CAP: tl.constexpr, PIECE: tl.constexpr):
    """Count row m, of c entries: (what its counter was, where its pieces are listed), of lane 0 each."""
    lanes = tl.arange(0, COUNTERS)
    overflow = c > CAP
    add = ONE_ROW + tl.where(overflow, ONE_OVERFLOW, c.to(tl.int64))
    zeros = tl.zeros([COUNTERS], tl.int64)
    of_row = state + LINE * (m % COUNTERS) + zeros
    old = tl.atomic_add(of_row, add + zeros, mask=lanes == 0, sem="relaxed")
    pieces = tl.where((c > PIECE) & (c <= CAP), tl.cdiv(c, PIECE), 0).to(tl.int64) + zeros
    listed = (lanes == 0) & (pieces > 0)
    place = tl.atomic_add(state + LISTED + zeros, pieces, mask=listed, sem="relaxed")
    return old, place


@triton.jit
def does_not_pay(entries, n_overflow, ROW, M):
    """Whether M rows are better off on the dense path: n_overflow of them are, the others cost so many entries."""
    return entries + n_overflow.to(tl.float32) * ROW > 0.9 * ROW * M


@triton.jit
def _settle_row(
    count, state, rows_overflow, listed, m, c, M, ROW,
    CAP: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Write row m's count. If it has several pieces, list them in `listed`, PIECES m + piece each, one after the other;
    the rows are in no certain order.

    The program that notes the last row decides: where packed rows do not pay, all take the dense path.
    """
    old, place = _note_row(state, m, c, CAP, PIECE)
    tl.store(count + m, c)
    first = tl.arange(0, COUNTERS) == 0
    if (c <= CAP) & (c > PIECE):
        begin = tl.sum(tl.where(first, place, 0), 0)
        j = tl.arange(0, triton.next_power_of_2(PIECES))
        tl.store(listed + begin + j, m * PIECES + j, mask=j < tl.cdiv(c, PIECE))
    counter = m % COUNTERS
    was = tl.sum(tl.where(first, old, 0), 0)
    of_counter = (M - counter + COUNTERS - 1) // COUNTERS
    if c > CAP:
        at = (was // ONE_OVERFLOW) % (ONE_ROW // ONE_OVERFLOW)
        tl.store(rows_overflow + counter * tl.cdiv(M, COUNTERS) + at, m)
    is_last = was // ONE_ROW == of_counter - 1
    if is_last:
        is_last = tl.atomic_add(state + FULL, 1) == tl.minimum(M, COUNTERS) - 1
    if is_last:
        lines = tl.arange(0, COUNTERS)
        counters = tl.atomic_add(state + LINE * lines, tl.zeros([COUNTERS], tl.int64))
        n_overflow = tl.sum(
            ((counters // ONE_OVERFLOW) % (ONE_ROW // ONE_OVERFLOW)).to(tl.int32), 0
        )
        entries = tl.sum((counters % ONE_OVERFLOW).to(tl.float32), 0)
        all_of_them = (n_overflow * 2 > M) | does_not_pay(entries, n_overflow, ROW, M)
        tl.store(state + DENSE, tl.where(all_of_them, M, n_overflow).to(tl.int64))


@relaunched
@triton.jit
def _pack_kernel(
    gate, count, index, value, groups, stats, state, rows_overflow, pieces,
    M, N, stride_s, THRESHOLD, threshold_pair, ROW, PAIRS: tl.constexpr,
    STEPS: tl.constexpr, STATS: tl.constexpr, GATED: tl.constexpr,
    CAP: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr, HEAD: tl.constexpr, CHUNK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A program packs one row of the gate projection [M, N]: reads 2 N bytes (at 16 bits), writes its active entries.

    First the groups of eight neurons with an active one among them are listed, in `groups` [M, CAP]; then only those
    are looked at again. A row overflows that has more than CAP such groups or entries, or an active neuron in three
    of four groups of the first HEAD columns: nothing of it is packed, and its count may just say so.
    rows_overflow [COUNTERS, M / COUNTERS]: the overflow rows of each counter.
    """
    m = tl.program_id(0)
    row = m.to(tl.int64)
    threshold = tl.full([], THRESHOLD, tl.float32)
    gates = gate + row * N
    lane = tl.arange(0, 8)  # eight 16-bit numbers are one load
    listed = tl.full([], 0, tl.int32)
    if N > HEAD:
        some, place, few = _list_groups(gates, 0, N, threshold, threshold_pair, PAIRS, HEAD // 8, C)
        listed = tl.where(few * 4 > 3 * (HEAD // 8), CAP + 1, 0)
    size = tl.zeros([BLOCK // 8], tl.float32)
    nonzero = tl.zeros([BLOCK // 8], tl.float32)
    if listed == 0:
        for n0 in range(0, N, BLOCK):
            some, place, more = _list_groups(
                gates, n0, N, threshold, threshold_pair, PAIRS, BLOCK // 8, C
            )
            n = n0 + tl.arange(0, BLOCK // 8 // C)[:, None] * (8 * C) + tl.arange(0, C)[None, :] * 8
            at = listed + place
            tl.store(groups + row * CAP + at, n, mask=(some != 0) & (at < CAP))
            listed += more
    if STATS:
        for n0 in range(0, N, BLOCK):
            n = n0 + tl.arange(0, BLOCK // 8)[:, None] * 8 + lane[None, :]
            g = tl.load(gates + n, mask=n < N, other=float("-inf")).to(tl.float32)
            a = tl.where(g <= threshold, 0.0, evaluate(g, STEPS))
            size += tl.sum(tl.abs(a), 1)
            nonzero += tl.sum((a != 0.0).to(tl.float32), 1)
    if STATS:
        sum_size, sum_nonzero = tl.sum(size, 0), tl.sum(nonzero, 0)
        tl.store(stats + row, sum_size)
        tl.store(stats + stride_s + row, sum_nonzero)
        if not GATED:
            tl.store(stats + 2 * stride_s + row, sum_size)
            tl.store(stats + 3 * stride_s + row, sum_nonzero)
    c = tl.full([], CAP + 1, tl.int32)
    if listed <= CAP:
        tl.debug_barrier()  # other threads' groups are read below
        c = tl.full([], 0, tl.int32)
        i = tl.arange(0, CHUNK)
        for i0 in range(0, listed, CHUNK):
            there = (i0 + i < listed)[:, None]
            first = tl.load(groups + row * CAP + i0 + i, mask=i0 + i < listed, other=0)
            n = first.to(tl.int32)[:, None] + lane[None, :]
            raw = tl.load(gates + n, mask=there & (n < N), other=float("-inf"))
            active = (there & (n < N) & ~(raw.to(tl.float32) <= threshold)).to(tl.int32)
            within = tl.cumsum(active, 1)
            sums = tl.sum(active, 1)
            before = tl.cumsum(sums, 0) - sums
            at = c + before[:, None] + within - 1
            mask = (active != 0) & (at < CAP)
            tl.store(index + row * CAP + at, n.to(index.dtype.element_ty), mask=mask)
            tl.store(value + row * CAP + at, raw, mask=mask)
            c += tl.sum(sums, 0)
    _settle_row(count, state, rows_overflow, pieces, m, c, M, ROW, CAP, PIECE, PIECES)


@triton.jit
def popcount(x):
    """How many bits of an int32 are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 0xFF


@functools.lru_cache(maxsize=256)
def twice(threshold: float, dtype: torch.dtype) -> int:
    """The largest 16-bit number of this type that is <= threshold, in both halves of an int32."""
    t = torch.tensor(threshold, dtype=torch.float64).to(dtype)
    bits = int(t.view(torch.int16)) & 0xFFFF
    if t.item() > threshold:
        bits = 0x8001 if t == 0 else bits - 1 if t > 0 else bits + 1
    return ((bits << 16 | bits) ^ 0x80000000) - 0x80000000


def new_state(device: torch.device, more: int = 0) -> torch.Tensor:
    """Room for `pack` to count in, and behind it for `more` words: all of it is to be zeros."""
    return torch.empty(ARRIVED.value + ARRIVALS + more, dtype=torch.int64, device=device)


def pack(
    gate: torch.Tensor,
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows_overflow: torch.Tensor,
    state: torch.Tensor,
    stats: torch.Tensor | None,
    f: Program,
    threshold: float,
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack rows from their gate projection [M, N], contiguous: (state, pieces), for `listed_rows` and the row kernels.

    rows_overflow: room for `listed` rows. state: of `new_state`, zeros. M is at most ROWS_MOST.
    """
    M, N = gate.shape
    count, index, value = packed
    cap = index.shape[1]
    piece, most = pieces_of(M, cap, not gate.is_cuda)
    pieces = torch.empty(M * most, dtype=torch.int32, device=gate.device)
    groups = torch.empty(M, cap, dtype=index.dtype, device=gate.device)
    block, head = (
        (min(PACK_BLOCK, max(64, triton.next_power_of_2(N))), PACK_HEAD)
        if gate.is_cuda
        else (64, 64)
    )
    hopper = gate.is_cuda and capability(gate.device)[0] >= 9
    pairs = {torch.bfloat16: "bf16", torch.float16: "f16"}.get(gate.dtype, "")
    if N % 8 or not hopper or stats is not None:
        pairs = ""
    # Groups that a vote is over; without votes it does not matter.
    warps, columns = (1, 32) if pairs else (PACK_WARPS, 1)
    _pack_kernel[(M,)](
        gate, count, index, value, groups, stats, state, rows_overflow, pieces,
        M, N, 0 if stats is None else stats.stride(0), threshold, twice(threshold, gate.dtype) if pairs else 0,
        dense_row(M, N),
        PAIRS=pairs, STEPS=encode(f), STATS=stats is not None, GATED=gated,
        CAP=cap, PIECE=piece, PIECES=most, BLOCK=block, HEAD=head, CHUNK=32 if gate.is_cuda else 4,
        C=columns, num_warps=warps,
    )  # fmt: skip
    return state, pieces


def room_for_rows(M: int) -> int:
    """Entries of a list of overflow rows."""
    return COUNTERS.value * triton.cdiv(M, COUNTERS.value)


@triton.jit
def n_listed(state):
    """How many rows take the dense path; all M of them are in order."""
    return tl.load(state + DENSE).to(tl.int32)


@triton.jit
def listed_rows(state, rows_overflow, i, M):
    """The rows of places i of the list; those past its end are some row."""
    lines = tl.arange(0, COUNTERS)
    counters = tl.load(state + LINE * lines)
    n = ((counters // ONE_OVERFLOW) % (ONE_ROW // ONE_OVERFLOW)).to(tl.int32)
    ends = tl.cumsum(n, 0)
    after = (i[:, None] >= ends[None, :]).to(tl.int32)
    line = tl.sum(after, 1)
    start = tl.sum(after * n[None, :], 1)
    in_list = line < COUNTERS
    at = line * tl.cdiv(M, COUNTERS) + i - start
    row = tl.load(rows_overflow + at, mask=in_list, other=0)
    return tl.where(n_listed(state) == M, tl.where(i < M, i, 0), row)


@relaunched
@triton.jit(do_not_specialize=["M"])
def _list_kernel(
    count, overflow, rows_overflow, M, CAP: tl.constexpr, BLOCK: tl.constexpr, ZEROS: tl.constexpr
):
    """rows_overflow[:overflow] = the rows with count > CAP, ascending; BLOCK rows a program, which counts those before
    it. ZEROS zeros behind `overflow`."""
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for p in range(0, tl.program_id(0)):
        before += (tl.load(count + p * BLOCK + lanes) > CAP).to(tl.int32)
    m = tl.program_id(0) * BLOCK + lanes
    take = (tl.load(count + m, mask=m < M, other=0) > CAP).to(tl.int32)
    first = tl.sum(before, 0)
    tl.store(rows_overflow + first + tl.cumsum(take, 0) - take, m, mask=take != 0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(overflow, first + tl.sum(take, 0))
        tl.store(overflow + 1 + tl.arange(0, ZEROS), tl.zeros([ZEROS], tl.int32))


def overflow_rows(
    count: torch.Tensor, cap: int, length: torch.Tensor, listed: torch.Tensor
) -> None:
    """length [1 + ARRIVALS], listed [M]: how many, and which, rows of a packed block overflow; behind the first
    length are zeros then, for `relu_ffn.overflow` to count in."""
    M = len(count)
    _list_kernel[(triton.cdiv(M, 1024),)](
        count, length, listed, M, CAP=cap, BLOCK=1024, ZEROS=ARRIVALS
    )
