"""What the kernels have in common that gather rows of a table for a row of tokens, packed as `relu_ffn.packing` says:
`relu_ffn.dots` multiplies by them, `relu_ffn.rows` sums them.

Every weight table read is [N, *] with unit stride along a row: a neuron's weights are one run of memory. A table that
stays in L2 is read from there, which is why up and down are kernels of their own: each reads one table. A larger one is
taken by slices of its columns, each of which all rows pass over before the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .packing import LISTED

# Table rows in flight a program, and registers of a thread where weights have 16 bits: what the compiler takes unasked
# leaves room for too few programs (162 us of dot products for 123, at 8 192 tokens of 30 entries, K = 2 048).
FLIGHT = 4
REGISTERS = 96
# Columns of a sum that a program holds, and of them a warp.
WIDTH = 2048
SUM_COLUMNS = 512
# Bytes of a table, or of a slice of its columns, that stay in L2 (50 MB on an H200) beside what passes through it.
RESIDENT = 36 << 20
# Columns of a slice at least: a warp's loads of 16 bytes.
NARROWEST = 256
# A kernel of these loops gains nothing from software pipelining: the loads of a block are all in flight already.
STAGES = 1
# Rows to a program that takes listed pieces, where many run; and such programs, one a row at most, where few do.
SHARE = 8
LISTERS = 2048
# A row's word of `ready`: how many of its entries are done, and this once the program that has the row has seen it.
ROW_SEEN = tl.constexpr(1 << 20)


def width(n: int, most: int, interpreted: bool) -> int:
    """Columns, `most` at most, that a program holds of rows of n; 32 at least, so that there is a half of them."""
    return 32 if interpreted else min(most, max(32, triton.next_power_of_2(n)))


def columns_that_stay(D: int, interpreted: bool, tables: Sequence[torch.Tensor]) -> int:
    """Columns of rows of D, so many of which stay in L2 of all rows of the tables."""
    columns = width(D, WIDTH, interpreted)
    column = sum(len(t) * t.element_size() for t in tables)
    while columns > NARROWEST and columns * column > RESIDENT:
        columns //= 2
    return columns


def limited(t: torch.Tensor) -> dict[str, int]:
    """Options of a kernel that holds FLIGHT rows of such elements."""
    return {"maxnreg": REGISTERS} if t.is_cuda and t.element_size() == 2 else {}


def in_pairs(table: torch.Tensor) -> bool:
    """Whether weights are made fp32 two at a time (`fp32`)."""
    return table.is_cuda and table.dtype == torch.bfloat16 and torch.version.hip is None


def listers_of(M: int, most: int) -> int:
    """Programs for the pieces that are listed, of rows of `most` at most."""
    return max(triton.cdiv(M, SHARE), min(M, LISTERS)) if most > 1 else 0


@triton.jit
def fp32(w, PAIRS: tl.constexpr):
    """Weights as fp32. PAIRS: of bf16, one instruction each; the compiler takes two for each second one."""
    if PAIRS:
        both: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(
            both, "=r,=r,r", [w], dtype=tl.float32, is_pure=True, pack=2
        )
    return w.to(tl.float32)


@triton.jit
def own_pieces(state, listers, M, LISTS: tl.constexpr):
    """(first, end, step): what is this program's. The first `listers` programs share the pieces that are listed, the
    others the rows of one piece. So the longest rows begin first: one that began last would be waited for.
    """
    p = tl.program_id(0)
    first, end, step = p - listers, tl.full([], 0, tl.int32) + M, tl.num_programs(0) - listers
    if LISTS and p < listers:
        first, end, step = p, tl.load(state + LISTED), listers
    return first, end, step


@triton.jit
def piece_at(pieces, i, listers, PIECES: tl.constexpr, LISTS: tl.constexpr):
    """(row, piece of it)."""
    m = tl.full([], 0, tl.int32) + i
    piece = m * 0
    if LISTS and tl.program_id(0) < listers:
        item = tl.load(pieces + i)
        m, piece = item // PIECES, item % PIECES
    return m.to(tl.int64), piece
