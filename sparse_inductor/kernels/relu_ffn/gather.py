"""Common parts of the kernels that gather table rows for packed token rows (`relu_ffn.packing`): `relu_ffn.dots`
computes dot products with them, `relu_ffn.rows` weighted sums of them.

Every weight table is [N, *] with unit stride along a row, so that a neuron's weights are contiguous. Up and down have
separate kernels, so that each kernel reads one table, which stays in L2. A larger table is processed in slices of its
columns: all rows process one slice before the next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .packing import LISTED

# Table rows in flight per program, and the register limit per thread for 16-bit weights: without the limit, too few
# programs run at a time (dot products 162 us instead of 123, at 8 192 tokens of 30 entries, K = 2 048).
FLIGHT = 4
REGISTERS = 96
# Columns of a sum per program, and per warp.
WIDTH = 2048
SUM_COLUMNS = 512
# Bytes of a table, or of a slice of its columns, that stay in L2 (50 MB on an H200) in addition to streamed data.
RESIDENT = 36 << 20
# Minimum columns of a slice: one load of 16 bytes per thread of a warp.
NARROWEST = 256
# Software pipelining gains nothing in these loops: all loads of a block are already in flight.
STAGES = 1
# Programs for listed pieces: one per SHARE rows, but at least LISTERS, or one per row if there are fewer rows.
SHARE = 8
LISTERS = 2048
# A row's word of `ready` is the number of its finished entries, plus ROW_SEEN once the row's own program has run.
ROW_SEEN = tl.constexpr(1 << 20)


def width(n: int, most: int, interpreted: bool) -> int:
    """Return how many of n columns a program holds at once: a power of 2 between 32 and `most`."""
    return 32 if interpreted else min(most, max(32, triton.next_power_of_2(n)))


def columns_that_stay(table: torch.Tensor) -> int:
    """Return the width of a column slice of the table such that the slice stays in L2."""
    columns = width(table.shape[1], WIDTH, not table.is_cuda)
    column = len(table) * table.element_size()
    while columns > NARROWEST and columns * column > RESIDENT:
        columns //= 2
    return columns


def limited(t: torch.Tensor) -> dict[str, int]:
    """Return the compiler options of a kernel that holds FLIGHT rows of elements of t's dtype."""
    return {"maxnreg": REGISTERS} if t.is_cuda and t.element_size() == 2 else {}


def in_pairs(table: torch.Tensor) -> bool:
    """Whether `fp32` converts weights two at a time."""
    return table.is_cuda and table.dtype == torch.bfloat16 and torch.version.hip is None


def listers_of(M: int, most: int) -> int:
    """Return the number of programs for the listed pieces of M rows with at most `most` pieces each."""
    return max(triton.cdiv(M, SHARE), min(M, LISTERS)) if most > 1 else 0


@triton.jit
def fp32(w, PAIRS: tl.constexpr):
    """Convert weights to fp32. PAIRS: with one instruction per bf16 element; the compiler uses two for every second
    one."""
    if PAIRS:
        both: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(
            both, "=r,=r,r", [w], dtype=tl.float32, is_pure=True, pack=2
        )
    return w.to(tl.float32)


@triton.jit
def own_pieces(state, listers, M, LISTS: tl.constexpr):
    """Return (first, end, step) of this program's items. The first `listers` programs share the listed pieces, the
    others the rows of one piece. The longest rows start first, because a long row that starts last would determine the
    time."""
    p = tl.program_id(0)
    first, end, step = p - listers, tl.full([], 0, tl.int32) + M, tl.num_programs(0) - listers
    if LISTS and p < listers:
        first, end, step = p, tl.load(state + LISTED), listers
    return first, end, step


@triton.jit
def piece_at(pieces, i, listers, PIECES: tl.constexpr, LISTS: tl.constexpr):
    """Return (row, piece) of item i."""
    m = tl.full([], 0, tl.int32) + i
    piece = m * 0
    if LISTS and tl.program_id(0) < listers:
        item = tl.load(pieces + i)
        m, piece = item // PIECES, item % PIECES
    return m.to(tl.int64), piece
