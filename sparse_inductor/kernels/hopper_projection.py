"""Projections of tokens, x weight^T, on the ring of `hopper_ring`: what kernels that end them in their own ways share.

A tile's rows and columns are tokens and neurons or, TURNED, neurons and tokens, as `hopper_tiles` finds best. Its sums
go to memory by pieces, each through a box of shared memory that is [tokens, neurons] in either case: of 64 x 64, or of
fewer tokens for the small pieces of a TURNED tile. Descriptors and boxes are tuples of these two.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gluon_names import store_box
from .hopper_ring import DEPTH, copy_tile, descriptor, descriptors, stages_of
from .hopper_tiles import (
    CONSUMERS,
    PIECE,
    ROWS,
    Tiles,
    accumulator,
    is_wide,
    part_of,
    parts_in,
    pieces,
    pieces_in,
    small_of,
    start_of,
    tile_for,
    wide_in,
)
from .launch import multiprocessors
from .tile_order import tile_at
from .unroll import unrolled

__all__ = [
    "Projection",
    "as_held",
    "behind",
    "biased",
    "box_at",
    "box_of",
    "copy_tiles",
    "make_boxes",
    "nothing",
    "pieces_of",
    "pieces_within",
    "place_of",
    "projection",
    "put",
    "rounded",
    "stages_beside",
    "tiles_of",
]


@gluon.jit
def make_boxes(outs, COLUMNS: gl.constexpr, MOST: gl.constexpr):
    """Of each warpgroup, for tensors of these descriptors: boxes, up to so many, that wide pieces take in turn, and the
    same for small ones."""
    dtype: gl.constexpr = outs[0].dtype
    WIDE: gl.constexpr = _boxes(COLUMNS, MOST)[0]
    SMALL: gl.constexpr = _boxes(COLUMNS, MOST)[1]
    wide = gl.allocate_shared_memory(dtype, [WIDE * CONSUMERS, PIECE, PIECE], outs[0].layout)
    small = wide
    if SMALL > 0:
        small = gl.allocate_shared_memory(
            dtype, [SMALL * CONSUMERS, small_of(COLUMNS), PIECE], outs[1].layout
        )
    return wide, small


@gluon.constexpr_function
def _boxes(columns, most):
    """How many boxes wide pieces have, and small ones."""
    wide = wide_in(columns)
    return min(wide, most), min(pieces_in(columns) - wide, most)


@gluon.constexpr_function
def _box(columns, place, most):
    """Which of those of its size a piece has."""
    wide, small = _boxes(columns, most)
    return place % wide if is_wide(columns, place) else (place - wide_in(columns)) % small


@gluon.jit
def box_of(boxes, PLACE: gl.constexpr, ME: gl.constexpr, COLUMNS: gl.constexpr, MOST: gl.constexpr):
    """That of a piece of warpgroup ME."""
    SIZE: gl.constexpr = 0 if is_wide(COLUMNS, PLACE) else 1
    return boxes[SIZE].index(_boxes(COLUMNS, MOST)[SIZE] * ME + _box(COLUMNS, PLACE, MOST))


@gluon.jit
def box_at(m0, n0, PLACE: gl.constexpr, COLUMNS: gl.constexpr, TURNED: gl.constexpr):
    """Where a piece's box begins of a tile that begins at (m0, n0)."""
    if TURNED:
        return m0 + start_of(COLUMNS, PLACE), n0
    else:
        return m0, n0 + start_of(COLUMNS, PLACE)


@gluon.constexpr_function
def behind(columns, place, most):
    """Pieces that have been written since the one that had this one's box, if one tile follows the other."""
    count = pieces_in(columns)
    boxes = [(is_wide(columns, i), _box(columns, i, most)) for i in range(count)]
    return next(n for n in range(count) if boxes[(place - 1 - n) % count] == boxes[place])


@gluon.jit
def tiles_of(M, N, COLUMNS: gl.constexpr, TURNED: gl.constexpr):
    """Tiles of so many tokens, and of so many neurons."""
    if TURNED:
        return gl.cdiv(M, COLUMNS), gl.cdiv(N, ROWS * CONSUMERS)
    else:
        return gl.cdiv(M, ROWS * CONSUMERS), gl.cdiv(N, COLUMNS)


@gluon.jit
def place_of(t, tiles_m, tiles_n, ME: gl.constexpr, COLUMNS: gl.constexpr, TURNED: gl.constexpr):
    """Where consumer ME's part of a tile begins: (token, neuron)."""
    pm, pn = tile_at(t, tiles_m, tiles_n)
    if TURNED:
        return pm * COLUMNS, (pn * CONSUMERS + ME) * ROWS
    else:
        return (pm * CONSUMERS + ME) * ROWS, pn * COLUMNS


@gluon.jit
def copy_tiles(
    source, COLUMNS: gl.constexpr, TURNED: gl.constexpr, KBLOCKS: gl.constexpr, STAGES: gl.constexpr
):
    """Producer warp: the operands of every tile of this program, in order, into the ring."""
    a, b, ring, tiles_m, tiles_n = source
    n = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        token, neuron = place_of(t, tiles_m, tiles_n, 0, COLUMNS, TURNED)
        if TURNED:
            n = copy_tile(a, b, ring, n, neuron, token, KBLOCKS, COLUMNS, STAGES, False, False)
        else:
            n = copy_tile(a, b, ring, n, token, neuron, KBLOCKS, COLUMNS, STAGES, False, False)


