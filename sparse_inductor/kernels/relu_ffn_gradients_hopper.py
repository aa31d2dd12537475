"""The gradients of a block's weights on Hopper GPUs where all rows are dense: sums over tokens by tiles, in Gluon.

    out = a^T x      [P, Q], of a [M, P] and x [M, Q]

Up to three of them in one launch, whose programs go on from one's tiles to the next one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from . import relu_ffn_heavy as heavy
from . import relu_ffn_hopper as hopper
from .boxes import addressable
from .gluon_names import let_next_start, load_box, store_box, wait_for_previous
from .hopper_ring import (
    DEPTH,
    begin_step,
    copy_tile,
    descriptor,
    end_step,
    make_ring,
    multiply_tile,
)
from .hopper_tiles import CONSUMERS, PIECE, ROWS, accumulator, as_boxed, pieces
from .launch import launch as launch_kernel
from .launch import multiprocessors
from .tile_order import tile_at

__all__ = ["Sum", "add_sums", "in_rows", "of_dense_rows"]

COLUMNS = gl.constexpr(256)
PIECES = gl.constexpr(COLUMNS.value // PIECE.value)


@gluon.jit
def _which(t, sizes):
    """(which sum tile t is of, its row and column there)."""
    tiles_p, tiles_q = sizes
    first = tiles_p[0] * tiles_q[0]
    second = tiles_p[1] * tiles_q[1]
    which = gl.where(t < first, 0, gl.where(t < first + second, 1, 2))
    t = t - gl.where(which == 0, 0, gl.where(which == 1, first, first + second))
    rows = gl.where(which == 0, tiles_p[0], gl.where(which == 1, tiles_p[1], tiles_p[2]))
    columns = gl.where(which == 0, tiles_q[0], gl.where(which == 1, tiles_q[1], tiles_q[2]))
    pm, pn = tile_at(t, rows, columns)
    return which, pm * (ROWS * CONSUMERS), pn * COLUMNS


@gluon.jit
def _copy_tiles(source, STAGES: gl.constexpr):
    """Producer warp: the operands of every tile of this program, in order, into the ring."""
    a, x, ring, sizes, tiles, steps = source
    n = 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        which, p0, q0 = _which(t, sizes)
        if which == 0:
            n = copy_tile(a[0], (x[0],), ring, n, p0, q0, steps, COLUMNS, STAGES, True, True)
        elif which == 1:
            n = copy_tile(a[1], (x[1],), ring, n, p0, q0, steps, COLUMNS, STAGES, True, True)
        else:
            n = copy_tile(a[2], (x[2],), ring, n, p0, q0, steps, COLUMNS, STAGES, True, True)


@gluon.jit
def _load_of(out, which, at, bar, to):
    if which == 0:
        load_box(out[0], at, bar, to)
    elif which == 1:
        load_box(out[1], at, bar, to)
    else:
        load_box(out[2], at, bar, to)


@gluon.jit
def _store_of(out, which, at, of):
    if which == 0:
        store_box(out[0], at, of)
    elif which == 1:
        store_box(out[1], at, of)
    else:
        store_box(out[2], at, of)


@gluon.jit
def _end_piece(
    piece,
    out,
    out_ring,
    place,
    PLACE: gl.constexpr,
    ME: gl.constexpr,
    BOXES: gl.constexpr,
    ADD: gl.constexpr,
):
    """A piece of consumer ME's part of a tile goes to its place; with ADD, to what its box has of that."""
    which, p0, q0 = place
    piece = as_boxed(piece)
    box = out_ring.index(BOXES * ME + PLACE % BOXES)
    if ADD:
        piece += box.load(piece.type.layout).to(gl.float32)
    else:
        tma.store_wait(BOXES - 1)  # what was copied from this box has left it
    box.store(piece.to(out[0].dtype))
    fence_async_shared()
    _store_of(out, which, [p0, q0 + PLACE * PIECE], box)


