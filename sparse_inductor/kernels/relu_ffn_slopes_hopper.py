"""The gradients of a dense block's projections on Hopper GPUs, where the gradient of h is made: one kernel in Gluon.

    dh = dy down                                 [M, N]
    (gate, up, .) -> (d gate, d up, h)           in the place of both projections, and a third tensor

A tile ends by pieces, in shared memory, one after the other while the tensor cores are at the next tile: little memory
goes to the pieces, much to the ring of operands. Made by two kernels, dh would be written and read once more.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from sparse_inductor.epilogue.steps import Program

from . import relu_ffn_hopper as hopper
from .boxes import addressable
from .epilogue import encode
from .gluon_names import let_next_start, load_box, store_box, wait_for_previous
from .hopper_ring import (
    DEPTH,
    begin_step,
    copy_tile,
    descriptor,
    end_step,
    make_ring,
    multiply_tile,
    stages_of,
)
from .hopper_tiles import CONSUMERS, ROWS, accumulator, pieces
from .launch import launch as launch_kernel
from .launch import multiprocessors
from .relu_ffn_dots import slopes as slopes_of
from .relu_ffn_hidden_hopper import may_activate
from .tile_order import tile_at

__all__ = ["applies", "slopes"]

# A tile's columns: half of what a wgmma can have, as two sums are held at a time.
COLUMNS = gl.constexpr(128)
# Columns that a tile ends by at a time.
PART = gl.constexpr(32)
PARTS = gl.constexpr(COLUMNS.value // PART.value)
# A consumer's boxes: a piece of both projections and of h.
BOXES = gl.constexpr(3)
STAGES = gl.constexpr(
    stages_of(COLUMNS.value, CONSUMERS.value * BOXES.value * ROWS.value * PART.value * 2)
)


@gluon.jit
def _copy_tiles(source):
    """Producer warp: the operands of every tile of this program, in order, into the ring."""
    dy, down, ring, tiles_m, tiles_n, steps = source
    n = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pm, pn = tile_at(t, tiles_m, tiles_n)
        m0 = pm * (ROWS * CONSUMERS)
        n = copy_tile(dy, (down,), ring, n, m0, pn * COLUMNS, steps, COLUMNS, STAGES, False, True)


@gluon.jit
def _ask(out, boxes, read, m0, n0, ME: gl.constexpr, GATED: gl.constexpr):
    """Send for a piece of both projections, when what was stored from its boxes has left them."""
    gate, up, _ = out
    tma.store_wait(0)
    bar = read.index(ME)
    mbarrier.expect(bar, (1 + GATED) * ROWS * PART * 2)
    load_box(gate, [m0, n0], bar, boxes.index(ME * BOXES))
    if GATED:
        load_box(up, [m0, n0], bar, boxes.index(ME * BOXES + 1))


@gluon.jit
def _end_piece(
    piece, out, boxes, read, phase, row, m0, n0, extra, M, cut,
    ME: gl.constexpr, GATED: gl.constexpr, F: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """A piece of a tile's dh to the slopes there."""
    OF_PART: gl.constexpr = accumulator(PART)
    gate, up, hidden = out
    da_extra, dh_extra = extra
    gate_box = boxes.index(ME * BOXES)
    up_box = boxes.index(ME * BOXES + 1)
    h_box = boxes.index(ME * BOXES + 2)
    mbarrier.wait(read.index(ME), phase)
    g = gate_box.load(OF_PART).to(gl.float32)
    u = g
    if GATED:
        u = up_box.load(OF_PART).to(gl.float32)
    dh = gl.convert_layout(piece, OF_PART)
    dg, du, h = slopes_of(g, u, dh, da_extra[:, None], dh_extra[:, None], F, G, GATED)
    # Rows behind the last are zeros, for products that sum over rows.
    off = (g <= cut) | (row >= M)[:, None]
    h_box.store(gl.where(off, 0.0, h).to(hidden.dtype))
    gate_box.store(gl.where(off, 0.0, dg).to(hidden.dtype))
    if GATED:
        up_box.store(gl.where(off, 0.0, du).to(hidden.dtype))
    fence_async_shared()
    store_box(hidden, [m0, n0], h_box)
    store_box(gate, [m0, n0], gate_box)
    if GATED:
        store_box(up, [m0, n0], up_box)


@gluon.jit
def _extra_of(d_stats, row, stride_s, M, STATS: gl.constexpr):
    """What the statistics add to the gradients of f(gate) and h of these rows."""
    da_extra = gl.full([ROWS], 0.0, gl.float32, row.type.layout)
    dh_extra = da_extra
    if STATS:
        da_extra = gl.load(d_stats + row, mask=row < M, other=0.0)
        dh_extra = gl.load(d_stats + 2 * stride_s + row, mask=row < M, other=0.0)
    return da_extra, dh_extra