@gluon.jit
def nothing(dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros, a warpgroup's sums of a tile, by its parts."""
    made: gl.tuple = ()
    for i in gl.static_range(parts_in(COLUMNS)):
        made = made + (
            gl.zeros([ROWS, part_of(COLUMNS, i)], dtype, accumulator(part_of(COLUMNS, i))),
        )
    return made


@gluon.jit
def _biases(bias, n0, N, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    n = n0 + gl.arange(0, COUNT, LAYOUT)
    return gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)


@gluon.jit
def biased(accs, bias, n0, N, TURNED: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Sums, with the bias of neurons from n0 on."""
    made: gl.tuple = ()
    for i in gl.static_range(len(accs)):
        acc = accs[i]
        if HAS_BIAS:
            if TURNED:
                acc += _biases(bias, n0, N, ROWS, gl.SliceLayout(1, acc.type.layout))[:, None]
            else:
                acc += _biases(bias, n0, N, acc.shape[1], gl.SliceLayout(0, acc.type.layout))[
                    None, :
                ]
        made = made + (acc,)
    return made


@gluon.jit
def rounded(accs, dtype: gl.constexpr):
    """Sums as they go to memory."""
    made: gl.tuple = ()
    for i in gl.static_range(len(accs)):
        made = made + (accs[i].to(dtype),)
    return made


@gluon.jit
def pieces_of(parts, COLUMNS: gl.constexpr):
    """The pieces of all parts of a tile of so many columns, from left to right."""
    found: gl.tuple = ()
    for i in gl.static_range(len(parts)):
        found = found + pieces(parts[i], pieces_within(COLUMNS, i))
    return found


@gluon.constexpr_function
def pieces_within(columns, i):
    """Pieces of a tile's i-th part."""
    part = part_of(columns, i)
    return part // PIECE.value if part >= PIECE.value else part // small_of(columns)


@gluon.jit
def as_held(box, TURNED: gl.constexpr):
    """A box [tokens, neurons] as [rows, columns] of a tile."""
    if TURNED:
        return box.permute((1, 0))
    else:
        return box


@gluon.jit
def put(value, box, outs, place, TURNED: gl.constexpr):
    """A piece to memory, through its box."""
    as_held(box, TURNED).store(value)
    fence_async_shared()
    out = outs[0] if value.shape[1] == PIECE else outs[1]
    store_box(out, [place[0], place[1]], box)


class _Plan(NamedTuple):
    """parts: columns of each part of a tile; small: those of its small pieces."""

    parts: tuple[int, ...]
    small: int
    constants: dict[str, Any]


@functools.lru_cache(maxsize=256)
def _plan(M: int, K: int, N: int, programs: int, tiles: Tiles, room: float) -> _Plan:
    columns, turned, _ = tile_for(M, N, programs, tiles, room)
    # As many as a tile has pieces: past the last feature are zeros.
    steps, each = unrolled(max(-(-K // DEPTH.value), pieces_in(columns)))
    return _Plan(
        tuple(part_of(columns, i) for i in range(parts_in(columns))),
        small_of(columns),
        {
            "COLUMNS": columns,
            "TURNED": turned,
            "KBLOCKS": steps,
            "EACH": each,
            "STAGES": tiles.stages(columns),
        },
    )


class Projection(NamedTuple):
    """What a kernel is launched with. operands: x and the weight, or TURNED the weight and x, in boxes; small:
    columns of a tile's small pieces."""

    programs: int
    operands: tuple[TensorDescriptor, ...]
    small: int
    constants: dict[str, Any]

    def boxes(self, t: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Of what is read or written by boxes, their two kinds."""
        wide = descriptor(t, PIECE.value, PIECE.value)
        return wide, wide if self.small == PIECE else descriptor(t, self.small, PIECE.value)


def projection(x: torch.Tensor, weight: torch.Tensor, tiles: Tiles, room: float = 0) -> Projection:
    """Of x [M, K] and weight [N, K], by a kernel that can have these tiles (`tile_for`): the same object each time,
    since what follows from sizes is kept."""
    programs = multiprocessors(x.device)
    plan = _plan(*x.shape, len(weight), programs, tiles, room)
    rows, wide = (weight, x) if plan.constants["TURNED"] else (x, weight)
    operands = (descriptor(rows, ROWS.value, DEPTH.value), *descriptors(wide, plan.parts))
    return Projection(programs, operands, plan.small, plan.constants)


def stages_beside(columns: int, *most: int) -> int:
    """Stages of the ring, beside boxes as `make_boxes` makes them."""
    boxed = 0
    for m in most:
        wide, small = _boxes(columns, m)
        boxed += wide * PIECE.value + small * small_of(columns)
    return stages_of(columns, CONSUMERS.value * ROWS.value * boxed * 2)