@gluon.jit
def _multiply_tiles(
    operands, ME: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr, ADD: gl.constexpr, LATE: gl.constexpr
):  # fmt: skip
    """Consumer ME: 64 rows of every tile of this program. LATE: a tile's sums are rounded and held, half the registers,
    and go to memory by pieces while the tensor cores are busy with the first steps of the next one."""
    out, ring, out_ring, read, sizes, tiles, steps = operands
    MMA: gl.constexpr = accumulator(COLUMNS)
    n = 0
    phase = 0
    held = gl.zeros([ROWS, COLUMNS], out[0].dtype, MMA)
    of_held = _which(0, sizes)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        which, p0, q0 = _which(t, sizes)
        place = (which, p0 + ME * ROWS, q0)
        if ADD:
            tma.store_wait(0)
            mbarrier.expect(read.index(ME), ROWS * COLUMNS * 2)
            for i in gl.static_range(PIECES):
                at = [place[1], q0 + i * PIECE]
                _load_of(out, which, at, read.index(ME), out_ring.index(BOXES * ME + i))
        accs = (gl.zeros([ROWS, COLUMNS], gl.float32, MMA),)
        if LATE:
            found = pieces(held, PIECES)
            for i in gl.static_range(PIECES):
                accs = begin_step(accs, ring, n, i > 0, ME, COLUMNS, STAGES, True, True)
                if t > gl.program_id(0):
                    _end_piece(found[i], out, out_ring, of_held, i, ME, BOXES, ADD)
                accs = end_step(accs, ring, n, 0, STAGES)
                n += 1
            accs, n = multiply_tile(accs, ring, n, steps - PIECES, ME, COLUMNS, STAGES, True, True)
            held, of_held = accs[0].to(out[0].dtype), place
        else:
            accs, n = multiply_tile(accs, ring, n, steps, ME, COLUMNS, STAGES, True, True)
            found = pieces(accs[0], PIECES)
            if ADD:
                mbarrier.wait(read.index(ME), phase)
                phase = phase ^ 1
            for i in gl.static_range(PIECES):
                _end_piece(found[i], out, out_ring, place, i, ME, BOXES, ADD)
    if LATE and gl.program_id(0) < tiles:
        found = pieces(held, PIECES)
        for i in gl.static_range(PIECES):
            _end_piece(found[i], out, out_ring, of_held, i, ME, BOXES, ADD)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "steps"])
def _sums_kernel(
    a0, x0, out0, a1, x1, out1, a2, x2, out2, length, M, steps, P0, Q0, P1, Q1, P2, Q2,
    STAGES: gl.constexpr, ADD: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Nothing but where all M rows are listed."""
    BOXES: gl.constexpr = PIECES if ADD else 2
    ring = make_ring(a0, (x0,), COLUMNS, STAGES, True, True)
    out_ring = gl.allocate_shared_memory(out0.dtype, [BOXES * CONSUMERS, ROWS, PIECE], out0.layout)
    read = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(read.index(i), count=1)
    let_next_start()
    wait_for_previous()
    HIGH: gl.constexpr = ROWS * CONSUMERS
    tiles_p = (gl.cdiv(P0, HIGH), gl.cdiv(P1, HIGH), gl.cdiv(P2, HIGH))
    tiles_q = (gl.cdiv(Q0, COLUMNS), gl.cdiv(Q1, COLUMNS), gl.cdiv(Q2, COLUMNS))
    tiles = tiles_p[0] * tiles_q[0] + tiles_p[1] * tiles_q[1] + tiles_p[2] * tiles_q[2]
    tiles = gl.where(gl.load(length) == M, tiles, 0)
    sizes = (tiles_p, tiles_q)
    source = ((a0, a1, a2), (x0, x1, x2), ring, sizes, tiles, steps)
    operands = ((out0, out1, out2), ring, out_ring, read, sizes, tiles, steps)
    gl.warp_specialize(
        [
            (_multiply_tiles, (operands, 0, STAGES, BOXES, ADD, LATE)),
            (_multiply_tiles, (operands, 1, STAGES, BOXES, ADD, LATE)),
            (_copy_tiles, (source, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


class Sum(NamedTuple):
    """out [P, Q] = a^T x of a [M or more, P] and x [M or more, Q]; rows of either behind the M-th are zeros up to a
    multiple of 64, or are not there."""

    a: torch.Tensor
    x: torch.Tensor
    out: torch.Tensor


def in_rows(s: heavy.Sum) -> Sum:
    """The same sum, or its transpose, so that what it makes has unit stride along its rows."""
    return Sum(s.a, s.source, s.out) if s.out.stride(1) == 1 else Sum(s.source, s.a, s.out.t())


def of_dense_rows(sums: Sequence[heavy.Sum]) -> list[Sum] | None:
    """What `add_sums` makes of these where all rows are listed; None where it cannot."""
    made = [in_rows(s) for s in sums]
    able = all(hopper.applies(s.a) and all(map(addressable, s)) for s in made)
    return made if able and all(s.bias is None for s in sums) else None


def add_sums(sums: Sequence[Sum], length: torch.Tensor, M: int, add: bool) -> None:
    """Where `length` says that all M rows are listed, one to three sums; with `add` to what is there."""
    given: list[object] = []
    sizes: list[int] = []
    for i in range(3):
        s = sums[min(i, len(sums) - 1)]
        given += [
            descriptor(s.a, DEPTH.value, ROWS.value),
            descriptor(s.x, DEPTH.value, COLUMNS.value),
            descriptor(s.out, ROWS.value, PIECE.value),
        ]
        sizes += s.out.shape if i < len(sums) else (0, 0)
    steps = -(-M // DEPTH.value)
    args = (*given, length, M, steps, *sizes)
    # What is added to what is there is rounded after that.
    late = not add and steps >= PIECES.value
    constants = {"STAGES": 3 if add else 4, "ADD": add, "LATE": late}
    programs = multiprocessors(length.device)
    launch_kernel(_sums_kernel, (programs,), args, constants, num_warps=4, launch_pdl=True)