@gluon.jit
def _multiply_tiles(
    operands, ME: gl.constexpr, GATED: gl.constexpr, STATS: gl.constexpr, F: gl.constexpr, G: gl.constexpr
):  # fmt: skip
    """Consumer ME: 64 rows of every tile of this program."""
    out, ring, boxes, read, d_stats, stride_s, tiles_m, tiles_n, steps, M, cut = operands
    MMA: gl.constexpr = accumulator(COLUMNS)
    OF_PART: gl.constexpr = accumulator(PART)
    i_row = ME * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OF_PART))
    first = gl.program_id(0)
    tiles = tiles_m * tiles_n
    # A piece and the steps beside it: the first is issued in front of it, and the next piece is sent for behind the
    # second, when what this one stores has left.
    beside = steps // PARTS
    soon = gl.minimum(beside - 1, 1)
    if first < tiles:
        pm, pn = tile_at(first, tiles_m, tiles_n)
        m0, n0 = (pm * CONSUMERS + ME) * ROWS, pn * COLUMNS
        _ask(out, boxes, read, m0, n0, ME, GATED)
        accs = (gl.zeros([ROWS, COLUMNS], gl.float32, MMA),)
        accs, n = multiply_tile(
            accs, ring, gl.to_tensor(0), steps, ME, COLUMNS, STAGES, False, True
        )
        for t in range(first + gl.num_programs(0), tiles, gl.num_programs(0)):
            pm, pn = tile_at(t, tiles_m, tiles_n)
            m1, n1 = (pm * CONSUMERS + ME) * ROWS, pn * COLUMNS
            row = m0 - ME * ROWS + i_row
            extra = _extra_of(d_stats, row, stride_s, M, STATS)
            found = pieces(accs[0], PARTS)
            accs = (gl.zeros([ROWS, COLUMNS], gl.float32, MMA),)
            for i in gl.static_range(PARTS):
                accs = begin_step(accs, ring, n, i > 0, ME, COLUMNS, STAGES, False, True)
                _end_piece(
                    found[i], out, boxes, read, i % 2, row, m0, n0 + i * PART, extra, M, cut, ME, GATED, F, G
                )  # fmt: skip
                accs = end_step(accs, ring, n, 0, STAGES)
                accs, n = multiply_tile(accs, ring, n + 1, soon, ME, COLUMNS, STAGES, False, True)
                if i + 1 < PARTS:
                    _ask(out, boxes, read, m0, n0 + (i + 1) * PART, ME, GATED)
                    left = beside - 1 - soon
                else:
                    _ask(out, boxes, read, m1, n1, ME, GATED)
                    left = steps - (PARTS - 1) * beside - 1 - soon
                accs, n = multiply_tile(accs, ring, n, left, ME, COLUMNS, STAGES, False, True)
            m0, n0 = m1, n1
        row = m0 - ME * ROWS + i_row
        extra = _extra_of(d_stats, row, stride_s, M, STATS)
        found = pieces(accs[0], PARTS)
        for i in gl.static_range(PARTS):
            _end_piece(
                found[i], out, boxes, read, i % 2, row, m0, n0 + i * PART, extra, M, cut, ME, GATED, F, G
            )  # fmt: skip
            if i + 1 < PARTS:
                _ask(out, boxes, read, m0, n0 + (i + 1) * PART, ME, GATED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "steps", "cut"])
def _slopes_kernel(
    dy, down, gate, up, hidden, d_stats, length, M, N, steps, stride_s, cut,
    GATED: gl.constexpr, STATS: gl.constexpr, F: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Nothing but where all M rows are listed."""
    ring = make_ring(dy, (down,), COLUMNS, STAGES, False, True)
    boxes = gl.allocate_shared_memory(dy.dtype, [BOXES * CONSUMERS, ROWS, PART], gate.layout)
    read = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(read.index(i), count=1)
    let_next_start()
    wait_for_previous()
    tiles_m = gl.where(gl.load(length) == M, gl.cdiv(M, ROWS * CONSUMERS), 0)
    tiles_n = gl.cdiv(N, COLUMNS)
    source = (dy, down, ring, tiles_m, tiles_n, steps)
    out = (gate, up, hidden)
    operands = (out, ring, boxes, read, d_stats, stride_s, tiles_m, tiles_n, steps, M, cut)
    gl.warp_specialize(
        [
            (_multiply_tiles, (operands, 0, GATED, STATS, F, G)),
            (_multiply_tiles, (operands, 1, GATED, STATS, F, G)),
            (_copy_tiles, (source,)),
        ],
        [4, 1],
        [240, 24],
    )


def applies(
    dy: torch.Tensor, down: torch.Tensor, gate: torch.Tensor, f: Program, g: Program
) -> bool:
    """Whether `slopes` can run: dy [M, D] and down [D, N], both rows of 16-byte pieces."""
    return (
        hopper.applies(dy)
        and all(map(addressable, (down, gate)))
        and down.shape[1] % 8 == 0
        and may_activate(f, g)
    )


def slopes(
    dy: torch.Tensor,
    down: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    hidden: torch.Tensor,
    d_stats: torch.Tensor | None,
    length: torch.Tensor,
    f: Program,
    g: Program,
    cut: float,
) -> None:
    """Where `length` says that all rows of dy [M, D] are listed, (gate, up) to their gradients, in place, and h to
    `hidden`: all three of M rows and more, which become zeros up to a multiple of a tile, as far as there are any."""
    M, D = dy.shape
    N = down.shape[1]
    programs = multiprocessors(dy.device)
    rows, depth = ROWS.value, DEPTH.value
    # At the least as many as a tile has pieces: past the last feature are zeros.
    steps = max(-(-D // depth), PARTS.value)
    args = (
        descriptor(dy, rows, depth), descriptor(down, depth, COLUMNS.value),
        *(descriptor(gate if t is None else t, rows, PART.value) for t in (gate, up, hidden)),
        length if d_stats is None else d_stats, length,
        M, N, steps, 0 if d_stats is None else d_stats.stride(0), cut,
    )  # fmt: skip
    constants = {
        "GATED": up is not None, "STATS": d_stats is not None, "F": encode(f), "G": encode(g),
    }  # fmt: skip
    launch_kernel(_slopes_kernel, (programs,), args, constants, num_warps=4, launch_pdl=True)
