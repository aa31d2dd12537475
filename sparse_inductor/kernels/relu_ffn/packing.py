"""Packing: the active neurons of every row of the gate projection, and which rows overflow.

The packed form of M rows: `count` [M] int32, `index` and values [M, CAP], the active neurons of a row in the order of
the bits that say which they are. A row with count > CAP *overflows*: nothing of it is packed, and `relu_ffn.listed`
computes it. The row kernels (`relu_ffn.dots`, `relu_ffn.rows`) take another row's entries a piece at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import relaunched
from ..common.pdl import pdl_options, wait_for_previous

# What `pack` counts, int32: rows; entries of those that do not overflow; rows that do; pieces that are listed.
ROWS = tl.constexpr(0)
ENTRIES = tl.constexpr(1)
OVERFLOW = tl.constexpr(2)
LISTED = tl.constexpr(3)
# What follows from it: how many rows are computed by `relu_ffn.listed`, those that overflow or all.
LENGTH = tl.constexpr(4)
# From here on, a counter for each tile that several programs of `relu_ffn.listed` make.
ARRIVED = tl.constexpr(8)
ARRIVALS = 512  # at least half as many as a GPU has SMs
# Rows from which on the longest of them do not count any more.
MANY = 16384
# Entries of packed rows that cost as much as a row of tile products, for each neuron: the tensor cores multiply by all
# N up and down weights in the time in which L2 yields those of N / 45 neurons (H100, at 8 192 and 32 768 tokens of
# K = 2 048).
DENSE_ROW = 1 / 45
# Entries a piece. Rows are uneven: where few rows run, the longest piece is the time it takes (49 us of dot products
# against 53 at 2 048 tokens, but 164 against 145 at 8 192).
PIECE = 64
PIECE_FEW = 32
# Up to so many rows a piece is a short one, and a program of `pack` has one row; else it has EACH.
FEW_ROWS = 4096
EACH = 4
# Words of 32 neurons that a program of `pack` looks at at once: of a bitmask, and of the projection itself.
WORDS = 256
WORDS_OF_GATES = 64


def dense_row(N: int) -> float:
    """Entries that cost as much as a row of tile products."""
    return max(N * DENSE_ROW, 1.0)


def pieces_of(M: int, cap: int, interpreted: bool) -> tuple[int, int]:
    """(entries a piece of M rows, pieces of a row at most)."""
    piece = 8 if interpreted else PIECE_FEW if M <= FEW_ROWS else PIECE
    return piece, triton.cdiv(cap, piece)


@triton.jit
def popcount(x):
    """How many bits of an int32 are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 0xFF


@triton.jit
def _lowest_bit(x):
    """The place of the lowest bit of an int32 that is set: the exponent of that bit as a number."""
    low = (x & (0 - x)).to(tl.float32)
    return ((low.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def neuron_of(place):
    """The neuron of a bit, counted from the first word's, of a bitmask as `relu_ffn.hopper` orders it."""
    word, b = place // 32, place % 32
    return word // 8 * 256 + word % 2 * 128 + b // 2 * 8 + word % 8 // 2 * 2 + b % 2


@triton.jit
def inactive(g, n, there, THRESHOLD, thresholds):
    """Whether gates, fp32, of neurons n are not above their threshold: that of all, or unless it is None `thresholds`
    [N]. A NaN is active."""
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
    """Write the count c of row m. If it overflows, list it; if it has several pieces, list these, PIECES m + piece
    each, one after the other. Rows are in no certain order."""
    tl.store(count + m, c)
    if c > CAP:
        tl.store(overflow + tl.atomic_add(state + OVERFLOW, 1, sem="relaxed"), m)
    elif c > PIECE:
        begin = tl.atomic_add(state + LISTED, tl.cdiv(c, PIECE), sem="relaxed")
        j = tl.arange(0, triton.next_power_of_2(PIECES))
        tl.store(pieces + begin + j, m * PIECES + j, mask=j < tl.cdiv(c, PIECE))


@triton.jit
def _decide(state, rows, entries, M, ROW):
    """Note that a program is done with so many rows, of so many entries. The last one decides: where the packed rows of
    M do not pay, or most of them overflow, all are computed by tiles."""
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
    """A program packs EACH rows of the gate projection [M, N]: of its bitmask [M, words], unless keep [words] is None
    of the bits in that, or if there is no bitmask of what is not `inactive`, with NONZERO of what is not 0. value:
    unless it is None, the gates of the entries."""
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
                # As often as the word with the most bits has one.
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
    """(state: room for `pack` to count in, and so many words `more`; these): all of the state is to be zeros."""
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
    """Pack rows from their gate projection [M, N], contiguous, of which `bitmask` says what is active, unless it is
    None: (state, pieces), for the row kernels. keep: of every row's bits those that are packed, unless all are.
    threshold: None where what is not 0 is active. thresholds: [N], contiguous, in its place.

    overflow: [M], the rows that do not fit. state: of `new_state`, zeros.
    """
    M, N = gate.shape
    count, index, value = packed
    cap = index.shape[1]
    piece, most = pieces_of(M, cap, not gate.is_cuda)
    pieces = torch.empty(M * most, dtype=torch.int32, device=gate.device)
    words = triton.cdiv(N, 32) if bitmask is None else bitmask.shape[1]
    at_once, warps = (WORDS_OF_GATES, 2) if bitmask is None else (WORDS, 1)
    if not gate.is_cuda:
        at_once = 2
    each = 1 if M <= FEW_ROWS else EACH
    _pack_kernel[(triton.cdiv(M, each),)](
        bitmask, keep, gate, thresholds, count, index, value, state, overflow, pieces,
        M, N, words, threshold or 0.0, dense_row(N),
        NONZERO=threshold is None, CAP=cap, PIECE=piece, PIECES=most,
        WORDS=min(at_once, triton.next_power_of_2(words)), EACH=each, **pdl_options(gate), num_warps=warps,
    )  # fmt: skip
    return state, pieces


@triton.jit
def n_listed(state):
    """How many rows are computed by tiles; all M of them are in order."""
    return tl.load(state + LENGTH)


@relaunched
@triton.jit(do_not_specialize=["M"])
def _list_kernel(
    count, length, overflow, M, CAP: tl.constexpr, BLOCK: tl.constexpr, ZEROS: tl.constexpr
):
    """overflow[:length] = the rows with count > CAP, ascending; BLOCK rows a program, which counts those before it.
    ZEROS zeros behind `length`."""
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
    """(overflow [M], length): which rows of a packed block overflow, ascending, and how many, in length[0]; ARRIVALS
    zeros are behind it, for `relu_ffn.listed` to count in."""
    M = len(count)
    overflow, length = count.new_empty(M), count.new_empty(1 + ARRIVALS)
    _list_kernel[(triton.cdiv(M, 1024),)](
        count, length, overflow, M, CAP=cap, BLOCK=1024, ZEROS=ARRIVALS
    )
    return overflow, length
