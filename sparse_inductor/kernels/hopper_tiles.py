"""Tiles of the products of `hopper_ring`: 128 rows of one operand, by as many columns as leaves few multiprocessors
waiting in the last round. Columns that are no power of two are made of parts that are, each with sums of its own, which
`hopper_wide` makes one product of.
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
    "Tiles",
    "accumulator",
    "as_boxed",
    "halves",
    "is_wide",
    "leaves_room",
    "offset_of",
    "part_of",
    "parts_in",
    "pieces",
    "pieces_in",
    "small_of",
    "start_of",
    "tile_for",
    "wide_in",
]

# Rows a warpgroup: the height of a wgmma. 64 x 256 fp32 are 128 registers a thread.
ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
# A tile is read and written by pieces of 64 columns, 8 KiB a warpgroup, and what is left by small ones.
PIECE = gl.constexpr(64)

# Stages that tiles of columns that are tokens need: three of 42 KB do not bridge the time to L2.
LEAST_STAGES = 4


class Tiles(NamedTuple):
    """The tiles that a kernel can have, with what one takes for one of 256 columns (H200, K = 2 048). stages: of its
    ring, of a tile's columns. In `upright` ones these are neurons, in `turned` ones tokens, and rows the other."""

    stages: Callable[[int], int]
    upright: tuple[tuple[int, float], ...]
    turned: tuple[tuple[int, float], ...]


class Tile(NamedTuple):
    """columns; turned: they are rows of the product, and its columns are the tile's rows; waiting: how many of the
    programs have nothing to do in the last round, in rounds of tiles of 256 columns."""

    columns: int
    turned: bool
    waiting: float


@functools.lru_cache(maxsize=256)
def tile_for(M: int, N: int, programs: int, tiles: Tiles, room: float = 0) -> Tile:
    """The tile of so many programs' product [M, N] that takes the least time. room: what it is worth, in rounds of
    tiles of 256 columns, if those leave room for something beside their last one."""
    height = ROWS.value * CONSUMERS.value
    found = []
    for turned, costs in ((False, tiles.upright), (True, tiles.turned)):
        rows, wide = (N, M) if turned else (M, N)
        for columns, cost in costs:
            if turned and tiles.stages(columns) < LEAST_STAGES:
                continue
            share = -(-rows // height) * -(-wide // columns) / programs
            rounds = math.ceil(share)
            tile = Tile(columns, turned, (rounds - share) * cost)
            found.append((rounds * cost - room * leaves_room(tile), tile))
    return min(found)[1]


def leaves_room(tile: Tile) -> bool:
    """Whether tiles have 256 columns, and a third of the multiprocessors nothing to do in their last round."""
    return tile.columns == 256 and tile.waiting >= 1 / 3


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
def small_of(columns):
    """Columns of a small piece, a power of two; PIECE where a tile has none."""
    return min(columns & -columns, PIECE.value)


@gluon.constexpr_function
def wide_in(columns):
    """How many of a tile's pieces are wide. The others are behind them."""
    return columns // PIECE.value


@gluon.constexpr_function
def pieces_in(columns):
    return wide_in(columns) + columns % PIECE.value // small_of(columns)


@gluon.constexpr_function
def is_wide(columns, i):
    """Whether a piece has PIECE columns."""
    return i < wide_in(columns)


@gluon.constexpr_function
def start_of(columns, i):
    """A piece's first column."""
    wide = wide_in(columns)
    return min(i, wide) * PIECE.value + max(i - wide, 0) * small_of(columns)


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
