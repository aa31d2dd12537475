"""Packs the active neurons of every row of the gate projection and lists the rows that overflow.

The packed form of M rows is `count` [M] int32 with `index` and values [M, CAP]: the active neurons of each row, in the
order of their bits in the bitmask. A row with count > CAP *overflows*: it is not packed, and `relu_ffn.listed` computes
it. A packed row is processed in pieces (`relu_ffn.dots`) or whole (`relu_ffn.rows`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched
from ..common.pdl import pdl_options, wait_for_previous

# Counters that `pack` keeps in `state`, int32: rows done; entries of packed rows; overflow rows; listed pieces.
ROWS = tl.constexpr(0)
ENTRIES = tl.constexpr(1)
OVERFLOW = tl.constexpr(2)
LISTED = tl.constexpr(3)
# Result: the number of rows that `relu_ffn.listed` computes, either the overflow rows or all rows.
LENGTH = tl.constexpr(4)
# From this index on: one counter per tile with a sum that several programs of `relu_ffn.listed` share.
ARRIVED = tl.constexpr(8)
ARRIVALS = 512  # at least half as many as a GPU has SMs
# With more rows than this, a packed row has twice as many entries (see `forward`).
MANY = 16384
# Break-even share of a row's neurons: while L2 delivers the weights of N / 45 neurons, the tensor cores multiply a row
# by all N up and down weights (H100, 8 192 and 32 768 tokens, K = 2 048).
DENSE_ROW = 1 / 45
# Entries per piece. Rows are uneven: with few rows, the longest piece determines the time, so that short pieces are
# faster (dot products at 2 048 tokens 49 us against 53, at 8 192 tokens 164 against 145).
PIECE = 64
PIECE_FEW = 32
# Up to FEW_ROWS rows, pieces are short and a program of `pack` has one row, else EACH rows.
FEW_ROWS = 4096
EACH = 4
# Words of 32 neurons that a program of `pack` loads at a time, from a bitmask and from the projection itself. For the
# projection, 64 words with two warps take 11 to 14 % longer (H200, 4 096 rows).
WORDS = 256
WORDS_OF_GATES = 32


def dense_row(N: int) -> float:
    """Return the number of entries that take as long as one row of tile products."""
    return max(N * DENSE_ROW, 1.0)


def pieces_of(M: int, cap: int, interpreted: bool) -> tuple[int, int]:
    """Return (entries per piece for M rows, maximum pieces of a row)."""
    piece = 8 if interpreted else PIECE_FEW if M <= FEW_ROWS else PIECE
    return piece, triton.cdiv(cap, piece)


@triton.jit
def popcount(x):
    """Return the number of set bits of an int32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 0xFF


