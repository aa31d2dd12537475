"""Tiles of the products of `hopper_ring`: 128 rows of one operand, by as many columns as leaves few multiprocessors
waiting in the last round. Columns that are no power of two are made of parts that are, each with sums of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "CONSUMERS",
    "PIECE",
    "ROWS",
    "Tile",
    "accumulator",
    "as_boxed",
    "halves",
    "is_wide",
    "last_of",
    "offset_of",
    "part_of",
    "parts_in",
    "pieces",
    "pieces_in",
    "tile_for",
]

# Rows a warpgroup: the height of a wgmma. 64 x 256 fp32 are 128 registers a thread.
ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
# A tile is read and written by pieces of 64 columns, 8 KiB a warpgroup; the last one may be less, a power of two.
PIECE = gl.constexpr(64)

# What a tile of so many columns takes, for one of 256: fewer columns are fewer flops a byte. Those of the second are
# tokens, its rows neurons. H200, K = 2 048; 176 takes as long as 192, and 224 as 256.
COSTS = {256: 1.0, 128: 0.54}
COSTS_TURNED = {208: 0.905, 192: 0.78, 160: 0.665, 144: 0.63}
# Stages that those of the second need: three of 42 KB do not bridge the time to L2.
LEAST_STAGES = 4


class Tile(NamedTuple):
    """columns; turned: they are rows of the product, and its columns are the tile's rows; waiting: how many of the
    programs have nothing to do in the last round, in rounds of tiles of 256 columns."""

    columns: int
    turned: bool
    waiting: float


@functools.lru_cache(maxsize=256)
def tile_for(M: int, N: int, programs: int, stages: Callable[[int], int]) -> Tile:
    """The tile of so many programs' product [M, N] that takes the least time. stages: how many a ring has, of a tile's
    columns."""
    height = ROWS.value * CONSUMERS.value
    found = []
    for turned, costs in ((False, COSTS), (True, COSTS_TURNED)):
        rows, wide = (N, M) if turned else (M, N)
        for columns, cost in costs.items():
            if turned and stages(columns) < LEAST_STAGES:
                continue
            share = -(-rows // height) * -(-wide // columns) / programs
            rounds = math.ceil(share)
            found.append((rounds * cost, Tile(columns, turned, (rounds - share) * cost)))
    return min(found)[1]


@gluon.constexpr_function
def _parts(columns):
    """Powers of two, the largest first."""
    return [1 << i for i in range(columns.bit_length() - 1, -1, -1) if columns >> i & 1]


@gluon.constexpr_function
def parts_in(columns):
    return len(_parts(columns))


@gluon.constexpr_function
def part_of(columns, i):
    """Columns of a part."""
    return _parts(columns)[i]


@gluon.constexpr_function
def offset_of(columns, i):
    """The first column of a part."""
    return sum(_parts(columns)[:i])


@gluon.constexpr_function
def pieces_in(columns):
    return -(-columns // PIECE.value)


@gluon.constexpr_function
def is_wide(columns, i):
    """Whether a piece has PIECE columns: all but the last one have."""
    return (i + 1) * PIECE.value <= columns


@gluon.constexpr_function
def last_of(columns):
    """Columns of the last piece."""
    return columns - (pieces_in(columns) - 1) * PIECE.value


@gluon.constexpr_function
def accumulator(columns):
    """How a warpgroup's threads hold sums [64, columns]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def halves(v):
    """A tile's left and right half. No data moves."""
    n: gl.constexpr = v.shape[1] // 2
    left, right = v.reshape([v.shape[0], 2, n]).permute((0, 2, 1)).split()
    return left, right


@gluon.jit
def pieces(v, COUNT: gl.constexpr):
    """A tile's so many pieces, from left to right. No data moves."""
    if COUNT == 1:
        return (v,)
    else:
        left, right = halves(v)
        return pieces(left, COUNT // 2) + pieces(right, COUNT // 2)


@gluon.jit
def as_boxed(piece):
    """A piece as its box of shared memory is written and read."""
    return gl.convert_layout(piece, accumulator(piece.shape[1]))