@triton.jit
def _lowest_bit(x):
    """Return the position of the lowest set bit of an int32, read from the exponent of that bit converted to fp32."""
    low = (x & (0 - x)).to(tl.float32)
    return ((low.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def neuron_of(place):
    """Return the neuron of bit `place` of a row's bitmask, in the bit order of `relu_ffn.hopper`."""
    word, b = place // 32, place % 32
    return word // 8 * 256 + word % 2 * 128 + b // 2 * 8 + word % 8 // 2 * 2 + b % 2


@triton.jit
def inactive(g, n, there, THRESHOLD, thresholds):
    """Whether gates g (fp32) of neurons n are at or below their threshold: `thresholds` [N], or THRESHOLD if
    `thresholds` is None. A NaN is active."""
    at = tl.full([], THRESHOLD, tl.float32)
    if thresholds is not None:
        at = tl.load(thresholds + n, mask=there, other=0.0).to(tl.float32)
    return g <= at


@triton.jit
def _list_row(
    count,
    overflow,
    pieces,
    state,
    m,
    c,
    CAP: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Write the count c of row m. If the row overflows, append it to `overflow`. Otherwise, if it has several pieces,
    append them to `pieces` as PIECES * m + piece. The order of the rows in both lists is not deterministic."""
    tl.store(count + m, c)
    if c > CAP:
        tl.store(overflow + tl.atomic_add(state + OVERFLOW, 1, sem="relaxed"), m)
    elif c > PIECE:
        begin = tl.atomic_add(state + LISTED, tl.cdiv(c, PIECE), sem="relaxed")
        j = tl.arange(0, triton.next_power_of_2(PIECES))
        tl.store(pieces + begin + j, m * PIECES + j, mask=j < tl.cdiv(c, PIECE))


@triton.jit
def _decide(state, rows, entries, M, ROW):
    """Add a program's rows and entries to the counters. The last program decides: if packing is not worthwhile, or
    most rows overflow, all M rows are computed by tiles."""
    tl.atomic_add(state + ENTRIES, entries, sem="relaxed")
    if tl.atomic_add(state + ROWS, rows, sem="acq_rel") + rows == M:
        n_overflow = tl.atomic_add(state + OVERFLOW, 0, sem="relaxed")
        packed = tl.atomic_add(state + ENTRIES, 0, sem="relaxed")
        lost = packed.to(tl.float32) + n_overflow.to(tl.float32) * ROW > 0.9 * ROW * M
        all_of_them = lost | (n_overflow * 2 > M)
        tl.store(state + LENGTH, tl.where(all_of_them, M, n_overflow))


@relaunched
@triton.jit(do_not_specialize=["M", "ROW"])
def _pack_kernel(
    bitmask, keep, gate, thresholds, count, index, value, state, overflow, pieces,
    M, N, words, THRESHOLD, ROW,
    NONZERO: tl.constexpr, CAP: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    WORDS: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program packs EACH rows of the gate projection [M, N].

    A neuron is packed if its bit is set in `bitmask` [M, words] and, unless that is None, in `keep` [words]. Without a
    bitmask it is packed if its gate is not `inactive`, or with NONZERO if its gate is not 0. value: receives the gates
    of the entries, unless it is None.
    """
    wait_for_previous(PDL)
    first = tl.program_id(0) * EACH
    entries = tl.zeros([], tl.int32)
    for m in range(first, tl.minimum(first + EACH, M)):
        row = tl.full([], 0, tl.int64) + m
        c = tl.zeros([], tl.int32)
        for w0 in range(0, words, WORDS):
            w = w0 + tl.arange(0, WORDS)
            if bitmask is not None:
                bits = tl.load(bitmask + row * words + w, mask=w < words, other=0)
                if keep is not None:
                    bits &= tl.load(keep + w, mask=w < words, other=0)
            else:
                of_bits = w[:, None] * 32 + tl.arange(0, 32)[None, :]
                below = 0.0 if NONZERO else float("-inf")
                in_row = of_bits < N
                g = tl.load(gate + row * N + of_bits, mask=in_row, other=below).to(tl.float32)
                if NONZERO:
                    some = g != 0.0
                else:
                    some = ~inactive(g, of_bits, in_row, THRESHOLD, thresholds)
                bits = tl.sum(some.to(tl.int32) << tl.arange(0, 32)[None, :], 1)
            of_word = popcount(bits)
            here = tl.sum(of_word, 0)
            if c + here <= CAP:
                at = row * CAP + c + tl.cumsum(of_word, 0) - of_word
                # One iteration per set bit of the fullest word.
                while tl.max((bits != 0).to(tl.int32), 0) > 0:
                    there = bits != 0
                    n = w * 32 + _lowest_bit(bits)
                    if bitmask is not None:
                        n = neuron_of(n)
                    tl.store(index + at, n.to(index.dtype.element_ty), mask=there)
                    if value is not None:
                        tl.store(
                            value + at,
                            tl.load(gate + row * N + n, mask=there, other=0.0),
                            mask=there,
                        )
                    bits = bits & (bits - 1)
                    at += 1
            c += here
        _list_row(count, overflow, pieces, state, m, c, CAP, PIECE, PIECES)
        entries += tl.where(c <= CAP, c, 0)
    _decide(state, tl.minimum(EACH, M - first), entries, M, ROW)


def new_state(device: torch.device, more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (`state`: the counters of `pack` followed by `more` words; a view of those words). The caller fills state
    with zeros."""
    begin = ARRIVED.value + ARRIVALS
    state = torch.empty(begin + more, dtype=torch.int32, device=device)
    return state, state[begin:]


def pack(
    gate: torch.Tensor,
    bitmask: torch.Tensor | None,
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    overflow: torch.Tensor,
    state: torch.Tensor,
    threshold: float | None,
    keep: torch.Tensor | None = None,
    thresholds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack the rows of a gate projection [M, N], contiguous, into `packed`; returns (state, pieces) for the row
    kernels.

    bitmask: which neurons are active; None to compare the projection itself. keep: mask of the bits that are packed in
    every row; None for all. threshold: a neuron is active above it; None if every non-zero gate is active. thresholds:
    one per neuron [N], contiguous, instead of `threshold`. overflow: [M], receives the rows that do not fit. state:
    zeros, from `new_state`.
    """
    M, N = gate.shape
    count, index, value = packed
    cap = index.shape[1]
    piece, most = pieces_of(M, cap, not gate.is_cuda)
    pieces = torch.empty(M * most, dtype=torch.int32, device=gate.device)
    words = triton.cdiv(N, 32) if bitmask is None else bitmask.shape[1]
    at_once = WORDS_OF_GATES if bitmask is None else WORDS
    if not gate.is_cuda:
        at_once = 2
    each = 1 if M <= FEW_ROWS else EACH
    _pack_kernel[(triton.cdiv(M, each),)](
        bitmask, keep, gate, thresholds, count, index, value, state, overflow, pieces,
        M, N, words, threshold or 0.0, dense_row(N),
        NONZERO=threshold is None, CAP=cap, PIECE=piece, PIECES=most,
        WORDS=min(at_once, triton.next_power_of_2(words)), EACH=each, **pdl_options(gate), num_warps=1,
    )  # fmt: skip
    return state, pieces


@triton.jit
def n_listed(state):
    """Return the number of rows that are computed by tiles. If it is M, these are all rows, in order."""
    return tl.load(state + LENGTH)


@relaunched
@triton.jit(do_not_specialize=["M"])
def _list_kernel(
    count, length, overflow, M, CAP: tl.constexpr, BLOCK: tl.constexpr, ZEROS: tl.constexpr
):
    """Write overflow[:length] = the rows with count > CAP, in ascending order. Each program handles BLOCK rows and
    counts the overflow rows before them itself. ZEROS zeros are written after `length`."""
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for p in range(0, tl.program_id(0)):
        before += (tl.load(count + p * BLOCK + lanes) > CAP).to(tl.int32)
    m = tl.program_id(0) * BLOCK + lanes
    take = (tl.load(count + m, mask=m < M, other=0) > CAP).to(tl.int32)
    first = tl.sum(before, 0)
    tl.store(overflow + first + tl.cumsum(take, 0) - take, m, mask=take != 0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(length, first + tl.sum(take, 0))
        tl.store(length + 1 + tl.arange(0, ZEROS), tl.zeros([ZEROS], tl.int32))


def overflow_rows(count: torch.Tensor, cap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (overflow [M], length): the overflow rows of a packed block in ascending order, and their number in
    length[0], followed by ARRIVALS zeros for the counters of `relu_ffn.listed`."""
    M = len(count)
    overflow, length = count.new_empty(M), count.new_empty(1 + ARRIVALS)
    _list_kernel[(triton.cdiv(M, 1024),)](
        count, length, overflow, M, CAP=cap, BLOCK=1024, ZEROS=ARRIVALS
    )
    return overflow, length
